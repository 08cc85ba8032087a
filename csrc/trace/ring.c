// Ring: records events of any thread in the run folder without waiting.
#include "trace/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "trace/event.h"

enum { LASTING_AT = NB_RING_HEADER - NB_RING_LASTING * sizeof(struct nb_event) };
_Static_assert(sizeof(struct nb_ring_header) <= LASTING_AT, "the header is one page");
_Static_assert((int)NB_EV_END <= (int)NB_RING_KIND, "a kind and a count fit into one field");
_Static_assert(sizeof NB_RING_MAGIC == sizeof(((struct nb_ring_header *)0)->magic), "the magic fills its field");

static size_t file_bytes(uint64_t events) {
    return NB_RING_HEADER + (size_t)events * sizeof(struct nb_event);
}

static size_t whole_bytes(uint64_t capacity) {
    return file_bytes(capacity) + sizeof(struct nb_ring_run);
}

static void fill_header(struct nb_ring_header *header, uint64_t capacity, int rank) {
    struct timespec wall;
    header->version = NB_RING_VERSION;
    header->event_bytes = sizeof(struct nb_event);
    header->capacity = capacity;
    header->once = capacity / NB_RING_ONCE;
    header->rank = (uint32_t)rank;
    header->pid = (uint32_t)getpid();
    clock_gettime(CLOCK_REALTIME, &wall);
    header->opened_mono_ns = nb_now_ns();
    header->opened_wall_ns = (int64_t)wall.tv_sec * 1000000000 + wall.tv_nsec;
    memcpy(header->magic, NB_RING_MAGIC, sizeof header->magic);
}

// Allocates all blocks of the file now, or none if the disk has no room for all.
static int reserve(int fd, const char *path, size_t bytes, struct nb_error *err) {
    int rc = nb_file_extend(fd, bytes, true);
    if (rc == 0) {
        return 0;
    }
    (void)!ftruncate(fd, 0);
    errno = -rc;
    return nb_fail(err, rc,
                   "%s: cannot reserve %zu bytes (%m): free disk space, set NETBOTTLENECK_DIR to another disk, or "
                   "lower NETBOTTLENECK_TRACE_EVENTS",
                   path, bytes);
}

// Empties the file, unless a recording is in progress in it: its process would get SIGBUS. Some file systems know no
// locks: they are used without.
static int make_own(int fd, const char *path, struct nb_error *err) {
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        return nb_fail(err, -EBUSY, "%s: another recording is in progress in this file: name another one", path);
    }
    return ftruncate(fd, 0) == 0 ? 0 : nb_fail(err, -errno, "empty %s: %m", path);
}

int nb_ring_open(struct nb_ring *ring, const char *path, uint64_t capacity, int rank, struct nb_error *err) {
    int rc;
    if (capacity > ((uint64_t)PTRDIFF_MAX - whole_bytes(0)) / sizeof(struct nb_event)) {
        return nb_fail(err, -EFBIG, "%s: %llu events exceed the largest file size", path, (unsigned long long)capacity);
    }
    size_t bytes = whole_bytes(capacity);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        return nb_fail(err, -errno, "open %s: %m", path);
    }
    rc = make_own(fd, path, err);
    rc = rc == 0 ? reserve(fd, path, bytes, err) : rc;
    if (rc != 0) {
        goto err_close;
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        rc = nb_fail(err, -errno, "%s: mapping %zu bytes: %m", path, bytes);
        goto err_close;
    }
    fill_header(base, capacity, rank);
    *ring = (struct nb_ring){.header = base,
                             .events = (struct nb_event *)(void *)((char *)base + NB_RING_HEADER),
                             .lasting = (struct nb_event *)(void *)((char *)base + LASTING_AT),
                             .run = (struct nb_ring_run *)(void *)((char *)base + file_bytes(capacity)),
                             .capacity = capacity,
                             .once = ((const struct nb_ring_header *)base)->once,
                             .fd = fd};
    ring->run->stride = 1;
    return 0;

err_close:
    close(fd);
    return rc;
}

void nb_ring_close(struct nb_ring *ring) {
    if (ring == NULL || ring->header == NULL) {
        return;
    }
    uint64_t taken = atomic_load_explicit(&ring->header->taken, memory_order_relaxed);
    size_t keep = taken <= ring->capacity ? file_bytes(taken) : whole_bytes(ring->capacity);
    atomic_store_explicit(&ring->header->closed, 1, memory_order_release);
    (void)munmap(ring->header, whole_bytes(ring->capacity));
    (void)!ftruncate(ring->fd, (off_t)keep); // without the truncation the file is just as readable
    (void)flock(ring->fd, LOCK_UN);          // a forked child may keep the descriptor
    close(ring->fd);
    ring->header = NULL;
    ring->events = NULL;
    ring->lasting = NULL;
    ring->run = NULL;
    ring->fd = -1;
}

uint32_t nb_ring_step(const struct nb_ring *ring) {
    return ring == NULL ? 0 : atomic_load_explicit(&ring->step, memory_order_relaxed);
}

void nb_ring_put(struct nb_ring *ring, enum nb_event_kind kind, uint64_t key, uint64_t a, uint64_t b, uint64_t c,
                 uint64_t d, uint64_t e) {
    if (ring == NULL || ring->header == NULL) {
        return;
    }
    nb_ring_put_at(ring, nb_now_ns(), kind, key, a, b, c, d, e);
}

