// Device operations: operations on CUDA memory. An algorithm sees host memory only: a device operation is cut into
// windows, each of which is copied to pinned memory, runs there as an operation of its own, and is copied back. While one
// window travels, later ones are copied. A window is a slice of each part of the buffer (cuda/staging.h), so it is a
// small operation of the same kind, with a number that follows from the number of the whole.
//
// An operation is submitted to rank 0 when its fences are reached, so a rank that still computes is late and not silent.
// It gets pinned memory in the agreed order. Operations start in the order of their numbers on every rank: one on host
// memory waits until all windows of the device operations before it have started.
// A rank that has no pinned memory left starts late, perhaps long after a rank that is in fewer communicators. So from the
// first device operation on, data travel only to ranks that have started the operation (nb_lanes_await_starts).
//
// The operation is done when its last copy back is under way and its streams wait for it. The host waits for no device.
#ifndef NB_ENGINE_DEVICE_H
#define NB_ENGINE_DEVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/list.h"
#include "base/wire.h"
#include "cuda/driver.h"
#include "engine/operation.h"

struct nb_device;
struct nb_comm;
struct nb_job;
struct nb_op;

struct nb_devices {       // of a job
    pthread_mutex_t lock; // guards `loaded` and additions to `opened`
    bool loaded;
    struct nb_cuda_driver driver;
    struct nb_device *_Atomic opened;
    // Fields of the progress owner.
    bool announced;         // rank 0: the ranks know that operations on device memory follow
    struct nb_list unready; // works with fences that are not reached, and joins behind them
    struct nb_list order;   // works that are agreed and have not started, or have windows that have not
};

// Of device_memory.c.

// Call once the lanes are closed.
void nb_devices_close(struct nb_job *job);
// Checks what nb_submit() was given about the device. `bytes`: of the operation.
int nb_device_check(const struct nb_comm *comm, const struct nb_op *op, size_t bytes, struct nb_error *err);
// The number of windows of an operation, and the bytes of the largest one: all of them on host memory.
uint64_t nb_device_windows(const struct nb_job *job, const struct op_descriptor *desc, int size, size_t *bytes);
// Opens the device at its first use, and records the fences. Any thread. A missing driver or device, a captured stream,
// and a device that a capture keeps from opening are refused; any other failure of the driver ends the job.
int nb_device_attach(struct nb_work *work, const struct nb_op *op, struct nb_error *err);
// True if its fences are not reached.
bool nb_device_is_unready(const struct nb_work *work);
// Ends what the device still does with a work that is finished.
void nb_device_end(struct nb_work *work);

// Of device_windows.c.

// Rank 0: tells the ranks, once, that an operation on device memory follows.
void nb_device_announce(struct nb_job *job);
// Table of a device operation; that of its windows is what the ranks agree on.
extern const struct nb_algorithm nb_device;

// Gives the zeros of a joined rank windows in host memory, without copies.
int nb_device_attach_zeros(struct nb_work *work, struct nb_error *err);
// Prepares an agreed work for the algorithm of its windows, and opens the lanes to their peers.
int nb_device_prepare(struct nb_work *work, const struct nb_algorithm *algorithm, struct nb_error *err);
// Starts an agreed work, perhaps later: behind the device operations before it.
void nb_device_start(struct nb_work *work, uint64_t seq);
// Starts what may start, in the agreed order. Returns how much has started.
int nb_device_start_next(struct nb_job *job);

// Of device_progress.c.

// Submits a work to rank 0 once its memory holds its values, which a later nb_device_progress() sees; a join once the
// works before it are submitted.
void nb_device_submit(struct nb_job *job, struct nb_work *work);
// Looks at fences and copies, and starts windows and works. Returns how much has moved.
int nb_device_progress(struct nb_job *job);
// True if fences or copies are to be looked at again soon; after a short pause.
bool nb_device_polls(struct nb_job *job);

#endif
