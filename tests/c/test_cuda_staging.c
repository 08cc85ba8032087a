// Staging of device memory, over the fake CUDA driver. Results are right for any stream delays, and each ordering rule
// is necessary. A failure of any call or operation is reported and leaves no resources. All that holds without kernels,
// and with kernels that copy small pieces.
#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "../cuda/fake.h"
#include "base/arena.h"
#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/staging.h"

enum { SEEDS = 1000, JOBS_MAX = 4, CHUNK = 512, DELAY_NS = 20000, QUIET_POLLS = 50, PIECES_MAX = 2500 };
static const int64_t deadline_ns = 60000000000;

static const struct fake_controls *fake;
static size_t gather_bytes; // 0: no kernels, and buffers of one piece

struct shape {
    int parts;
    struct nb_staging_parts out;
    struct nb_staging_parts back;
    size_t rotation; // the buffer begins at this offset of its memory and wraps around
};

static const struct shape plain = {.parts = 1, .out = {0, 1}, .back = {0, 1}};

// One transfer: `input` is copied to a buffer, staged, each byte replaced by its result, and copied to `output`.
struct job {
    size_t bytes;
    struct shape shape;
    struct nb_staging_piece pieces[PIECES_MAX];
    int piece_count;
    nb_cuda_address buffer;
    struct CUstream_st *caller;
    struct nb_staging_transfer transfer;
    bool started;
    unsigned char *input;
    unsigned char *output;
};

struct world {
    struct nb_cuda_driver driver;
    struct nb_cuda_device device;
    struct CUstream_st *out;
    struct CUstream_st *back;
    struct nb_staging *staging;
    struct job jobs[JOBS_MAX];
    int count;
    int64_t until_ns;
    uint64_t random;
    struct nb_error err;
};

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void check_success(unsigned result, const char *what) {
    CHECK(result == NB_CUDA_SUCCESS, "%s: %u", what, result);
}

static unsigned char result_of(unsigned char value, size_t offset) {
    return (unsigned char)(value * 3 + offset % 251 + 1);
}

