// Shared memory: areas, arenas and wake-ups of the ranks of this host.
#include "transport/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fdpass.h"
#include "base/fork.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/wire.h"
#include "transport/shm_internal.h"

bool nb_shm_sealed(int fd, size_t bytes) {
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && fstat(fd, &st) == 0 && st.st_size >= 0 &&
           (size_t)st.st_size >= bytes;
}

static int area_make(struct nb_shm *shm, struct nb_error *err) {
    size_t bytes = sizeof(struct nb_shm_area);
    void *base = NULL;
    int fd = nb_arena_shared(bytes, true, &base);
    if (fd < 0) {
        return nb_fail(err, fd, "shared memory of %zu bytes: %s", bytes, nb_code_name(fd));
    }
    (void)madvise(base, bytes, MADV_DONTFORK);
    shm->area_fd = fd;
    shm->area = base;
    return 0;
}

static struct nb_shm *shm_alloc(int ranks_max) {
    struct nb_shm *shm = calloc(1, sizeof *shm + (size_t)ranks_max * sizeof shm->peers[0]);
    if (shm == NULL) {
        return NULL;
    }
    shm->area_fd = -1;
    shm->listener = -1;
    for (int r = 0; r < ranks_max; r++) {
        shm->peers[r].shm = shm;
        shm->peers[r].rank = r;
        shm->peers[r].watch.fd = -1;
        shm->peers[r].wake_fd = -1;
    }
    return shm;
}

void nb_shm_group(struct nb_shm *shm, const int *ranks, int size, int index) {
    shm->rank = index;
    shm->size = size;
    for (int r = 0; r < size; r++) {
        shm->peers[r].job_rank = ranks[r];
    }
    shm->peers[index].area = shm->area;
}

int nb_shm_open(struct nb_shm **out, int ranks_max, struct nb_error *err) {
    struct nb_shm *shm = shm_alloc(ranks_max);
    if (shm == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate shared memory of %d ranks", ranks_max);
    }
    int rc = area_make(shm, err);
    if (rc == 0) {
        rc = nb_fdpass_listen(shm->name, ranks_max + NB_SHM_INCOMING, err);
        shm->listener = rc < 0 ? -1 : rc;
    }
    if (rc < 0) {
        nb_shm_close(shm);
        return rc;
    }
    *out = shm;
    return 0;
}

int nb_shm_alone(struct nb_shm **out, int rank, struct nb_error *err) {
    struct nb_shm *shm = shm_alloc(1);
    size_t bytes = sizeof(struct nb_shm_area);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (shm == NULL || base == MAP_FAILED) {
        free(shm);
        return nb_fail(err, -ENOMEM, "cannot allocate %zu bytes for a rank that is alone on its host", bytes);
    }
    shm->area = base;
    nb_shm_group(shm, &rank, 1, 0);
    *out = shm;
    return 0;
}

static void peer_close(struct nb_shm_peer *peer) {
    struct nb_shm *shm = peer->shm;
    if (peer->watch.fd >= 0 && shm->loop != NULL) {
        nb_loop_remove(shm->loop, &peer->watch);
    }
    nb_shm_fd_close(&peer->watch.fd);
    nb_shm_fd_close(&peer->wake_fd);
    for (uint32_t i = 0; peer->rank != shm->rank && i < peer->arena_count; i++) {
        if (peer->arenas[i] != NULL) {
            (void)munmap(peer->arenas[i], peer->arena_bytes[i]);
        }
    }
    if (peer->area != NULL && peer->area != shm->area) {
        (void)munmap(peer->area, sizeof *peer->area);
    }
}

void nb_shm_close(struct nb_shm *shm) {
    if (shm == NULL) {
        return;
    }
    for (int r = 0; r < shm->size; r++) {
        peer_close(&shm->peers[r]);
    }
    if (shm->area != NULL) {
        (void)munmap(shm->area, sizeof *shm->area);
    }
    nb_shm_fd_close(&shm->listener);
    nb_shm_fd_close(&shm->area_fd);
    free(shm);
}

// --- arenas

static _Atomic uint32_t *mapped_life(const struct nb_shm_peer *peer, uint32_t arena) {
    return &peer->shm->peers[peer->shm->rank].area->mapped[peer->rank][arena];
}

// Unmaps an arena that its owner has withdrawn: operations over it are complete on all ranks.
static void arena_drop(struct nb_shm_peer *peer, uint32_t arena) {
    if (peer->arenas[arena] == NULL || atomic_load(&peer->area->lives[arena]) == peer->arena_lives[arena]) {
        return;
    }
    atomic_store(mapped_life(peer, arena), 0);
    (void)munmap(peer->arenas[arena], peer->arena_bytes[arena]);
    peer->arenas[arena] = NULL;
    peer->arena_bytes[arena] = 0;
}

