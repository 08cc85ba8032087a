// Operations in steps (coll/step_schedule.h) on the lanes. All arrivals have their place from the start. The data of a
// step is sent when all earlier steps are complete.
//
// A lane may read a flow's memory again until the flow is done. So sent memory is overwritten only by data whose
// arrival implies that the sent data has landed. Doubling therefore keeps the sum of every step. Halving gets its own
// half back only from the rank that has reduced it.
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bits.h"
#include "base/error.h"
#include "coll/choose.h"
#include "coll/ring_schedule.h"
#include "coll/step_schedule.h"
#include "engine/algorithms.h"
#include "engine/buffer.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum { STEP_MASK = (1 << STEP_BITS) - 1, MEMORY_ALIGN = 64 };

struct part { // one step
    struct nb_step step;
    char *in;        // where its arrivals go; NULL: to the buffer
    const char *out; // where it is sent from; NULL: from the buffer
    bool landed;
};

struct steps_state {
    struct nb_steps steps;
    int at;      // the step whose arrivals are awaited
    char *sum;   // doubling: the partial sum of this rank and those whose data has arrived
    char *spare; // doubling: room for one buffer
    char *memory;
    size_t memory_bytes;
    uint64_t *maps;
    struct part parts[];
};

static struct part *part_of(const struct nb_flow *flow) {
    const struct nb_work *work = flow->owner;
    return &work->steps->parts[flow->op & STEP_MASK];
}

static struct nb_range flow_range(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct part *part = part_of(flow);
    struct nb_range whole = flow->dir == NB_FLOW_IN ? part->step.in : part->step.out;
    size_t begin = first * flow->block_bytes;
    size_t end = begin + count * flow->block_bytes;
    end = end < whole.bytes ? end : whole.bytes;
    return (struct nb_range){whole.offset + begin, end - begin};
}

static size_t flow_bytes(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    return flow_range(flow, first, count).bytes;
}

static int flow_memory(const struct nb_flow *flow, uint32_t first, uint32_t count, struct iovec iov[NB_LANE_IOV_MAX]) {
    const struct part *part = part_of(flow);
    const char *base = flow->dir == NB_FLOW_IN ? part->in : part->out;
    if (base != NULL) {
        iov[0] = (struct iovec){.iov_base = (char *)base + first * flow->block_bytes,
                                .iov_len = flow_bytes(flow, first, count)};
        return 1;
    }
    int n = nb_buffer_memory(flow->owner, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX);
    return n <= NB_LANE_IOV_MAX ? n : 0; // in: the sender's pieces differ from this rank's
}

static uint32_t flow_run_limit(const struct nb_flow *flow, uint32_t first, uint32_t count) {
    const struct nb_work *work = flow->owner;
    struct iovec iov[NB_LANE_IOV_MAX];
    while (flow->dir == NB_FLOW_OUT && work->piece_count > 1 && count > 1 && part_of(flow)->out == NULL &&
           nb_buffer_memory(work, flow_range(flow, first, count), iov, NB_LANE_IOV_MAX) > NB_LANE_IOV_MAX) {
        count /= 2;
    }
    return count;
}

static void flow_consume(struct nb_flow *flow, uint32_t first, uint32_t count, const void *data, size_t bytes) {
    (void)bytes;
    if (data != NULL) {
        nb_buffer_place(flow->owner, flow_range(flow, first, count), data);
    }
}

// Sends the data of a step: all earlier steps are complete.
static void step_send(struct nb_work *work, int index) {
    struct nb_flow *out = nb_work_flow(work, 2 * index + 1);
    struct part *part = &work->steps->parts[index];
    if (part->step.out.bytes == 0) {
        return;
    }
    part->out = work->steps->sum;
    for (uint32_t i = 0; i < out->blocks; i++) {
        nb_lanes_ready(work->comm->job->lanes, out, i);
    }
    nb_lanes_push(work->comm->job->lanes, out->peer);
}

