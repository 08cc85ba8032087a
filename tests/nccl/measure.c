// Benchmark of a net plugin, or of NCCL's own network: two processes, host memory, called as NCCL's proxy calls it.
//
//   measure --plugin FILE [--version N] [--through LIBNCCL]   a plugin's table; --through: by NCCL's own adapter
//   measure --stock LIBNCCL                                   NCCL's Socket network
//   options: --bytes N --count N --depth N --channels N --warm N --rounds N --ping N --ahead N --side N --socket N
//            --fault kill|stop
//
// One line of JSON: Gbit/s from process 0 to process 1, half the time of a round trip of --ping bytes (8), CPU time of
// both, and the number of wrong bytes among the last messages. --warm: messages of each channel before the measured
// ones. --ahead: receives of round trips that are posted before their message is due, as NCCL does. --side, --socket:
// only one of the two processes, and its socket to the other. With a fault: the time until process 0 sees an error
// after process 1 is killed or stopped. What is missing: {"not_run": why}.
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "pair.h"
#include "proxy.h"
#include "stock.h"

extern char **environ;

enum { CHANNELS_MAX = 16, PING_BYTES = 8, WARM_ROUNDS = 100, PATTERN = 251 };

struct plan {
    const char *plugin;
    const char *stock;
    const char *through;
    const char *fault;
    int version;
    size_t bytes;
    long count; // messages of one channel
    long depth; // in flight on one channel
    long channels;
    long warm;   // messages of one channel that are not measured
    long rounds; // of the latency
    long ping;   // bytes of a round trip
    long ahead;  // receives of round trips that are posted before their message is due
    long side;   // -1: the parent
    long socket; // to the other process
};

struct channel {
    void *listener;
    void *send;
    void *recv;
    char *data;
};

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static double cpu_s(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

__attribute__((noreturn, format(printf, 1, 2))) static void not_run(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)printf("{\"not_run\": \"");
    (void)vprintf(fmt, args);
    (void)printf("\"}\n");
    va_end(args);
    exit(0);
}

static void require(bool ok, const char *what) {
    if (!ok) {
        (void)fprintf(stderr, "failed: %s\n", what);
        exit(1);
    }
}

static void send_bytes(const void *data, size_t bytes) {
    require(pair_send(data, bytes), "write to the other process");
}

static void receive_bytes(void *data, size_t bytes) {
    require(pair_receive(data, bytes), "the other process has ended");
}

static void barrier(void) {
    char byte = 'm';
    send_bytes(&byte, 1);
    receive_bytes(&byte, 1);
}

static struct proxy proxy_load(const struct plan *plan) {
    struct proxy proxy = {.version = plan->version};
    struct stock stock = {0};
    const char *path = plan->stock != NULL ? plan->stock : plan->through;
    if (path != NULL && !stock_open(&stock, path)) {
        not_run("%s", stock.why);
    }
    if (plan->stock != NULL) {
        proxy.version = 12;
        proxy.table = stock_socket(&stock);
    } else {
        char name[32];
        void *library = dlopen(plan->plugin, RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            not_run("%s", dlerror());
        }
        (void)snprintf(name, sizeof name, "ncclNetPlugin_v%d", plan->version);
        proxy.table = plan->through != NULL ? stock_adapted(&stock, library, plan->version) : dlsym(library, name);
        proxy.version = plan->through != NULL ? 12 : plan->version;
    }
    if (proxy.table == NULL) {
        not_run("%s", stock.why[0] != 0 ? stock.why : "no such table");
    }
    return proxy;
}