static void prepare_job(struct world *w, struct job *job, size_t bytes, const struct shape *shape) {
    const struct nb_cuda_driver *driver = &w->driver;
    job->bytes = bytes;
    job->shape = *shape;
    job->input = malloc(bytes);
    job->output = calloc(1, bytes);
    unsigned char *garbage = malloc(bytes);
    CHECK(job->input != NULL && job->output != NULL && garbage != NULL, "memory");
    for (size_t i = 0; i < bytes; i++) {
        job->input[i] = (unsigned char)draw(&w->random);
        garbage[i] = (unsigned char)(job->input[i] ^ 0x5a);
    }
    check_success(driver->mem_alloc(&job->buffer, bytes), "cuMemAlloc");
    fake->poke(job->buffer, garbage, bytes);
    free(garbage);
    check_success(driver->host_register(job->input, bytes, 0), "cuMemHostRegister");
    check_success(driver->host_register(job->output, bytes, 0), "cuMemHostRegister");
    check_success(driver->stream_create(&job->caller, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static void world_open(struct world *w, uint64_t seed) {
    fake->reset(seed, DELAY_NS);
    *w = (struct world){.random = seed, .until_ns = nb_now_ns() + deadline_ns};
    CHECK(nb_cuda_driver_open(&w->driver, fake_path(), &w->err) == 0, "%s", w->err.text);
    CHECK(nb_cuda_device_open(&w->device, &w->driver, 0, &w->err) == 0, "%s", w->err.text);
    CHECK(nb_cuda_enter(&w->device, &w->err) == 0, "%s", w->err.text);
    check_success(w->driver.stream_create(&w->out, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
    check_success(w->driver.stream_create(&w->back, NB_CUDA_STREAM_NON_BLOCKING), "cuStreamCreate");
}

static void add_job(struct world *w, size_t bytes) {
    prepare_job(w, &w->jobs[w->count++], bytes, &plain);
}

static int open_staging(struct world *w, size_t chunk_bytes, int chunks, bool one_stream) {
    nb_cuda_leave(&w->device); // staging makes the context current itself
    const struct nb_staging_config config = {.chunk_bytes = chunk_bytes,
                                             .chunks = chunks,
                                             .gather_bytes = gather_bytes,
                                             .image = fake_image,
                                             .out = w->out,
                                             .back = one_stream ? w->out : w->back};
    return nb_staging_open(&w->staging, &w->device, &config, &w->err);
}

static void enter(struct world *w) {
    struct nb_error err = {0};
    CHECK(nb_cuda_enter(&w->device, &err) == 0, "%s", err.text);
}

// The caller's work before a transfer: fills the buffer and waits until it holds its values.
static void compute(struct world *w, struct job *job) {
    enter(w);
    check_success(w->driver.copy_to_device(job->buffer, job->input, job->bytes, job->caller), "cuMemcpyHtoDAsync");
    check_success(w->driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    nb_cuda_leave(&w->device);
}

// Adds memory to a job's buffer: as one piece, or with kernels as pieces of up to twice the size that they copy.
static void add_memory(struct world *w, struct job *job, nb_cuda_address base, size_t bytes) {
    while (bytes > 0) {
        const bool last = gather_bytes == 0 || job->piece_count >= PIECES_MAX - 2;
        const size_t drawn = last ? bytes : 1 + draw(&w->random) % (2 * gather_bytes);
        const size_t take = drawn < bytes ? drawn : bytes;
        job->pieces[job->piece_count++] = (struct nb_staging_piece){base, take};
        base += take;
        bytes -= take;
    }
}

static int start(struct world *w, struct job *job) {
    const struct shape *shape = &job->shape;
    job->piece_count = 0;
    add_memory(w, job, job->buffer + shape->rotation, job->bytes - shape->rotation);
    add_memory(w, job, job->buffer, shape->rotation);
    const struct nb_staging_request request = {.pieces = job->pieces,
                                               .piece_count = job->piece_count,
                                               .parts = shape->parts,
                                               .element_bytes = 1,
                                               .out = shape->out,
                                               .back = shape->back,
                                               .callers = &job->caller,
                                               .caller_count = 1};
    int rc = nb_staging_start(w->staging, &job->transfer, &request, &w->err);
    job->started = rc == 0;
    return rc;
}

// The caller's work after a transfer: copies the result in its stream.
static void use_result(struct world *w, struct job *job) {
    check_success(w->driver.copy_to_host(job->output, job->buffer, job->bytes, job->caller), "cuMemcpyDtoHAsync");
}

static bool contains(struct nb_staging_parts some, int part, int parts) {
    return (part - some.first + parts) % parts < some.count;
}

static bool result_is_right(const struct job *job) {
    const struct shape *shape = &job->shape;
    for (size_t i = 0; i < job->bytes; i++) {
        const size_t at = (i + shape->rotation) % job->bytes;
        const int part = (int)(i / (job->bytes / (size_t)shape->parts));
        const unsigned char staged = contains(shape->out, part, shape->parts) ? job->input[at] : 0;
        const unsigned char right = contains(shape->back, part, shape->parts) ? result_of(staged, i) : job->input[at];
        if (job->output[at] != right) {
            return false;
        }
    }
    return true;
}

static void fill_results(const struct job *job, const struct nb_staging_chunk *chunk) {
    const struct nb_staging_cut *cut = &job->transfer.cut;
    unsigned char *memory = chunk->memory;
    for (int part = 0; part < job->shape.parts; part++) {
        const size_t offset = (size_t)part * cut->part_bytes + chunk->number * cut->slice_bytes;
        const bool staged = contains(job->shape.out, part, job->shape.parts);
        for (size_t i = 0; i < chunk->slice_bytes; i++, memory++) {
            *memory = result_of(staged ? *memory : 0, offset + i);
        }
    }
}

// Takes chunks of a job, and returns them in random order. Returns their number or an error.
static int work(struct world *w, struct job *job) {
    struct nb_staging_chunk held[8];
    int count = 0;
    int rc = 0;
    while (count < 8 && (rc = nb_staging_take(w->staging, &job->transfer, &held[count], &w->err)) == 1) {
        fill_results(job, &held[count++]);
    }
    for (int left = count; rc >= 0 && left > 0; left--) {
        int which = (int)(draw(&w->random) % (uint64_t)left);
        rc = nb_staging_return(w->staging, &job->transfer, held[which].index, &w->err);
        held[which] = held[left - 1];
    }
    return rc < 0 ? rc : count;
}

static bool all_done(const struct world *w) {
    for (int i = 0; i < w->count; i++) {
        if (!w->jobs[i].transfer.done) {
            return false;
        }
    }
    return true;
}

// Polls until all transfers are done. Releases the held stream when nothing else makes progress.
static int finish(struct world *w, struct CUstream_st *held) {
    int quiet = 0;
    while (!all_done(w)) {
        CHECK(nb_now_ns() < w->until_ns, "transfers are not done");
        int moved = nb_staging_poll(w->staging, &w->err);
        for (int i = 0; moved >= 0 && i < w->count; i++) {
            int returned = work(w, &w->jobs[i]);
            moved = returned < 0 ? returned : moved + returned;
        }
        if (moved < 0) {
            return moved;
        }
        quiet = moved > 0 ? 0 : quiet + 1;
        if (held != NULL && quiet == QUIET_POLLS) {
            fake->hold(held, false);
            held = NULL;
        }
        if (moved == 0) {
            (void)sched_yield();
        }
    }
    return 0;
}

static void free_jobs(struct world *w) {
    for (int i = 0; i < w->count; i++) {
        free(w->jobs[i].input);
        free(w->jobs[i].output);
    }
}

static void world_close(struct world *w) {
    enter(w);
    for (int i = 0; i < w->count; i++) {
        check_success(w->driver.stream_synchronize(w->jobs[i].caller), "cuStreamSynchronize");
        check_success(w->driver.host_unregister(w->jobs[i].input), "cuMemHostUnregister");
        check_success(w->driver.host_unregister(w->jobs[i].output), "cuMemHostUnregister");
    }
    nb_cuda_leave(&w->device);
    nb_staging_close(w->staging);
    struct fake_live_objects live_objects = fake->live_objects();
    CHECK(live_objects.registrations == 0 && live_objects.events == 0 && live_objects.modules == 0,
          "%d registrations, %d events, %d modules", live_objects.registrations, live_objects.events,
          live_objects.modules);
    CHECK(fake->pageable_copies() == 0, "%d pageable copies", fake->pageable_copies());
    free_jobs(w);
}

// Runs all jobs of a world. Returns 0 or an error of the staging.
static int run_jobs(struct world *w) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < w->count; i++) {
        compute(w, &w->jobs[i]);
        rc = start(w, &w->jobs[i]);
    }
    rc = rc < 0 ? rc : finish(w, NULL);
    enter(w);
    for (int i = 0; rc == 0 && i < w->count; i++) {
        use_result(w, &w->jobs[i]);
        check_success(w->driver.stream_synchronize(w->jobs[i].caller), "cuStreamSynchronize");
        CHECK(result_is_right(&w->jobs[i]), "job %d of %zu bytes", i, w->jobs[i].bytes);
    }
    nb_cuda_leave(&w->device);
    return rc;
}

static void test_sizes(void) {
    static const size_t sizes[] = {1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 100 * CHUNK + 17};
    static const int chunks[] = {1, 2, 7};
    struct world w;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
            world_open(&w, s * 10 + c);
            add_job(&w, sizes[s]);
            CHECK(open_staging(&w, CHUNK, chunks[c], s % 2 == 0) == 0, "%s", w.err.text);
            CHECK(run_jobs(&w) == 0, "%s", w.err.text);
            world_close(&w);
        }
    }
}

// The transfers that collectives of RANKS ranks need, for each rank.
static void test_shapes(void) {
    enum { RANKS = 3, SHAPES = 6 };
    for (int rank = 0; rank < RANKS; rank++) {
        const struct nb_staging_parts own = {rank, 1};
        const struct nb_staging_parts others = {rank + 1, RANKS - 1};
        const struct nb_staging_parts none = {0, 0};
        const struct shape shapes[SHAPES] = {
            {.parts = 1, .out = {0, 1}, .back = none},
            {.parts = 1, .out = none, .back = {0, 1}},
            {.parts = RANKS, .out = own, .back = others},
            {.parts = RANKS, .out = {0, RANKS}, .back = own},
            {.parts = 2 * RANKS, .out = {0, RANKS}, .back = {RANKS, RANKS}},
            {.parts = 1, .out = {0, 1}, .back = {0, 1}},
        };
        for (int i = 0; i < SHAPES; i++) {
            for (size_t part = 1; part < 400; part += 133) {
                struct world w;
                world_open(&w, part + (size_t)i);
                for (int job = 0; job < 2; job++) {
                    struct shape shape = shapes[i];
                    const size_t bytes = part * (size_t)shape.parts;
                    shape.rotation = job == 0 ? 0 : bytes / 3;
                    prepare_job(&w, &w.jobs[w.count++], bytes, &shape);
                }
                CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
                CHECK(run_jobs(&w) == 0, "shape %d: %s", i, w.err.text);
                world_close(&w);
            }
        }
    }
}

// Memory that cannot be pinned is used with blocking copies.
static void test_unpinned_memory(void) {
    struct world w;
    world_open(&w, 1);
    add_job(&w, 5 * CHUNK + 3);
    fake->fail_call(1, NB_CUDA_OUT_OF_MEMORY);
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    const char *why = nb_staging_unpinned(w.staging);
    CHECK(why != NULL && strstr(why, "cuMemHostRegister of ") != NULL, "%s", why);
    CHECK(run_jobs(&w) == 0, "%s", w.err.text);
    CHECK(fake->pageable_copies() > 0, "no copy was pageable");
    enter(&w);
    check_success(w.driver.stream_synchronize(w.jobs[0].caller), "cuStreamSynchronize");
    nb_cuda_leave(&w.device);
    nb_staging_close(w.staging);
    free_jobs(&w);
}

// True if the kernel has a flag for the mapping at `base`: "sh" for a shared one, "dc" for one that a fork leaves out.
static bool mapping_has(const void *base, const char *flag) {
    char line[512];
    char wanted[8];
    bool here = false;
    bool found = false;
    unsigned long long first;
    unsigned long long end;
    snprintf(wanted, sizeof wanted, " %s", flag);
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL, "/proc/self/smaps: %m");
    while (fgets(line, sizeof line, maps) != NULL) {
        if (sscanf(line, "%llx-%llx ", &first, &end) == 2) {
            here = first <= (uintptr_t)base && (uintptr_t)base < end;
        } else if (here && strncmp(line, "VmFlags:", 8) == 0) {
            found = strstr(line, wanted) != NULL;
        }
    }
    fclose(maps);
    return found;
}

// The device writes to pinned pages while a forked process lives, so a fork must not make them copy-on-write.
static void test_a_fork_leaves_pinned_pages_in_place(void) {
    for (int private = 0; private < 2; private ++) {
        struct world w;
        struct rlimit before;
        world_open(&w, 1);
        add_job(&w, 5 * CHUNK);
        CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0, "getrlimit: %m");
        const struct rlimit none = {.rlim_cur = private ? 0 : before.rlim_cur, .rlim_max = before.rlim_max};
        CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0, "setrlimit: %m");
        int rc = open_staging(&w, CHUNK, 2, false);
        CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0, "setrlimit: %m");
        CHECK(rc == 0 && nb_staging_unpinned(w.staging) == NULL, "%s", w.err.text);
        const struct nb_arena *memory = nb_staging_memory(w.staging);
        CHECK((memory->fd < 0) == private, "descriptor %d", memory->fd);
        CHECK(mapping_has(memory->base, private ? "dc" : "sh"), "a fork makes the pages copy-on-write");
        CHECK(run_jobs(&w) == 0, "%s", w.err.text);
        world_close(&w);
    }
}

