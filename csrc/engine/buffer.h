// Buffer: the pieces of memory of an operation, as one range of bytes that can be located, reduced into, copied and
// scaled.
#ifndef NB_ENGINE_BUFFER_H
#define NB_ENGINE_BUFFER_H

#include <stddef.h>
#include <sys/uio.h>

#include "base/error.h"
#include "coll/ring_schedule.h"
#include "engine/context.h"

// Writes the pieces of a range to iov, at most `max`. Returns their number, or max + 1 if there are more.
int nb_buffer_memory(const struct nb_work *work, struct nb_range range, struct iovec *iov, int max);
void nb_buffer_scale(const struct nb_work *work, struct nb_range range, double factor);
// range = range op data, with the operation's reduction.
void nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data);
void nb_buffer_place(const struct nb_work *work, struct nb_range range, const void *data);
void nb_buffer_read(const struct nb_work *work, struct nb_range range, void *data);
// Copies a range to another of the same size. They do not overlap.
void nb_buffer_move(const struct nb_work *work, struct nb_range from, struct nb_range to);
struct nb_range nb_buffer_all(const struct nb_work *work);
// Copies the buffer to one piece of memory of the engine if a block of it lies in more pieces than a segment carries.
int nb_buffer_pack(struct nb_work *work, struct nb_error *err);
// Copies a packed buffer back to the caller's memory.
void nb_buffer_unpack(const struct nb_work *work);

#endif