static void arena_take(struct nb_shm_peer *peer, const struct wire_shm_arena *gift, int fd) {
    size_t bytes = gift->bytes;
    if (gift->magic != NB_WIRE_SHM_ARENA_MAGIC || gift->arena >= NB_SHM_ARENAS || bytes == 0 ||
        bytes > (size_t)PTRDIFF_MAX || !nb_shm_sealed(fd, bytes)) {
        return;
    }
    arena_drop(peer, gift->arena);
    if (peer->arenas[gift->arena] != NULL || gift->life != atomic_load(&peer->area->lives[gift->arena])) {
        return; // it was withdrawn meanwhile
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return; // its data go through staging
    }
    (void)madvise(base, bytes, MADV_DONTFORK); // a forked child does not need it
    peer->arenas[gift->arena] = base;
    peer->arena_bytes[gift->arena] = bytes;
    peer->arena_lives[gift->arena] = gift->life;
    peer->arena_count = gift->arena >= peer->arena_count ? gift->arena + 1 : peer->arena_count;
    atomic_store(mapped_life(peer, gift->arena), gift->life);
}

static void peer_ready(struct nb_watch *watch, uint32_t events) {
    struct nb_shm_peer *peer = NB_CONTAINER(watch, struct nb_shm_peer, watch);
    struct wire_shm_arena gift;
    int fd;
    (void)events;
    int rc = nb_fdpass_receive(watch->fd, &gift, sizeof gift, &fd, 1);
    if (rc == 0) {
        arena_take(peer, &gift, fd);
        nb_fork_close(fd);
    } else if (rc != -EAGAIN && rc != -EMFILE &&
               rc != NB_EWIRE) { // it has left; its control connection reports whether in good order
        nb_loop_remove(peer->shm->loop, watch);
        nb_shm_fd_close(&watch->fd);
    }
}

int nb_shm_watch(struct nb_shm *shm, struct nb_loop *loop, struct nb_error *err) {
    shm->loop = loop;
    for (int r = 0; r < shm->size; r++) {
        struct nb_shm_peer *peer = &shm->peers[r];
        peer->watch.ready = peer_ready;
        int rc = r == shm->rank ? 0 : nb_loop_add(loop, &peer->watch, EPOLLIN, err);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

// Passes a numbered arena to all other ranks.
static int arena_pass(struct nb_shm *shm, uint32_t number, int fd, struct nb_error *err) {
    const struct nb_shm_peer *me = &shm->peers[shm->rank];
    struct wire_shm_arena gift = {.magic = NB_WIRE_SHM_ARENA_MAGIC,
                                  .arena = number,
                                  .bytes = me->arena_bytes[number],
                                  .life = me->arena_lives[number]};
    int rc = 0;
    for (int r = 0; r < shm->size; r++) {
        if (r != shm->rank && shm->peers[r].watch.fd >= 0) {
            int sent = nb_fdpass_send(shm->peers[r].watch.fd, &gift, sizeof gift, &fd, 1);
            rc = rc < 0 || sent == 0 || sent == -EPIPE
                     ? rc
                     : nb_fail_peer(err, sent, shm->peers[r].job_rank, "cannot pass memory to rank %d: %s",
                                    shm->peers[r].job_rank, nb_code_name(sent));
        }
    }
    return rc;
}

int nb_shm_offer(struct nb_shm *shm, void *base, size_t bytes, int fd, struct nb_error *err) {
    struct nb_shm_peer *me = &shm->peers[shm->rank];
    uint32_t number = NB_SHM_ARENAS;
    struct stat st;
    if (fstat(fd, &st) != 0) {
        return nb_fail(err, -errno, "cannot query the descriptor of memory to share: %m");
    }
    for (uint32_t i = NB_SHM_ARENAS; i-- > 0;) {
        if (me->arenas[i] == NULL) {
            number = i;
        } else if (shm->arena_inodes[i] == (uint64_t)st.st_ino && me->arenas[i] == base) {
            return 0;
        }
    }
    if (number == NB_SHM_ARENAS) {
        return nb_fail(
            err, -ENOSPC,
            "this rank shares memory of %d models, the limit: gradients of further models are copied, which is slower",
            NB_SHM_ARENAS);
    }
    me->arenas[number] = base;
    me->arena_bytes[number] = bytes;
    me->arena_lives[number] = atomic_fetch_add(&shm->area->lives[number], 1) + 1;
    me->arena_count = number >= me->arena_count ? number + 1 : me->arena_count;
    shm->arena_inodes[number] = (uint64_t)st.st_ino;
    return arena_pass(shm, number, fd, err);
}

void nb_shm_withdraw(struct nb_shm *shm, const void *base) {
    struct nb_shm_peer *me = &shm->peers[shm->rank];
    for (uint32_t i = 0; i < me->arena_count; i++) {
        if (me->arenas[i] != NULL && me->arenas[i] == base) {
            me->arenas[i] = NULL;
            me->arena_bytes[i] = 0;
            shm->arena_inodes[i] = 0;
            (void)atomic_fetch_add(&shm->area->lives[i], 1);
        }
    }
}

void nb_shm_unmap_withdrawn(struct nb_shm *shm) {
    for (int r = 0; r < shm->size; r++) {
        for (uint32_t i = 0; r != shm->rank && i < shm->peers[r].arena_count; i++) {
            arena_drop(&shm->peers[r], i);
        }
    }
}

static bool all_have(const struct nb_shm *shm, uint32_t arena) {
    const uint32_t life = shm->peers[shm->rank].arena_lives[arena];
    for (int r = 0; r < shm->size; r++) {
        if (r != shm->rank && atomic_load(&shm->peers[r].area->mapped[shm->rank][arena]) != life) {
            return false;
        }
    }
    return true;
}

bool nb_shm_find(const struct nb_shm *shm, const void *base, size_t bytes, struct nb_shm_piece *piece) {
    const struct nb_shm_peer *me = &shm->peers[shm->rank];
    const char *at = base;
    for (uint32_t i = me->arena_count; i-- > 0;) { // newest first
        size_t offset = (size_t)((uintptr_t)at - (uintptr_t)me->arenas[i]);
        if (offset < me->arena_bytes[i] && bytes <= me->arena_bytes[i] - offset) {
            *piece = (struct nb_shm_piece){.arena = i, .offset = offset, .bytes = bytes};
            return all_have(shm, i);
        }
    }
    return false;
}

char *nb_shm_memory(const struct nb_shm *shm, int rank, const struct nb_shm_piece *piece) {
    const struct nb_shm_peer *peer = &shm->peers[rank];
    if (piece->arena >= NB_SHM_ARENAS || peer->arenas[piece->arena] == NULL ||
        piece->offset > peer->arena_bytes[piece->arena] ||
        piece->bytes > peer->arena_bytes[piece->arena] - piece->offset) {
        return NULL;
    }
    return peer->arenas[piece->arena] + piece->offset;
}

// --- sleeping, and protection from late writes

static void rank_wake(const struct nb_shm_peer *peer) {
    const uint64_t one = 1;
    if (atomic_load_explicit(&peer->area->asleep, memory_order_relaxed) != 0 &&
        atomic_exchange(&peer->area->asleep, 0) != 0) {
        (void)!write(peer->wake_fd, &one, sizeof one);
    }
}

void nb_shm_wake(struct nb_shm *shm) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < shm->size; r++) {
        if (r != shm->rank) {
            rank_wake(&shm->peers[r]);
        }
    }
}

