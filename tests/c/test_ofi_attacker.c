// libfabric lanes under attack: a process that knows only a job's ports sends arrivals of every slot, block and tag,
// and garbage messages and connections. All results are right, and the job continues and loses no lane.
#include "job.h"
#ifdef NB_HAVE_OFI
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/arena.h"
#include "base/sha256.h"
#include "engine/context.h"
#include "raw_endpoint.h"

enum { RANKS = 2, LANES = 2, COUNT = 1 << 18, REFUSED = 2000, DEADLINE_S = 90, SAME_SLOT = 16, SOCKETS = 4 };

// The attacker's knowledge: the addresses of the lanes, which a port scan finds.
struct lane_addresses {
    struct wire_lane_address lane[RANKS][LANES];
};

static int address_pipe[2];

static uint32_t draw(void) {
    uint32_t drawn = 0;
    CHECK(nb_random(&drawn, sizeof drawn) == 0, "random");
    return drawn;
}

// Opens a TCP connection to an endpoint's port and sends random bytes. Returns its descriptor, or -1.
static int connect_and_send_garbage(const unsigned char *name) {
    struct sockaddr_in to;
    unsigned char garbage[64];
    memcpy(&to, name, sizeof to);
    int fd = to.sin_family == AF_INET ? socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0) : -1;
    if (fd >= 0) {
        (void)connect(fd, (const struct sockaddr *)&to, sizeof to);
        CHECK(nb_random(garbage, sizeof garbage) == 0, "random");
        (void)send(fd, garbage, sizeof garbage, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return fd;
}

// Sends a forged arrival, and a garbage message in every eighth call.
static void attack(struct raw_endpoint *attacker, int victim, uint32_t pass) {
    struct nb_frame frame = {
        .block = pass * 4 % 64, .blocks = 4, .slot = pass / SAME_SLOT % 4, .tag = draw() * (pass % 2)};
    unsigned char garbage[NB_LANE_MESSAGE_MAX];
    memset(garbage, (int)(pass % 11), sizeof garbage);
    (void)raw_endpoint_write(attacker, victim, frame);
    if (pass % 8 == 0) {
        (void)nb_ofi_ops.message(attacker->lane, victim, garbage, 1 + pass % NB_LANE_MESSAGE_MAX);
    }
    (void)nb_ofi_ops.progress(attacker->lane);
}

// The socket address of a rank's endpoint, which libfabric stores at the end of a lane's address.
static const unsigned char *endpoint_name(const struct wire_lane_address *address) {
    return address->addr + address->bytes - 104;
}

// Attacks until the job has ended, which closes the pipe.
static int attacker_main(void) {
    struct raw_endpoint attacker[LANES];
    struct lane_addresses lane_addresses;
    struct nb_error err = {0};
    char byte;
    int fds[SOCKETS] = {-1, -1, -1, -1};
    close(address_pipe[1]);
    if (read(address_pipe[0], &lane_addresses, sizeof lane_addresses) != (ssize_t)sizeof lane_addresses) {
        return 0; // the job did not open
    }
    CHECK(fcntl(address_pipe[0], F_SETFL, O_NONBLOCK) == 0, "fcntl");
    for (int i = 0; i < LANES; i++) { // poses as rank 2 of 3, so that it is neither rank
        CHECK(raw_endpoint_open(&attacker[i], i, RANKS, RANKS + 1, NULL, &err) == 0, "%s", err.text);
        for (int victim = 0; victim < RANKS; victim++) {
            const struct wire_lane_address *at = &lane_addresses.lane[victim][i];
            CHECK(nb_ofi_ops.peer_open(attacker[i].lane, victim, at->addr, at->bytes, &err) == 0, "%s", err.text);
        }
    }
    for (uint32_t pass = 0; read(address_pipe[0], &byte, 1) < 0; pass++) {
        for (int i = 0; i < LANES; i++) {
            nb_ofi_lane_of(attacker[i].lane)->config.rank = (int)(pass % RANKS); // the sender that its messages name
            attack(&attacker[i], (int)(pass % RANKS), pass / RANKS);
            attack(&attacker[i], (int)((pass + 1) % RANKS), pass / RANKS);
        }
        int *fd = &fds[pass / 64 % SOCKETS];
        if (pass % 64 == 0) {
            close(*fd >= 0 ? *fd : -1);
            *fd = connect_and_send_garbage(endpoint_name(&lane_addresses.lane[draw() % RANKS][draw() % LANES]));
        }
    }
    return 0; // without closing its endpoints
}

static uint64_t refused_count(struct test_rank *me) {
    struct nb_job_info info = {0};
    nb_job_info(me->job, &info);
    CHECK(info.dropped == 0, "rank %d: %llu lanes were lost", me->rank, (unsigned long long)info.dropped);
    return info.refused;
}

static void send_addresses(struct test_rank *me, float *data) {
    struct lane_addresses lane_addresses = {0};
    struct wire_lane_address mine[LANES];
    unsigned char *both = (unsigned char *)data;
    CHECK(nb_lanes_address_bytes(me->job->lanes) == sizeof mine, "%d lanes", LANES);
    nb_lanes_address(me->job->lanes, mine);
    struct nb_segment all = {.base = both, .bytes = sizeof lane_addresses};
    memset(both, 0, sizeof lane_addresses); // each rank fills its own half, so the sum holds both
    memcpy(both + (size_t)me->rank * sizeof mine, mine, sizeof mine);
    struct nb_op op = test_op("places", NB_OP_ALLREDUCE, &all);
    op.dtype = NB_U8;
    test_do(me, op);
    memcpy(&lane_addresses, both, sizeof lane_addresses);
    if (me->rank == 0) {
        CHECK(write(address_pipe[1], &lane_addresses, sizeof lane_addresses) == (ssize_t)sizeof lane_addresses,
              "pipe: %m");
    }
}

static void run_operations(struct test_rank *me, float *data, int round) {
    struct nb_segment all = {.base = data, .bytes = COUNT * sizeof *data};
    for (int i = 0; i < COUNT; i++) {
        data[i] = (float)(me->rank + 1 + (round + i) % 7);
    }
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    for (int i = 0; i < COUNT; i++) {
        CHECK(data[i] == (float)(3 + 2 * ((round + i) % 7)), "rank %d: round %d, element %d is %g", me->rank, round, i,
              (double)data[i]);
    }
    for (int i = 0; i < COUNT && me->rank == 0; i++) {
        data[i] = (float)(round + i % 5);
    }
    test_do(me, test_op("weights", NB_OP_BROADCAST, &all));
    for (int i = 0; i < COUNT; i++) {
        CHECK(data[i] == (float)(round + i % 5), "rank %d: round %d, element %d of the broadcast is wrong", me->rank,
              round, i);
    }
}

// Runs operations until both ranks have refused REFUSED arrivals and messages.
static void run(struct test_rank *me) {
    struct nb_arena arena;
    struct nb_error err = {0};
    CHECK(nb_arena_open(&arena, COUNT * sizeof(float), &err) == 0, "%s", err.text);
    CHECK(nb_job_map_arena(me->job, &arena, &err) == 0, "%s", err.text);
    float *data = arena.base;
    send_addresses(me, data);
    int32_t go = 1;
    int64_t deadline = nb_now_ns() + (int64_t)DEADLINE_S * 1000000000;
    for (int round = 0; go != 0 && nb_now_ns() < deadline; round++) {
        run_operations(me, data, round);
        go = refused_count(me) < REFUSED;
        struct nb_segment more = {.base = &go, .bytes = sizeof go};
        struct nb_op op = test_op("more", NB_OP_ALLREDUCE, &more);
        op.dtype = NB_I32;
        test_do(me, op);
    }
    CHECK(go == 0, "the job refused too few arrivals and messages");
    test_barrier(me, "end");
    nb_job_close(me->job);
    me->job = NULL;
    nb_arena_close(&arena);
}

int main(void) {
    struct test_rank template = test_on("ofi");
    int status = 0;
    CHECK(pipe(address_pipe) == 0, "pipe: %m");
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        _exit(attacker_main());
    }
    close(address_pipe[0]);
    template.size = RANKS;
    template.run = run;
    template.streams = LANES;
    int rc = test_job(&template);
    close(address_pipe[1]);
    CHECK(waitpid(child, &status, 0) == child, "wait: %m");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the attacker ended with status %x", (unsigned)status);
    return rc;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