// Adds this rank's sum and its peer's, in the order of ranks on both. The sum that was sent is not overwritten.
static void sums_join(struct nb_work *work, const struct part *part) {
    struct steps_state *s = work->steps;
    size_t bytes = s->steps.bytes;
    if (part->step.lower) {
        work->reduce(part->in, s->sum, bytes / work->element_bytes);
    } else {
        memcpy(s->spare, part->in, bytes);
        memcpy(part->in, s->sum, bytes);
        work->reduce(part->in, s->spare, bytes / work->element_bytes);
    }
    s->sum = part->in;
}

static void step_apply(struct nb_work *work, int index) {
    struct steps_state *s = work->steps;
    const struct part *part = &s->parts[index];
    if (s->steps.kind == NB_STEPS_DOUBLING && part->step.reduces) {
        sums_join(work, part);
    } else if (s->steps.kind == NB_STEPS_DOUBLING && part->in != NULL) {
        s->sum = part->in;
    } else if (part->step.reduces && part->step.in.bytes > 0) {
        nb_buffer_reduce(work, part->step.in, part->in);
    }
    if (s->steps.kind == NB_STEPS_HALVING && index + 1 == s->steps.reducing) {
        nb_buffer_scale(work, nb_steps_own(&s->steps), work->desc.postscale);
    }
}

// Moves the result to the buffer, if it is not there already.
static void buffer_finish(struct nb_work *work) {
    const struct steps_state *s = work->steps;
    if (s->steps.kind == NB_STEPS_DOUBLING) {
        nb_buffer_place(work, nb_buffer_all(work), s->sum);
        nb_buffer_scale(work, nb_buffer_all(work), work->desc.postscale);
    }
}

static void advance(struct nb_work *work) {
    struct steps_state *s = work->steps;
    while (s->at < s->steps.count && s->parts[s->at].landed) {
        step_apply(work, s->at);
        s->at++;
        if (s->at == s->steps.count) {
            buffer_finish(work);
        } else if (s->steps.kind != NB_STEPS_PAIRWISE) {
            step_send(work, s->at);
        }
    }
}

static void flow_finished(struct nb_flow *flow) {
    struct nb_work *work = flow->owner;
    if (flow->dir == NB_FLOW_IN) {
        part_of(flow)->landed = true;
        advance(work);
    }
    nb_work_flow_done(work);
}

static const struct nb_flow_ops flow_ops = {.bytes = flow_bytes,
                                            .run_limit = flow_run_limit,
                                            .memory = flow_memory,
                                            .consume = flow_consume,
                                            .finished = flow_finished};

static size_t aligned(size_t bytes) {
    return (bytes + MEMORY_ALIGN - 1) / MEMORY_ALIGN * MEMORY_ALIGN;
}

// Bytes that arrive in this step and cannot go to the buffer at once.
static size_t staged_bytes(const struct nb_steps *steps, const struct nb_step *step) {
    return steps->kind == NB_STEPS_DOUBLING || step->reduces ? aligned(step->in.bytes) : 0;
}

static uint32_t blocks_of(const struct nb_work *work, struct nb_range range) {
    return (uint32_t)((range.bytes + work->block_bytes - 1) / work->block_bytes);
}

// Takes the spare memory if it fits. Fresh memory of this size would be mapped, cleared and unmapped for each
// operation.
static void memory_get(struct nb_job *job, struct steps_state *s, size_t bytes) {
    pthread_mutex_lock(&job->lock);
    bool fits = job->ops.spare_bytes >= bytes && job->ops.spare_bytes / 4 <= bytes;
    s->memory = fits ? job->ops.spare : NULL;
    s->memory_bytes = fits ? job->ops.spare_bytes : bytes;
    if (fits) {
        job->ops.spare = NULL;
        job->ops.spare_bytes = 0;
    }
    pthread_mutex_unlock(&job->lock);
    if (s->memory == NULL) {
        s->memory = aligned_alloc(MEMORY_ALIGN, bytes);
    }
}

