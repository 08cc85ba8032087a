// What the files of the engine share. Unless a line says otherwise, a field belongs to the communication thread, or to the
// caller that drives in its place.
#ifndef NB_ENGINE_INTERNAL_H
#define NB_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/arena.h"
#include "base/hash.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "coll/reduce.h"
#include "coll/sched.h"
#include "coll/steps.h"
#include "engine/engine.h"
#include "engine/group.h"
#include "engine/local.h"
#include "transport/lanes.h"
#include "transport/shm_pipe.h"

enum {
    STREAMS_AUTO_MAX = 16,   // opened when streams=auto
    STREAMS_BEFORE_AUTO = 2, // used until the probe: small transfers gain little from more
    SEGMENT_DEFAULT = 256 * 1024,
    IN_FLIGHT_MAX = 8 * 1024 * 1024,
    PROBE_FROM_BYTES = 4 * 1024 * 1024, // the first transfer of this size starts the probe
    NO_ID = 0xffffffff,
    BINDS_MAX = 8,           // interfaces
    IDS_MAX = 1024,          // operations that a bit can stand for
    SUBMITS_MAX = 1024,      // in one message
    PENDING_MAX = 64 * 1024, // operations of one rank that wait for the others
    TICK_MS = 50,
    WORK_DONE = 1 << 16, // added to a work's refs when it is over
    STEP_BITS = 12       // of a flow's number: the step; the others are the operation's
};

// What all ranks must submit alike under one key. Crosses the wire.
struct desc {
    uint64_t key;
    uint64_t bytes;
    uint64_t shape;
    double prescale;
    double postscale;
    uint8_t kind;
    uint8_t dtype;
    uint8_t redop;
    uint8_t device;
    int32_t root;
    int32_t priority;
    uint32_t comm;
    int32_t limit_ms; // of its first rank
    uint32_t zero;
    char name[NB_NAME_MAX];
};

_Static_assert(sizeof(struct desc) == 64 + NB_NAME_MAX, "crosses the wire");

struct nb_work {
    struct nb_list link;        // in the job's inbox, then among its waiting or running works
    struct nb_hash_node by_key; // under the job's lock: in flight by name
    struct nb_comm *comm;
    _Atomic int refs;        // the caller's and the engine's; and WORK_DONE
    struct nb_error failure; // valid when done
    struct desc desc;
    uint32_t round;
    uint32_t bucket;
    uint64_t seq; // the operation's number: its flows' is this and their step
    bool quiet;   // a probe: not recorded
    bool running;
    enum nb_algorithm algorithm;
    struct nb_sched sched;   // of a ring or chain
    struct stepper *stepper; // of an algorithm in steps
    size_t block_bytes;
    size_t element_bytes;
    nb_reduce_fn reduce;
    nb_scale_fn scale;
    int flows_left;
    int flow_count; // of nb_work_flow()
    struct nb_flow in;
    struct nb_flow out;
    struct nb_flow *more; // beyond these two
    struct nb_local_op local;
    struct nb_work_times times;
    void *stand_in;  // zeros, of a rank that has joined
    void *fused;     // the line as one piece, where the caller's pieces are too small to travel
    int piece_count; // of the line that travels
    struct nb_segment *pieces;
    size_t *starts;    // piece_count + 1 prefix sums
    int segment_count; // of the caller's line
    struct nb_segment *segments;
};

// One control connection. A message is a header and its body, as bootstrap left the stream.
struct control {
    struct nb_watch watch;
    struct nb_job *job;
    int peer;
    bool left;                   // the peer said that it leaves
    struct nb_shm_pipe *pipe_in; // where all ranks share memory messages take this way; NULL: the connection
    struct nb_shm_pipe *pipe_out;
    int64_t heard_ns;
    unsigned char *in;
    size_t in_room;
    size_t in_bytes;
    unsigned char *out;
    size_t out_room;
    size_t out_bytes;
};

enum { NB_STALLS_KEPT = 16 };

