// Fuzzes shared memory with the data of a broken peer. The first byte selects the input. 0: the peer's area (counters,
// descriptions, staging) while operations run. 1: messages with arenas. 2: messages to the rendezvous socket. 3: a
// pipe.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/clock.h"
#include "engine/algorithms.h"
#include "engine/context.h"
#include "engine/shared.h"
#include "engine/shared_fold.h"
#include "input.h"
#include "transport/shm.h"

enum {
    MODES = 4,
    WORKS = 3,
    ARENA = 8192,
    BUFFER_BYTES = 4096,
    PASSES = 48,
    FD_KINDS = 8,
    FDS_MAX = 6,
    PIPE_ROOM = 600
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

// --- 0: an area

struct stage {
    struct nb_job job;
    struct shared local;
    struct nb_shm *shm;
    struct nb_work *works[WORKS];
    char *memory[2]; // arenas of both ranks, on the heap so that ASan detects overruns
};

static void *require(void *memory) {
    if (memory == NULL) {
        abort();
    }
    return memory;
}

static void shm_make(struct stage *s) {
    static const int ranks[2] = {0, 1};
    size_t area = (sizeof(struct nb_shm_area) + 4095) / 4096 * 4096;
    s->shm = require(calloc(1, sizeof *s->shm + 2 * sizeof s->shm->peers[0]));
    s->shm->area = require(aligned_alloc(4096, area));
    memset(s->shm->area, 0, area);
    nb_shm_group(s->shm, ranks, 2, 0);
    s->shm->peers[1].area = require(aligned_alloc(4096, area));
    memset(s->shm->peers[1].area, 0, area);
    for (int r = 0; r < 2; r++) {
        struct nb_shm_peer *peer = &s->shm->peers[r];
        s->memory[r] = require(calloc(1, ARENA));
        peer->shm = s->shm;
        peer->rank = r;
        peer->wake_fd = -1;
        peer->watch.fd = -1;
        peer->arena_count = 1;
        peer->arenas[0] = s->memory[r];
        peer->arena_bytes[0] = ARENA;
        peer->arena_lives[0] = 1;
        atomic_store(&(r == 0 ? s->shm->area : peer->area)->lives[0], 1);
    }
}

// Makes a job of two ranks that share memory, like nb_job_open, but without a thread and connections.
static void stage_open(struct stage *s) {
    struct nb_error err = {0};
    struct nb_job *job = &s->job;
    struct shared *l = &s->local;
    shm_make(s);
    job->size = 2;
    job->world = (struct nb_comm){.job = job, .rank = 0, .size = 2};
    job->config.timeout_ms = 1000;
    nb_job_lists_init(job);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->finished, NULL);
    if (nb_loop_init(&job->loop, &err) < 0) {
        abort();
    }
    *l = (struct shared){.job = job, .shm = s->shm, .size = 2, .hosts = 1, .parts = 2};
    l->views = require(calloc(2 * (size_t)LOCAL_OPEN, sizeof *l->views));
    l->rooms = require(calloc(2 * (size_t)LOCAL_OPEN, sizeof *l->rooms));
    l->sum = require(aligned_alloc(NB_SHM_LINE, FOLD_BYTES));
    l->term = require(aligned_alloc(NB_SHM_LINE, FOLD_BYTES));
    nb_list_init(&l->queue);
    job->shared = l;
}

static void stage_close(struct stage *s) {
    struct nb_error why = {0};
    struct nb_job *job = &s->job;
    nb_fail(&why, NB_ECLOSED, "closed");
    nb_job_fail(job, &why, false);
    while (!nb_list_empty(&job->ops.running)) {
        struct nb_work *work = NB_CONTAINER(job->ops.running.next, struct nb_work, link);
        nb_work_cancel(work);
        nb_work_finish(work, &why);
    }
    for (int i = 0; i < WORKS; i++) {
        nb_work_release(s->works[i]);
    }
    nb_rounds_close(job);
    nb_loop_fini(&job->loop);
    free(s->local.views);
    free(s->local.rooms);
    free(s->local.sum);
    free(s->local.term);
    for (int r = 0; r < 2; r++) {
        free(s->shm->peers[r].area);
        free(s->memory[r]);
    }
    free(s->shm);
    pthread_cond_destroy(&job->finished);
    pthread_mutex_destroy(&job->lock);
}