void nb_shm_wake_one(struct nb_shm *shm, int rank) {
    atomic_thread_fence(memory_order_seq_cst);
    rank_wake(&shm->peers[rank]);
}

void nb_shm_mark_asleep(struct nb_shm *shm) {
    atomic_store(&shm->peers[shm->rank].area->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
}

void nb_shm_mark_awake(struct nb_shm *shm) {
    _Atomic uint32_t *asleep = &shm->peers[shm->rank].area->asleep;
    if (atomic_load_explicit(asleep, memory_order_relaxed) != 0) {
        atomic_store_explicit(asleep, 0, memory_order_relaxed);
    }
}

bool nb_shm_write_begin(struct nb_shm *shm, int *revoker) {
    _Atomic uint32_t *busy = &shm->peers[shm->rank].area->busy;
    atomic_store(busy, 1);
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < shm->size; r++) {
        if (atomic_load_explicit(&shm->peers[r].area->revoked, memory_order_relaxed) != 0) {
            atomic_store_explicit(busy, 0, memory_order_release);
            *revoker = r;
            return false;
        }
    }
    return true;
}

void nb_shm_write_end(struct nb_shm *shm) {
    struct nb_shm_area *area = shm->peers[shm->rank].area;
    atomic_store_explicit(&area->pulse, area->pulse + 1, memory_order_relaxed);
    atomic_store_explicit(&area->busy, 0, memory_order_release);
}

bool nb_shm_revoke(struct nb_shm *shm, int64_t deadline_ns) {
    bool all = true;
    atomic_store(&shm->peers[shm->rank].area->revoked, 1);
    atomic_thread_fence(memory_order_seq_cst);
    for (int r = 0; r < shm->size; r++) {
        const _Atomic uint32_t *busy = &shm->peers[r].area->busy;
        while (atomic_load_explicit(busy, memory_order_acquire) != 0 && nb_now_ns() < deadline_ns) {
            (void)poll(NULL, 0, 1);
        }
        all = all && atomic_load_explicit(busy, memory_order_acquire) == 0;
    }
    return all;
}