enum control_type {
    CTL_SUBMIT = 1, // to 0: struct desc each
    CTL_MASK,       // to 0: uint64_t words: one bit for each cached operation that was submitted
    CTL_GO,         // from 0: struct wire_go each
    CTL_REFUSE,     // from 0: struct wire_refuse
    CTL_PING,       // to 0: int64_t
    CTL_PONG,       // from 0: struct wire_pong
    CTL_FAIL,       // to 0: struct wire_failure
    CTL_ABORT,      // from 0: struct wire_failure
    CTL_BYE,        // both ways
    CTL_LEFT,       // from 0: int32_t rank
    CTL_PROBE,      // from 0: struct wire_probe
    CTL_STREAMS,    // from 0: struct wire_streams
    CTL_STALL,      // from 0: struct wire_stall, and its text
    CTL_COSTS,      // from 0: struct nb_costs
    CTL_STAND_IN,   // from 0: struct desc, of what starts next though this rank, which has joined, has not submitted it
    CTL_GROUP,      // to 0: int32_t each: the number of a comm, and its ranks
    CTL_PART,       // to 0: struct wire_part, this rank's line
    CTL_TOTAL       // from 0: struct wire_go, the line that came out
};

struct wire_go {
    uint64_t seq;
    uint64_t key;
    uint32_t id;        // by which the key may be named in a mask from now on, or NO_ID
    uint32_t algorithm; // of a join: the rank that came last
};

struct wire_part { // submits a cached operation
    uint32_t id;
    uint32_t zero;
};

struct wire_stall {
    uint64_t key;
    int32_t count; // of the ranks that are missing
    int32_t ranks[NB_MISSING_MAX];
};

struct wire_refuse {
    uint64_t key;
    int32_t code;
    int32_t peer;
    char text[NB_ERROR_TEXT];
};

struct wire_failure {
    int32_t code;
    int32_t peer;
    char text[NB_ERROR_TEXT];
};

struct wire_pong {
    int64_t sent_ns;
    int64_t here_ns;
};

struct wire_probe {
    uint64_t seq;
    uint32_t lanes;
    uint32_t slot;
    uint64_t bytes;
    uint32_t algorithm;
    uint32_t zero;
};

struct wire_streams {
    uint32_t used;
    uint32_t count;
    struct nb_probe_point points[NB_PROBE_MAX];
};

struct map_request {
    struct nb_list link;
    void *base;
    size_t bytes;
    int fd;                  // to be passed to ranks of this host, or -1
    int why;                 // of an arena then: -errno
    void (*gone)(void *ctx); // NULL: to be mapped. Else to be unmapped, and this is called then
    void *ctx;
};

enum nb_driver { NB_DRIVER_THREAD, NB_DRIVER_ASLEEP, NB_DRIVER_CALLER, NB_DRIVER_NONE }; // asleep: the thread

struct suspicion { // of one peer, whose lane broke: it may be dead, or another rank is and the peer left because of it
    bool raised;
    int64_t since_ns;
    uint64_t lanes; // that broke since, a bit each
    struct nb_error why;
};

struct nb_job {
    struct nb_job_config config;
    struct nb_boot boot;
    int rank;
    int size;
    struct nb_comm world;
    struct nb_loop loop;
    pthread_t thread;
    bool thread_runs;
    bool spins; // a core for each rank of this host: a short wait need not sleep
    bool lends; // callers may drive
    struct nb_lanes *lanes;
    struct control *controls; // rank 0: by rank; others: [0]
    int control_count;
    bool *peer_left;          // by rank
    int left_rank;            // one of those that left, or NB_NO_PEER
    bool *peer_open;          // by rank: lanes were opened
    unsigned char *addresses; // all ranks' lane addresses

