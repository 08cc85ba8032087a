// Connections that never authenticate, at every port that a job opens: silent ones, slow ones, and ones that begin a
// handshake. They are dropped after a time limit and hold few descriptors. They delay ranks only briefly and do not
// wake the loop.
#include <dirent.h>
#include <poll.h>
#include <time.h>

#include "boot.h"
#include "bootstrap/internal.h"
#include "flows.h"
#include "job.h"

enum {
    HELD_MAX = 8,
    STEP_MS = 50,
    WAVE_MS = 30000,
    WAVES = 6,
    WAVE = 30,
    LANES = 3,
    CLIENTS_PER_PORT = 9,
    PORTS_MAX = 16
};

static const int64_t MS = 1000000;

// Simulated time of rank 0 while it waits for other ranks: it advances when poll() finds nothing. NULL: real time.
struct simulation {
    int64_t now_ns;
    bool real_time;
    void (*before_poll)(struct simulation *simulation);
    struct clients *clients;
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
    simulation = NULL; // clients use real time
    s->before_poll(s);
    int rc = __real_poll(polled, count, s->real_time ? 1 : 0);
    s->now_ns += rc == 0 && !s->real_time ? (timeout_ms < STEP_MS ? timeout_ms : STEP_MS) * MS : 0;
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

struct clients {
    int count;
    int own; // descriptors of the job
    int64_t sent_ms;
    int fds[WAVE * WAVES + LANES * WAVE]; // -1: the peer closed it
};

static void client_connect(struct clients *all, const struct nb_sockaddr *to, const void *first, size_t bytes) {
    int fd = nb_sock_connect(to, NULL, NULL, NULL);
    CHECK(fd >= 0, "connect: %m");
    struct pollfd poller = {.fd = fd, .events = POLLOUT};
    CHECK(poll(&poller, 1, LIMIT_MS) == 1 && nb_sock_connected(fd) == 0, "connect: %m");
    CHECK(nb_sock_write_all(fd, first, bytes, test_deadline_ns(), NULL) == 0, "write: %m");
    all->fds[all->count++] = fd;
}

static int clients_connected(struct clients *all) {
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

// Descriptors that this process holds for the clients.
static int descriptors_held(struct clients *all) {
    int left = clients_connected(all); // closes those that the peer has closed
    return descriptors() - all->own - left;
}

// Every third client sends a byte a second.
static void clients_send(struct clients *all, const void *what, size_t bytes, int64_t ms) {
    size_t at = (size_t)(ms / 1000) % bytes;
    for (int i = 1; i < all->count && ms - all->sent_ms >= 1000; i += 3) {
        (void)!(all->fds[i] >= 0 ? send(all->fds[i], (const char *)what + at, 1, MSG_DONTWAIT | MSG_NOSIGNAL) : 0);
    }
    all->sent_ms = ms - all->sent_ms >= 1000 ? ms : all->sent_ms;
}

static void clients_close(struct clients *all) {
    for (int i = 0; i < all->count; i++) {
        if (all->fds[i] >= 0) {
            close(all->fds[i]);
        }
    }
}

// Connects waves of clients to rank 0's port for some simulated minutes, then starts rank 1.
static void bootstrap_pass(struct simulation *s) {
    struct clients *all = s->clients;
    int64_t ms = s->now_ns / MS;
    struct wire_join_hello hello = {.magic = NB_WIRE_JOIN_MAGIC, .version = NB_WIRE_JOIN_VERSION, .rank = 1, .size = 2};
    if (s->real_time) {
        return;
    }
    if (ms >= WAVES * WAVE_MS) {
        CHECK(clients_connected(all) == 0, "%d clients are not dropped", clients_connected(all));
        s->real_time = true;
        start(&s->job->ranks[1], join);
        return;
    }
    if (ms >= WAVE_MS * (all->count / WAVE)) {
        CHECK(clients_connected(all) == 0, "%lld s: %d clients are still connected", (long long)ms / 1000,
              clients_connected(all));
        for (int i = 0; i < WAVE; i++) {
            client_connect(all, &s->job->listener.addr, &hello, i % 3 == 2 ? sizeof hello : 0);
        }
    }
    clients_send(all, &hello, sizeof hello, ms);
    int held = descriptors_held(all);
    CHECK(held <= HELD_MAX, "%d descriptors are held for clients", held);
}

static void test_bootstrap_port(void) {
    struct job job;
    struct clients all = {0};
    struct simulation s = {.now_ns = 1, .before_poll = bootstrap_pass, .clients = &all, .job = &job};
    job_open(&job, 2);
    job.ranks[0].config.timeout_ms = WAVES * WAVE_MS * 2;
    all.own = descriptors();
    simulation = &s;
    (void)join(&job.ranks[0]);
    simulation = NULL;
    finish(&job.ranks[1]);
    check_joined(&job);
    job_close(&job);
}

static void lanes_progress(struct flow_world *world, int64_t now_ns) {
    for (int rank = 0; rank < world->plan.size; rank++) {
        flows_progress(&world->nodes[rank]);
        nb_lanes_tick(world->nodes[rank].lanes, now_ns);
    }
}

// Connects one wave of clients to every lane of rank 1.
static void connect_wave(struct clients *all, const struct nb_sockaddr *ports, int64_t *now_ns) {
    static const uint32_t hello[8] = {0x4e424c41, 0, 0}; // the first words of a hello
    for (int i = 0; i < LANES * WAVE; i++) {
        client_connect(all, &ports[i % LANES], hello, i % 3 == 2 ? sizeof hello - 1 : 0);
    }
    *now_ns += MS;
}

static void address_of(const unsigned char *address, struct nb_sockaddr *port) {
    struct nb_error err = {0};
    CHECK(nb_sock_parse((const char *)address + 8, port, &err) == 0, "%s", err.text); // after its length
}

static void connect_rank(struct flow_world *world, int from, int to) {
    unsigned char address[LANES * (NB_LANE_ADDR_MAX + 8)];
    struct nb_error err = {0};
    CHECK(nb_lanes_address_bytes(world->nodes[from].lanes) == sizeof address, "addresses");
    nb_lanes_address(world->nodes[from].lanes, address);
    CHECK(nb_lanes_peer_open(world->nodes[to].lanes, from, address, &err) == 0, "%s", err.text);
}

// Ports of lanes, while the ranks connect late.
static void test_lanes_ports(void) {
    struct nb_boot boots[2] = {{.rank = 0, .size = 2}, {.rank = 1, .size = 2}};
    struct flow_world *world = calloc(1, sizeof *world);
    struct clients *all = calloc(1, sizeof *all);
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
    all->own = descriptors();
    connect_wave(all, ports, &now);
    int most = 0;
    for (int64_t ms = 0; clients_connected(all) > 0; ms += STEP_MS) {
        CHECK(ms < 60000, "%d clients are not dropped", clients_connected(all));
        lanes_progress(world, now + ms * MS);
        clients_send(all, "x", 1, ms);
        int held = descriptors_held(all);
        most = held > most ? held : most;
    }
    CHECK(most == HELD_MAX, "%d descriptors were held for clients", most);
    now += 60000 * MS;
    connect_wave(all, ports, &now);
    for (int i = 0; i < 10; i++) { // with all places taken, further connections do not wake the thread
        flows_progress(&world->nodes[1]);
    }
    CHECK(nb_loop_wait(&world->nodes[1].loop, 0) == 0, "a connection in the backlog wakes the loop");
    connect_rank(world, 0, 1);
    connect_rank(world, 1, 0);
    for (int64_t ms = 0;
         !nb_lanes_peer_ready(world->nodes[0].lanes, 1) || !nb_lanes_peer_ready(world->nodes[1].lanes, 0);
         ms += STEP_MS) {
        CHECK(ms < 60000, "clients keep a rank from connecting");
        lanes_progress(world, now + ms * MS);
    }
    clients_close(all);
    flows_close(world);
    free(all);
    free(world);
}

static int listening_ports(struct nb_sockaddr *ports) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens;
        struct nb_sockaddr addr = {.len = sizeof addr.in6};
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0 &&
            getsockname(fd, &addr.any, &addr.len) == 0 && addr.any.sa_family == AF_INET) {
            CHECK(count < PORTS_MAX, "more ports than expected");
            ports[count++] = addr;
        }
    }
    return count;
}

