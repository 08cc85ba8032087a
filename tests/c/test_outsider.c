// A process that knows only a job's ports sends arrivals of every slot, block and tag, and garbage messages and
// connections, while the job runs. Every sum is right, and the job continues and loses no lane.
#include "job.h"
#ifdef NB_HAVE_OFI
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/arena.h"
#include "base/sha256.h"
#include "engine/context.h"
#include "outsider.h"

enum { RANKS = 2, LANES = 2, COUNT = 1 << 18, REFUSED = 2000, NOTICED_S = 90, SAME_SLOT = 16, SOCKETS = 4 };

// What the outsider knows: the addresses of the lanes, which a scan for open ports finds.
struct places {
    struct wire_lane_address lane[RANKS][LANES];
};

static int places_pipe[2];

static uint32_t draw(void) {
    uint32_t drawn = 0;
    CHECK(nb_random(&drawn, sizeof drawn) == 0, "random");
    return drawn;
}

// A connection that sends what no libfabric sends. The port stands behind the family in a socket address.
static int knock(const unsigned char *name) {
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

// One of each that it can do to a rank.
static void harass(struct outsider *outsider, int victim, uint32_t turn) {
    struct nb_frame frame = {
        .block = turn * 4 % 64, .blocks = 4, .slot = turn / SAME_SLOT % 4, .tag = draw() * (turn % 2)};
    unsigned char garbage[NB_LANE_MESSAGE_MAX];
    memset(garbage, (int)(turn % 11), sizeof garbage);
    (void)outsider_arrive(outsider, victim, frame);
    if (turn % 8 == 0) {
        (void)nb_ofi_ops.message(outsider->lane, victim, garbage, 1 + turn % NB_LANE_MESSAGE_MAX);
    }
    (void)nb_ofi_ops.progress(outsider->lane);
}

// Where a rank's endpoint is as libfabric's sockets have it: the name at the end of a lane's address.
static const unsigned char *name_of(const struct wire_lane_address *address) {
    return address->addr + address->bytes - 104;
}

// Until the job is over, which is when nobody has the pipe open any more.
static int outsider_main(void) {
    struct outsider outsider[LANES];
    struct places places;
    struct nb_error err = {0};
    char byte;
    int fds[SOCKETS] = {-1, -1, -1, -1};
    close(places_pipe[1]);
    if (read(places_pipe[0], &places, sizeof places) != (ssize_t)sizeof places) {
        return 0; // there was no job
    }
    CHECK(fcntl(places_pipe[0], F_SETFL, O_NONBLOCK) == 0, "fcntl");
    for (int i = 0; i < LANES; i++) { // it is neither of the ranks: rank 2 of 3, by its own account
        CHECK(outsider_open(&outsider[i], i, RANKS, RANKS + 1, NULL, &err) == 0, "%s", err.text);
        for (int victim = 0; victim < RANKS; victim++) {
            const struct wire_lane_address *at = &places.lane[victim][i];
            CHECK(nb_ofi_ops.peer_open(outsider[i].lane, victim, at->addr, at->bytes, &err) == 0, "%s", err.text);
        }
    }
    for (uint32_t turn = 0; read(places_pipe[0], &byte, 1) < 0; turn++) {
        for (int i = 0; i < LANES; i++) {
            nb_ofi_lane_of(outsider[i].lane)->config.rank = (int)(turn % RANKS); // in its messages
            harass(&outsider[i], (int)(turn % RANKS), turn / RANKS);
            harass(&outsider[i], (int)((turn + 1) % RANKS), turn / RANKS);
        }
        int *fd = &fds[turn / 64 % SOCKETS];
        if (turn % 64 == 0) {
            close(*fd >= 0 ? *fd : -1);
            *fd = knock(name_of(&places.lane[draw() % RANKS][draw() % LANES]));
        }
    }
    return 0; // as it is: nobody closes anything in good order
}

static uint64_t refused_here(struct test_rank *me) {
    struct nb_job_info info = {0};
    nb_job_info(me->job, &info);
    CHECK(info.dropped == 0, "rank %d: %llu lanes were lost", me->rank, (unsigned long long)info.dropped);
    return info.refused;
}

static void tell_places(struct test_rank *me, float *line) {
    struct places places = {0};
    struct wire_lane_address mine[LANES];
    unsigned char *both = (unsigned char *)line;
    CHECK(nb_lanes_address_bytes(me->job->lanes) == sizeof mine, "%d lanes", LANES);
    nb_lanes_address(me->job->lanes, mine);
    struct nb_segment all = {.base = both, .bytes = sizeof places};
    memset(both, 0, sizeof places); // bytes of one rank and zeros of the other: their sum is both
    memcpy(both + (size_t)me->rank * sizeof mine, mine, sizeof mine);
    struct nb_op op = test_op("places", NB_OP_ALLREDUCE, &all);
    op.dtype = NB_U8;
    test_do(me, op);
    memcpy(&places, both, sizeof places);
    if (me->rank == 0) {
        CHECK(write(places_pipe[1], &places, sizeof places) == (ssize_t)sizeof places, "pipe: %m");
    }
}

static void check_round(struct test_rank *me, float *line, int round) {
    struct nb_segment all = {.base = line, .bytes = COUNT * sizeof *line};
    for (int i = 0; i < COUNT; i++) {
        line[i] = (float)(me->rank + 1 + (round + i) % 7);
    }
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all));
    for (int i = 0; i < COUNT; i++) {
        CHECK(line[i] == (float)(3 + 2 * ((round + i) % 7)), "rank %d: round %d, element %d is %g", me->rank, round, i,
              (double)line[i]);
    }
    for (int i = 0; i < COUNT && me->rank == 0; i++) {
        line[i] = (float)(round + i % 5);
    }
    test_do(me, test_op("weights", NB_OP_BROADCAST, &all));
    for (int i = 0; i < COUNT; i++) {
        CHECK(line[i] == (float)(round + i % 5), "rank %d: round %d, element %d was not sent so", me->rank, round, i);
    }
}