    // In the steady state whoever drives takes it where something is asked for, where an operation is over, and around its
    // sleep: never else.
    pthread_mutex_t lock; // guards the fields down to the blank line
    pthread_cond_t finished;
    _Atomic bool asked;           // there is something in the inbox or in maps, or aborting. Read without the lock too
    struct nb_list inbox;         // works, and
    struct nb_list maps;          // memory to be mapped, for the communication thread
    struct nb_list comms;         // of some of the ranks
    int comm_count;               //
    bool comms_new;               // rank 0 was not told of all of them
    struct nb_hash in_flight;     // works by key
    struct nb_hash rounds;        // struct round: how often a key was used
    struct nb_list rounds_by_age; // the same, the one that was used last at the end
    int round_count;
    void *spare; // memory of an operation in steps that is over, for the next one
    size_t spare_bytes;
    int waiters;          // threads inside nb_work_wait
    pthread_cond_t aside; // where the thread waits while it does not drive
    enum nb_driver driver;
    _Atomic bool wanted;     // a caller that waits would drive. Read without the lock too
    bool hurry;              // there is work that the thread should not leave to a caller that may come
    bool thread_sleeps;      // until it is told
    bool thread_polls;       // until something is ready, or the loop is woken
    uint64_t drives;         // how often a caller has begun to
    int64_t free_ns;         // when the thread drives again, if no caller does
    struct nb_error failure; // sticky
    struct nb_job_info info;
    _Atomic bool stop; // read without the lock too
    bool aborting;
    struct nb_error abort_why;
    char notices[4][NB_ERROR_TEXT];
    int notice_count;
    bool limit_told;                          // that memory is not registered, as much is
    struct wire_stall stalls[NB_STALLS_KEPT]; // told last, one after another
    uint32_t stall_count;

    size_t star_bytes;      // rank 0: lines of sums that travel with the agreement, those of operations that rest too
    uint64_t last_seq;      // of the operations that rank 0 has started
    struct nb_list waiting; // submitted, not agreed
    struct nb_list running;
    bool failed;
    struct suspicion *suspicions; // by rank
    int64_t next_ping_ns;
    int64_t ticked_ns;     // when time was last looked at
    int64_t next_tick_ns;  // when it is looked at again
    int64_t moved_ns;      // when something last moved
    int64_t gap_ns;        // from one movement to the next, the mean of late
    struct member *member; // what this rank knows of the agreement
    struct agree *agree;   // rank 0: what it knows of all
    uint64_t *joined;      // rank 0: ranks that have joined, as bits
    int joined_count;      //
    int joined_last;       //
    struct nb_list groups; // rank 0: comms that it was told of
    int group_count;
    struct probe *probe;
    struct costs *costs;
    bool costs_new;      // the record has them not yet
    struct local *local; // operations in shared memory; NULL: there are none
};

// work.c
size_t nb_work_line(const struct nb_op *op);
int nb_work_make(struct nb_comm *comm, const struct nb_op *op, struct nb_work **work, struct nb_error *err);
void nb_work_unref(struct nb_work *work);
void nb_work_rounds_free(struct nb_job *job);
// Done: with job->failure's record or the given one; NULL: success.
void nb_work_finish(struct nb_work *work, const struct nb_error *why);

// A flow of the operation: 0 in, 1 out, then by twos.
struct nb_flow *nb_work_flow(struct nb_work *work, int index);

// run.c
// Makes what the algorithm needs, in place of what another one needed. Of a thread that has the work for itself.
int nb_run_prepare(struct nb_work *work, enum nb_algorithm algorithm, struct nb_error *err);
void nb_run_unprepare(struct nb_work *work);
// The only algorithm of an operation; NONE: an all-reduce has several.
enum nb_algorithm nb_run_only(int kind);
// Whether an operation can travel so.
bool nb_run_possible(int kind, uint32_t algorithm);
// The peers that the operation needs are opened.
int nb_run_peers(struct nb_work *work, struct nb_error *err);
void nb_run_start(struct nb_work *work, uint64_t seq);
void nb_run_cancel(struct nb_work *work);
// Completes an operation in which no byte moves.
void nb_run_alone(struct nb_work *work);

// Readies a flow for the lanes: what is the same for all algorithms. `step`: of the operation, it is part of its number.
void nb_run_flow(struct nb_work *work, struct nb_flow *flow, const struct nb_flow_ops *ops, int step);
// A ring or chain, in blocks that follow each other, goes on the lanes. False: it has no bytes.
bool nb_run_pipeline(struct nb_work *work, int64_t now_ns);
// A flow is over: the operation is, with the last one.
void nb_run_flow_over(struct nb_work *work);