static void test_empty_transfer(void) {
    struct world w;
    world_open(&w, 1);
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    struct nb_staging_transfer transfer;
    const struct nb_staging_request nothing = {.parts = 1, .element_bytes = 1};
    CHECK(nb_staging_start(w.staging, &transfer, &nothing, &w.err) == 0 && transfer.done, "%s", w.err.text);
    CHECK(nb_staging_poll(w.staging, &w.err) == 0, "%s", w.err.text);
    nb_staging_cancel(w.staging, &transfer);
    nb_staging_close(w.staging);
}

static void test_seeds(uint64_t seeds) {
    for (uint64_t seed = 0; seed < seeds; seed++) {
        struct world w;
        world_open(&w, seed);
        const int jobs = 1 + (int)(draw(&w.random) % JOBS_MAX);
        const size_t chunk_bytes = 16 + draw(&w.random) % CHUNK;
        for (int i = 0; i < jobs; i++) {
            add_job(&w, 1 + draw(&w.random) % (chunk_bytes * 6));
        }
        CHECK(open_staging(&w, chunk_bytes, 1 + (int)(seed % 5), seed % 3 == 0) == 0, "%s", w.err.text);
        CHECK(run_jobs(&w) == 0, "seed %d: %s", (int)seed, w.err.text);
        world_close(&w);
    }
}

