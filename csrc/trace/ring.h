// Ring: records events in a file of this rank's run folder, through a shared mapping. Writing never blocks, never
// allocates and never overwrites: when the file is full, events are counted as dropped. Written events are readable
// after SIGKILL. Several threads may write to one ring.
#ifndef NB_TRACE_RING_H
#define NB_TRACE_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "trace/event.h"

enum { NB_RING_HEADER = 4096, NB_RING_VERSION = 3 };
#define NB_RING_MAGIC "NBRING1"

// The first page of the file. Little-endian, as are all supported machines.
struct nb_ring_header {
    char magic[8];
    uint32_t version;
    uint32_t event_bytes;
    uint64_t capacity; // in events
    uint32_t rank;
    uint32_t pid;
    int64_t opened_mono_ns; // the same moment on both clocks
    int64_t opened_wall_ns;
    _Atomic uint64_t taken;  // slots taken; may exceed capacity
    _Atomic uint64_t closed; // 1 after an orderly close
};

struct nb_ring {
    struct nb_ring_header *header; // NULL: recording is off, and nb_ring_put does nothing
    struct nb_event *events;
    uint64_t capacity;
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

uint64_t nb_ring_dropped(const struct nb_ring *ring);

#endif
