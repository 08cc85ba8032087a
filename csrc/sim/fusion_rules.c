// Fusion rules: decide which gradients become an operation, and when (enum nb_sim_rule).
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "sim/internal.h"
#include "sim/shape.h"
#include "sim/sim.h"

static bool is_static(const struct sim *sim) {
    return sim->plan->rule == NB_SIM_EXPLICIT || sim->plan->rule == NB_SIM_DDP;
}

void rule_step(struct sim *sim, int step) {
    int ranks = sim->program->ranks;
    sim->step = step;
    sim->first_op = sim->result->count;
    sim->done_ops = 0;
    sim->sent = 0;
    sim->pending_count = 0;
    sim->pending_bytes = 0;
    sim->last_send_ns = sim->now;
    sim->tick_ns = INT64_MAX;
    memset(sim->arrived, 0, (size_t)sim->program->tensors * sizeof *sim->arrived);
    for (int rank = 0; rank < ranks; rank++) {
        sim->ranks[rank].next = 0;
    }
    if (is_static(sim)) {
        size_t cells = (size_t)sim->plan->buckets * (size_t)ranks;
        memset(sim->submitted, 0, (size_t)sim->plan->buckets * sizeof *sim->submitted);
        memset(sim->missing, 0, cells * sizeof *sim->missing);
        for (int tensor = 0; tensor < sim->program->tensors; tensor++) {
            for (int rank = 0; rank < ranks; rank++) {
                sim->missing[sim->plan->bucket_of[tensor] * ranks + rank]++;
            }
        }
    }
}

static struct nb_sim_op *op_begin(struct sim *sim, int bucket) {
    struct nb_sim_op *op = &sim->result->ops[sim->result->count++];
    *op = (struct nb_sim_op){.step = sim->step, .bucket = bucket};
    return op;
}

static void op_add(struct sim *sim, struct nb_sim_op *op, int tensor) {
    op->members++;
    op->bytes += sim->program->bytes[tensor];
    sim->result->op_of[(int64_t)sim->step * sim->program->tensors + tensor] = (int32_t)(op - sim->result->ops);
    sim->sent++;
}

static void op_end(struct sim *sim, struct nb_sim_op *op) {
    op->wire_bytes = nb_sim_wire_bytes(sim->cost, op->bytes);
    op->agreed_ns = sim->now + (sim->cost->size > 1 ? (int64_t)(sim->cost->launch_ns + 0.5) : 0);
}

// ---- fixed buckets

static void bucket_send(struct sim *sim, int bucket) {
    int ranks = sim->program->ranks;
    struct nb_sim_op *op = op_begin(sim, bucket);
    for (int tensor = 0; tensor < sim->program->tensors; tensor++) {
        if (sim->plan->bucket_of[tensor] == bucket) {
            op_add(sim, op, tensor);
        }
    }
    memcpy(&sim->result->submit_ns[(op - sim->result->ops) * ranks], &sim->submitted_ns[(int64_t)bucket * ranks],
           (size_t)ranks * sizeof *sim->submitted_ns);
    op_end(sim, op);
}

static void bucket_submit(struct sim *sim, int rank, int bucket) {
    sim->submitted_ns[(int64_t)bucket * sim->program->ranks + rank] = sim->now;
    if (++sim->submitted[bucket] == sim->program->ranks) {
        bucket_send(sim, bucket);
    }
}

static void bucket_ready(struct sim *sim, int rank, int bucket) {
    int ranks = sim->program->ranks;
    struct rank *self = &sim->ranks[rank];
    if (--sim->missing[bucket * ranks + rank] > 0) {
        return;
    }
    if (sim->plan->rule == NB_SIM_EXPLICIT) {
        bucket_submit(sim, rank, bucket);
        return;
    }
    while (self->next < sim->plan->buckets && sim->missing[self->next * ranks + rank] == 0) {
        bucket_submit(sim, rank, self->next++);
    }
}

// ---- rules that decide as tensors become ready

// A rank submits an operation when the last of its tensors is ready there.
static void pending_add(struct sim *sim, struct nb_sim_op *op, int tensor) {
    int ranks = sim->program->ranks;
    int64_t *submit_ns = &sim->result->submit_ns[(op - sim->result->ops) * ranks];
    const int64_t *ready_ns = &sim->ready_ns[(int64_t)tensor * ranks];
    for (int rank = 0; rank < ranks; rank++) {
        submit_ns[rank] = op->members > 0 && submit_ns[rank] > ready_ns[rank] ? submit_ns[rank] : ready_ns[rank];
    }
    op_add(sim, op, tensor);
    sim->pending_bytes -= sim->program->bytes[tensor];
}

static void send_all(struct sim *sim) {
    struct nb_sim_op *op = op_begin(sim, -1);
    for (int i = 0; i < sim->pending_count; i++) {
        pending_add(sim, op, sim->pending[i]);
    }
    op_end(sim, op);
    sim->pending_count = 0;
    sim->last_send_ns = sim->now;
}

// Sends the first pending tensor and those that fit with it; the others keep their order.
static void send_fused(struct sim *sim) {
    const struct nb_sim_program *program = sim->program;
    int64_t limit = sim->plan->fusion_bytes;
    int64_t passed = 0;
    int first = sim->pending[0];
    int kept = 0;
    bool looking = true;
    struct nb_sim_op *op = op_begin(sim, -1);
    pending_add(sim, op, first);
    for (int i = 1; i < sim->pending_count; i++) {
        int tensor = sim->pending[i];
        int64_t bytes = program->bytes[tensor];
        if (looking && program->kinds[tensor] == program->kinds[first] && op->bytes + bytes <= limit) {
            pending_add(sim, op, tensor);
            continue;
        }
        passed += bytes;
        looking = looking && op->bytes + passed <= limit;
        sim->pending[kept++] = tensor;
    }
    sim->pending_count = kept;
    op_end(sim, op);
}

bool rule_tick(struct sim *sim) {
    if (sim->now < sim->tick_ns) {
        return false;
    }
    while (sim->pending_count > 0) {
        send_fused(sim);
    }
    sim->tick_ns = INT64_MAX;
    return true;
}

static void arrive(struct sim *sim, int tensor) {
    const struct nb_sim_plan *plan = sim->plan;
    sim->pending[sim->pending_count++] = tensor;
    sim->pending_bytes += sim->program->bytes[tensor];
    if (plan->rule == NB_SIM_HOROVOD) {
        int64_t cycles = (sim->now - sim->ranks[0].begin_ns + plan->cycle_ns - 1) / plan->cycle_ns;
        sim->tick_ns = sim->ranks[0].begin_ns + (cycles > 0 ? cycles : 1) * plan->cycle_ns;
        return;
    }
    bool last = sim->sent + sim->pending_count == sim->program->tensors;
    if (last || sim->pending_bytes >= plan->fusion_bytes || sim->now - sim->last_send_ns >= plan->cycle_ns) {
        send_all(sim);
    }
}

void rule_backward(struct sim *sim) {
    if (sim->sent == 0) {
        sim->last_send_ns = sim->now;
    }
}

void rule_ready(struct sim *sim, int rank, int tensor) {
    int ranks = sim->program->ranks;
    sim->ready_ns[(int64_t)tensor * ranks + rank] = sim->now;
    sim->arrived[tensor]++;
    if (is_static(sim)) {
        bucket_ready(sim, rank, sim->plan->bucket_of[tensor]);
    } else if (sim->arrived[tensor] == ranks) {
        arrive(sim, tensor);
    }
}