void nb_ring_put_at(struct nb_ring *ring, int64_t time_ns, enum nb_event_kind kind, uint64_t key, uint64_t a,
                    uint64_t b, uint64_t c, uint64_t d, uint64_t e) {
    if (ring == NULL || ring->header == NULL) {
        return;
    }
    nb_ring_put_event(ring, &(struct nb_event){.time_ns = time_ns,
                                               .kind = (uint32_t)kind,
                                               .step = nb_ring_step(ring),
                                               .key = key,
                                               .a = a,
                                               .b = b,
                                               .c = c,
                                               .d = d,
                                               .e = e});
}

// Makes one row of each two.
static void halve(struct nb_ring_run *run) {
    for (uint64_t i = 0; i < NB_RING_STEPS / 2; i++) {
        const struct nb_ring_steps *one = &run->steps[2 * i];
        const struct nb_ring_steps *other = one + 1;
        run->steps[i] = (struct nb_ring_steps){
            .first = one->first,
            .count = one->count + other->count,
            .total_ns = one->total_ns + other->total_ns,
            .longest_ns = one->longest_ns > other->longest_ns ? one->longest_ns : other->longest_ns,
            .waited_ns = one->waited_ns + other->waited_ns,
        };
    }
    run->rows = NB_RING_STEPS / 2;
    run->stride *= 2;
}

static void add_step(struct nb_ring *ring, uint64_t took_ns) {
    struct nb_ring_run *run = ring->run;
    atomic_fetch_add_explicit(&run->changes, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (run->rows == 0 || run->steps[run->rows - 1].count >= run->stride) {
        if (run->rows == NB_RING_STEPS) {
            halve(run);
        }
        run->steps[run->rows++] = (struct nb_ring_steps){.first = ring->step_number};
    }
    struct nb_ring_steps *row = &run->steps[run->rows - 1];
    row->count++;
    row->total_ns += took_ns;
    row->longest_ns = took_ns > row->longest_ns ? took_ns : row->longest_ns;
    row->waited_ns += ring->waited_ns;
    atomic_fetch_add_explicit(&run->changes, 1, memory_order_release);
}

// Adds an event to the row of its step. Steps that two threads stamp at once are left out.
static void take_step(struct nb_ring *ring, const struct nb_event *event) {
    if (atomic_exchange_explicit(&ring->stepping, true, memory_order_acquire)) {
        return;
    }
    switch ((enum nb_event_kind)event->kind) {
    case NB_EV_STEP_BEGIN:
        ring->step_number = event->step;
        ring->step_ns = event->time_ns;
        ring->wait_ns = 0;
        ring->waited_ns = 0;
        break;
    case NB_EV_WAIT_BEGIN:
        ring->wait_ns = event->time_ns;
        break;
    case NB_EV_WAIT_END:
        ring->waited_ns += ring->wait_ns != 0 ? (uint64_t)(event->time_ns - ring->wait_ns) : 0;
        ring->wait_ns = 0;
        break;
    default:
        if (ring->step_ns != 0 && event->time_ns >= ring->step_ns) {
            add_step(ring, (uint64_t)(event->time_ns - ring->step_ns));
        }
        ring->step_ns = 0;
    }
    atomic_store_explicit(&ring->stepping, false, memory_order_release);
}

// Writes an event of a slot that other threads may write, or read, at the same time.
static void write_slot(struct nb_event *slot, const struct nb_event *event, uint32_t kind) {
    __atomic_store_n(&slot->time_ns, event->time_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->step, event->step, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->key, event->key, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->a, event->a, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->b, event->b, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->c, event->c, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->d, event->d, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->e, event->e, __ATOMIC_RELAXED);
    __atomic_store_n(&slot->kind, kind, __ATOMIC_RELEASE);
}

// Records a lasting event where it is never overwritten. False: it can be recorded as any other.
static bool put_lasting(struct nb_ring *ring, const struct nb_event *event) {
    if (atomic_load_explicit(&ring->header->taken, memory_order_relaxed) < ring->once) {
        return false;
    }
    uint64_t place = atomic_fetch_add_explicit(&ring->header->lasting, 1, memory_order_relaxed);
    if (place >= NB_RING_LASTING) {
        return false;
    }
    write_slot(&ring->lasting[place], event, event->kind);
    return true;
}

void nb_ring_put_event(struct nb_ring *ring, const struct nb_event *event) {
    if (ring == NULL || ring->header == NULL || (!ring->timeline && nb_event_for_timeline(event->kind))) {
        return;
    }
    if (nb_event_lasts(event->kind) && put_lasting(ring, event)) {
        return;
    }
    if (nb_event_of_step_time(event->kind)) {
        take_step(ring, event);
    }
    uint64_t number = atomic_fetch_add_explicit(&ring->header->taken, 1, memory_order_relaxed);
    if (number < ring->capacity) {
        struct nb_event *slot = &ring->events[number];
        __builtin_prefetch(slot + 1, 1);
        write_slot(slot, event, event->kind);
        return;
    }
    uint64_t later = number - ring->once;
    uint64_t around = ring->capacity - ring->once;
    // A reader that finds a part of this event finds its number taken, too.
    atomic_thread_fence(memory_order_release);
    write_slot(&ring->events[ring->once + later % around], event,
               event->kind + NB_RING_KIND * (uint32_t)(later / around));
}

void nb_ring_drop(struct nb_ring *ring) {
    if (ring != NULL && ring->header != NULL) {
        // Readers count a slot that was taken and not written.
        atomic_fetch_add_explicit(&ring->header->taken, 1, memory_order_relaxed);
    }
}

uint64_t nb_ring_overwritten(const struct nb_ring *ring) {
    if (ring == NULL || ring->header == NULL) {
        return 0;
    }
    uint64_t taken = atomic_load_explicit(&ring->header->taken, memory_order_relaxed);
    return taken > ring->capacity ? taken - ring->capacity : 0;
}
