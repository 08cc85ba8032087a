// One rank of MPI_Allreduce beside one rank of the benchmark: it reduces that rank's memory on order. With WITH_CCL and
// ccl_peer.cpp it calls oneCCL's all-reduce, and MPI only starts the ranks.
//
// usage: mpi_peer DTYPE OP BYTES PID:MEMORY:ORDERS:ANSWERS…     a group for each rank: a process and three descriptors
//
// ORDERS and ANSWERS are pipes of the process, MEMORY a memfd of BYTES. Rank 0 answers when all ranks are ready.
// An order is a struct order, the answer a struct answer. Between orders a rank sleeps in read(): MPI's own waiting would
// spin. The end of ORDERS is the end.
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef WITH_CCL
#include "ccl_peer.h"
#endif

enum { FIRST_RANK = 4, PATH_BYTES = 64 };

struct order {
    uint64_t count; // elements from the beginning of the memory
    uint64_t times; // all-reduces in place, one after another
};

struct answer {
    int64_t took_ns; // by this rank's clock
    int64_t cpu_ns;  // of all of its threads
};

struct rank {
    void *memory;
    int orders;
    int answers;
};

struct name {
    const char *text;
    MPI_Datatype type;
    MPI_Op op;
};

static int fail(const char *what) {
    (void)fprintf(stderr, "mpi_peer: %s: %m\n", what);
    MPI_Abort(MPI_COMM_WORLD, 1);
    return -1;
}

static int descriptor(int pid, int fd, int flags) {
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int opened = open(path, flags | O_CLOEXEC);
    return opened >= 0 ? opened : fail(path);
}

static void rank_open(struct rank *rank, const char *text, size_t bytes) {
    int pid;
    int memory;
    int orders;
    int answers;
    if (sscanf(text, "%d:%d:%d:%d", &pid, &memory, &orders, &answers) != 4) { // NOLINT(cert-err34-c)
        errno = EINVAL;
        (void)fail(text);
    }
    int fd = descriptor(pid, memory, O_RDWR);
    rank->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (rank->memory == MAP_FAILED) {
        (void)fail("mmap");
    }
    close(fd);
    rank->orders = descriptor(pid, orders, O_RDONLY);
    rank->answers = descriptor(pid, answers, O_WRONLY);
}

static const struct name *find(const struct name *names, const char *text) {
    while (names->text != NULL && strcmp(names->text, text) != 0) {
        names++;
    }
    if (names->text == NULL) {
        errno = EINVAL;
        (void)fail(text);
    }
    return names;
}

static int64_t now_ns(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static void answer(const struct rank *rank, struct answer value) {
    if (write(rank->answers, &value, sizeof value) != (ssize_t)sizeof value) {
        (void)fail("answer");
    }
}

static void all_reduce(void *memory, uint64_t count, const struct name *type, const struct name *op) {
#ifdef WITH_CCL
    ccl_all_reduce(memory, count, type->text, op->text);
#else
    MPI_Allreduce(MPI_IN_PLACE, memory, (int)count, type->type, op->op, MPI_COMM_WORLD);
#endif
}

static void serve(const struct rank *rank, const struct name *type, const struct name *op) {
    struct order order;
    while (read(rank->orders, &order, sizeof order) == (ssize_t)sizeof order) { // an order is written in one piece
        MPI_Barrier(MPI_COMM_WORLD);
        struct answer start = {.took_ns = now_ns(CLOCK_MONOTONIC), .cpu_ns = now_ns(CLOCK_PROCESS_CPUTIME_ID)};
        for (uint64_t i = 0; i < order.times; i++) {
            all_reduce(rank->memory, order.count, type, op);
        }
        answer(rank, (struct answer){.took_ns = now_ns(CLOCK_MONOTONIC) - start.took_ns,
                                     .cpu_ns = now_ns(CLOCK_PROCESS_CPUTIME_ID) - start.cpu_ns});
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    const struct name types[] = {
        {"float32", MPI_FLOAT, MPI_OP_NULL},    {"float64", MPI_DOUBLE, MPI_OP_NULL},
        {"int32", MPI_INT32_T, MPI_OP_NULL},    {"int64", MPI_INT64_T, MPI_OP_NULL},
        {NULL, MPI_DATATYPE_NULL, MPI_OP_NULL},
    };
    const struct name ops[] = {
        {"sum", MPI_DATATYPE_NULL, MPI_SUM},    {"min", MPI_DATATYPE_NULL, MPI_MIN},
        {"max", MPI_DATATYPE_NULL, MPI_MAX},    {"product", MPI_DATATYPE_NULL, MPI_PROD},
        {NULL, MPI_DATATYPE_NULL, MPI_OP_NULL},
    };
    int self;
    int size;
    MPI_Comm_rank(MPI_COMM_WORLD, &self);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != FIRST_RANK + size) {
        errno = EINVAL;
        (void)fail("usage: mpi_peer DTYPE OP BYTES PID:MEMORY:ORDERS:ANSWERS… for each rank");
    }
    struct rank rank = {0};
    rank_open(&rank, argv[FIRST_RANK + self], strtoull(argv[3], NULL, 10));
    const struct name *type = find(types, argv[1]);
    const struct name *op = find(ops, argv[2]);
#ifdef WITH_CCL
    ccl_open(self, size);
#endif
    MPI_Barrier(MPI_COMM_WORLD);
    if (self == 0) {
        answer(&rank, (struct answer){0});
    }
    serve(&rank, type, op);
#ifdef WITH_CCL
    ccl_close();
#endif
    MPI_Finalize();
    return 0;
}