// Goes on until both ranks have refused many.
static void run(struct test_rank *me) {
    struct nb_arena arena;
    struct nb_error err = {0};
    CHECK(nb_arena_open(&arena, COUNT * sizeof(float), &err) == 0, "%s", err.text);
    CHECK(nb_job_map_arena(me->job, &arena, &err) == 0, "%s", err.text);
    float *line = arena.base;
    tell_places(me, line);
    int32_t go = 1;
    int64_t deadline = nb_now_ns() + (int64_t)NOTICED_S * 1000000000;
    for (int round = 0; go != 0 && nb_now_ns() < deadline; round++) {
        check_round(me, line, round);
        go = refused_here(me) < REFUSED;
        struct nb_segment more = {.base = &go, .bytes = sizeof go};
        struct nb_op op = test_op("more", NB_OP_ALLREDUCE, &more);
        op.dtype = NB_I32;
        test_do(me, op);
    }
    CHECK(go == 0, "the outsider was not noticed");
    test_barrier(me, "end");
    nb_job_close(me->job);
    me->job = NULL;
    nb_arena_close(&arena);
}

int main(void) {
    struct test_rank like = test_on("ofi");
    int status = 0;
    CHECK(pipe(places_pipe) == 0, "a pipe: %m");
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        _exit(outsider_main());
    }
    close(places_pipe[0]);
    like.size = RANKS;
    like.run = run;
    like.streams = LANES;
    int rc = test_job(&like);
    close(places_pipe[1]);
    CHECK(waitpid(child, &status, 0) == child, "wait: %m");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the outsider ended with %x", (unsigned)status);
    return rc;
}
#else
int main(void) {
    SKIP("built without libfabric's headers");
}
#endif
