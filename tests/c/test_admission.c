// Admission: the limit on connections that have not authenticated, which connection is dropped, and when listeners
// are polled.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/admission.h"
#include "check.h"

static const int64_t MS = 1000000;

struct caller {
    struct nb_pending pending;
    struct nb_admission *admission;
    bool dropped;
};

struct door {
    struct nb_gate gate;
    int opened;
};

static void caller_drop(struct nb_pending *pending) {
    struct caller *caller = NB_CONTAINER(pending, struct caller, pending);
    caller->dropped = true;
    nb_admission_remove(caller->admission, pending);
}

static void caller_add(struct nb_admission *admission, struct caller *caller) {
    *caller = (struct caller){.pending.drop = caller_drop, .admission = admission};
    nb_admission_add(admission, &caller->pending);
}

static void door_open(struct nb_gate *gate) {
    NB_CONTAINER(gate, struct door, gate)->opened++;
}

static void door_shut(struct nb_admission *admission, struct door *door, int64_t for_ns) {
    *door = (struct door){.gate.open = door_open};
    nb_list_init(&door->gate.link);
    nb_admission_shut(admission, &door->gate, for_ns);
}

// Steps that count in full.
static void pass(struct nb_admission *admission, int64_t *now_ns, int ms) {
    for (; ms > 0; ms -= 50) {
        *now_ns += 50 * MS;
        nb_admission_tick(admission, *now_ns);
    }
}

static void full(struct nb_admission *admission, struct caller *callers, int64_t *now_ns) {
    nb_admission_init(admission);
    *now_ns = 1;
    nb_admission_tick(admission, *now_ns);
    for (int i = 0; i < NB_PENDING_MAX; i++) {
        CHECK(nb_admission_may(admission), "%d are there", i);
        caller_add(admission, &callers[i]);
    }
}

static void test_places(void) {
    struct nb_admission admission;
    struct caller callers[NB_PENDING_MAX + 1];
    int64_t now;
    full(&admission, callers, &now);
    CHECK(!nb_admission_may(&admission), "a ninth, at once");
    pass(&admission, &now, NB_PENDING_SAFE_MS);
    CHECK(!nb_admission_may(&admission), "a ninth, after a second");
    pass(&admission, &now, 50);
    CHECK(nb_admission_may(&admission), "no connection may be accepted after more than a second");
    caller_add(&admission, &callers[NB_PENDING_MAX]);
    CHECK(callers[0].dropped && !callers[1].dropped && admission.count == NB_PENDING_MAX, "the oldest goes");
    nb_admission_remove(&admission, &callers[1].pending);
    CHECK(nb_admission_may(&admission) && !callers[1].dropped, "one has authenticated");
    pass(&admission, &now, NB_PENDING_MS - NB_PENDING_SAFE_MS);
    CHECK(callers[2].dropped && callers[7].dropped && !callers[8].dropped, "dropped by time");
    pass(&admission, &now, NB_PENDING_MS);
    CHECK(callers[8].dropped && admission.count == 0, "%d are left", admission.count);
}

static void caller_proves(struct nb_pending *pending) {
    struct caller *caller = NB_CONTAINER(pending, struct caller, pending);
    nb_admission_remove(caller->admission, pending);
}

// The proof of the oldest has arrived and was not read yet: it is admitted, and nobody is dropped.
static void test_a_proof_that_waits(void) {
    struct nb_admission admission;
    struct caller callers[NB_PENDING_MAX + 1];
    int64_t now;
    full(&admission, callers, &now);
    callers[0].pending.read = caller_proves;
    pass(&admission, &now, NB_PENDING_SAFE_MS + 50);
    caller_add(&admission, &callers[NB_PENDING_MAX]);
    CHECK(!callers[0].dropped && !callers[1].dropped && admission.count == NB_PENDING_MAX, "an honest rank goes");
}

// A thread that was not here has heard nobody: nobody is dropped for that.
static void test_away(void) {
    struct nb_admission admission;
    struct caller caller;
    nb_admission_init(&admission);
    nb_admission_tick(&admission, 1000 * MS);
    caller_add(&admission, &caller);
    nb_admission_tick(&admission, 60000 * MS);
    CHECK(!caller.dropped && caller.pending.age_ns == NB_PENDING_STEP_MS * MS, "a minute counts");
}

static void test_gates(void) {
    struct nb_admission admission;
    struct caller callers[NB_PENDING_MAX];
    struct door doors[3];
    int64_t now;
    full(&admission, callers, &now);
    door_shut(&admission, &doors[0], 100 * MS);
    door_shut(&admission, &doors[1], 0);
    door_shut(&admission, &doors[2], 0);
    pass(&admission, &now, 50);
    CHECK(doors[0].opened + doors[1].opened + doors[2].opened == 0, "no place is free");
    pass(&admission, &now, 50);
    CHECK(doors[0].opened == 1 && doors[1].opened == 0, "the first gate opens when due");
    nb_admission_remove(&admission, &callers[0].pending);
    CHECK(doors[1].opened == 1 && doors[2].opened == 0, "a place for one");
    pass(&admission, &now, 50);
    CHECK(doors[1].opened == 1 && doors[2].opened == 1, "there is a place still");
}

int main(void) {
    test_places();
    test_a_proof_that_waits();
    test_away();
    test_gates();
    return 0;
}
