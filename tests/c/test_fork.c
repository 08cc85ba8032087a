// Fork guard: a rank forks before, while and after a job is open. The child's writes stay private. The job's
// connections close with the rank although its child survives.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/arena.h"
#include "base/fork.h"
#include "base/sock.h"
#include "sums.h"

enum { FDS = 1024, LONG_MS = 600000 };

static void check_child(pid_t child) {
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a child ended with status %x",
          (unsigned)status);
}

// --- memory

static void test_arena_is_private_to_the_child(void) {
    struct nb_arena arena;
    struct nb_error err = {0};
    CHECK(nb_arena_open(&arena, 1 << 20, &err) == 0 && arena.fd >= 0, "open arena: %s", err.text);
    unsigned char *base = arena.base;
    memset(base, 1, arena.bytes);
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < arena.bytes; i++) {
            CHECK(base[i] == 1, "[%zu] is %d at the fork", i, base[i]);
        }
        memset(base, 2, arena.bytes);
        pid_t grandchild = fork();
        if (grandchild == 0) {
            CHECK(base[0] == 2 && base[arena.bytes - 1] == 2, "a grandchild does not see the child's memory");
            memset(base, 3, arena.bytes);
            _exit(0);
        }
        check_child(grandchild);
        CHECK(base[0] == 2 && base[arena.bytes - 1] == 2, "the grandchild changed the child's memory");
        // The arena's descriptor is closed in the child, so its number may be reused.
        CHECK(fcntl(arena.fd, F_GETFD) < 0 && errno == EBADF, "the memory's descriptor is open");
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        CHECK(null == arena.fd, "%d, not %d", null, arena.fd);
        nb_arena_close(&arena);
        CHECK(fcntl(null, F_GETFD) >= 0, "closing the arena closed the child's descriptor");
        CHECK(nb_arena_open(&arena, 1 << 20, &err) == 0 && arena.fd >= 0, "open an arena in the child: %s", err.text);
        nb_arena_close(&arena);
        _exit(0);
    }
    check_child(child);
    for (size_t i = 0; i < arena.bytes; i++) {
        CHECK(base[i] == 1, "[%zu] is %d: the child's write is visible", i, base[i]);
    }
    nb_arena_close(&arena);
}

// --- descriptors

// A descriptor of the user with the number of a former socket of the core stays open in a child.
static void test_reused_descriptor(void) {
    struct nb_error err = {0};
    struct nb_sockaddr addr;
    CHECK(nb_sock_parse("127.0.0.1:0", &addr, &err) == 0, "%s", err.text);
    int core_socket = nb_sock_listen(&addr, (struct nb_port_range){0}, 1, &err);
    int kept = nb_sock_listen(&(struct nb_sockaddr){.in4 = {.sin_family = AF_INET}, .len = sizeof addr.in4},
                              (struct nb_port_range){0}, 1, &err);
    CHECK(core_socket >= 0 && kept >= 0, "listen: %s", err.text);
    close(core_socket);
    int pipes[2];
    CHECK(pipe(pipes) == 0 && (pipes[0] == core_socket || pipes[1] == core_socket),
          "the number was not reused: %d, not %d", pipes[0], core_socket);
    pid_t child = fork();
    if (child == 0) {
        CHECK(fcntl(pipes[0], F_GETFD) >= 0 && fcntl(pipes[1], F_GETFD) >= 0, "a user's descriptor was closed");
        CHECK(fcntl(kept, F_GETFD) < 0, "a listener of the core is open");
        _exit(0);
    }
    check_child(child);
    close(pipes[0]);
    close(pipes[1]);
    nb_fork_close(kept);
}

// In a child, sockets that a library opened are closed; they are identified by address. Other sockets stay open.
static void test_sockets_of_a_library(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t bytes = sizeof at;
    int fds[4];
    int others[2];
    int owner;
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fds[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(fds[0], (const struct sockaddr *)&at, bytes) == 0 && listen(fds[0], 1) == 0, "listen: %m");
    CHECK(getsockname(fds[0], (struct sockaddr *)&at, &bytes) == 0, "getsockname: %m");
    CHECK(connect(fds[1], (const struct sockaddr *)&at, bytes) == 0, "connect: %m");
    fds[2] = accept(fds[0], NULL, NULL);
    fds[3] = dup(fds[2]);
    CHECK(fds[2] >= 0 && fds[3] >= 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, others) == 0, "sockets: %m");
    nb_fork_own_sockets(&owner, "not an address", 14);
    nb_fork_own_sockets(&owner, &at, bytes);
    for (int known = 1; known >= 0; known--) {
        pid_t child = fork();
        if (child == 0) {
            for (int i = 0; i < 4; i++) {
                CHECK((fcntl(fds[i], F_GETFD) < 0) == known, "socket %d, known: %d", i, known);
            }
            CHECK(fcntl(others[0], F_GETFD) >= 0 && fcntl(STDERR_FILENO, F_GETFD) >= 0,
                  "other descriptors were closed");
            _exit(0);
        }
        check_child(child);
        nb_fork_disown_sockets(&owner);
    }
    for (int i = 0; i < 4; i++) {
        close(fds[i]);
    }
    close(others[0]);
    close(others[1]);
}

