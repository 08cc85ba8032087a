// Calls a profiler plugin as NCCL does during one collective, with waits of known length.
//
//   profile --plugin FILE --version N [--through LIBNCCL]   the plugin's table; --through: by NCCL's own adapter
//
// Prints one line of JSON: the waits in ns by this program's clock, and the requested event mask. If something is
// missing: {"not_run": reason}.
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

#include "profiled.h"
#include "stock.h"

enum { COUNT = 250000, MS = 1000 * 1000, GPU_EPOCH = 777, COMM = 0xc0ffee };

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

// Waits, and returns the actual time in ns.
static int64_t wait_ms(int64_t since_ns, int ms) {
    int64_t until_ns = since_ns + (int64_t)ms * MS;
    const struct timespec nap = {.tv_nsec = 50 * 1000};
    while (now_ns() < until_ns) {
        nanosleep(&nap, NULL);
    }
    return now_ns() - since_ns;
}

__attribute__((noreturn)) static void not_run(const char *why) {
    printf("{\"not_run\": \"%s\"}\n", why);
    exit(0);
}

static void log_message(int level, unsigned long subsystems, const char *file, int line, const char *fmt, ...) {
    va_list args;
    (void)subsystems;
    (void)file;
    (void)line;
    va_start(args, fmt);
    (void)fprintf(stderr, "%s ", level == NCCL_LOG_WARN ? "WARN" : "INFO");
    (void)vfprintf(stderr, fmt, args);
    (void)fprintf(stderr, "\n");
    va_end(args);
}

static const void *adapted(struct stock *stock, void *plugin, int version) {
    char name[32];
    (void)snprintf(name, sizeof name, "_Z18getNcclProfiler_v%dPv", version);
    const void *(*adapter)(void *) = NULL;
    void *code = stock_symbol(stock, name, 0);
    memcpy(&adapter, &code, sizeof code);
    return adapter != NULL ? adapter(plugin) : NULL;
}

// A send waits for the GPU, the peer and the wire. A receive waits for the arrival, the flush and the GPU.
static void send_and_receive(const struct profiled *nccl, void *task) {
    void *op = profiled_op(nccl, task, 0, 1, 1, getpid());
    int64_t at = now_ns();
    void *step = profiled_step(nccl, op, 0);
    profiled_state(nccl, step, NCCL_STATE_SEND_GPU_WAIT, 0);
    int64_t gpu = wait_ms(at, 80);
    at = now_ns();
    profiled_state(nccl, step, NCCL_STATE_SEND_PEER_WAIT, 0);
    int64_t peer = wait_ms(at, 40);
    profiled_state(nccl, step, NCCL_STATE_SEND_PEER_WAIT, 0);
    at = now_ns();
    profiled_state(nccl, step, NCCL_STATE_SEND_WAIT, 4 * COUNT);
    int64_t wire = wait_ms(at, 60);
    profiled_stop(nccl, step);
    profiled_stop(nccl, op);

    op = profiled_op(nccl, task, 0, 1, 0, getpid());
    at = now_ns();
    step = profiled_step(nccl, op, 0);
    profiled_state(nccl, step, NCCL_STATE_RECV_WAIT, 0);
    int64_t arrival = wait_ms(at, 50);
    at = now_ns();
    profiled_state(nccl, step, NCCL_STATE_RECV_FLUSH_WAIT, 4 * COUNT);
    int64_t flush = wait_ms(at, 20);
    at = now_ns();
    profiled_state(nccl, step, NCCL_STATE_RECV_GPU_WAIT, 4 * COUNT);
    int64_t drain = wait_ms(at, 30);
    profiled_stop(nccl, step);
    profiled_stop(nccl, op);
    printf("\"sent\": [%" PRId64 ", %" PRId64 ", %" PRId64 "], ", gpu, peer, wire);
    printf("\"received\": [%" PRId64 ", %" PRId64 ", %" PRId64 "], ", arrival, flush, drain);
}

int main(int argc, char **argv) {
    const char *file = NULL;
    const char *through = NULL;
    struct stock stock;
    struct profiled nccl = {0};
    for (int i = 1; i + 1 < argc; i += 2) {
        file = strcmp(argv[i], "--plugin") == 0 ? argv[i + 1] : file;
        through = strcmp(argv[i], "--through") == 0 ? argv[i + 1] : through;
        nccl.version = strcmp(argv[i], "--version") == 0 ? atoi(argv[i + 1]) : nccl.version;
    }
    if (file == NULL || nccl.version < NCCL_PROFILER_OLDEST || nccl.version > NCCL_PROFILER_NEWEST) {
        (void)fprintf(stderr, "usage: profile --plugin FILE --version 4 to 7 [--through LIBNCCL]\n");
        return 2;
    }
    char name[32];
    (void)snprintf(name, sizeof name, "ncclProfiler_v%d", nccl.version);
    void *plugin = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    nccl.table = plugin != NULL ? dlsym(plugin, name) : NULL;
    if (nccl.table != NULL && through != NULL) {
        nccl.table = stock_open(&stock, through) ? adapted(&stock, plugin, nccl.version) : NULL;
        nccl.version = 6; // NCCL 2.30 calls its adapters by this version
        if (nccl.table == NULL) {
            not_run(stock.why);
        }
    }
    if (nccl.table == NULL) {
        not_run("the plugin has no such table");
    }
    if (profiled_init(&nccl, COMM, "harness", 2, 0, log_message) != NCCL_SUCCESS) {
        return 1;
    }
    printf("{\"mask\": %d, \"pid\": %d, ", nccl.mask, (int)getpid());
    void *group = profiled_group(&nccl);
    void *task = profiled_all_reduce(&nccl, group, 5, COUNT, 1, 42);
    uint64_t began = (uint64_t)now_ns() + GPU_EPOCH;
    void *kernel = profiled_kernel(&nccl, task, 0, began);
    profiled_stop(&nccl, task);
    profiled_stop(&nccl, group);
    send_and_receive(&nccl, task);
    uint64_t ended = (uint64_t)now_ns() + GPU_EPOCH;
    profiled_kernel_stop(&nccl, kernel, ended);
    printf("\"kernel\": %" PRIu64 "}\n", ended - began);
    return profiled_finalize(&nccl) == NCCL_SUCCESS ? 0 : 1;
}
