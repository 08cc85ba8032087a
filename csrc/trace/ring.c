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

_Static_assert(sizeof(struct nb_ring_header) <= NB_RING_HEADER, "the header is one page");
_Static_assert(sizeof NB_RING_MAGIC == sizeof(((struct nb_ring_header *)0)->magic), "the magic fills its field");

static size_t file_bytes(uint64_t events) {
    return NB_RING_HEADER + (size_t)events * sizeof(struct nb_event);
}

static void fill_header(struct nb_ring_header *header, uint64_t capacity, int rank) {
    struct timespec wall;
    header->version = NB_RING_VERSION;
    header->event_bytes = sizeof(struct nb_event);
    header->capacity = capacity;
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
    if (capacity > ((uint64_t)PTRDIFF_MAX - NB_RING_HEADER) / sizeof(struct nb_event)) {
        return nb_fail(err, -EFBIG, "%s: %llu events exceed the largest file size", path, (unsigned long long)capacity);
    }
    size_t bytes = file_bytes(capacity);
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
    ring->header = base;
    ring->events = (struct nb_event *)(void *)((char *)base + NB_RING_HEADER);
    ring->capacity = capacity;
    ring->timeline = false;
    atomic_init(&ring->step, 0);
    ring->fd = fd;
    return 0;

err_close:
    close(fd);
    return rc;
}

static uint64_t written(const struct nb_ring *ring) {
    uint64_t taken = atomic_load_explicit(&ring->header->taken, memory_order_relaxed);
    return taken < ring->capacity ? taken : ring->capacity;
}

void nb_ring_close(struct nb_ring *ring) {
    if (ring == NULL || ring->header == NULL) {
        return;
    }
    size_t keep = file_bytes(written(ring));
    atomic_store_explicit(&ring->header->closed, 1, memory_order_release);
    (void)munmap(ring->header, file_bytes(ring->capacity));
    (void)!ftruncate(ring->fd, (off_t)keep); // without the truncation the file is just as readable
    (void)flock(ring->fd, LOCK_UN);          // a forked child may keep the descriptor
    close(ring->fd);
    ring->header = NULL;
    ring->events = NULL;
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

void nb_ring_put_event(struct nb_ring *ring, const struct nb_event *event) {
    if (ring == NULL || ring->header == NULL || (!ring->timeline && nb_event_for_timeline(event->kind))) {
        return;
    }
    uint64_t taken = atomic_fetch_add_explicit(&ring->header->taken, 1, memory_order_relaxed);
    if (taken >= ring->capacity) {
        return;
    }
    struct nb_event *slot = &ring->events[taken];
    __builtin_prefetch(slot + 1, 1);
    slot->time_ns = event->time_ns;
    slot->step = event->step;
    slot->key = event->key;
    slot->a = event->a;
    slot->b = event->b;
    slot->c = event->c;
    slot->d = event->d;
    slot->e = event->e;
    __atomic_store_n(&slot->kind, event->kind, __ATOMIC_RELEASE);
}

void nb_ring_drop(struct nb_ring *ring) {
    if (ring != NULL && ring->header != NULL) {
        // Readers count a slot that was taken and not written.
        atomic_fetch_add_explicit(&ring->header->taken, 1, memory_order_relaxed);
    }
}

uint64_t nb_ring_dropped(const struct nb_ring *ring) {
    if (ring == NULL || ring->header == NULL) {
        return 0;
    }
    uint64_t taken = atomic_load_explicit(&ring->header->taken, memory_order_relaxed);
    return taken > ring->capacity ? taken - ring->capacity : 0;
}
