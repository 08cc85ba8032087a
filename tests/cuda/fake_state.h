// State of the fake CUDA driver, shared by fake_driver.c (CUDA calls) and fake_controls.c (controls).
#ifndef NB_TEST_CUDA_FAKE_STATE_H
#define NB_TEST_CUDA_FAKE_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "fake.h"

#define FAKE_EXPORT __attribute__((visibility("default")))

struct CUctx_st {
    struct CUstream_st *default_stream; // which callers name NULL; NULL: not used yet
    int retained;
};

struct CUevent_st {
    struct CUevent_st *next;
    struct CUctx_st *context;
    const struct CUstream_st *stream; // of the last record
    uint64_t recorded;                // number of the last record, 0: never
    uint64_t completed;
    int64_t completed_ns; // of the last completed record, on the device's clock
    bool timed;
    bool destroyed;
};

struct operation {
    struct operation *next;
    enum fake_kind kind;
    struct CUevent_st *event;
    uint64_t ticket;
    nb_cuda_address address;
    void *host;
    size_t bytes;
    bool pinned;
    void *staged; // copy of the source of a pageable copy to the device
    int kernel;
    uint64_t to;
    uint64_t from;
    uint64_t count;
    double factor;
};

struct CUstream_st {
    struct CUstream_st *next;
    struct CUctx_st *context;
    pthread_t thread;
    struct operation *first;
    struct operation **last;
    uint64_t submitted;
    uint64_t executed;
    uint64_t random;
    int priority; // has no effect
    bool held;
    bool captured;
    bool destroyed;
};

struct allocation {
    struct allocation *next;
    struct CUctx_st *context;
    unsigned char *base; // address that the caller gets
    unsigned char *alias;
    size_t bytes;
    size_t mapped;
    int users;
    bool freed;
};

struct registration {
    struct registration *next;
    unsigned char *base;
    size_t bytes;
    bool mapped;
};

struct CUmod_st {
    struct CUmod_st *next;
    struct CUctx_st *context;
    bool unloaded;
};

struct CUfunc_st {
    int kernel;
};

struct fake_state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct CUctx_st contexts[FAKE_DEVICES];
    struct CUfunc_st functions[NB_CUDA_KERNEL_COUNT];
    struct CUstream_st *streams;
    struct CUevent_st *events;
    struct allocation *allocations;
    struct registration *registrations;
    struct CUmod_st *modules;
    struct fake_entry *log;
    size_t logged;
    size_t log_room;
    const struct CUstream_st *reported_done;
    uint64_t seed;
    int64_t delay_max_ns;
    int64_t clock_ppm; // how much faster the clock of the devices is than the host's
    int capturing;     // streams that are captured
    int refusals;
    int version;
    int calls;
    int poll_calls;
    int executed;
    int pageable_copies;
    int fail_in;
    int fail_poll_in;
    unsigned fail_with;
    const char *fail_symbol;
    int fail_device;
    unsigned fail_symbol_with;
    int break_in;
    int drop_in;
    bool initialized;
    bool broken;
    bool ending;
};

extern struct fake_state fake;

// Memory. The caller holds the lock.

struct allocation *fake_allocation_of(nb_cuda_address address, size_t bytes);
// Returns an accessible alias of the memory at an address, valid until fake_alias_close().
unsigned char *fake_alias_open(struct allocation *it, nb_cuda_address address);
void fake_alias_close(struct allocation *it);

// Drops the contexts that this thread has pushed.
void fake_contexts_forget(void);
// Number of polling calls of this thread.
int fake_polls(void);

#endif
