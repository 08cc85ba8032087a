// Descriptors of operations (layout: base/wire.h): comparison and validation.
#ifndef NB_ENGINE_DESCRIPTOR_H
#define NB_ENGINE_DESCRIPTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/wire.h"

enum {
    NO_ID = 0xffffffff,
    IDS_MAX = 1024,    // operations that have a bit in a mask
    SUBMITS_MAX = 1024 // in one message
};

// Describes how the operations of two ranks differ; leaves text unchanged if they agree.
void nb_desc_differ(const struct op_descriptor *a, int rank_a, const struct op_descriptor *b, int rank_b, char *text,
                    size_t room);
// True if a rank of a communicator of `size` ranks could have submitted it.
bool nb_desc_possible(const struct op_descriptor *desc, int size);
bool nb_desc_equal(const struct op_descriptor *a, const struct op_descriptor *b);
const char *nb_kind_name(int kind);

#endif