// Rules that order copies. The fake driver disables each of them, and the result must then be wrong.
enum rule { NONE, ARRIVAL, REUSE, CALLER_WAITS };

// Runs one job while the stream of a rule is held. Returns true if the result is right.
static bool result_is_right_with(enum rule held, enum rule broken) {
    struct world w;
    world_open(&w, 7);
    add_job(&w, 3 * CHUNK + 5);
    struct job *job = &w.jobs[0];
    CHECK(open_staging(&w, CHUNK, held == REUSE ? 1 : 8, false) == 0, "%s", w.err.text);
    struct CUstream_st *const streams[] = {[ARRIVAL] = w.out, [REUSE] = w.back, [CALLER_WAITS] = w.back};
    fake->hold(streams[held], true);
    fake->report_done(broken == ARRIVAL || broken == REUSE ? streams[held] : NULL);
    fake->drop_wait(broken == CALLER_WAITS);
    compute(&w, job);
    // If the rule is broken, nothing waits for the held stream.
    CHECK(start(&w, job) == 0 && finish(&w, broken == NONE ? streams[held] : NULL) == 0, "%s", w.err.text);
    enter(&w);
    use_result(&w, job);
    if (held == CALLER_WAITS && broken == CALLER_WAITS) {
        check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    }
    fake->report_done(NULL);
    fake->hold(streams[held], false);
    check_success(w.driver.stream_synchronize(w.out), "cuStreamSynchronize");
    check_success(w.driver.stream_synchronize(w.back), "cuStreamSynchronize");
    check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    nb_cuda_leave(&w.device);
    bool right = result_is_right(job);
    world_close(&w);
    return right;
}