static void channel_open(const struct proxy *proxy, struct channel *channel, const struct plan *plan) {
    unsigned char handle[NCCL_HANDLE_BYTES] = {0};
    void *mhandle = NULL;
    require(proxy_listen(proxy, 0, handle, &channel->listener) == 0, "listen");
    send_bytes(handle, sizeof handle);
    receive_bytes(handle, sizeof handle);
    while (channel->send == NULL || channel->recv == NULL) {
        char byte;
        require(recv(SOCKET, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 0, "the other process has ended");
        require(channel->send != NULL || proxy_connect(proxy, 0, handle, &channel->send) == 0, "connect");
        require(channel->recv != NULL || proxy_accept(proxy, channel->listener, &channel->recv) == 0, "accept");
    }
    size_t room = (size_t)plan->depth * (plan->bytes + (size_t)plan->ping);
    channel->data = calloc(1, room);
    require(channel->data != NULL, "memory");
    require(proxy_register(proxy, channel->send, channel->data, room, &mhandle) == 0, "regMr");
    require(proxy_register(proxy, channel->recv, channel->data, room, &mhandle) == 0, "regMr");
}

// The content of process 0's memory, other at each place of a message. Process 1 counts the bytes that are not so.
static size_t pattern(const struct channel *channels, const struct plan *plan) {
    size_t wrong = 0;
    for (long c = 0; c < plan->channels; c++) {
        for (size_t i = 0; i < (size_t)plan->depth * plan->bytes; i++) {
            char value = (char)((i + i / plan->bytes + (size_t)c) % PATTERN);
            wrong += channels[c].data[i] != value;
            channels[c].data[i] = plan->side == 0 ? value : channels[c].data[i];
        }
    }
    return wrong;
}

// Moves `count` messages of each channel one way. Returns the time.
static int64_t stream(const struct proxy *proxy, struct channel *channels, const struct plan *plan, long count) {
    struct proxy_queue queues[CHANNELS_MAX] = {0};
    long posted[CHANNELS_MAX] = {0};
    long left = plan->channels * count;
    int64_t began = now_ns();
    for (long c = 0; c < plan->channels; c++) {
        queues[c].sends = plan->side == 0;
        queues[c].comm = plan->side == 0 ? channels[c].send : channels[c].recv;
    }
    while (left > 0) {
        for (long c = 0; c < plan->channels; c++) {
            int result = 0;
            int bytes = 0;
            char *data = channels[c].data + (size_t)(posted[c] % plan->depth) * plan->bytes;
            if (posted[c] < count && queues[c].count < plan->depth) {
                posted[c] += proxy_post(proxy, &queues[c], data, plan->bytes, &result);
                require(result == 0, "isend or irecv");
            }
            left -= proxy_poll(proxy, &queues[c], &bytes, &result);
            require(result == 0, "test");
        }
    }
    return now_ns() - began;
}

static void post(const struct proxy *proxy, struct proxy_queue *queue, char *data, size_t size) {
    int result = 0;
    while (!proxy_post(proxy, queue, data, size, &result)) {
        require(result == 0, "isend or irecv");
    }
}

static void finish(const struct proxy *proxy, struct proxy_queue *queue) {
    int result = 0;
    int bytes = 0;
    while (!proxy_poll(proxy, queue, &bytes, &result)) {
        require(result == 0, "test");
    }
}

// Posts receives until `total` were posted.
static long receives(const struct proxy *proxy, struct proxy_queue *queue, const struct channel *channel, size_t size,
                     long posted, long total) {
    for (; posted < total; posted++) {
        post(proxy, queue, channel->data, size);
    }
    return posted;
}

static int64_t round_trips(const struct proxy *proxy, struct channel *channel, const struct plan *plan, long rounds) {
    struct proxy_queue in = {.comm = channel->recv};
    struct proxy_queue out = {.comm = channel->send, .sends = true};
    size_t size = (size_t)plan->ping;
    long posted = 0;
    int64_t began = now_ns();
    for (long i = 0; i < rounds; i++) {
        long ahead = i + plan->side + plan->ahead;
        for (int half = 0; half < 2; half++) {
            if ((half == 0) == (plan->side == 0)) {
                post(proxy, &out, channel->data, size);
                posted = receives(proxy, &in, channel, size, posted, ahead < rounds ? ahead : rounds);
                finish(proxy, &out);
            } else {
                posted = receives(proxy, &in, channel, size, posted, i + 1);
                finish(proxy, &in);
            }
        }
    }
    return now_ns() - began;
}

// Kills or stops the other process while a receive is pending. Returns the time in ns until an error, or -1.
static int64_t fault(const struct proxy *proxy, struct channel *channel, const struct plan *plan) {
    pid_t pid = getpid();
    if (plan->side == 1) {
        send_bytes(&pid, sizeof pid);
        for (;;) {
            pause();
        }
    }
    receive_bytes(&pid, sizeof pid);
    struct proxy_queue queue = {.comm = channel->recv};
    int result = 0;
    int bytes = 0;
    require(proxy_post(proxy, &queue, channel->data, plan->bytes, &result), "irecv");
    require(!proxy_poll(proxy, &queue, &bytes, &result) && result == 0, "test");
    int64_t began = now_ns();
    require(kill(pid, strcmp(plan->fault, "kill") == 0 ? SIGKILL : SIGSTOP) == 0, "kill");
    while (result == 0 && now_ns() - began < (int64_t)120 * 1000000000) {
        (void)proxy_poll(proxy, &queue, &bytes, &result);
    }
    int64_t took = now_ns() - began;
    (void)kill(pid, SIGKILL);
    return result != 0 ? took : -1;
}

static int side_main(const struct plan *plan) {
    struct proxy proxy = proxy_load(plan);
    struct channel channels[CHANNELS_MAX] = {0};
    require(proxy_init(&proxy, 1) == 0, "init");
    int64_t began = now_ns();
    for (long c = 0; c < plan->channels; c++) {
        channel_open(&proxy, &channels[c], plan);
    }
    double open_ms = (double)(now_ns() - began) / 1e6;
    barrier();
    if (plan->fault != NULL) {
        int64_t took = fault(&proxy, &channels[0], plan);
        (void)printf("{\"fault\": \"%s\", \"error_after_s\": %.3f}\n", plan->fault,
                     took < 0 ? (double)NAN : (double)took / 1e9);
        return 0;
    }
    (void)round_trips(&proxy, &channels[0], plan, WARM_ROUNDS);
    double trip_us = (double)round_trips(&proxy, &channels[0], plan, plan->rounds) / (double)plan->rounds / 1e3;
    if (plan->side == 0) {
        (void)pattern(channels, plan);
    }
    barrier();
    (void)stream(&proxy, channels, plan, plan->warm);
    barrier();
    double cpu[2] = {cpu_s(), 0};
    int64_t took = stream(&proxy, channels, plan, plan->count);
    cpu[0] = cpu_s() - cpu[0];
    send_bytes(&cpu[0], sizeof cpu[0]);
    receive_bytes(&cpu[1], sizeof cpu[1]);
    double moved = (double)plan->bytes * (double)plan->count * (double)plan->channels;
    if (plan->side == 1) { // only the receiver knows when all data have arrived
        (void)printf(
            "{\"gbit_per_s\": %.3f, \"latency_us\": %.2f, \"open_ms\": %.1f, \"cpu_s_per_gb\": %.3f, \"bytes\": %zu, "
            "\"count\": %ld, \"depth\": %ld, \"channels\": %ld, \"time_s\": %.6f, \"cpu_s\": %.6f, \"wrong\": %zu}\n",
            moved * 8 / (double)took, trip_us / 2, open_ms, (cpu[0] + cpu[1]) / (moved / 1e9), plan->bytes, plan->count,
            plan->depth, plan->channels, (double)took / 1e9, cpu[0] + cpu[1], pattern(channels, plan));
    }
    for (long c = 0; c < plan->channels; c++) {
        require(proxy_close_send(&proxy, channels[c].send) == 0, "closeSend");
        require(proxy_close_recv(&proxy, channels[c].recv) == 0, "closeRecv");
        require(proxy_close_listen(&proxy, channels[c].listener) == 0, "closeListen");
        free(channels[c].data);
    }
    barrier();
    require(proxy_finalize(&proxy) == 0, "finalize");
    return 0;
}

static int parent_main(int argc, char **argv) {
    int ends[2];
    pid_t pids[2];
    char *arguments[64];
    require(argc < 60 && socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    int fds[2] = {fcntl(ends[0], F_DUPFD_CLOEXEC, 10), fcntl(ends[1], F_DUPFD_CLOEXEC, 10)};
    close(ends[0]);
    close(ends[1]);
    memcpy(arguments, argv, (size_t)argc * sizeof *arguments);
    arguments[argc] = "--side";
    arguments[argc + 2] = NULL;
    for (int i = 0; i < 2; i++) {
        posix_spawn_file_actions_t actions;
        arguments[argc + 1] = i == 0 ? "0" : "1";
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, fds[i], SOCKET);
        require(posix_spawn(&pids[i], "/proc/self/exe", &actions, NULL, arguments, environ) == 0, "start a process");
        posix_spawn_file_actions_destroy(&actions);
    }
    close(fds[0]);
    close(fds[1]);
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        int status = -1;
        require(waitpid(pids[i], &status, 0) == pids[i], "waitpid");
        failed = failed || (WIFEXITED(status) && WEXITSTATUS(status) != 0) ||
                 (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL);
    }
    return failed;
}

