// The line that an operation's pieces of memory form: ranges of it found, added to, placed in, scaled.
#ifndef NB_ENGINE_LINE_H
#define NB_ENGINE_LINE_H

#include <stddef.h>
#include <sys/uio.h>

#include "coll/sched.h"
#include "engine/internal.h"

// The memory of a range, at most `max` pieces; the count, or max + 1 when it lies in more.
int nb_line_memory(const struct nb_work *work, struct nb_range range, struct iovec *iov, int max);
void nb_line_scale(const struct nb_work *work, struct nb_range range, double factor);
// range = range op data, as the operation reduces.
void nb_line_reduce(const struct nb_work *work, struct nb_range range, const void *data);
void nb_line_place(const struct nb_work *work, struct nb_range range, const void *data);
void nb_line_read(const struct nb_work *work, struct nb_range range, void *data);
// Of as many bytes; they do not overlap.
void nb_line_move(const struct nb_work *work, struct nb_range from, struct nb_range to);
struct nb_range nb_line_all(const struct nb_work *work);

#endif