static void test_each_rule_is_necessary(void) {
    for (int rule = ARRIVAL; rule <= CALLER_WAITS; rule++) {
        CHECK(result_is_right_with((enum rule)rule, NONE), "the result is wrong with rule %d", rule);
        CHECK(!result_is_right_with((enum rule)rule, (enum rule)rule), "the result is right without rule %d", rule);
    }
}

// Cancels the first of two jobs after some steps; then its caller writes to the buffer. Returns true if the buffer
// keeps the caller's data.
static bool buffer_kept_after_cancel(uint64_t seed, bool drop_waits) {
    struct world w;
    world_open(&w, seed);
    add_job(&w, 5 * CHUNK + 3);
    add_job(&w, 3 * CHUNK + 1);
    struct job *job = &w.jobs[0];
    CHECK(open_staging(&w, CHUNK, 3, false) == 0, "%s", w.err.text);
    compute(&w, &w.jobs[0]);
    compute(&w, &w.jobs[1]);
    CHECK(start(&w, job) == 0 && start(&w, &w.jobs[1]) == 0, "%s", w.err.text);
    struct nb_staging_chunk chunk;
    const size_t returned = drop_waits ? 1 : draw(&w.random) % 5;
    int held = 0;
    while (job->transfer.returned < returned) {
        CHECK(nb_now_ns() < w.until_ns && nb_staging_poll(w.staging, &w.err) >= 0, "%s", w.err.text);
        if (nb_staging_take(w.staging, &job->transfer, &chunk, &w.err) == 1) {
            fake->hold(w.back, drop_waits);
            memset(chunk.memory, 1, chunk.slice_bytes);
            CHECK(nb_staging_return(w.staging, &job->transfer, chunk.index, &w.err) == 0, "%s", w.err.text);
        }
    }
    for (uint64_t polls = draw(&w.random) % 20; polls > 0; polls--) {
        CHECK(nb_staging_poll(w.staging, &w.err) >= 0, "%s", w.err.text);
        held += nb_staging_take(w.staging, &job->transfer, &chunk, &w.err);
    }
    CHECK(held <= 3, "%d of 3 chunks were taken", held);
    if (drop_waits) { // the first wait is for the copy back, because chunks are cancelled in order
        fake->drop_wait(1);
    }
    nb_staging_cancel(w.staging, &job->transfer);
    nb_staging_cancel(w.staging, &job->transfer);
    enter(&w);
    memset(job->input, 2, job->bytes);
    check_success(w.driver.copy_to_device(job->buffer, job->input, job->bytes, job->caller), "cuMemcpyHtoDAsync");
    if (drop_waits) {
        check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
        fake->hold(w.back, false);
    }
    nb_cuda_leave(&w.device);
    CHECK(finish(&w, NULL) == 0, "%s", w.err.text); // the second transfer reuses the chunks of the first
    enter(&w);
    use_result(&w, &w.jobs[1]);
    use_result(&w, job);
    check_success(w.driver.stream_synchronize(w.out), "cuStreamSynchronize");
    check_success(w.driver.stream_synchronize(w.back), "cuStreamSynchronize");
    check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    check_success(w.driver.stream_synchronize(w.jobs[1].caller), "cuStreamSynchronize");
    fake->peek(job->output, job->buffer, job->bytes);
    nb_cuda_leave(&w.device);
    CHECK(result_is_right(&w.jobs[1]), "seed %d: wrong result of the other transfer", (int)seed);
    bool right = memcmp(job->output, job->input, job->bytes) == 0;
    world_close(&w);
    return right;
}

static void test_cancel(void) {
    for (uint64_t seed = 0; seed < SEEDS / 5; seed++) {
        CHECK(buffer_kept_after_cancel(seed, false), "seed %d: a copy back overwrote the buffer after the cancel",
              (int)seed);
    }
    CHECK(!buffer_kept_after_cancel(1, true), "a late copy back has no effect on the result");
}