int main(int argc, char **argv) {
    struct plan plan = {.version = 12,
                        .bytes = 1 << 20,
                        .count = 256,
                        .depth = 4,
                        .channels = 1,
                        .rounds = 2000,
                        .ping = PING_BYTES,
                        .side = -1,
                        .socket = SOCKET};
    for (int i = 1; i + 1 < argc; i += 2) {
        const struct {
            const char *name;
            const char **text;
            long *number;
        } options[] = {
            {"--plugin", &plan.plugin, NULL},     {"--stock", &plan.stock, NULL},   {"--through", &plan.through, NULL},
            {"--fault", &plan.fault, NULL},       {"--count", NULL, &plan.count},   {"--depth", NULL, &plan.depth},
            {"--channels", NULL, &plan.channels}, {"--rounds", NULL, &plan.rounds}, {"--side", NULL, &plan.side},
            {"--warm", NULL, &plan.warm},         {"--ping", NULL, &plan.ping},     {"--socket", NULL, &plan.socket},
            {"--ahead", NULL, &plan.ahead}};
        bool known = strcmp(argv[i], "--version") == 0 || strcmp(argv[i], "--bytes") == 0;
        for (size_t o = 0; o < sizeof options / sizeof options[0]; o++) {
            bool this = strcmp(argv[i], options[o].name) == 0;
            known = known || this;
            if (this && options[o].text != NULL) {
                *options[o].text = argv[i + 1];
            } else if (this) {
                *options[o].number = atol(argv[i + 1]);
            }
        }
        require(known && strncmp(argv[i + 1], "--", 2) != 0,
                argv[i]); // else the processes could start each other for ever
        plan.version = strcmp(argv[i], "--version") == 0 ? atoi(argv[i + 1]) : plan.version;
        plan.bytes = strcmp(argv[i], "--bytes") == 0 ? (size_t)atol(argv[i + 1]) : plan.bytes;
    }
    require(argc % 2 == 1, argv[argc - 1]);
    require(plan.plugin != NULL || plan.stock != NULL, "name --plugin or --stock");
    require(plan.depth > 0 && plan.depth <= PROXY_REQUESTS && plan.channels > 0 && plan.channels <= CHANNELS_MAX,
            "--depth is at most 32, --channels at most 16");
    require(plan.socket == SOCKET || dup2((int)plan.socket, SOCKET) == SOCKET, "the socket");
    return plan.side < 0 ? parent_main(argc, argv) : side_main(&plan);
}
