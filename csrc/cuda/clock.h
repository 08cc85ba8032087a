// Device clock: the times at which streams of a GPU reach given moments, on the host's clock (nb_now_ns).
//
// A mark is an event of the driver, recorded on a stream. Its time is read after the GPU has passed it, so nothing waits
// for the GPU. The driver gives times between two events as float milliseconds with a resolution of about 0.5 us, so the
// base of these times moves along with the marks. The offset between the two clocks is bounded by probes: an event on
// an otherwise empty stream is passed after the host records it and before the host sees it passed.
//
// Not thread-safe. The owner calls all functions under one lock, in the process that opened the clock.
#ifndef NB_CUDA_CLOCK_H
#define NB_CUDA_CLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "cuda/driver.h"

enum { NB_MARK_WORDS = 8, NB_CUDA_DEVICES_MAX = 64 };

struct nb_cuda_clock;

// Streams that live as long as the process, by the ordinal of their device. torch's allocator keeps the stream on which
// memory was used, and records an event on it when that memory is freed, perhaps long after the clock is closed. Zeroed
// at first; nothing ends it. A stream retains its primary context. The lock of the clocks guards it.
struct nb_cuda_kept_streams {
    struct CUstream_st *of[NB_CUDA_DEVICES_MAX];
};

// What the caller gets back with the time of a mark.
struct nb_cuda_mark {
    uint64_t words[NB_MARK_WORDS];
};

// `device` must outlive the clock. Keeps a stream of the device in `kept`, or uses the one that is there. Takes the first
// probes, for at most 10 ms. Errors: those of nb_cuda_check, -ENOMEM, -ENODEV beyond NB_CUDA_DEVICES_MAX devices.
int nb_cuda_clock_open(struct nb_cuda_clock **out, const struct nb_cuda_device *device,
                       struct nb_cuda_kept_streams *kept, struct nb_error *err);
// Marks that are not read are lost.
void nb_cuda_clock_close(struct nb_cuda_clock *clock);

// Marks what `stream` has been given so far. in_order: the time is not before that of the mark in order before it. A stream
// that is captured into a graph is left untouched, and a full queue keeps its marks: both count as lost.
int nb_cuda_clock_mark(struct nb_cuda_clock *clock, struct CUstream_st *stream, const struct nb_cuda_mark *mark,
                       bool in_order, struct nb_error *err);

// Begins to read: takes a probe if one is due, which takes up to 0.1 ms.
int nb_cuda_clock_look(struct nb_cuda_clock *clock, struct nb_error *err);
// Reads the oldest mark if the GPU has passed it. 1: written to `mark` and `time_ns`; 0: none; negative: a failure.
int nb_cuda_clock_next(struct nb_cuda_clock *clock, struct nb_cuda_mark *mark, int64_t *time_ns, struct nb_error *err);

// The largest distance between a time and the true one, in ns, of the times read since the last call; 0: none.
int64_t nb_cuda_clock_take_error_ns(struct nb_cuda_clock *clock);
// Marks that are not read yet, and marks that were lost.
size_t nb_cuda_clock_pending(const struct nb_cuda_clock *clock);
uint64_t nb_cuda_clock_lost(const struct nb_cuda_clock *clock);
// The device's kept stream: it waits for nothing that the training does. Still valid after the clock is closed.
struct CUstream_st *nb_cuda_clock_stream(const struct nb_cuda_clock *clock);

#endif