static void retire(struct nb_work *work) {
    struct nb_job *job = work->comm->job;
    struct steps_state *s = work->steps;
    if (s != NULL && s->memory != NULL && s->memory_bytes >= job->ops.spare_bytes) {
        char *smaller = job->ops.spare; // freed with the work
        job->ops.spare = s->memory;
        job->ops.spare_bytes = s->memory_bytes;
        s->memory = smaller;
    }
}

static int memory_make(struct nb_work *work, struct nb_error *err) {
    struct steps_state *s = work->steps;
    bool doubling = s->steps.kind == NB_STEPS_DOUBLING;
    size_t at = doubling ? 2 * aligned(s->steps.bytes) : 0;
    size_t words = 0;
    for (int i = 0; i < s->steps.count; i++) {
        s->parts[i].step = nb_steps_get(&s->steps, i);
        at += staged_bytes(&s->steps, &s->parts[i].step);
        words +=
            nb_bits_words(blocks_of(work, s->parts[i].step.in)) + nb_bits_words(blocks_of(work, s->parts[i].step.out));
    }
    s->maps = calloc(words + 1, sizeof *s->maps);
    if (at > 0) {
        memory_get(work->comm->job, s, at);
    }
    const size_t more = 2 * (size_t)(s->steps.count > 1 ? s->steps.count - 1 : 0);
    work->more = more > 0 ? calloc(more, sizeof *work->more) : NULL;
    if (s->maps == NULL || (at > 0 && s->memory == NULL) || (more > 0 && work->more == NULL)) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %zu bytes for partial sums", work->desc.name, at);
    }
    s->sum = doubling ? s->memory : NULL;
    s->spare = doubling ? s->memory + aligned(s->steps.bytes) : NULL;
    return 0;
}

static void flow_make(struct nb_work *work, int index, enum nb_flow_dir dir, uint64_t **map) {
    struct nb_flow *flow = nb_work_flow(work, index);
    const struct nb_step *step = &work->steps->parts[index / 2].step;
    *flow = (struct nb_flow){.dir = dir};
    flow->peer = nb_comm_peer(work->comm, dir == NB_FLOW_IN ? step->from : step->to);
    flow->blocks = blocks_of(work, dir == NB_FLOW_IN ? step->in : step->out);
    flow->left = flow->blocks;
    flow->map = *map;
    *map += nb_bits_words(flow->blocks);
}

static int make(struct nb_work *work, enum nb_steps_kind kind, struct nb_error *err) {
    struct nb_steps steps;
    const struct nb_comm *comm = work->comm;
    nb_steps_init(&steps, kind, comm->rank, comm->size, work->starts[work->piece_count]);
    work->steps = calloc(1, sizeof *work->steps + (size_t)steps.count * sizeof work->steps->parts[0]);
    if (work->steps == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %d steps", work->desc.name, steps.count);
    }
    work->steps->steps = steps;
    work->block_bytes = NB_BLOCK_MIN;
    while (steps.bytes / work->block_bytes >= NB_BLOCKS_MAX) {
        work->block_bytes *= 2;
    }
    int rc = memory_make(work, err);
    if (rc < 0) {
        return rc;
    }
    work->flow_count = 2 * steps.count; // all of them exist
    uint64_t *map = work->steps->maps;
    size_t at = kind == NB_STEPS_DOUBLING ? 2 * aligned(steps.bytes) : 0;
    for (int i = 0; i < steps.count; i++) {
        struct part *part = &work->steps->parts[i];
        size_t aside = staged_bytes(&steps, &part->step);
        part->in = aside > 0 ? work->steps->memory + at : NULL;
        part->landed = part->step.in.bytes == 0;
        at += aside;
        flow_make(work, 2 * i, NB_FLOW_IN, &map);
        flow_make(work, 2 * i + 1, NB_FLOW_OUT, &map);
    }
    return 0;
}

