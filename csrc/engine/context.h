// Job context: the state of each part of the engine, and what they share. Each part's own header describes its state.
// Unless a comment says otherwise, a field belongs to the progress owner (progress_owner.h).
#ifndef NB_ENGINE_CONTEXT_H
#define NB_ENGINE_CONTEXT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "bootstrap/bootstrap.h"
#include "engine/communicator.h"
#include "engine/control.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/joined_ranks.h"
#include "engine/operation.h"
#include "engine/progress_owner.h"
#include "engine/stall.h"
#include "engine/watchdog.h"

struct nb_lanes;

enum { NB_NOTICES_MAX = 4 };

struct map_request {
    struct nb_list link;
    void *base;
    size_t bytes;
    int fd;                  // descriptor for the ranks of this host, or -1
    int why;                 // if an arena has no descriptor: -errno
    void (*gone)(void *ctx); // NULL: map. Else: unmap, then call this
    void *ctx;
};

struct nb_inbox {         // requests of callers to the progress owner. Under the lock
    _Atomic bool filled;  // the inbox is not empty. Read without the lock too
    struct nb_list works; // submitted
    struct nb_list maps;  // memory to map or unmap
    bool aborting;
    struct nb_error abort_why;
};

struct nb_clock_log {             // a second ring for measurements of this rank's clock; without a lock
    struct nb_ring *_Atomic ring; // or NULL
    _Atomic bool busy;            // the progress owner writes to it
    _Atomic bool due;             // a measurement was requested
};

struct nb_job {
    struct nb_job_config config;
    struct nb_boot boot;
    int rank;
    int size;
    struct nb_comm world;
    struct nb_loop loop;
    struct nb_lanes *lanes;
    bool *peer_open;          // by rank: lanes are opened
    unsigned char *addresses; // all ranks' lane addresses
    struct control *controls; // rank 0: by rank; others: [0]
    int control_count;
    nb_control_handler_fn *handle_control; // handler of their messages
    bool failed;
    bool failure_due;    // the failure must still be announced to the other ranks
    bool costs_new;      // the trace does not have them yet
    bool limit_reported; // the limit on registered memory was reported

    // In the steady state the progress owner takes the lock only for requests, for operations that complete, and around
    // its sleep.
    pthread_mutex_t lock; // guards the fields up to the blank line
    pthread_cond_t finished;
    struct nb_error failure; // sticky
    struct nb_job_info info;
    char notices[NB_NOTICES_MAX][NB_ERROR_TEXT];
    int notice_count;
    int notices_dropped; // for lack of room, since the last time that all were read

    struct nb_inbox inbox;
    struct nb_comms comms;
    struct nb_operations ops;
    struct nb_devices devices;
    struct nb_progress progress;
    struct nb_watchdog watchdog;
    struct nb_clock_log clock;
    struct nb_stalls stalls;
    struct nb_joined joined;
    size_t inline_bytes; // inline.c
    struct negotiation *negotiation;
    struct coordinator *coordinator; // rank 0
    struct autotune *autotune;
    struct shared *shared; // NULL: the ranks of this host share no memory
};

// Makes the lists and tables of requests, communicators and operations empty.
void nb_job_lists_init(struct nb_job *job);
void nb_job_notify(struct nb_job *job, const char *text);
// Fails the job: the first failure sticks and ends every operation. `announce`: the other ranks do not know it yet.
void nb_job_fail(struct nb_job *job, const struct nb_error *why, bool announce);
// Asks the progress owner to fail the job on all ranks. Any thread.
void nb_job_abort_for(struct nb_job *job, const struct nb_error *why);
// Fails the job because a peer broke the protocol, and names the peer.
void nb_job_wire_fail(struct nb_job *job, int peer, const char *what);
// Opens the lanes to a peer, unless they are open. NB_EPEER if the peer has left the job.
int nb_job_peer_ready(struct nb_job *job, int peer, struct nb_error *err);
// Registers memory with the lanes. Memory that cannot be registered travels through staging, which is slower; a notice
// gives the cause. By the progress owner.
void nb_job_register(struct nb_job *job, void *base, size_t bytes);
// Rank 0: returns the first of the numbers of the next operation, which has `count` of them.
uint64_t nb_job_next_seq(struct nb_job *job, uint64_t count);
// True if the number is above all earlier ones, and records it: the numbers of started operations only grow.
bool nb_job_accept_seq(struct nb_job *job, uint64_t seq);
// Records a measurement of this rank's clock: its offset to rank 0's. By the progress owner.
void nb_job_clock_measured(struct nb_job *job, int64_t at_ns, uint64_t offset_ns, uint64_t trip_ns);
// True if the progress owner should keep polling after the last movement, at moved_ns. May yield the core.
bool nb_job_polls(const struct nb_job *job, int64_t moved_ns);

#endif
