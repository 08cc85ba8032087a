// Admission: the limit on connections that have not authenticated, which of them is dropped, and when listeners are
// polled.
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/admission.h"
#include "check.h"

static const int64_t MS = 1000000;

struct connection {
    struct nb_pending pending;
    struct nb_admission *admission;
    bool dropped;
};

struct listener {
    struct nb_gate gate;
    int opened;
};

static void connection_drop(struct nb_pending *pending) {
    struct connection *connection = NB_CONTAINER(pending, struct connection, pending);
    connection->dropped = true;
    nb_admission_remove(connection->admission, pending);
}

static void connection_add(struct nb_admission *admission, struct connection *connection) {
    *connection = (struct connection){.pending.drop = connection_drop, .admission = admission};
    nb_admission_add(admission, &connection->pending);
}

static void listener_open(struct nb_gate *gate) {
    NB_CONTAINER(gate, struct listener, gate)->opened++;
}

static void listener_shut(struct nb_admission *admission, struct listener *listener, int64_t for_ns) {
    *listener = (struct listener){.gate.open = listener_open};
    nb_list_init(&listener->gate.link);
    nb_admission_shut(admission, &listener->gate, for_ns);
}

// Advances the time in steps that are counted in full.
static void advance(struct nb_admission *admission, int64_t *now_ns, int ms) {
    for (; ms > 0; ms -= 50) {
        *now_ns += 50 * MS;
        nb_admission_tick(admission, *now_ns);
    }
}

static void fill(struct nb_admission *admission, struct connection *connections, int64_t *now_ns) {
    nb_admission_init(admission);
    *now_ns = 1;
    nb_admission_tick(admission, *now_ns);
    for (int i = 0; i < NB_PENDING_MAX; i++) {
        CHECK(nb_admission_may(admission), "only %d connections are admitted", i);
        connection_add(admission, &connections[i]);
    }
}

static void test_limit_and_drops(void) {
    struct nb_admission admission;
    struct connection connections[NB_PENDING_MAX + 1];
    int64_t now;
    fill(&admission, connections, &now);
    CHECK(!nb_admission_may(&admission), "a ninth connection is admitted at once");
    advance(&admission, &now, NB_PENDING_SAFE_MS);
    CHECK(!nb_admission_may(&admission), "a ninth connection is admitted after one second");
    advance(&admission, &now, 50);
    CHECK(nb_admission_may(&admission), "no ninth connection is admitted after more than a second");
    connection_add(&admission, &connections[NB_PENDING_MAX]);
    CHECK(connections[0].dropped && !connections[1].dropped && admission.count == NB_PENDING_MAX,
          "the oldest connection is not the one that is dropped");
    nb_admission_remove(&admission, &connections[1].pending);
    CHECK(nb_admission_may(&admission) && !connections[1].dropped, "an authenticated connection still has a place");
    advance(&admission, &now, NB_PENDING_MS - NB_PENDING_SAFE_MS);
    CHECK(connections[2].dropped && connections[7].dropped && !connections[8].dropped,
          "connections are not dropped after their time limit");
    advance(&admission, &now, NB_PENDING_MS);
    CHECK(connections[8].dropped && admission.count == 0, "%d connections are left", admission.count);
}

static void connection_authenticates(struct nb_pending *pending) {
    struct connection *connection = NB_CONTAINER(pending, struct connection, pending);
    nb_admission_remove(connection->admission, pending);
}

// The proof of the oldest connection has arrived but was not read yet: the proof is read, and no connection is dropped.
static void test_unread_proof(void) {
    struct nb_admission admission;
    struct connection connections[NB_PENDING_MAX + 1];
    int64_t now;
    fill(&admission, connections, &now);
    connections[0].pending.read = connection_authenticates;
    advance(&admission, &now, NB_PENDING_SAFE_MS + 50);
    connection_add(&admission, &connections[NB_PENDING_MAX]);
    CHECK(!connections[0].dropped && !connections[1].dropped && admission.count == NB_PENDING_MAX,
          "a rank with a valid proof is dropped");
}

// A thread that was descheduled could not read any proof: that time does not count.
static void test_descheduled_thread(void) {
    struct nb_admission admission;
    struct connection connection;
    nb_admission_init(&admission);
    nb_admission_tick(&admission, 1000 * MS);
    connection_add(&admission, &connection);
    nb_admission_tick(&admission, 60000 * MS);
    CHECK(!connection.dropped && connection.pending.age_ns == NB_PENDING_STEP_MS * MS,
          "the minute without ticks counts");
}

static void test_gates_of_listeners(void) {
    struct nb_admission admission;
    struct connection connections[NB_PENDING_MAX];
    struct listener listeners[3];
    int64_t now;
    fill(&admission, connections, &now);
    listener_shut(&admission, &listeners[0], 100 * MS);
    listener_shut(&admission, &listeners[1], 0);
    listener_shut(&admission, &listeners[2], 0);
    advance(&admission, &now, 50);
    CHECK(listeners[0].opened + listeners[1].opened + listeners[2].opened == 0, "a gate opens without a free place");
    advance(&admission, &now, 50);
    CHECK(listeners[0].opened == 1 && listeners[1].opened == 0, "the gate does not open when it is due");
    nb_admission_remove(&admission, &connections[0].pending);
    CHECK(listeners[1].opened == 1 && listeners[2].opened == 0, "not exactly one gate opens for one free place");
    advance(&admission, &now, 50);
    CHECK(listeners[1].opened == 1 && listeners[2].opened == 1,
          "the gate does not open for the place that is still free");
}

int main(void) {
    test_limit_and_drops();
    test_unread_proof();
    test_descheduled_thread();
    test_gates_of_listeners();
    return 0;
}