// After a cancel, the caller's stream waits for a copy out, so that the buffer may be freed in stream order.
static void test_cancel_waits_for_copies_out(void) {
    enum { YIELDS = 1000 };
    struct world w;
    world_open(&w, 3);
    add_job(&w, 2 * CHUNK);
    struct job *job = &w.jobs[0];
    CHECK(open_staging(&w, CHUNK, 1, false) == 0, "%s", w.err.text);
    compute(&w, job);
    fake->hold(w.out, true);
    CHECK(start(&w, job) == 0, "%s", w.err.text);
    while (job->transfer.granted == 0) {
        CHECK(nb_now_ns() < w.until_ns && nb_staging_poll(w.staging, &w.err) >= 0, "%s", w.err.text);
    }
    nb_staging_cancel(w.staging, &job->transfer);
    enter(&w);
    check_success(w.driver.copy_to_device(job->buffer, job->input, job->bytes, job->caller), "cuMemcpyHtoDAsync");
    for (int i = 0; i < YIELDS; i++) {
        (void)sched_yield(); // time for a stream that does not wait
    }
    fake->hold(w.out, false);
    check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    nb_cuda_leave(&w.device);
    struct fake_entry entries[16];
    const size_t count = fake->log(0, entries, 16);
    CHECK(count >= 2 && count <= 16, "%zu operations", count);
    CHECK(entries[count - 2].kind == FAKE_WAIT && entries[count - 2].stream == job->caller,
          "the cancel adds no wait to the caller's stream");
    CHECK(entries[count - 1].kind == FAKE_TO_DEVICE && entries[count - 1].stream == job->caller,
          "the caller's stream did not wait");
    world_close(&w);
}

// Releases the staging after a run that may have failed.
static void close_after_failure(struct world *w) {
    for (int i = 0; w->staging != NULL && i < w->count; i++) {
        if (w->jobs[i].started) {
            nb_staging_cancel(w->staging, &w->jobs[i].transfer);
        }
    }
    nb_staging_close(w->staging);
}

// Injected fault: the n-th call, the n-th of the calls that polling repeats, or the n-th operation; 0: none.
struct fault {
    int call;
    int poll;
    int operation;
};

// Calls for pinned memory, a module, its functions, an address. If one fails, copies block, or are made one by one.
enum { OPENING = 3 + NB_CUDA_KERNEL_COUNT };

// Runs two small jobs with a fault. Returns 0 or an error of the staging. *calls: number of calls that the staging
// made.
static int run_with_fault(uint64_t seed, struct fault fault, int *calls) {
    struct world w;
    world_open(&w, seed);
    add_job(&w, 2 * CHUNK + 1);
    add_job(&w, CHUNK);
    compute(&w, &w.jobs[0]);
    compute(&w, &w.jobs[1]);
    const int before = fake->calls();
    fake->fail_call(fault.call, NB_CUDA_OUT_OF_MEMORY);
    fake->fail_poll(fault.poll, NB_CUDA_OUT_OF_MEMORY);
    fake->break_operation(fault.operation);
    int rc = open_staging(&w, CHUNK, 2, false);
    const bool gathers = rc == 0 && nb_staging_ungathered(w.staging) == NULL;
    const bool may_gather = gather_bytes > 0 && (fault.call == 0 || fault.call > OPENING);
    CHECK(rc < 0 || gather_bytes == 0 || gathers == may_gather, "call %d: %d", fault.call, gathers);
    for (int i = 0; rc == 0 && i < w.count; i++) {
        rc = start(&w, &w.jobs[i]);
    }
    rc = rc < 0 ? rc : finish(&w, NULL);
    *calls = fake->calls() - before;
    if (rc < 0) {
        CHECK(w.err.code == rc && strncmp(w.err.text, "CUDA: cu", 8) == 0, "%d: %s", rc, w.err.text);
        CHECK(strstr(w.err.text, " on device 0: CUDA_ERROR_") != NULL, "%s", w.err.text);
    }
    if (rc < 0 && w.staging != NULL) {
        struct nb_error again = {0};
        CHECK(nb_staging_poll(w.staging, &again) == rc && strcmp(again.text, w.err.text) == 0, "%s", again.text);
        CHECK(start(&w, &w.jobs[1]) == rc, "a transfer starts after a failure");
    }
    close_after_failure(&w);
    fake->fail_call(0, 0);
    fake->fail_poll(0, 0);
    struct CUstream_st *const streams[] = {w.out, w.back, w.jobs[0].caller, w.jobs[1].caller};
    if (fault.operation == 0) { // the device works: no operation of the staging may be pending
        enter(&w);
        for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
            check_success(w.driver.stream_synchronize(streams[i]), "cuStreamSynchronize");
        }
        nb_cuda_leave(&w.device);
    }
    fake->reset(0, 0);
    free_jobs(&w);
    return rc;
}

static void test_each_call_fails(void) {
    enum { CLOSING = 5, ROUNDS = 5 };
    const int may_fail = gather_bytes > 0 ? OPENING : 1;
    int unused_calls = 0;
    for (uint64_t seed = 0; seed < ROUNDS; seed++) { // it also decides the pieces
        int calls = 0;
        CHECK(run_with_fault(seed, (struct fault){0}, &calls) == 0 && calls > 20, "%d calls", calls);
        for (int call = 1; call <= calls + CLOSING; call++) {
            int rc = run_with_fault(seed, (struct fault){.call = call}, &unused_calls);
            bool fails = call > may_fail && call <= calls;
            CHECK(rc == (fails ? -ENOMEM : 0), "call %d of %d: %d", call, calls, rc);
        }
    }
}