// All ports of a job of two ranks in one process. Each lane of each rank has one. No rank accepts from rank 0's
// bootstrap port after the join.
static void job_run(struct test_rank *me) {
    float data[1000];
    struct nb_segment all_data = {.base = data, .bytes = sizeof data};
    test_barrier(me, "before");
    if (me->rank == 0) {
        struct clients all = {0};
        struct nb_sockaddr ports[PORTS_MAX];
        int count = listening_ports(ports);
        CHECK(count == 2 * me->streams + 1, "%d ports", count);
        all.own = descriptors();
        for (int i = 0; i < count * CLIENTS_PER_PORT; i++) {
            client_connect(&all, &ports[i % count], NULL, 0);
        }
        int64_t until = test_deadline_ns();
        while (clients_connected(&all) > CLIENTS_PER_PORT) {
            int held = descriptors_held(&all);
            // Each rank accepts a connection before it drops the oldest one.
            CHECK(held <= 2 * (HELD_MAX + 1), "%d descriptors are held for clients", held);
            CHECK(nb_now_ns() < until, "%d clients are not dropped", clients_connected(&all) - CLIENTS_PER_PORT);
            (void)poll(NULL, 0, 10);
        }
        clients_close(&all);
    }
    for (int i = 0; i < 1000; i++) {
        data[i] = 1;
    }
    test_do(me, test_op("sum", NB_OP_ALLREDUCE, &all_data));
    CHECK(data[0] == 2 && data[999] == 2, "the sum is wrong");
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
