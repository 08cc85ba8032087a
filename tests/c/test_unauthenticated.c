// Connections that never authenticate, at every port that a job opens: silent ones, slow ones, and ones that begin a
// handshake. They are dropped by time, hold few descriptors, do not keep ranks out for long, and cost no turns of
// the loop.
#include <dirent.h>
#include <poll.h>
#include <time.h>

#include "boot.h"
#include "bootstrap/internal.h"
#include "flows.h"
#include "job.h"

enum { HELD_MAX = 8, STEP_MS = 50, WAVE_MS = 30000, WAVES = 6, WAVE = 30, LANES = 3, AT_A_PORT = 9, PORTS_MAX = 16 };

static const int64_t MS = 1000000;

// The time of rank 0 while it waits for the others: it passes where nothing happens. NULL: time is as it is.
struct simulation {
    int64_t now_ns;
    bool stands;
    void (*turn)(struct simulation *simulation);
    struct outsiders *outsiders;
    struct job *job;
};

static _Thread_local struct simulation *simulation;

int __real_clock_gettime(clockid_t clock, struct timespec *time);
int __wrap_clock_gettime(clockid_t clock, struct timespec *time);
int __real_poll(struct pollfd *polled, nfds_t count, int timeout_ms);
int __wrap_poll(struct pollfd *polled, nfds_t count, int timeout_ms);

int __wrap_clock_gettime(clockid_t clock, struct timespec *time) {
    if (simulation == NULL) {
        return __real_clock_gettime(clock, time);
    }
    time->tv_sec = (time_t)(simulation->now_ns / 1000000000);
    time->tv_nsec = (long)(simulation->now_ns % 1000000000);
    return 0;
}

int __wrap_poll(struct pollfd *polled, nfds_t count, int timeout_ms) {
    struct simulation *s = simulation;
    if (s == NULL) {
        return __real_poll(polled, count, timeout_ms);
    }
    simulation = NULL; // what an outsider does takes its time
    s->turn(s);
    int rc = __real_poll(polled, count, s->stands ? 1 : 0);
    s->now_ns += rc == 0 && !s->stands ? (timeout_ms < STEP_MS ? timeout_ms : STEP_MS) * MS : 0;
    simulation = s;
    return rc;
}

static int descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    CHECK(folder != NULL, "/proc/self/fd: %m");
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

struct outsiders {
    int count;
    int made; // descriptors that are not theirs
    int64_t spoke_ms;
    int fds[WAVE * WAVES + LANES * WAVE]; // -1: it was hung up on
};

static void outsider_connect(struct outsiders *all, const struct nb_sockaddr *to, const void *first, size_t bytes) {
    int fd = nb_sock_connect(to, NULL, NULL, NULL);
    CHECK(fd >= 0, "connect: %m");
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1 && nb_sock_connected(fd) == 0, "connect: %m");
    CHECK(nb_sock_write_all(fd, first, bytes, test_deadline_ns()) == 0, "write: %m");
    all->fds[all->count++] = fd;
}

static int outsiders_left(struct outsiders *all) {
    int left = 0;
    for (int i = 0; i < all->count; i++) {
        char bytes[512];
        ssize_t n = all->fds[i] >= 0 ? recv(all->fds[i], bytes, sizeof bytes, MSG_DONTWAIT) : 0;
        if (all->fds[i] >= 0 && (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))) {
            close(all->fds[i]);
            all->fds[i] = -1;
        }
        left += all->fds[i] >= 0;
    }
    return left;
}

// Descriptors that this process has for them.
static int outsiders_held(struct outsiders *all) {
    int left = outsiders_left(all); // closes those that were hung up on
    return descriptors() - all->made - left;
}

// Every third one says a byte a second.
static void outsiders_speak(struct outsiders *all, const void *what, size_t bytes, int64_t ms) {
    size_t at = (size_t)(ms / 1000) % bytes;
    for (int i = 1; i < all->count && ms - all->spoke_ms >= 1000; i += 3) {
        (void)!(all->fds[i] >= 0 ? send(all->fds[i], (const char *)what + at, 1, MSG_DONTWAIT | MSG_NOSIGNAL) : 0);
    }
    all->spoke_ms = ms - all->spoke_ms >= 1000 ? ms : all->spoke_ms;
}