static void test_each_polling_call_fails(void) {
    enum { CALLS = 60, CERTAIN = 10 };
    int unused_calls = 0;
    for (int call = 1; call <= CALLS; call++) {
        int rc = run_with_fault((uint64_t)call, (struct fault){.poll = call}, &unused_calls);
        CHECK(rc == -ENOMEM || (rc == 0 && call > CERTAIN), "call %d: %d", call, rc);
    }
}

static void test_each_operation_fails_the_device(void) {
    enum {
        OPERATIONS = 24,
        CERTAIN = 7
    }; // number of operations that certainly run: before the last of 4 copies out and 4 records
    int unused_calls = 0;
    for (int operation = 1; operation <= OPERATIONS; operation++) {
        int rc = run_with_fault((uint64_t)operation, (struct fault){.operation = operation}, &unused_calls);
        CHECK(rc == -EIO || (rc == 0 && operation > CERTAIN), "operation %d: %d", operation, rc);
    }
}

static void test_invalid_arguments(void) {
    struct world w;
    struct nb_error err = {0};
    world_open(&w, 1);
    add_job(&w, CHUNK + 1);
    struct nb_staging *none = NULL;
    const struct nb_staging_config configs[] = {
        {.chunk_bytes = 0, .chunks = 1}, {.chunk_bytes = 1, .chunks = 0}, {.chunk_bytes = SIZE_MAX / 2, .chunks = 3}};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        CHECK(nb_staging_open(&none, &w.device, &configs[i], &err) == -EINVAL && none == NULL, "%s", err.text);
    }
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    struct job *job = &w.jobs[0];
    const struct nb_staging_piece piece = {job->buffer, CHUNK + 1};
    const struct nb_staging_request narrow = {
        .pieces = &piece, .piece_count = 1, .parts = CHUNK + 1, .element_bytes = 1};
    CHECK(nb_staging_start(w.staging, &job->transfer, &narrow, &err) == -EINVAL, "%s", err.text);
    compute(&w, job);
    CHECK(start(&w, job) == 0, "%s", w.err.text);
    for (int index = -1; index <= 2; index++) {
        CHECK(nb_staging_return(w.staging, &job->transfer, index, &err) == -EINVAL, "chunk %d", index);
    }
    struct nb_staging_chunk chunk;
    while (nb_staging_take(w.staging, &job->transfer, &chunk, &w.err) == 0) {
        CHECK(nb_now_ns() < w.until_ns && nb_staging_poll(w.staging, &w.err) >= 0, "%s", w.err.text);
    }
    fill_results(job, &chunk);
    CHECK(nb_staging_return(w.staging, &job->transfer, chunk.index, &w.err) == 0, "%s", w.err.text);
    CHECK(nb_staging_return(w.staging, &job->transfer, chunk.index, &err) == -EINVAL, "returned twice");
    CHECK(finish(&w, NULL) == 0, "%s", w.err.text);
    world_close(&w);
}

// Counts the kernels and the copies on the streams of a staging.
static void count_copies(const struct world *w, int *kernels, int *copies) {
    static struct fake_entry entries[8192];
    const size_t count = fake->log(0, entries, 8192);
    *kernels = *copies = 0;
    for (size_t i = 0; i < count && i < 8192; i++) {
        const bool ours = entries[i].stream == w->out || entries[i].stream == w->back;
        *kernels += ours && entries[i].kind == FAKE_KERNEL;
        *copies += ours && (entries[i].kind == FAKE_TO_HOST || entries[i].kind == FAKE_TO_DEVICE);
    }
}

// Runs one job of pieces of this size in chunks of 3000 bytes.
static void gather_pieces(size_t bytes, size_t piece, int *kernels, int *copies) {
    struct world w;
    world_open(&w, 5);
    add_job(&w, bytes);
    struct job *job = &w.jobs[0];
    CHECK(open_staging(&w, 3000, 2, false) == 0 && nb_staging_ungathered(w.staging) == NULL, "%s", w.err.text);
    compute(&w, job);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t take = bytes - at < piece ? bytes - at : piece;
        job->pieces[job->piece_count++] = (struct nb_staging_piece){job->buffer + at, take};
    }
    const struct nb_staging_request request = {.pieces = job->pieces,
                                               .piece_count = job->piece_count,
                                               .parts = 1,
                                               .element_bytes = 1,
                                               .out = {0, 1},
                                               .back = {0, 1},
                                               .callers = &job->caller,
                                               .caller_count = 1};
    CHECK(nb_staging_start(w.staging, &job->transfer, &request, &w.err) == 0 && finish(&w, NULL) == 0, "%s",
          w.err.text);
    enter(&w);
    use_result(&w, job);
    check_success(w.driver.stream_synchronize(job->caller), "cuStreamSynchronize");
    nb_cuda_leave(&w.device);
    CHECK(result_is_right(job), "%zu bytes in pieces of %zu", bytes, piece);
    count_copies(&w, kernels, copies);
    world_close(&w);
}