static void start(struct stage *s, int i, uint8_t flags) {
    static const enum nb_op_kind kinds[] = {NB_OP_ALLREDUCE, NB_OP_BROADCAST, NB_OP_ALLGATHER, NB_OP_REDUCESCATTER};
    char name[2] = {(char)('a' + i), 0};
    struct nb_segment all = {.base = s->memory[0], .bytes = BUFFER_BYTES};
    struct nb_op op = {.name = name, .kind = kinds[flags % 4], .dtype = NB_F32, .segments = &all, .segment_count = 1};
    op.scaled = (flags & 16) != 0;
    op.prescale = 2;
    op.postscale = 1;
    atomic_store(&s->shm->peers[1].area->mapped[0][0], (flags & 8) == 0); // otherwise this rank's buffer is staged
    if (s->job.failed || nb_submit(&s->job.world, &op, &s->works[i], NULL) < 0) {
        return;
    }
    if (s->works[i]->algorithm != &nb_shared) {
        abort();
    }
    nb_work_start(s->works[i], (uint64_t)i + 1);
}

// The peer's next write to its area. It wakes no sleeping rank, because there is none.
static void write_to_area(struct stage *s, struct input *in) {
    struct nb_shm_area *area = s->shm->peers[1].area;
    struct nb_shm_slot *slot = &area->slots[take_byte(in) % NB_SHM_SLOTS];
    uint8_t what = take_byte(in);
    uint64_t value = 0;
    switch (what % 6) {
    case 0: // advances a counter
        ((_Atomic uint64_t *)area)[what / 6 % 6] += take_byte(in) % 3;
        break;
    case 1: // sets a counter to any value
        take(in, &value, sizeof value);
        ((_Atomic uint64_t *)area)[what / 6 % 6] = value;
        break;
    case 2:
        take(in, slot, 4 + 4 * (size_t)take_byte(in) % sizeof *slot);
        break;
    case 3: // a valid description
        slot->count = 1;
        slot->pieces[0] = (struct nb_shm_piece){.offset = 64 * (uint64_t)take_byte(in), .bytes = BUFFER_BYTES};
        break;
    case 4:
        slot->count = NB_SHM_STAGED;
        break;
    default:
        take(in, area->stage[what / 6 % 2], take_byte(in));
        take(in, &area->revoked, 1);
        break;
    }
    atomic_store(&area->busy, 0); // otherwise revoking waits for the peer
    atomic_store(&area->asleep, 0);
}

static void feed_area(struct input *in) {
    struct stage *s = require(calloc(1, sizeof *s));
    stage_open(s);
    for (int i = 0; i < WORKS; i++) {
        start(s, i, take_byte(in));
    }
    for (int i = 0; i < PASSES && in->bytes > 0; i++) {
        write_to_area(s, in);
        (void)nb_shared_progress(&s->job);
        (void)nb_shared_arm(&s->job);
        nb_shared_tick(&s->job, nb_now_ns());
    }
    stage_close(s);
    free(s);
}

// --- 1 and 2: descriptors

static int make_memory(size_t bytes, unsigned seals) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 || (seals != 0 && fcntl(fd, F_ADD_SEALS, seals) != 0)) {
        abort();
    }
    return fd;
}

static int make_descriptor(uint8_t kind) {
    switch (kind % FD_KINDS) {
    case 0:
        return make_memory(ARENA, F_SEAL_SHRINK | F_SEAL_GROW);
    case 1:
        return make_memory(ARENA, 0); // without seals: it could shrink while mapped
    case 2:
        return make_memory(ARENA, F_SEAL_SHRINK | F_SEAL_WRITE);
    case 3:
        return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    case 4:
        return open("/dev/null", O_RDWR | O_CLOEXEC);
    case 5:
        return open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    case 6:
        return make_memory(sizeof(struct nb_shm_area), F_SEAL_SHRINK | F_SEAL_GROW);
    default:
        return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    }
}

static void send_message(int fd, struct input *in, const void *message, size_t bytes) {
    int fds[FDS_MAX];
    int count = take_byte(in) % FDS_MAX;
    int sent = count < NB_FDPASS_FDS ? count : NB_FDPASS_FDS;
    for (int i = 0; i < count; i++) {
        fds[i] = make_descriptor(take_byte(in));
    }
    (void)nb_fdpass_send(fd, message, bytes, fds, sent);
    for (int i = 0; i < count; i++) {
        close(fds[i]);
    }
}

// A description gives accessible memory or none.
static void access_memory(const struct nb_shm *shm, struct input *in) {
    struct nb_shm_piece piece;
    take(in, &piece, sizeof piece);
    volatile char *at = nb_shm_memory(shm, 1, &piece);
    if (at != NULL && piece.bytes > 0) {
        at[0] = at[piece.bytes - 1];
    }
}

