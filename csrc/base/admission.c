// Admission: limits accepted connections that have not authenticated yet.
#include "base/admission.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"

static const int64_t MS = 1000000;

void nb_admission_init(struct nb_admission *admission) {
    nb_list_init(&admission->pending);
    nb_list_init(&admission->shut);
    admission->count = 0;
    admission->ticked_ns = 0;
}

static struct nb_pending *oldest(const struct nb_admission *admission) {
    return NB_CONTAINER(admission->pending.next, struct nb_pending, link);
}

bool nb_admission_may(const struct nb_admission *admission) {
    return admission->count < NB_PENDING_MAX || oldest(admission)->age_ns > NB_PENDING_SAFE_MS * MS;
}

void nb_admission_add(struct nb_admission *admission, struct nb_pending *pending) {
    if (admission->count >= NB_PENDING_MAX && oldest(admission)->read != NULL) {
        oldest(admission)->read(oldest(admission));
    }
    if (admission->count >= NB_PENDING_MAX) {
        oldest(admission)->drop(oldest(admission));
    }
    pending->age_ns = 0;
    nb_list_init(&pending->link);
    nb_list_insert(&admission->pending, &pending->link);
    admission->count++;
}

static void gate_open(struct nb_gate *gate) {
    nb_list_remove(&gate->link);
    gate->left_ns = 0;
    gate->open(gate);
}

void nb_admission_remove(struct nb_admission *admission, struct nb_pending *pending) {
    nb_list_remove(&pending->link);
    admission->count--;
    NB_LIST_EACH(it, &admission->shut) {
        struct nb_gate *gate = NB_CONTAINER(it, struct nb_gate, link);
        if (gate->left_ns == 0) {
            gate_open(gate);
            return;
        }
    }
}

void nb_admission_shut(struct nb_admission *admission, struct nb_gate *gate, int64_t for_ns) {
    nb_list_remove(&gate->link);
    nb_list_insert(&admission->shut, &gate->link);
    gate->left_ns = for_ns;
}

// Time since the last tick, at most NB_PENDING_STEP_MS, in ns.
static int64_t step(struct nb_admission *admission, int64_t now_ns) {
    int64_t passed = admission->ticked_ns != 0 ? now_ns - admission->ticked_ns : 0;
    admission->ticked_ns = now_ns;
    return passed < NB_PENDING_STEP_MS * MS ? passed : NB_PENDING_STEP_MS * MS;
}

void nb_admission_tick(struct nb_admission *admission, int64_t now_ns) {
    int64_t passed = step(admission, now_ns);
    NB_LIST_EACH(it, &admission->pending) {
        NB_CONTAINER(it, struct nb_pending, link)->age_ns += passed;
    }
    while (admission->count > 0 && oldest(admission)->age_ns > NB_PENDING_MS * MS) {
        oldest(admission)->drop(oldest(admission));
    }
    bool may = nb_admission_may(admission);
    NB_LIST_EACH_SAFE(it, nx, &admission->shut) {
        struct nb_gate *gate = NB_CONTAINER(it, struct nb_gate, link);
        bool timed = gate->left_ns > 0;
        gate->left_ns -= timed ? passed : 0;
        if (timed ? gate->left_ns <= 0 : may) {
            gate_open(gate);
        }
    }
}