// A chunk takes one kernel each way, however many small pieces it has; a large piece and a lone one take a copy.
static void test_one_kernel_a_chunk(void) {
    int kernels = 0;
    int copies = 0;
    gather_bytes = 100;
    gather_pieces(6000, 100, &kernels, &copies);
    CHECK(kernels == 4 && copies == 0, "%d kernels, %d copies", kernels, copies);
    gather_pieces(3000, 101, &kernels, &copies); // 29 large pieces, and a small one
    CHECK(kernels == 0 && copies == 2 * 30, "%d kernels, %d copies", kernels, copies);
    gather_pieces(2400, 1, &kernels, &copies); // more pieces than a list has
    CHECK(kernels == 2 && copies == 2 * (2400 - 1024), "%d kernels, %d copies", kernels, copies);
}

// A driver that does not load the kernels copies one by one.
static void test_kernels_that_do_not_load(void) {
    struct world w;
    gather_bytes = 100;
    world_open(&w, 1);
    add_job(&w, 5 * CHUNK + 3);
    fake->fail_named("cuModuleLoadData", 0, NB_CUDA_NO_BINARY_FOR_GPU);
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    const char *why = nb_staging_ungathered(w.staging);
    CHECK(why != NULL && strstr(why, "cuModuleLoadData") != NULL, "%s", why);
    CHECK(run_jobs(&w) == 0, "%s", w.err.text);
    int kernels = 0;
    int copies = 0;
    count_copies(&w, &kernels, &copies);
    CHECK(kernels == 0 && copies > 0, "%d kernels, %d copies", kernels, copies);
    world_close(&w);
}

// A capture of any thread, which forbids other threads to pin memory and to load code.
static void test_a_capture_does_not_change_what_is_opened(void) {
    struct world w;
    gather_bytes = 100;
    world_open(&w, 1);
    add_job(&w, 5 * CHUNK + 3);
    fake->capture(w.jobs[0].caller, true);
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    CHECK(nb_staging_unpinned(w.staging) == NULL, "%s", nb_staging_unpinned(w.staging));
    CHECK(nb_staging_ungathered(w.staging) == NULL, "%s", nb_staging_ungathered(w.staging));
    nb_staging_close(w.staging);
    const struct fake_live_objects left = fake->live_objects();
    CHECK(left.registrations == 2 && left.modules == 0, "%d registrations, %d modules", left.registrations,
          left.modules);
    fake->capture(w.jobs[0].caller, false);
    static const char *const calls[] = {"cuMemHostRegister", "cuModuleLoadData"};
    for (int i = 0; i < 2; i++) {
        w.err = (struct nb_error){0};
        enter(&w);
        fake->fail_named(calls[i], 0, i == 0 ? NB_CUDA_CAPTURE_UNSUPPORTED : NB_CUDA_CAPTURED_EVENT);
        CHECK(open_staging(&w, CHUNK, 2, false) == -EBUSY, "%s: %s", calls[i], w.err.text);
        CHECK(strstr(w.err.text, calls[i]) != NULL, "%s", w.err.text);
    }
    w.err = (struct nb_error){0};
    enter(&w);
    CHECK(open_staging(&w, CHUNK, 2, false) == 0, "%s", w.err.text);
    CHECK(run_jobs(&w) == 0, "%s", w.err.text);
    world_close(&w);
}

static void test_transfers(uint64_t seeds) {
    test_invalid_arguments();
    test_empty_transfer();
    test_sizes();
    test_shapes();
    test_unpinned_memory();
    test_each_rule_is_necessary();
    test_cancel();
    test_each_call_fails();
    test_each_polling_call_fails();
    test_each_operation_fails_the_device();
    test_seeds(seeds);
}

int main(void) {
    fake = fake_controls_get();
    test_transfers(SEEDS);
    test_cancel_waits_for_copies_out();
    test_a_fork_leaves_pinned_pages_in_place();
    gather_bytes = 24;
    test_transfers(SEEDS / 4);
    test_one_kernel_a_chunk();
    test_kernels_that_do_not_load();
    test_a_capture_does_not_change_what_is_opened();
    fake->reset(0, 0);
    return 0;
}
