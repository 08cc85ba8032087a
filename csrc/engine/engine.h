// The engine: runs operations on one communication thread per job, which owns the lanes and the control connections.
// Callers submit operations and wait. Nothing here touches Python.
//
// Operations match by (communicator, key, round), never by submission order. Rank 0, the coordinator, learns which rank
// has submitted what, and sends "go" when all members have submitted. A go also serves as the
// receivers' credit: every member's memory is known by then.
#ifndef NB_ENGINE_H
#define NB_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/wire.h" // IWYU pragma: export
#include "bootstrap/bootstrap.h"
#include "coll/choose.h"
#include "trace/ring.h"
#include "transport/transport.h"

struct CUevent_st;
struct CUstream_st;
struct nb_algorithm;
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
    // Of all ranks, on one int32, which becomes the rank that joined last. Until all have joined, a joined rank
    // contributes zeros to all-reduces and takes part in barriers. All other kinds are refused meanwhile.
    NB_OP_JOIN,
    NB_OP_KINDS
};

enum { NB_SEGMENTS_MAX = 512, NB_OP_STREAMS_MAX = 8, NB_STREAMS_AUTO = 0 };

// Shared memory between the ranks of one host. OFF: not tried. AUTO: used where all ranks can, else the network and a
// notice. REQUIRED: an error where not all ranks can.
enum nb_shm_mode { NB_SHM_OFF, NB_SHM_AUTO, NB_SHM_REQUIRED };

struct nb_segment {
    void *base;
    size_t bytes; // a multiple of the element size
};

// Works in place on the buffer that the segments form, in their order. All-gather: the buffer is the whole output; this
// rank has filled its own part. Reduce-scatter: the buffer is the whole input; this rank's part becomes its result.
// All-to-all: the buffer is the input, one part for each rank, followed by the output, one part from each. Unused
// fields are zero.
struct nb_op {
    const char *name; // for messages, and hashed to the key where key is 0
    uint64_t key;
    enum nb_op_kind kind;
    int dtype;
    int redop;
    int root;     // rank in the communicator
    int priority; // among negotiated operations the highest starts first
    bool scaled;  // false: prescale and postscale count as 1
    double prescale;
    double postscale;
    uint64_t shape;                    // identifies the tensor's dimensions; must be the same on all ranks
    const struct nb_segment *segments; // copied
    int segment_count;
    uint32_t bucket; // bucket + 1, for the trace; 0: none
    uint16_t part;   // this is part `part` of `parts` of one tensor (0: whole)
    uint16_t parts;
    bool awaited; // the caller waits for it at once, so the communication thread need not be woken
    int limit_ms; // fails alone after this time if ranks have not submitted it, and names them. 0: never
    // 0: host memory. Else the number of a CUDA device + 1; the segments then are addresses of that device. The memory
    // is used until the work is done, and after that only by what the streams wait for.
    int device;
    struct CUstream_st *const *streams; // that wrote the memory; work given to them after the operation sees the result
    int stream_count;                   // 1…NB_OP_STREAMS_MAX
    struct CUevent_st *fence; // event after which the memory holds its values; stays until the work is done. NULL: all
                              // that the streams have been given by now
};

struct nb_job_config {
    struct nb_boot *boot;  // joined; the job takes over its control connections
    const char *transport; // "tcp", "ofi"
    int streams;           // NB_STREAMS_AUTO, or 1…NB_LANES_MAX
    const char *provider;
    const char *library;
    const char *congestion; // congestion control of TCP lanes; NULL: the system's default
    const char *ifname;
    struct nb_port_range ports;
    size_t segment_bytes;            // 0: 256 KiB
    int timeout_ms;                  // limit of a wait for a peer
    int start_ms;                    // limit for opening the lanes; 0: timeout_ms
    int pending_max;                 // operations of one rank that may wait for other ranks; 0: 65 536
    int stall_ms;                    // time until a notice names the missing ranks; 0: never
    int stall_end_ms;                // time until a stall ends the job; 0: never
    struct nb_ring *ring;            // of the communication thread; NULL: no recording
    int64_t clock_offset_ns;         // from nb_boot_clock()
    enum nb_algorithm_id algorithm;  // of all-reduces; NONE: rank 0 chooses. Rank 0's setting applies
    const struct nb_algorithm *more; // an algorithm beside the built-in ones, for tests; NULL: none
    enum nb_shm_mode shm;
    unsigned char host[NB_HOST_BYTES]; // identifies the host: the same on all its ranks
    const int *cpus;                   // CPU of each communication thread of this host, by local rank
    int cpu_count;                     // 0: the threads are not pinned
    const char *cuda_library;          // NULL: libcuda.so.1
    size_t device_chunk_bytes;         // of pinned memory; the same on all ranks. 0: the default
    int device_chunks;                 // for each device; 0: the default
    size_t device_gather_bytes;        // pieces of at most this size are copied together by a kernel; 0: none
    const void *cuda_image;            // of the kernels; NULL: that of the build
};