// stepper.c: algorithms in steps
int nb_stepper_make(struct nb_work *work, enum nb_steps_kind kind, struct nb_error *err);
void nb_stepper_free(struct nb_work *work);
// Its memory, which is large, goes to the job. With the job's lock.
void nb_stepper_retire(struct nb_work *work);
void nb_stepper_start(struct nb_work *work, int64_t now_ns);

// desc.c
// Says how what two ranks submitted differs, or leaves text as it is.
void nb_desc_differ(const struct desc *a, int rank_a, const struct desc *b, int rank_b, char *text, size_t room);
// Whether a rank among `size` could have submitted it.
bool nb_desc_possible(const struct desc *desc, int size);
bool nb_desc_equal(const struct desc *a, const struct desc *b);
const char *nb_kind_name(int kind);

// control.c
int nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err);
void nb_control_fini(struct control *control);
void nb_control_send(struct control *control, enum control_type type, const void *body, size_t bytes);
// The same, sent with the next one or by nb_control_flush().
void nb_control_queue(struct control *control, enum control_type type, const void *body, size_t bytes);
void nb_control_flush(struct control *control);
// To every other rank that is still there. Rank 0 only.
void nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes);
// What has come in memory, and what had no room there. Returns how many connections had something.
int nb_control_poll(struct nb_job *job);
// Before whoever drives sleeps: false where something has come since.
bool nb_control_arm(struct nb_job *job);
// Writes what is queued, until deadline_ns at most.
void nb_control_drain(struct control *control, int64_t deadline_ns);

// member.c: this rank's side of the agreement
int nb_member_open(struct nb_job *job, struct nb_error *err);
void nb_member_close(struct nb_job *job);
void nb_member_submit(struct nb_job *job, struct nb_work *work);
void nb_member_flush(struct nb_job *job);
// Whether rank 0 may start an operation by this number now: they only grow.
bool nb_member_next(struct nb_job *job, uint64_t seq);
void nb_member_go(struct nb_job *job, const struct wire_go *go);
// The operation that rank 0 says starts now, or NULL: the job has failed.
struct nb_work *nb_member_agreed(struct nb_job *job, const struct wire_go *go);
void nb_member_refuse(struct nb_job *job, const struct wire_refuse *refuse);
void nb_member_message(struct nb_job *job, enum control_type type, const unsigned char *body, size_t bytes);

// agree.c: rank 0's side
int nb_agree_open(struct nb_job *job, struct nb_error *err);
void nb_agree_close(struct nb_job *job);
void nb_agree_submit(struct nb_job *job, int rank, const struct desc *desc);
void nb_agree_mask(struct nb_job *job, int rank, const uint64_t *words, size_t count);
void nb_agree_message(struct nb_job *job, int rank, enum control_type type, const unsigned char *body, size_t bytes);
// Says go for what all ranks have submitted.
void nb_agree_release(struct nb_job *job);
void nb_agree_tick(struct nb_job *job, int64_t now_ns);
uint64_t nb_agree_next_seq(struct nb_job *job);

// stall.c: an operation that some ranks have submitted and not all. Returns whether it has been told of.
struct stalled {
    const struct desc *desc;
    const struct nb_group *group; // whose it is; NULL: of all ranks
    const uint64_t *have;         // who has submitted it
    int64_t waited_ns;
    uint32_t round;
    bool told;
};
bool nb_stall_tick(struct nb_job *job, const struct stalled *stalled);
// Whether it has waited as long as it may; then says whom it waited for, and returns the first of them in peer.
bool nb_stall_over(const struct nb_job *job, const struct stalled *stalled, int32_t *peer, char text[NB_ERROR_TEXT]);
// What rank 0 tells of one.
void nb_stall_heard(struct nb_job *job, const unsigned char *body, size_t bytes);

