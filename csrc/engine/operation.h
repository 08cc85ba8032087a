// Operations of this rank, from submission to release, and the table that each algorithm fills in.
#ifndef NB_ENGINE_OPERATION_H
#define NB_ENGINE_OPERATION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/list.h"
#include "coll/choose.h"
#include "coll/reduce.h"
#include "coll/ring_schedule.h"
#include "engine/descriptor.h"
#include "engine/engine.h"
#include "transport/lanes.h"

struct nb_device_op;
struct piece;
struct steps_state;

enum {
    WORK_DONE = 1 << 16, // added to a work's refs when it is done
    STEP_BITS = 12       // low bits of a flow's number: the step; the others are the operation's number
};

// How the bytes of an operation travel. A new algorithm is a file with such a table, and a line in algorithms.c.
//
// The communication thread calls all functions except prepare() and release(), which run on any thread that has the
// work to itself.
struct nb_algorithm {
    enum nb_algorithm_id id; // on the wire and in the trace
    const char *name;        // for NETBOTTLENECK_ALGORITHM; NULL: users cannot choose it
    // True if it can run this operation. Each rank checks rank 0's choice.
    bool (*possible)(const struct nb_work *work);
    // Allocates memory and flows; release() frees them, also if prepare() fails. Sets work->block_bytes: a block must
    // not lie in more pieces of memory than a segment carries. 0 where that does not matter.
    int (*prepare)(struct nb_work *work, struct nb_error *err);
    void (*release)(struct nb_work *work);
    // Starts the operation on this rank. nb_work_moved() ends it, perhaps before start() returns.
    void (*start)(struct nb_work *work, int64_t now_ns);
    // Ends the operation at once: nothing touches its memory after this returns.
    void (*cancel)(struct nb_work *work);
    // True if the operation waits for this peer; then raises *moved_ns to the time when data last moved between the
    // two.
    bool (*waits_for)(struct nb_work *work, int peer, int64_t *moved_ns);
    // Records the bytes of each lane, adds them to the totals, and returns the algorithm's number for the trace.
    enum nb_algorithm_id (*record)(struct nb_work *work, uint64_t *sent, uint64_t *received);
    // Keeps large memory for the next operation. The caller holds the job's lock. NULL: nothing to keep.
    void (*retire)(struct nb_work *work);
    // Ranks other than 0: sends the data instead of the submission. False: the caller submits it. NULL: never.
    bool (*announce)(const struct nb_work *work, uint32_t id);
};

enum nb_shared_stage { NB_SHARED_QUEUED, NB_SHARED_DESCRIBED, NB_SHARED_RUNS, NB_SHARED_SHARE_DONE };

// State of an operation in shared memory (shared_operations.c, two_level.c).
struct nb_shared_op {
    bool staged;
    enum nb_shared_stage stage;
    uint64_t index;      // position in the job's order of such operations
    size_t at;           // direct: bytes of this rank's share that are done
    uint64_t window;     // staged: its first window, counted over the job
    uint64_t windows;    //
    struct piece *piece; // of a ring between hosts: the piece that it reduces
    uint64_t pieces;     // two levels: number of pieces in this rank's part
    uint64_t folded;     // of these: started
    uint64_t spread;     // of these: complete
    uint64_t bytes_in;   // read from other ranks' memory
    uint64_t bytes_out;  // written to other ranks' memory, or to staging that they read
    struct nb_list link; // in the order of starts
};

struct nb_work {
    struct nb_list link;        // in the job's inbox, then its waiting or running list
    struct nb_list order;       // in a list of device.h
    struct nb_hash_node by_key; // under the job's lock: in flight, by key
    struct nb_comm *comm;
    struct nb_ring *ring;    // trace ring; NULL: not recorded
    _Atomic int refs;        // the caller's and the engine's, plus WORK_DONE
    struct nb_error failure; // valid when done
    struct op_descriptor desc;
    uint32_t round;
    bool names_key; // its submission records the name of its key
    uint32_t bucket;
    uint32_t step; // of the training, when it was submitted
    uint64_t seq;  // the operation's number; with a step it forms a flow's number
    bool running;
    const struct nb_algorithm *algorithm;
    void (*on_flows_done)(struct nb_work *work); // called when all bytes have moved. NULL: the work is then complete
    uint32_t detail;                             // wire_go.detail of its start
    size_t block_bytes;
    size_t element_bytes;
    nb_reduce_fn reduce;
    nb_scale_fn scale;
    int flows_left;
    int flow_count; // of nb_work_flow()
    struct nb_flow in;
    struct nb_flow out;
    struct nb_flow *more; // flows beyond these two
    struct nb_work_times times;
    void *zeros;     // memory that a joined rank contributes
    void *fused;     // the buffer copied to one piece, if the caller's pieces are too small for segments
    int piece_count; // of the buffer that travels
    struct nb_segment *pieces;
    size_t *starts;    // piece_count + 1 prefix sums
    int segment_count; // of the caller's buffer
    struct nb_segment *segments;
    struct nb_device_op *device; // of device_memory.c; NULL: host memory
    struct nb_work *whole;       // of a window of device_windows.c: its operation
    int chunk;                   // the same: its memory
    struct nb_sched sched;       // of pipeline.c
    struct steps_state *steps;   // of step_operations.c
    struct nb_shared_op shared;  // of shared_operations.c and two_level.c
};