static void outsiders_close(struct outsiders *all) {
    for (int i = 0; i < all->count; i++) {
        if (all->fds[i] >= 0) {
            close(all->fds[i]);
        }
    }
}

// Rank 0's port. Waves of outsiders for some minutes, then rank 1.
static void host_turn(struct simulation *s) {
    struct outsiders *all = s->outsiders;
    int64_t ms = s->now_ns / MS;
    struct wire_join_hello hello = {.magic = NB_WIRE_JOIN_MAGIC, .version = NB_WIRE_JOIN_VERSION, .rank = 1, .size = 2};
    if (s->stands) {
        return;
    }
    if (ms >= WAVES * WAVE_MS) {
        CHECK(outsiders_left(all) == 0, "%d outsiders are never dropped", outsiders_left(all));
        s->stands = true;
        start(&s->job->ranks[1], join);
        return;
    }
    if (ms >= WAVE_MS * (all->count / WAVE)) {
        CHECK(outsiders_left(all) == 0, "%lld s: %d outsiders are still there", (long long)ms / 1000,
              outsiders_left(all));
        for (int i = 0; i < WAVE; i++) {
            outsider_connect(all, &s->job->listener.addr, &hello, i % 3 == 2 ? sizeof hello : 0);
        }
    }
    outsiders_speak(all, &hello, sizeof hello, ms);
    int held = outsiders_held(all);
    CHECK(held <= HELD_MAX, "%d descriptors are held for outsiders", held);
}

static void test_bootstrap_port(void) {
    struct job job;
    struct outsiders all = {0};
    struct simulation s = {.now_ns = 1, .turn = host_turn, .outsiders = &all, .job = &job};
    job_open(&job, 2);
    job.ranks[0].config.timeout_ms = WAVES * WAVE_MS * 2;
    all.made = descriptors();
    simulation = &s;
    (void)join(&job.ranks[0]);
    simulation = NULL;
    finish(&job.ranks[1]);
    check_joined(&job);
    job_close(&job);
}

static void lanes_turn(struct flow_world *world, int64_t now_ns) {
    for (int rank = 0; rank < world->plan.size; rank++) {
        flows_progress(&world->nodes[rank]);
        nb_lanes_tick(world->nodes[rank].lanes, now_ns);
    }
}

// One wave at every lane of rank 1.
static void lanes_wave(struct outsiders *all, const struct nb_sockaddr *ports, int64_t *now_ns) {
    static const uint32_t hello[8] = {0x4e424c41, 0, 0}; // the first words of a greeting
    for (int i = 0; i < LANES * WAVE; i++) {
        outsider_connect(all, &ports[i % LANES], hello, i % 3 == 2 ? sizeof hello - 1 : 0);
    }
    *now_ns += MS;
}

static void address_of(const unsigned char *address, struct nb_sockaddr *port) {
    struct nb_error err = {0};
    CHECK(nb_sock_parse((const char *)address + 8, port, &err) == 0, "%s", err.text); // behind its length
}

static void meet(struct flow_world *world, int from, int to) {
    unsigned char address[LANES * (NB_LANE_ADDR_MAX + 8)];
    struct nb_error err = {0};
    CHECK(nb_lanes_address_bytes(world->nodes[from].lanes) == sizeof address, "addresses");
    nb_lanes_address(world->nodes[from].lanes, address);
    CHECK(nb_lanes_peer_open(world->nodes[to].lanes, from, address, &err) == 0, "%s", err.text);
}

