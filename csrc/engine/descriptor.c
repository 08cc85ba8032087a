// Descriptors of operations: comparison between ranks, and validation.
#include "engine/descriptor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "engine/engine.h"

static const uint64_t BYTES_MAX = (uint64_t)1 << 40;

static const char *const device_names[] = {"cpu", "cuda"};

static const char *const kind_names[NB_OP_KINDS] = {"allreduce", "allgather", "reducescatter", "broadcast",
                                                    "barrier",   "alltoall",  "join"};

// By rank, not by the order of submission.
static void devices_differ(const struct op_descriptor *a, int rank_a, const struct op_descriptor *b, int rank_b,
                           char *text, size_t room) {
    if (rank_a > rank_b) {
        devices_differ(b, rank_b, a, rank_a, text, room);
        return;
    }
    snprintf(text, room, "%s %s: rank %d has it on %s, rank %d on %s",
             a->kind == NB_OP_ALLREDUCE ? "gradient" : kind_names[a->kind], a->name, rank_a, device_names[a->device],
             rank_b, device_names[b->device]);
}

void nb_desc_differ(const struct op_descriptor *a, int rank_a, const struct op_descriptor *b, int rank_b, char *text,
                    size_t room) {
    const char *what = NULL;
    char va[64];
    char vb[64];
    if (a->device != b->device) {
        devices_differ(a, rank_a, b, rank_b, text, room);
    } else if (a->kind != b->kind) {
        what = "operations";
        snprintf(va, sizeof va, "%s", kind_names[a->kind]);
        snprintf(vb, sizeof vb, "%s", kind_names[b->kind]);
    } else if (a->dtype != b->dtype) {
        what = "data types";
        snprintf(va, sizeof va, "%s", nb_dtype_name(a->dtype));
        snprintf(vb, sizeof vb, "%s", nb_dtype_name(b->dtype));
    } else if (a->bytes != b->bytes) {
        what = "sizes";
        snprintf(va, sizeof va, "%llu bytes", (unsigned long long)a->bytes);
        snprintf(vb, sizeof vb, "%llu bytes", (unsigned long long)b->bytes);
    } else if (a->shape != b->shape) {
        what = "shapes";
        snprintf(va, sizeof va, "%llu bytes in one", (unsigned long long)a->bytes);
        snprintf(vb, sizeof vb, "as many in another");
    } else if (a->redop != b->redop) {
        what = "reductions";
        snprintf(va, sizeof va, "%s", nb_redop_name(a->redop));
        snprintf(vb, sizeof vb, "%s", nb_redop_name(b->redop));
    } else if (a->root != b->root) {
        what = "root ranks";
        snprintf(va, sizeof va, "%d", a->root);
        snprintf(vb, sizeof vb, "%d", b->root);
    } else if (a->prescale != b->prescale || a->postscale != b->postscale) {
        what = "scale factors";
        snprintf(va, sizeof va, "%g and %g", a->prescale, a->postscale);
        snprintf(vb, sizeof vb, "%g and %g", b->prescale, b->postscale);
    }
    if (what != NULL) {
        snprintf(text, room, "mismatched %s of '%s': rank %d has %s, but rank %d has %s", what, a->name, rank_a, va,
                 rank_b, vb);
    }
}

bool nb_desc_equal(const struct op_descriptor *a, const struct op_descriptor *b) {
    return a->key == b->key && a->bytes == b->bytes && a->shape == b->shape && a->prescale == b->prescale &&
           a->postscale == b->postscale && a->kind == b->kind && a->dtype == b->dtype && a->redop == b->redop &&
           a->device == b->device && a->root == b->root && a->priority == b->priority && a->comm == b->comm &&
           a->limit_ms == b->limit_ms && strcmp(a->name, b->name) == 0;
}

bool nb_desc_possible(const struct op_descriptor *desc, int size) {
    return desc->kind < NB_OP_KINDS && desc->dtype < NB_DTYPES && desc->redop < NB_REDOPS && desc->device <= 1 &&
           desc->root >= 0 && desc->root < size && desc->bytes <= BYTES_MAX && desc->limit_ms >= 0 &&
           memchr(desc->name, 0, sizeof desc->name) != NULL;
}

const char *nb_kind_name(int kind) {
    return kind_names[kind];
}