static void release(struct nb_work *work) {
    if (work->steps != NULL) {
        free(work->steps->memory);
        free(work->steps->maps);
        free(work->steps);
    }
    free(work->more);
    work->more = NULL;
    work->in.map = NULL;
    work->out.map = NULL;
    work->steps = NULL;
}

// Copies the part that this rank sends to itself.
static void own_part_copy(struct nb_work *work) {
    const struct nb_steps *steps = &work->steps->steps;
    size_t part = steps->bytes / (2 * (size_t)steps->size);
    struct nb_range from = {(size_t)steps->rank * part, part};
    struct nb_range to = {((size_t)steps->size + (size_t)steps->rank) * part, part};
    nb_buffer_move(work, from, to);
}

static void start(struct nb_work *work, int64_t now_ns) {
    if (!nb_work_begin(work)) {
        return;
    }
    struct nb_lanes *lanes = work->comm->job->lanes;
    struct steps_state *s = work->steps;
    work->flows_left = 1; // one for this function
    if (s->steps.kind == NB_STEPS_DOUBLING) {
        nb_buffer_read(work, nb_buffer_all(work), s->sum);
    } else if (s->steps.kind == NB_STEPS_PAIRWISE) {
        own_part_copy(work);
    }
    for (int i = 0; i < work->flow_count; i++) {
        struct nb_flow *flow = nb_work_flow(work, i);
        if (flow->blocks > 0) {
            nb_work_flow_ready(work, flow, &flow_ops, i / 2);
            work->flows_left++;
        }
    }
    // Outgoing flows first, because an arrival may let them send. In rising order of steps, as peers expect them.
    for (int i = 1; i < work->flow_count; i += 2) {
        if (nb_work_flow(work, i)->blocks > 0) {
            nb_lanes_add(lanes, nb_work_flow(work, i), now_ns);
        }
    }
    for (int i = 0; i < s->steps.count && (i == 0 || s->steps.kind == NB_STEPS_PAIRWISE); i++) {
        step_send(work, i);
    }
    for (int i = 0; i < work->flow_count; i += 2) {
        if (nb_work_flow(work, i)->blocks > 0) {
            nb_lanes_add(lanes, nb_work_flow(work, i), now_ns);
        }
    }
    advance(work); // skip steps in which nothing arrives
    nb_work_flow_done(work);
}

static bool is_allreduce(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLREDUCE;
}

static int doubling_prepare(struct nb_work *work, struct nb_error *err) {
    return make(work, NB_STEPS_DOUBLING, err);
}

static int halving_prepare(struct nb_work *work, struct nb_error *err) {
    return make(work, NB_STEPS_HALVING, err);
}

static bool is_alltoall(const struct nb_work *work) {
    return work->desc.kind == NB_OP_ALLTOALL;
}

static int pairwise_prepare(struct nb_work *work, struct nb_error *err) {
    return make(work, NB_STEPS_PAIRWISE, err);
}

#define IN_STEPS(number, asked_for, is_possible, make)                                                                 \
    {.id = (number),                                                                                                   \
     .name = (asked_for),                                                                                              \
     .possible = (is_possible),                                                                                        \
     .prepare = (make),                                                                                                \
     .release = release,                                                                                               \
     .start = start,                                                                                                   \
     .cancel = nb_flows_cancel,                                                                                        \
     .waits_for = nb_flows_wait_for,                                                                                   \
     .record = nb_flows_record,                                                                                        \
     .retire = retire}

const struct nb_algorithm nb_doubling =
    IN_STEPS(NB_ALGORITHM_DOUBLING, "recursive_doubling", is_allreduce, doubling_prepare);
const struct nb_algorithm nb_halving =
    IN_STEPS(NB_ALGORITHM_HALVING, "halving_doubling", is_allreduce, halving_prepare);
const struct nb_algorithm nb_pairwise = IN_STEPS(NB_ALGORITHM_PAIRWISE, NULL, is_alltoall, pairwise_prepare);