static void feed_arenas(struct input *in) {
    static const int ranks[2] = {0, 1};
    struct nb_error err = {0};
    struct nb_loop loop;
    struct nb_shm *shm = NULL;
    int pair[2];
    if (nb_shm_open(&shm, 2, &err) < 0 || nb_loop_init(&loop, &err) < 0 ||
        socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
        abort();
    }
    nb_shm_group(shm, ranks, 2, 0);
    shm->peers[1].watch.fd = pair[0];
    void *area = mmap(NULL, sizeof *shm->area, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED) {
        abort();
    }
    shm->peers[1].area = area;
    if (nb_shm_watch(shm, &loop, &err) < 0) {
        abort();
    }
    while (in->bytes > 0) {
        struct { // the announcement of an arena
            uint32_t magic;
            uint32_t arena;
            uint64_t bytes;
            uint32_t life;
            uint32_t zero;
            uint64_t more;
        } announcement = {.magic = 0x4e425347};
        uint8_t flags = take_byte(in);
        take(in, &announcement.arena, flags % 2 != 0 ? 1 : 4);
        take(in, &announcement.bytes, flags % 3 != 0 ? 2 : 8);
        announcement.magic ^= flags / 128;
        announcement.life = flags / 4 % 4;
        atomic_store(&shm->peers[1].area->lives[announcement.arena % NB_SHM_ARENAS], flags / 16 % 4);
        send_message(pair[1], in, &announcement, flags % 16 == 15 ? flags % sizeof announcement : 24);
        nb_loop_wait(&loop, 0);
        if (flags % 5 == 0) {
            nb_shm_unmap_withdrawn(shm);
        }
        access_memory(shm, in);
    }
    nb_shm_close(shm);
    nb_loop_fini(&loop);
    close(pair[1]);
}

static void feed_rendezvous(struct input *in) {
    static const int ranks[2] = {0, 1};
    static const char names[2][NB_FDPASS_NAME] = {{0}};
    struct nb_boot boot = {.rank = 0, .size = 2};
    struct nb_error err = {0};
    struct nb_shm *shm = NULL;
    int fds[4];
    int wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int count = 0;
    if (wake < 0 || nb_shm_open(&shm, 2, &err) < 0) {
        abort();
    }
    nb_shm_group(shm, ranks, 2, 0);
    while (in->bytes > 0 && count < 4) {
        struct { // the hello of the rendezvous
            uint32_t magic;
            int32_t rank;
            uint64_t area_bytes;
            unsigned char token[NB_TOKEN_BYTES];
        } hello = {.magic = 0x4e425348, .rank = 1, .area_bytes = sizeof(struct nb_shm_area)};
        uint8_t flags = take_byte(in);
        nb_boot_token(&boot, "shared memory", 1, 0, hello.token);
        take(in,
             flags % 4 == 1   ? (void *)&hello.rank
             : flags % 4 == 2 ? (void *)&hello.area_bytes
                              : hello.token,
             flags % 4 == 0 ? 0 : 4);
        fds[count] = nb_fdpass_connect(shm->name, &err);
        if (fds[count] < 0) {
            abort();
        }
        send_message(fds[count++], in, &hello, flags % 16 == 15 ? flags % sizeof hello : sizeof hello);
    }
    if (nb_shm_rendezvous(shm, names, &boot, wake, nb_now_ns(), &err) == 0) {
        volatile unsigned char *area = (volatile unsigned char *)shm->peers[1].area;
        area[0] = area[sizeof(struct nb_shm_area) - 1]; // the whole area is mapped
    }
    nb_shm_close(shm);
    for (int i = 0; i < count; i++) {
        close(fds[i]);
    }
    close(wake);
}

// --- 3: a pipe

static void feed_pipe(struct input *in) {
    struct nb_shm_pipe *pipe = require(aligned_alloc(64, sizeof *pipe));
    unsigned char *room = require(malloc(PIPE_ROOM));
    memset(pipe, 0, sizeof *pipe);
    memset(room, 1, PIPE_ROOM);
    while (in->bytes > 0) {
        uint8_t flags = take_byte(in);
        size_t bytes = (size_t)take_byte(in) * 2;
        uint64_t value;
        bool writer_waits;
        take(in, &value, flags & 4 ? 8 : 2);
        if ((flags & 8) != 0) {
            atomic_store((flags & 16) != 0 ? &pipe->written : &pipe->read, value);
        }
        if ((flags & 1) != 0) {
            size_t wrote = nb_shm_pipe_write(pipe, room, bytes);
            if (wrote > bytes) {
                abort();
            }
        } else {
            long got = nb_shm_pipe_read(pipe, room, bytes, &writer_waits);
            if (got > (long)bytes) {
                abort();
            }
        }
    }
    free(room);
    free(pipe);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static void (*const feeds[MODES])(struct input *) = {feed_area, feed_arenas, feed_rendezvous, feed_pipe};
    if (bytes < 1) {
        return 0;
    }
    struct input in = {.data = data + 1, .bytes = bytes - 1};
    feeds[data[0] % MODES](&in);
    return 0;
}