// probe.c
int nb_probe_open(struct nb_job *job, struct nb_error *err);
void nb_probe_close(struct nb_job *job);
bool nb_probe_wanted(const struct nb_job *job, uint64_t bytes);
bool nb_probe_busy(const struct nb_job *job);
void nb_probe_begin(struct nb_job *job);
void nb_probe_run(struct nb_job *job, const struct wire_probe *order);
void nb_probe_streams(struct nb_job *job, const struct wire_streams *streams);
void nb_probe_finished(struct nb_job *job, struct nb_work *work);

// From rank 0: every rank runs a sum over the lanes, which is not recorded. `seq` is filled in.
void nb_probe_order(struct nb_job *job, struct wire_probe *sum);

// costs.c
int nb_costs_open(struct nb_job *job, struct nb_error *err);
void nb_costs_close(struct nb_job *job);
bool nb_costs_wanted(const struct nb_job *job, const struct desc *desc);
bool nb_costs_busy(const struct nb_job *job);
void nb_costs_begin(struct nb_job *job);
void nb_costs_finished(struct nb_job *job);
void nb_costs_heard(struct nb_job *job, const struct nb_costs *found);
void nb_costs_wire(struct nb_job *job, double bytes_per_ns);
// How an all-reduce of so many bytes among so many of the ranks would travel now: of whoever drives, and of any thread.
enum nb_algorithm nb_costs_choose(const struct nb_job *job, int size, size_t bytes);
enum nb_algorithm nb_costs_guess(struct nb_job *job, int size, size_t bytes);

// The interfaces that lanes are spread over.
struct binds {
    int count;
    struct nb_sockaddr at[BINDS_MAX];
    char names[BINDS_MAX][IF_NAMESIZE];
};

// muster.c
// Every rank says how its lanes opened (rc, with err where that is a failure), over which interfaces, and how many CPUs
// its threads may have; decides which of them is this rank's. 0, or the failure that keeps the job from opening.
int nb_job_muster(struct nb_job *job, const struct binds *binds, int rc, struct nb_error *err);

// open.c
void nb_job_free(struct nb_job *job);
int nb_job_peer_ready(struct nb_job *job, int peer, struct nb_error *err);

// job.c
void *nb_job_main(void *job);
// Once through all that can move; sleeps sleep_ms at most where nothing does and `awaited` (or NULL) is not done. Of
// whoever drives.
void nb_job_turn(struct nb_job *job, const struct nb_work *awaited, int sleep_ms);
// drive.c
// Until the work is done or it is until_ns (INT64_MAX: without end).
void nb_drive_wait(struct nb_work *work, int64_t until_ns);
// The operation is in the inbox. With the lock.
void nb_drive_tell(struct nb_job *job, const struct nb_op *op);
// Whether whoever drives, and asks, looks again instead of sleeping, where something moved at moved_ns and nothing since.
// Others on its core may go first.
bool nb_drive_looks(const struct nb_job *job, int64_t moved_ns);
// The job is to end. With the lock.
void nb_drive_end(struct nb_job *job);
// In a turn of the thread: sleeps, and waits for as long as callers drive.
void nb_drive_sleep(struct nb_job *job, int sleep_ms);
// After a turn of the thread: it waits here while callers drive.
void nb_drive_lend(struct nb_job *job);

// tick.c: what happens by time: silence, bytes that do not move, lanes that broke
void nb_job_tick(struct nb_job *job, int64_t now);
void nb_job_lanes_failed(void *job, const struct nb_error *why);
void nb_job_lane_lost(void *job, int peer, int lane, const struct nb_error *why, int lanes_left);
void nb_job_fail(struct nb_job *job, const struct nb_error *why, bool tell);
void nb_job_peer_left(struct nb_job *job, int rank);
// What is waiting cannot run any more when some rank has left: the job fails then.
void nb_job_left_check(struct nb_job *job);
// A peer sent what the protocol does not allow: the job fails and names it.
void nb_job_wire_fail(struct nb_job *job, int peer, const char *what);
void nb_job_notify(struct nb_job *job, const char *text);

#endif