// The lanes' ports, while peers that belong there come late.
static void test_lanes_ports(void) {
    struct nb_boot boots[2] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}};
    struct flow_world *world = calloc(1, sizeof *world);
    struct outsiders *all = calloc(1, sizeof *all);
    struct nb_sockaddr ports[LANES];
    unsigned char address[LANES * (NB_LANE_ADDR_MAX + 8)];
    struct nb_error err = {0};
    int64_t now = 1;
    CHECK(world != NULL && all != NULL, "memory");
    world->ops = nb_transport_find("tcp");
    world->plan = (struct flow_plan){.size = 2, .lanes = LANES, .segment_bytes = 4096};
    world->boots = boots;
    CHECK(nb_sock_parse("127.0.0.1:0", &world->bind, &err) == 0, "%s", err.text);
    for (int rank = 0; rank < 2; rank++) {
        CHECK(flows_node_open(world, rank, &err) == 0, "%s", err.text);
    }
    nb_lanes_address(world->nodes[1].lanes, address);
    for (int i = 0; i < LANES; i++) {
        address_of(address + (size_t)i * (NB_LANE_ADDR_MAX + 8), &ports[i]);
    }
    all->made = descriptors();
    lanes_wave(all, ports, &now);
    int most = 0;
    for (int64_t ms = 0; outsiders_left(all) > 0; ms += STEP_MS) {
        CHECK(ms < 60000, "%d outsiders are never dropped", outsiders_left(all));
        lanes_turn(world, now + ms * MS);
        outsiders_speak(all, "x", 1, ms);
        int held = outsiders_held(all);
        most = held > most ? held : most;
    }
    CHECK(most == HELD_MAX, "%d descriptors were held for outsiders", most);
    now += 60000 * MS;
    lanes_wave(all, ports, &now);
    for (int i = 0; i < 10; i++) { // where all places are taken, nothing more wakes the thread
        flows_progress(&world->nodes[1]);
    }
    CHECK(nb_loop_wait(&world->nodes[1].loop, 0) == 0, "a connection in the backlog makes the loop turn");
    meet(world, 0, 1);
    meet(world, 1, 0);
    for (int64_t ms = 0;
         !nb_lanes_peer_ready(world->nodes[0].lanes, 1) || !nb_lanes_peer_ready(world->nodes[1].lanes, 0);
         ms += STEP_MS) {
        CHECK(ms < 60000, "outsiders keep a rank out");
        lanes_turn(world, now + ms * MS);
    }
    outsiders_close(all);
    flows_close(world);
    free(all);
    free(world);
}

static int ports_of_this_process(struct nb_sockaddr *ports) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens;
        struct nb_sockaddr addr = {.len = sizeof addr.in6};
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0 &&
            getsockname(fd, &addr.any, &addr.len) == 0 && addr.any.sa_family == AF_INET) {
            CHECK(count < PORTS_MAX, "more ports than were expected");
            ports[count++] = addr;
        }
    }
    return count;
}

// All ports of a job of two ranks, in one process: each lane of each rank, and rank 0's, which nobody hears after the join.
static void job_run(struct test_rank *me) {
    float data[1000];
    struct nb_segment line = {.base = data, .bytes = sizeof data};
    test_barrier(me, "before");
    if (me->rank == 0) {
        struct outsiders all = {0};
        struct nb_sockaddr ports[PORTS_MAX];
        int count = ports_of_this_process(ports);
        CHECK(count == 2 * me->streams + 1, "%d ports", count);
        all.made = descriptors();
        for (int i = 0; i < count * AT_A_PORT; i++) {
            outsider_connect(&all, &ports[i % count], NULL, 0);
        }
        int64_t until = test_deadline_ns();
        while (outsiders_left(&all) > AT_A_PORT) {
            int held = outsiders_held(&all);
            CHECK(held <= 2 * HELD_MAX, "%d descriptors are held for outsiders", held);
            CHECK(nb_now_ns() < until, "%d outsiders are never dropped", outsiders_left(&all) - AT_A_PORT);
            (void)poll(NULL, 0, 10);
        }
        outsiders_close(&all);
    }
    for (int i = 0; i < 1000; i++) {
        data[i] = 1;
    }
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &line));
    CHECK(data[0] == 2 && data[999] == 2, "a wrong sum");
}

int main(void) {
    struct test_rank template = test_on("tcp");
    template.size = 2;
    template.streams = 2;
    template.run = job_run;
    test_bootstrap_port();
    test_lanes_ports();
    return test_job(&template);
}