// --- a job

static bool was_open[FDS];

static bool is_connection(int fd) {
    int domain;
    socklen_t bytes = sizeof domain;
    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain != AF_UNIX;
}

// In a child: checks that no descriptor of the job is open. A provider's event descriptors, which reach no other
// process, may be open.
static void check_nothing_open(const struct test_rank *me) {
    bool library = strcmp(me->transport, "ofi") == 0;
    for (int fd = 0; fd < FDS; fd++) {
        char path[32];
        char what[64] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        CHECK(was_open[fd] || readlink(path, what, sizeof what - 1) < 0 || (library && !is_connection(fd)),
              "descriptor %d is open in a child of rank %d: %s", fd, me->rank, what);
    }
}

struct plan {
    int alive[2]; // pipe that keeps the surviving child alive until rank 0 is done
};

static void forks_during_a_job(struct test_rank *me) {
    static float heap[1024];
    struct plan *plan = me->arg;
    struct nb_error err = {0};
    char *arena = arena_share(me);
    struct nb_segment all = {.base = arena, .bytes = 1 << 20};
    struct nb_segment some = {.base = heap, .bytes = sizeof heap};
    memset(arena, 0, all.bytes);
    test_do(me, test_op("first", NB_OP_ALLREDUCE, &all));
    test_do(me, test_op("staged", NB_OP_ALLREDUCE, &some));
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        check_nothing_open(me);
        memset(arena, 1, all.bytes);
        _exit(0);
    }
    check_child(child);
    test_do(me, test_op("first", NB_OP_ALLREDUCE, &all));
    for (size_t i = 0; i < all.bytes; i++) {
        CHECK(arena[i] == 0, "rank %d: [%zu] is %d", me->rank, i, arena[i]);
    }
    if (me->rank == 1) {
        if (fork() == 0) {
            CHECK(prctl(PR_SET_PDEATHSIG, 0) == 0, "prctl: %m");
            char byte;
            close(plan->alive[1]);
            (void)!read(plan->alive[0], &byte, 1); // until rank 0 closes its end
            _exit(0);
        }
        (void)raise(SIGKILL);
    }
    close(plan->alive[0]);
    int rc = test_try(me, test_op("second", NB_OP_ALLREDUCE, &all), &err);
    CHECK(rc == NB_EPEER && err.peer == 1, "%s: rank 1 is dead and its child is alive: %d %s", me->transport, rc,
          err.text);
}

// Runs a job of two ranks. Rank 0 is this process; rank 1 is a child that is forked before the job exists.
static int run_job(const char *network) {
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = 2, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    struct plan plan;
    struct test_rank me = test_on(network);
    int addresses[2];
    me.size = 2;
    me.run = forks_during_a_job;
    me.timeout_ms = LONG_MS; // too long for the deadline to detect the death
    me.arg = &plan;
    CHECK(pipe(plan.alive) == 0 && pipe(addresses) == 0, "pipe: %m");
    for (int fd = 0; fd < FDS; fd++) {
        was_open[fd] = fcntl(fd, F_GETFD) >= 0;
    }
    pid_t rank1 = fork();
    CHECK(rank1 >= 0, "fork: %m");
    if (rank1 == 0) {
        CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0, "prctl: %m");
        CHECK(read(addresses[0], me.address, sizeof me.address) == sizeof me.address, "read the address");
        me.rank = 1;
        test_rank_main(&me);
        _exit(me.rc == NB_ENOLIB ? CHECK_SKIPPED : 1);
    }
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    nb_sock_format(&listener.addr, me.address);
    me.listener = &listener;
    CHECK(write(addresses[1], me.address, sizeof me.address) == sizeof me.address, "write: %m");
    test_rank_main(&me);
    if (me.rc == NB_ENOLIB) {
        fprintf(stderr, "%s\n", me.err.text);
        return CHECK_SKIPPED;
    }
    CHECK(me.rc == 0, "rank 0: %s", me.err.text);
    int status;
    CHECK(waitpid(rank1, &status, 0) == rank1 && WIFSIGNALED(status), "rank 1 ended with status %x", (unsigned)status);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "alone") != 0) {
        return run_job(argv[1]);
    }
    test_arena_is_private_to_the_child();
    test_reused_descriptor();
    test_sockets_of_a_library();
    return 0;
}
