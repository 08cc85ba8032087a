// The engine: one communication thread a job, which owns the lanes and the control connections. Callers submit
// operations and wait; nothing here ever touches Python.
//
// Operations match by (comm, key, round), never by the order of submission: rank 0 learns who has submitted what,
// and says "go" when all members have. A go is also the receiver's credit: every member's memory is known by then.
#ifndef NB_ENGINE_H
#define NB_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "base/error.h"
#include "bootstrap/bootstrap.h"
#include "coll/choose.h"
#include "trace/ring.h"

struct nb_job;
struct nb_comm;
struct nb_work;

enum nb_op_kind {
    NB_OP_ALLREDUCE,
    NB_OP_ALLGATHER,
    NB_OP_REDUCESCATTER,
    NB_OP_BROADCAST,
    NB_OP_BARRIER,
    NB_OP_ALLTOALL,
    NB_OP_JOIN, // of all ranks: an int32, which becomes the rank that came last. A rank that waits for the others here
                // takes part in their all-reduces with zeros, and in their barriers; all else is refused
    NB_OP_KINDS
};

enum {
    NB_NAME_MAX = 96,
    NB_SEGMENTS_MAX = 512,
    NB_PROBE_MAX = 8,
    NB_STREAMS_AUTO = 0,
    NB_HOST_BYTES = 16,
    NB_MISSING_MAX = 16
};

// Memory shared between ranks of one host: not tried; used where all can, else the network with a notice; an error where
// not all can.
enum nb_shm_mode { NB_SHM_OFF, NB_SHM_AUTO, NB_SHM_REQUIRED };

struct nb_segment {
    void *base;
    size_t bytes; // a multiple of the element size
};

// In place, over the line that the segments form. All-gather: the line is the whole output, this rank's part is filled
// in. Reduce-scatter: the line is the whole input, this rank's part is the answer. All-to-all: the line is the input, one
// part for each rank, and behind it the output, one part from each. Unused fields are zero.
struct nb_op {
    const char *name; // for messages, and hashed to the key where key is 0
    uint64_t key;
    enum nb_op_kind kind;
    int dtype;
    int redop;
    int root;        // rank in the comm
    int priority;    // the higher travels first among agreed operations
    double prescale; // 0 stands for 1
    double postscale;
    uint64_t shape; // what stands for the dimensions that the caller sees in the line: all ranks must give the same
    const struct nb_segment *segments; // copied
    int segment_count;
    uint32_t bucket; // bucket + 1 for the record, 0: none
    uint16_t part;   // this is part `part` of `parts` of one tensor (0: whole)
    uint16_t parts;
    bool awaited; // the caller waits for it at once: nobody else need be woken for it
    int limit_ms; // after which it fails where not all ranks have submitted it, naming them; the job goes on. 0: never
    int device;   // 0: host memory. Others are refused
    void *fence;  // what must have happened before memory is read; NULL: nothing
};

struct nb_job_config {
    struct nb_boot *boot;  // joined; the job takes its control connections over
    const char *transport; // "tcp", "ofi"
    int streams;           // NB_STREAMS_AUTO, or 1…NB_LANES_MAX
    const char *provider;
    const char *library;
    const char *congestion; // of tcp lanes; NULL: as it comes
    const char *ifname;
    struct nb_port_range ports;
    size_t segment_bytes;        // 0: 256 KiB
    int timeout_ms;              // of a wait on a peer
    int start_ms;                // of the lanes' opening; 0: timeout_ms
    int pending_max;             // operations of one rank that may wait for the others; 0: 65 536
    int stall_ms;                // after which a missing rank is named; 0: never
    int stall_end_ms;            // after which it ends the job; 0: never
    struct nb_ring *ring;        // of the communication thread; NULL: nothing is recorded
    int64_t clock_offset_ns;     // as nb_boot_clock found it
    enum nb_algorithm algorithm; // of all-reduces: RING, DOUBLING, HALVING; NONE: rank 0 chooses. Rank 0's counts
    enum nb_shm_mode shm;
    unsigned char host[NB_HOST_BYTES]; // what ranks of one host have in common
    const int *cpus;                   // of the communication threads of this host's ranks, in their order
    int cpu_count;                     // 0: wherever the system puts them
};

// What streams=auto found, in the order tried.
struct nb_probe_point {
    int lanes;
    uint64_t bytes; // moved a rank, one way
    int64_t ns;
};

