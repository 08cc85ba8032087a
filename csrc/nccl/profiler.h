// Profiler: NCCL's events of this process as events of our ring (csrc/trace/event.h), and passed on to another profiler.
//
// A network step is recorded once, at its end, with the duration of each of its states: a state lasts from its own report
// to the next one. A handle that NCCL gets is a number and no address: a late, repeated or unknown one finds nothing.
// After opening, no function allocates, locks or fails. What finds no room in a table is counted in the ring as dropped.
//
// NCCL calls from its callers' threads and from its proxy threads at once; one operation's calls come from one thread. The
// functions carry no context for stop and state, so the process has one profiler. A forked child has none.
#ifndef NB_NCCL_PROFILER_H
#define NB_NCCL_PROFILER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "nccl/abi.h"
#include "nccl/profiler_abi.h"

#define NB_PROFILER_NAME "NetBottleneck"

// What NCCL says when it opens a communicator, and the version of the table by which it does.
struct nb_profile_about {
    int version;
    uint64_t id; // equal on all ranks
    const char *name;
    int hosts;
    int ranks;
    int rank;
    nccl_logger log;
};

// Sets the events that NCCL shall report in *mask, which NCCL reads as long as it runs, and leaves it as it is if neither
// a ring nor another profiler is asked for: *ctx is NULL then. Writes to NCCL's log what is not possible. A context is a
// number and no address: with PXN, NCCL gives this process events with the contexts of other processes.
void nb_profile_open(void **ctx, const struct nb_profile_about *about, int *mask);
// Forgets its unfinished events. NCCL reports no more of them.
void nb_profile_close(const void *ctx);

// Returns the handle of an event, NULL if it is not wanted or was dropped. Reads only the fields that the version has.
void *nb_profile_start(const void *ctx, int version, uint64_t type, const void *event);
void nb_profile_state(void *handle, int state, const union nccl_state_args *args);
void nb_profile_stop(void *handle);

// Another profiler, profiler_next.c: NCCL loads one, and ours passes events on to it. Its newest version up to that by
// which NCCL calls is used.
struct nb_next {
    int version; // 0: none
    int called;  // version of NCCL's calls
    int *mask;   // what it wants, which it may change at any time: NCCL's mask, or `own_mask`
    int own_mask;
    const void *table;
};

// Loads the library as NCCL would: by `name` as it is, else as libnccl-profiler-<name>.so. Fails with a text.
int nb_next_open(struct nb_next *next, const char *name, int called, struct nb_error *err);
// nccl_mask: NCCL's, where all that NCCL reports is for the other profiler; NULL: it gets a mask of its own.
bool nb_next_open_comm(struct nb_next *next, void **ctx, const struct nb_profile_about *about, int *nccl_mask);
void nb_next_close_comm(const struct nb_next *next, void *ctx);
// True if NCCL itself would report an event of this type to it.
bool nb_next_wants(const struct nb_next *next, uint64_t type);
// `parent` and `group` are its own handles.
void *nb_next_start(const struct nb_next *next, void *ctx, uint64_t type, const void *event, void *parent, void *group);
void nb_next_state(const struct nb_next *next, void *handle, int state, const union nccl_state_args *args);
void nb_next_stop(const struct nb_next *next, void *handle);

#endif