// Counters and settings of a job. `probe`: what streams=auto measured, in the order tried.
struct nb_job_info {
    int streams_open;
    int streams_used;   // 0 until streams=auto has decided
    uint64_t bytes_out; // payload, counted as transfers complete
    uint64_t bytes_in;
    uint64_t dropped;      // lanes that were lost
    uint64_t refused;      // connections, arrivals and messages that failed authentication and were dropped
    const char *provider;  // "tcp", "ofi: net 117.0 (libfabric 1.17)"
    struct nb_costs costs; // of the lanes; zero until the first all-reduce with a choice of algorithms
    int probe_count;
    struct nb_probe_point probe[NB_PROBE_MAX];
    int cpu;                      // of the communication thread, or -1
    uint16_t ports[NB_LANES_MAX]; // of each open lane: nb_lanes_port()
    char shm[192];                // "on", or "off: " and the reason
    uint64_t shm_bytes;           // read from and written to other ranks' memory
    uint64_t shm_staged_bytes;    // of these: through staging
};

// Opens the lanes, exchanges their addresses and starts the communication thread. Errors name what was asked for and
// what is available. All operations compute in the float mode of the calling thread: how it rounds, and whether it
// flushes denormal numbers to zero. A thread that changes its own mode later does not change results. -EINTR if the
// interrupt of config->boot ends a wait; it is not used after the call.
int nb_job_open(struct nb_job **job, const struct nb_job_config *config, struct nb_error *err);
// Announces to the other ranks that this rank leaves in good order, fails pending operations with NB_ECLOSED, and ends
// the thread. Waits at most 2 s for live peers to confirm what was sent to them.
void nb_job_close(struct nb_job *job);
// Fails the job on every rank and names this rank as the cause. The caller still calls nb_job_close().
void nb_job_abort(struct nb_job *job, const char *why);
void nb_job_info(struct nb_job *job, struct nb_job_info *info);
// Records this rank's clock against rank 0's in a ring too, about once a second, beginning soon. NULL: no longer; the
// ring is then not used any more.
void nb_job_record_clock(struct nb_job *job, struct nb_ring *ring);
// Returns the next notice for the user (a stall, a lost lane), each at most once; the last one counts those for which
// there was no room. False: there is none.
bool nb_job_notice(struct nb_job *job, char *text, size_t text_bytes);
// Writes the ranks that had not submitted the communicator's operation of this name at its last stall report: in rising
// order, at most NB_MISSING_MAX. Returns their number; 0 if it was not reported, or if later reports have replaced it.
int nb_comm_missing(struct nb_comm *comm, const char *name, int32_t ranks[NB_MISSING_MAX]);
// Returns the code of the error that ended the job, and 0 if none did.
int nb_job_failure(struct nb_job *job, struct nb_error *err);

// Registers memory that many operations will use, with every lane that needs it, until nb_job_unmap() or the end of the
// job.
int nb_job_map(struct nb_job *job, void *base, size_t bytes, struct nb_error *err);
// The same for an arena. Where memory is shared, the other ranks of this host map it too.
int nb_job_map_arena(struct nb_job *job, const struct nb_arena *arena, struct nb_error *err);
// Releases memory that was mapped; every operation of this rank on it is done. gone(ctx) is called once no peer can
// reach the memory any more, or the job has ended: by another thread, or before this returns. If this returns an error,
// gone() is never called.
int nb_job_unmap(struct nb_job *job, void *base, void (*gone)(void *ctx), void *ctx, struct nb_error *err);

// The communicator of all ranks; the job owns it.
struct nb_comm *nb_job_world(struct nb_job *job);
// Makes a communicator of some ranks, in rising order and with this rank among them. `id` is above 0, the same on all
// its ranks, and not used by another communicator of the job. -EINVAL, -EEXIST, -ENOMEM, -ENOSPC. The job owns it.
int nb_comm_make(struct nb_job *job, uint32_t id, const int *ranks, int count, struct nb_error *err);
// NULL: this rank has no communicator of this number. 0: the one of all ranks.
struct nb_comm *nb_comm_find(struct nb_job *job, uint32_t id);
int nb_comm_rank(const struct nb_comm *comm);
int nb_comm_size(const struct nb_comm *comm);

// Never blocks on a peer. The engine owns the memory of the segments until the work is done. -EINVAL for what no rank
// could do (unknown dtype, bytes that are not whole elements); -EEXIST while an operation of this name is pending.
int nb_submit(struct nb_comm *comm, const struct nb_op *op, struct nb_work **work, struct nb_error *err);

// True if the work is done; then *code is 0 or the failure.
bool nb_work_test(const struct nb_work *work, int *code);
// 0 when done, -EAGAIN after timeout_ms (-1: none), or the operation's failure, described in err.
int nb_work_wait(struct nb_work *work, int timeout_ms, struct nb_error *err);
// Any thread may call this. The engine keeps a work that is not done until it is.
void nb_work_release(struct nb_work *work);

// Makes another stream wait for the result of a device operation that is done, as the operation's own streams do. It
// does not wait for other work of these streams. Call it before the job is closed. No effect on host memory. -EBUSY if
// the stream is captured.
int nb_work_follow(const struct nb_work *work, struct CUstream_st *stream, struct nb_error *err);

struct nb_work_times { // nb_now_ns(); 0: not yet
    int64_t submit_ns;
    int64_t agreed_ns;
    int64_t start_ns;
    int64_t first_byte_ns;
    int64_t done_ns;
};
void nb_work_times(const struct nb_work *work, struct nb_work_times *times);

// The number of an algorithm that a user can choose by name; "auto" is NB_ALGORITHM_NONE. Negative: no such name.
int nb_algorithm_find(const char *name);
// Writes the names that nb_algorithm_find() knows, as "a", "b" or "c".
void nb_algorithm_names(char *text, size_t room);

// The key of an operation: 64-bit FNV-1a of its name.
uint64_t nb_key(const char *name);

#endif