// The operations of a job on this rank.
struct nb_operations {
    struct nb_list waiting; // submitted, not negotiated
    struct nb_list running;
    uint64_t last_seq; // number of the last operation that rank 0 started
    uint64_t numbered; // rank 0: the last number given out
    // Under the job's lock.
    struct nb_hash in_flight;     // works by key
    struct nb_hash rounds;        // struct key_rounds: number of uses of each key
    struct nb_list rounds_by_age; // the same, least recently used first
    int round_count;
    void *spare; // memory of a finished operation in steps, for the next one
    size_t spare_bytes;
};

// Gives the work the next round of its key. An operation that the ranks agree on takes a round on each rank, also on one
// that has joined, so that its rounds are equal on all ranks. The caller holds the job's lock.
void nb_work_take_round(struct nb_work *work);
void nb_rounds_close(struct nb_job *job);
// Records that the values of a work are handed over, and before it the name of a new key: all other events carry only
// the key.
void nb_work_record_submit(const struct nb_work *work, int64_t now_ns);

// -EINVAL for what no rank could do.
int nb_op_check(const struct nb_comm *comm, const struct nb_op *op, struct nb_error *err);
size_t nb_op_bytes(const struct nb_op *op);
// Makes a work of an operation that was checked, and prepares it for an algorithm. -EINVAL if its blocks exceed the
// segments, -ENOMEM.
int nb_work_make(struct nb_comm *comm, const struct nb_op *op, const struct nb_algorithm *algorithm,
                 struct nb_work **work, struct nb_error *err);
// Prepares the work for another algorithm, in place of the present one.
int nb_work_prepare(struct nb_work *work, const struct nb_algorithm *algorithm, struct nb_error *err);
// Opens the lanes to the peers of its flows.
int nb_work_peers(struct nb_work *work, struct nb_error *err);
void nb_work_start(struct nb_work *work, uint64_t seq);
void nb_work_cancel(struct nb_work *work);
// Completes an operation in which no byte moves between ranks.
void nb_work_alone(struct nb_work *work);
// Finishes the work with the given failure; NULL: success.
void nb_work_finish(struct nb_work *work, const struct nb_error *why);
// Ends a work that nobody waits for, without counting it.
void nb_work_discard(struct nb_work *work);
// Marks the work as done and drops the engine's reference in one step: a waiting caller then holds the last reference
// and frees the work.
void nb_work_set_done(struct nb_work *work);

// For algorithms. Prescales the buffer and moves the work to the running list. False: no flow has a block, and the work
// is complete.
bool nb_work_begin(struct nb_work *work);
void nb_work_set_running(struct nb_work *work);
// A flow of the operation. Even indices are incoming, odd ones outgoing.
struct nb_flow *nb_work_flow(struct nb_work *work, int index);
// Prepares a flow for the lanes. `step` becomes part of the flow's number.
void nb_work_flow_ready(struct nb_work *work, struct nb_flow *flow, const struct nb_flow_ops *ops, int step);
// All bytes of the operation have moved.
void nb_work_moved(struct nb_work *work);
// A flow is done. The last one means nb_work_moved().
void nb_work_flow_done(struct nb_work *work);
// Table entries for algorithms that move all data by flows.
void nb_flows_cancel(struct nb_work *work);
bool nb_flows_wait_for(struct nb_work *work, int peer, int64_t *moved_ns);
enum nb_algorithm_id nb_flows_record(struct nb_work *work, uint64_t *sent, uint64_t *received);

#endif
