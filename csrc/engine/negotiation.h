// Negotiation, this rank's side: sends what it has submitted, and handles rank 0's answers.
#ifndef NB_ENGINE_NEGOTIATION_H
#define NB_ENGINE_NEGOTIATION_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/descriptor.h"
#include "engine/operation.h"

enum { PENDING_MAX = 64 * 1024 }; // operations of one rank that may wait for other ranks

struct nb_submitted { // submissions since the last clear
    const struct op_descriptor *fresh;
    size_t fresh_count;
    const uint64_t *mask; // bits of operations that have a number from rank 0
    size_t mask_words;
};

int nb_negotiation_open(struct nb_job *job, struct nb_error *err);
void nb_negotiation_close(struct nb_job *job);
void nb_negotiation_submit(struct nb_job *job, struct nb_work *work);
// Returns what was submitted since the last nb_negotiation_clear().
struct nb_submitted nb_negotiation_submitted(const struct nb_job *job);
void nb_negotiation_clear(struct nb_job *job);
// Ranks other than 0: sends the submissions to rank 0, the mask first.
void nb_negotiation_flush(struct nb_job *job);
void nb_negotiation_go(struct nb_job *job, const struct wire_go *go);
// Returns the operation that rank 0 starts now, or NULL: the job has failed.
struct nb_work *nb_negotiation_agreed(struct nb_job *job, const struct wire_go *go);
void nb_negotiation_refuse(struct nb_job *job, const struct wire_refuse *refuse);
// Handles a message of rank 0.
void nb_negotiation_message(struct nb_job *job, int peer, enum control_type type, const unsigned char *body,
                            size_t bytes);

#endif