struct nb_job_info {
    int streams_open;
    int streams_used;   // 0 while auto has not decided
    uint64_t bytes_out; // payload by the lanes' completions
    uint64_t bytes_in;
    uint64_t dropped;      // lanes that were lost
    uint64_t refused;      // arrivals and messages on the lanes that proved no right to be taken, and were dropped
    const char *provider;  // "tcp", "ofi: net 117.0 (libfabric 1.17)"
    struct nb_costs costs; // of the lanes; zero while no all-reduce has left a choice
    int probe_count;
    struct nb_probe_point probe[NB_PROBE_MAX];
    int cpu;                   // of the communication thread, or -1
    char shm[192];             // "on", or "off: " and why
    uint64_t shm_bytes;        // read from and written to other ranks' memory
    uint64_t shm_staged_bytes; // of these: by way of staging
};

// Opens the lanes, exchanges their addresses, starts the thread. Errors name what was asked for and what there is.
int nb_job_open(struct nb_job **job, const struct nb_job_config *config, struct nb_error *err);
// Tells the others that this rank leaves in good order, fails what is pending with NB_ECLOSED, ends the thread.
// Waits 2 s at most for peers that are alive and do not say yet that they have what was sent to them.
void nb_job_close(struct nb_job *job);
// Fails the job on every rank, with this rank as the one at fault. nb_job_close is still due.
void nb_job_abort(struct nb_job *job, const char *why);
void nb_job_info(struct nb_job *job, struct nb_job_info *info);
// The next thing that a user must be told (a stall, a lost lane), at most once each; false: nothing.
bool nb_job_notice(struct nb_job *job, char *text, size_t text_bytes);
// The ranks that had not submitted a comm's operation of this name when it was last told of as stalled, in rising order,
// the first NB_MISSING_MAX; returns how many, 0 where none was told of, or long ago.
int nb_comm_missing(struct nb_comm *comm, const char *name, int32_t ranks[NB_MISSING_MAX]);
// The error that ended the job, if one did.
int nb_job_failure(struct nb_job *job, struct nb_error *err);

// Memory that many operations will use: mapped for every lane that wants it, until nb_job_unmap() or the job's end.
int nb_job_map(struct nb_job *job, void *base, size_t bytes, struct nb_error *err);
// The same of an arena, which the other ranks of this host map too where memory is shared.
int nb_job_map_arena(struct nb_job *job, const struct nb_arena *arena, struct nb_error *err);
// Takes back memory that was mapped, of which every operation of this rank is over. gone(ctx) is called once nobody reaches
// it any more, or the job has ended: by another thread, or before this returns. An error: it never is.
int nb_job_unmap(struct nb_job *job, void *base, void (*gone)(void *ctx), void *ctx, struct nb_error *err);

// The comm of all ranks; it belongs to the job.
struct nb_comm *nb_job_world(struct nb_job *job);
// Makes one of some ranks, which rise and have this one among them, under a number above 0 that all of them give it and no
// other comm of the job has. -EINVAL, -EEXIST. It belongs to the job, too.
int nb_comm_make(struct nb_job *job, uint32_t id, const int *ranks, int count, struct nb_error *err);
// NULL: there is none of this number here. 0: of all ranks.
struct nb_comm *nb_comm_find(struct nb_job *job, uint32_t id);
int nb_comm_rank(const struct nb_comm *comm);
int nb_comm_size(const struct nb_comm *comm);

// Never blocks on a peer. The memory of the segments is the engine's until the work is done. -EINVAL for what no rank
// could do (unknown dtype, bytes that are no multiple of an element); -EEXIST when an operation of this name is pending.
int nb_submit(struct nb_comm *comm, const struct nb_op *op, struct nb_work **work, struct nb_error *err);

// Done? Then *code is 0 or the failure.
bool nb_work_test(const struct nb_work *work, int *code);
// 0 when done, -EAGAIN after timeout_ms (-1: none), or the operation's failure, described in err.
int nb_work_wait(struct nb_work *work, int timeout_ms, struct nb_error *err);
// Of any thread; a work that is not done stays with the engine until it is.
void nb_work_release(struct nb_work *work);

struct nb_work_times { // nb_now_ns(); 0: not yet
    int64_t submit_ns;
    int64_t agreed_ns;
    int64_t start_ns;
    int64_t first_byte_ns;
    int64_t done_ns;
};
void nb_work_times(const struct nb_work *work, struct nb_work_times *times);

// 64-bit FNV-1a of the name: the key.
uint64_t nb_key(const char *name);

#endif
