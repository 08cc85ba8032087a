// Ring: records events in a file of this rank's run folder, through a shared mapping. Writing never blocks and never
// allocates. The first quarter of the file keeps the first events; the rest keeps the last ones, each over the oldest
// there. Written events are readable after SIGKILL. Several threads may write to one ring: an event may be lost or torn
// only if its writer is overtaken by all others, once around the file, while it writes.
#ifndef NB_TRACE_RING_H
#define NB_TRACE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "trace/event.h"

enum {
    NB_RING_HEADER = 4096,
    NB_RING_VERSION = 4,
    NB_RING_ONCE = 4,     // one in so many slots keeps a first event
    NB_RING_LASTING = 60, // lasting events behind the first ones, in the rest of the first page
    NB_RING_KIND = 256,   // in a slot: kind + this number x the times that the slot was written before
    NB_RING_STEPS = 1024, // rows about the steps of the whole run
};
#define NB_RING_MAGIC "NBRING1"

// The first page of the file. Little-endian, as are all supported machines. Event n, from 0 on, is in slot n up to the
// capacity, and then in slot once + (n - once) % (capacity - once).
struct nb_ring_header {
    char magic[8];
    uint32_t version;
    uint32_t event_bytes;
    uint64_t capacity; // in events
    uint32_t rank;
    uint32_t pid;
    int64_t opened_mono_ns; // the same moment on both clocks
    int64_t opened_wall_ns;
    _Atomic uint64_t taken;   // number of events so far
    _Atomic uint64_t closed;  // 1 after an orderly close
    uint64_t once;            // slots that are written once
    _Atomic uint64_t lasting; // places of lasting events taken in this page; may exceed NB_RING_LASTING
};

// Some steps in a row, of a training's ring.
struct nb_ring_steps {
    uint32_t first, count;
    uint64_t total_ns, longest_ns;
    uint64_t waited_ns; // of these, in which the training thread waited for communication
};

// Behind the last slot: the steps of the whole run. When the rows are full, each two become one.
struct nb_ring_run {
    _Atomic uint64_t changes; // even: the rows are as they were when it was read before
    uint64_t rows;            // of them, the last one may be in progress
    uint64_t stride;          // steps of a row
    struct nb_ring_steps steps[NB_RING_STEPS];
};

struct nb_ring {
    struct nb_ring_header *header; // NULL: recording is off, and nb_ring_put does nothing
    struct nb_event *events;
    struct nb_event *lasting;
    struct nb_ring_run *run;
    uint64_t capacity, once;
    // Of the step in progress; changed by whoever has taken `stepping`.
    _Atomic bool stepping;
    uint32_t step_number;
    int64_t step_ns, wait_ns; // when it began, and when the wait in progress did; 0: none
    uint64_t waited_ns;
    bool timeline;         // also records events that only a timeline needs; set after opening, before the first event
    _Atomic uint32_t step; // copied into every event
    int fd;
};

// Creates the file for `capacity` events and reserves disk space for all of them: a store to a mapped page would kill
// the process if the disk were full. Errors: -errno, naming the path; if space is missing, also the bytes and remedies.
int nb_ring_open(struct nb_ring *ring, const char *path, uint64_t capacity, int rank, struct nb_error *err);
// Truncates the file to what was written. No thread may be writing.
void nb_ring_close(struct nb_ring *ring);

// The step that events are stamped with; 0 without a ring.
uint32_t nb_ring_step(const struct nb_ring *ring);

// Records an event now.
void nb_ring_put(struct nb_ring *ring, enum nb_event_kind kind, uint64_t key, uint64_t a, uint64_t b, uint64_t c,
                 uint64_t d, uint64_t e);
// Records an event with an earlier time.
void nb_ring_put_at(struct nb_ring *ring, int64_t time_ns, enum nb_event_kind kind, uint64_t key, uint64_t a,
                    uint64_t b, uint64_t c, uint64_t d, uint64_t e);

// Records an event as it is, of any step.
void nb_ring_put_event(struct nb_ring *ring, const struct nb_event *event);

// Counts an event that its writer could not record.
void nb_ring_drop(struct nb_ring *ring);

// Events that the file does not keep any more.
uint64_t nb_ring_overwritten(const struct nb_ring *ring);

#endif
