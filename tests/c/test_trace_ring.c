// Trace ring: the events of several threads are all recorded, a full ring keeps the first and the last ones, and the file
// of a killed rank is readable.
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "check.h"
#include "trace/ring.h"

enum { PATH_BYTES = 64, THREADS = 2, EACH = 5000 };

// Opens an unlinked file; `path` refers to it.
static FILE *file_open(char path[PATH_BYTES]) {
    FILE *file = tmpfile();
    CHECK(file != NULL, "tmpfile: %m");
    (void)snprintf(path, PATH_BYTES, "/proc/self/fd/%d", fileno(file));
    return file;
}

struct view {
    const struct nb_ring_header *header;
    const struct nb_event *events;
    size_t bytes;
};

// Maps the file as a reader in another process does.
static struct view view_open(FILE *file) {
    struct stat stat;
    CHECK(fstat(fileno(file), &stat) == 0, "fstat: %m");
    struct view view = {.bytes = (size_t)stat.st_size};
    const char *base = mmap(NULL, view.bytes, PROT_READ, MAP_SHARED, fileno(file), 0);
    CHECK(base != MAP_FAILED, "mmap: %m");
    view.header = (const void *)base;
    view.events = (const void *)(base + NB_RING_HEADER);
    return view;
}

static void view_close(const struct view *view) {
    CHECK(munmap((void *)view->header, view->bytes) == 0, "munmap: %m");
}

static uint64_t view_count(const struct view *view) {
    uint64_t taken = atomic_load(&view->header->taken);
    return taken < view->header->capacity ? taken : view->header->capacity;
}

struct writer {
    struct nb_ring *ring;
    uint64_t id;
};

static void *write_events(void *arg) {
    const struct writer *writer = arg;
    for (uint64_t i = 0; i < EACH; i++) {
        nb_ring_put(writer->ring, NB_EV_OP_DONE, writer->id, i, i + 1, i + 2, i + 3, ~i);
    }
    return NULL;
}

static void write_from_threads(struct nb_ring *ring) {
    pthread_t threads[THREADS];
    struct writer writers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        writers[i] = (struct writer){ring, i};
        CHECK(pthread_create(&threads[i], NULL, write_events, &writers[i]) == 0, "thread");
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0, "join");
    }
}

// Each thread's events are complete, in order and without duplicates.
static void check_events(const struct view *view, uint64_t count) {
    uint64_t next[THREADS] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const struct nb_event *event = &view->events[i];
        CHECK(__atomic_load_n(&event->kind, __ATOMIC_ACQUIRE) == NB_EV_OP_DONE, "event %llu is not written",
              (unsigned long long)i);
        CHECK(event->key < THREADS, "unknown thread");
        uint64_t a = next[event->key]++;
        CHECK(event->a == a && event->b == a + 1 && event->c == a + 2 && event->d == a + 3 && event->e == ~a,
              "event %llu of thread %llu is missing or wrong", (unsigned long long)a, (unsigned long long)event->key);
        CHECK(event->time_ns >= view->header->opened_mono_ns && event->time_ns <= nb_now_ns(),
              "the event's time is out of range");
    }
}

static void test_events_of_several_threads(void) {
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, (uint64_t)THREADS * EACH + 100, 3, NULL) == 0, "open: %m");
    write_from_threads(&ring);
    CHECK(nb_ring_overwritten(&ring) == 0, "events are dropped");
    struct view view = view_open(file);
    CHECK(view_count(&view) == (uint64_t)THREADS * EACH, "events are missing before the close");
    check_events(&view, view_count(&view));
    CHECK(memcmp(view.header->magic, NB_RING_MAGIC, sizeof view.header->magic) == 0, "wrong magic");
    CHECK(view.header->version == NB_RING_VERSION && view.header->event_bytes == 64, "wrong version");
    CHECK(view.header->rank == 3 && view.header->pid == (uint32_t)getpid(), "wrong rank or pid");
    CHECK(view.header->opened_wall_ns > view.header->opened_mono_ns, "the wall clock is behind the monotonic clock");
    CHECK(atomic_load(&view.header->closed) == 0, "the file is marked as closed");
    view_close(&view);

    nb_ring_close(&ring);
    view = view_open(file);
    CHECK(view.bytes == NB_RING_HEADER + (size_t)THREADS * EACH * 64, "the file is not truncated to its events: %zu",
          view.bytes);
    CHECK(atomic_load(&view.header->closed) == 1, "the file is not marked as closed");
    check_events(&view, view_count(&view));
    view_close(&view);
    (void)fclose(file);
}

// Events that only a timeline needs are recorded only if the ring is for a timeline.
static void test_timeline_events(void) {
    static const enum nb_event_kind kinds[] = {NB_EV_OP_SUBMIT, NB_EV_OP_NAME, NB_EV_OP_READY, NB_EV_OP_PACK};
    for (int timeline = 0; timeline < 2; timeline++) {
        struct nb_ring ring;
        char path[PATH_BYTES];
        FILE *file = file_open(path);
        CHECK(nb_ring_open(&ring, path, 8, 0, NULL) == 0, "open: %m");
        ring.timeline = timeline == 1;
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
            nb_ring_put(&ring, kinds[i], i, 0, 0, 0, 0, 0);
        }
        nb_ring_close(&ring);
        struct view view = view_open(file);
        CHECK(view_count(&view) == (timeline == 1 ? 4U : 1U), "timeline %d", timeline);
        view_close(&view);
        (void)fclose(file);
    }
}

// The first events stay, and behind them the last ones, each over the oldest there.
static void test_full_ring(void) {
    enum { CAPACITY = 777, ONCE = CAPACITY / NB_RING_ONCE, AROUND = CAPACITY - ONCE };
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, CAPACITY, 0, NULL) == 0, "open: %m");
    write_from_threads(&ring);
    CHECK(nb_ring_overwritten(&ring) == THREADS * EACH - CAPACITY, "overwritten %llu",
          (unsigned long long)nb_ring_overwritten(&ring));
    nb_ring_close(&ring);
    struct view view = view_open(file);
    CHECK(view.bytes == NB_RING_HEADER + CAPACITY * 64 + sizeof(struct nb_ring_run) && view_count(&view) == CAPACITY,
          "%zu bytes", view.bytes);
    CHECK(view.header->once == ONCE && atomic_load(&view.header->taken) == THREADS * EACH, "wrong header");
    check_events(&view, ONCE);
    uint64_t last[THREADS] = {0};
    for (uint64_t number = THREADS * EACH - AROUND; number < THREADS * EACH; number++) {
        const struct nb_event *event = &view.events[ONCE + (number - ONCE) % AROUND];
        uint64_t times = (number - ONCE) / AROUND;
        CHECK(event->kind == NB_EV_OP_DONE + NB_RING_KIND * times && event->key < THREADS, "event %llu has kind %u",
              (unsigned long long)number, event->kind);
        CHECK(event->a > last[event->key] && event->b == event->a + 1 && event->c == event->a + 2 &&
                  event->d == event->a + 3 && event->e == ~event->a,
              "event %llu is wrong", (unsigned long long)number);
        last[event->key] = event->a;
    }
    view_close(&view);
    (void)fclose(file);
}

// Events that count for all later steps are not overwritten, as far as the first page has room.
static void test_lasting_events(void) {
    enum { CAPACITY = 16, ONCE = CAPACITY / NB_RING_ONCE };
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, CAPACITY, 0, NULL) == 0, "open: %m");
    nb_ring_put(&ring, NB_EV_PROBE, 7, 0, 0, 0, 0, 0); // among the first events
    for (uint64_t i = 1; i < ONCE; i++) {
        nb_ring_put(&ring, NB_EV_STEP_END, 0, 0, 0, 0, 0, 0);
    }
    for (uint64_t i = 0; i < NB_RING_LASTING + 1; i++) {
        nb_ring_put(&ring, NB_EV_LANE_LOST, i, i, i + 1, i + 2, 0, 0);
    }
    for (uint64_t i = 0; i < 10 * CAPACITY; i++) {
        nb_ring_put(&ring, NB_EV_STEP_END, 0, 0, 0, 0, 0, 0);
    }
    CHECK(ring.events[0].kind == NB_EV_PROBE && ring.events[0].key == 7, "the first event is overwritten");
    for (uint64_t i = 0; i < NB_RING_LASTING; i++) {
        const struct nb_event *event = &ring.lasting[i];
        CHECK(event->kind == NB_EV_LANE_LOST && event->key == i && event->c == i + 2, "lasting event %llu is wrong",
              (unsigned long long)i);
    }
    CHECK(atomic_load(&ring.header->taken) == ONCE + 1 + 10 * CAPACITY, "one lasting event too many has no place");
    nb_ring_close(&ring);
    (void)fclose(file);
}

// Steps of the whole run are summed in at most NB_RING_STEPS rows, each of the same number of them.
static void test_run_steps(void) {
    enum { STEPS = 5 * NB_RING_STEPS / 2 + 3, STRIDE = 4 };
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, 16, 0, NULL) == 0, "open: %m");
    nb_ring_put_at(&ring, 5, NB_EV_STEP_END, 0, 0, 0, 0, 0, 0); // of no step
    for (int64_t i = 0; i < STEPS; i++) {
        int64_t begin_ns = 1000 * (i + 1);
        atomic_store(&ring.step, (uint32_t)i + 10);
        nb_ring_put_at(&ring, begin_ns, NB_EV_STEP_BEGIN, 0, 0, 0, 0, 0, 0);
        nb_ring_put_at(&ring, begin_ns + 2, NB_EV_WAIT_BEGIN, 7, 0, 0, 0, 0, 0);
        nb_ring_put_at(&ring, begin_ns + 5, NB_EV_WAIT_END, 7, 0, 0, 0, 0, 0);
        nb_ring_put_at(&ring, begin_ns + 100 + i % STRIDE, NB_EV_STEP_END, 0, 0, 0, 0, 0, 0);
    }
    nb_ring_close(&ring);
    struct view view = view_open(file);
    const struct nb_ring_run *run = (const void *)&view.events[16];
    CHECK(atomic_load(&run->changes) == 2 * STEPS && run->stride == STRIDE &&
              run->rows == (STEPS + STRIDE - 1) / STRIDE,
          "%llu rows of %llu steps", (unsigned long long)run->rows, (unsigned long long)run->stride);
    for (uint64_t i = 0; i < run->rows; i++) {
        const struct nb_ring_steps *row = &run->steps[i];
        uint32_t count = i + 1 < run->rows ? STRIDE : STEPS - STRIDE * (uint32_t)i;
        uint64_t more = count * (count - 1) / 2;
        CHECK(row->first == 10 + STRIDE * i && row->count == count, "row %llu has %u steps from %u on",
              (unsigned long long)i, row->count, row->first);
        CHECK(row->total_ns == 100 * count + more && row->longest_ns == 99 + count && row->waited_ns == 3 * count,
              "row %llu is wrong", (unsigned long long)i);
    }
    view_close(&view);
    (void)fclose(file);
}

static void test_time_and_step(void) {
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, 8, 0, NULL) == 0, "open: %m");
    nb_ring_put_at(&ring, 12345, NB_EV_STEP_BEGIN, 0, 0, 0, 0, 0, 0);
    atomic_store(&ring.step, 41);
    nb_ring_put_at(&ring, -1, NB_EV_STEP_END, 9, 0, 0, 0, 0, 0);
    CHECK(ring.events[0].time_ns == 12345 && ring.events[0].step == 0, "wrong time or step of the first event");
    CHECK(ring.events[1].time_ns == -1 && ring.events[1].step == 41 && ring.events[1].key == 9,
          "wrong time, step or key of the second event");
    nb_ring_close(&ring);
    (void)fclose(file);
}

static void test_killed_process(void) {
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        struct nb_ring ring;
        CHECK(nb_ring_open(&ring, path, 1000000, 1, NULL) == 0, "open: %m");
        struct writer writer = {&ring, 0};
        (void)write_events(&writer);
        (void)kill(getpid(), SIGKILL);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "the child was not killed: status %x", status);
    struct view view = view_open(file);
    CHECK(view_count(&view) == EACH && atomic_load(&view.header->closed) == 0,
          "events are missing, or the file is marked as closed");
    CHECK(view.header->pid == (uint32_t)child, "wrong pid");
    check_events(&view, EACH);
    CHECK(view.events[EACH].kind == NB_EV_NONE, "there is an event too many");
    view_close(&view);
    (void)fclose(file);
}

static void test_recording_off_and_errors(void) {
    struct nb_ring off = {0};
    struct nb_ring ring;
    struct nb_error err = {0};
    nb_ring_put(&off, NB_EV_STEP_END, 1, 2, 3, 4, 5, 6);
    nb_ring_put(NULL, NB_EV_STEP_END, 1, 2, 3, 4, 5, 6);
    CHECK(nb_ring_overwritten(&off) == 0, "events are dropped while recording is off");
    nb_ring_close(&off);
    CHECK(nb_ring_open(&ring, "/proc/no/such/place", 8, 0, &err) == -ENOENT, "missing folder: %d", err.code);
    CHECK(strstr(err.text, "/proc/no/such/place") != NULL, "%s", err.text);
    CHECK(nb_ring_open(&ring, "/proc/no/such/place", UINT64_MAX / 64, 0, NULL) == -EFBIG,
          "a ring of too many events is opened");
}

// A file in which a recording is in progress is refused: emptying it would end the other process with SIGBUS. A child
// of the first process that keeps the descriptor does not keep the file.
static void test_file_in_use(void) {
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    struct nb_ring first;
    struct nb_ring second;
    struct nb_error err = {0};
    int go[2];
    CHECK(pipe(go) == 0, "pipe: %m");
    CHECK(nb_ring_open(&first, path, 1000, 0, &err) == 0, "%s", err.text);
    CHECK(nb_ring_open(&second, path, 8, 1, &err) == -EBUSY, "a second recording: %d", err.code);
    CHECK(strstr(err.text, "another recording is in progress in this file") != NULL, "%s", err.text);
    for (uint64_t i = 0; i < 1000; i++) {
        nb_ring_put(&first, NB_EV_STEP_END, i, 0, 0, 0, 0, 0);
    }
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        char end;
        (void)close(go[1]);
        _exit(read(go[0], &end, 1) != 0);
    }
    nb_ring_close(&first);
    err.code = 0;
    CHECK(nb_ring_open(&second, path, 8, 1, &err) == 0, "%s", err.text);
    nb_ring_close(&second);
    (void)close(go[0]);
    (void)close(go[1]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with status %x", status);
    (void)fclose(file);
}

// Disk space for all events is allocated when the ring opens.
static void test_disk_space_is_allocated(void) {
    enum { CAPACITY = 100000 };
    struct nb_ring ring;
    struct stat stat;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, CAPACITY, 0, NULL) == 0, "open: %m");
    CHECK(fstat(fileno(file), &stat) == 0, "fstat: %m");
    CHECK(stat.st_size == NB_RING_HEADER + CAPACITY * 64 + sizeof(struct nb_ring_run) &&
              stat.st_blocks * 512 >= stat.st_size,
          "%lld bytes, but %lld blocks are allocated", (long long)stat.st_size, (long long)stat.st_blocks);
    nb_ring_close(&ring);
    (void)fclose(file);
}

// Without enough disk space, opening fails with a message and frees what it allocated. A smaller ring can then be
// opened.
static void check_no_disk_space(const char *path, int code) {
    struct nb_ring ring;
    struct nb_error err = {0};
    struct stat stat_after;
    CHECK(nb_ring_open(&ring, path, 1000000, 0, &err) == code, "%d: %s", err.code, err.text);
    CHECK(strstr(err.text, path) != NULL && strstr(err.text, "64036888 bytes") != NULL &&
              strstr(err.text, strerror(-code)) != NULL && strstr(err.text, "NETBOTTLENECK_DIR") != NULL &&
              strstr(err.text, "NETBOTTLENECK_TRACE_EVENTS") != NULL,
          "%s", err.text);
    CHECK(stat(path, &stat_after) == 0 && stat_after.st_blocks == 0, "%lld blocks are still allocated",
          (long long)stat_after.st_blocks);
    CHECK(nb_ring_open(&ring, path, EACH, 0, NULL) == 0, "a smaller ring: %m");
    struct writer writer = {&ring, 0};
    (void)write_events(&writer);
    CHECK(nb_ring_overwritten(&ring) == 0, "events are dropped");
    nb_ring_close(&ring);
}

static void run_in_child(void (*run)(const char *path), const char *path) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        run(path);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with status %x", status);
}

static void with_small_file_limit(const char *path) {
    struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit: %m");
    check_no_disk_space(path, -EFBIG);
}

static bool write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    bool written = file != NULL && fputs(text, file) >= 0;
    return file != NULL && fclose(file) == 0 && written;
}

// Moves this process to new user and mount namespaces, as root.
static bool enter_namespaces(void) {
    char users[32];
    char groups[32];
    (void)snprintf(users, sizeof users, "0 %u 1", geteuid());
    (void)snprintf(groups, sizeof groups, "0 %u 1", getegid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && write_text("/proc/self/uid_map", users) &&
           write_text("/proc/self/setgroups", "deny") && write_text("/proc/self/gid_map", groups);
}

// On a file system of 1 MiB, if this process may mount one.
static void on_small_file_system(const char *folder) {
    char path[PATH_BYTES];
    if (!enter_namespaces() || mount("none", folder, "tmpfs", 0, "size=1m") != 0) {
        (void)fprintf(stderr, "cannot mount a file system (%m): only the file size limit is tested\n");
        return;
    }
    (void)snprintf(path, sizeof path, "%s/ring", folder);
    check_no_disk_space(path, -ENOSPC);
}

static void test_no_disk_space(void) {
    char path[PATH_BYTES];
    char folder[] = "/tmp/test_trace_ring.XXXXXX";
    FILE *file = file_open(path);
    run_in_child(with_small_file_limit, path);
    (void)fclose(file);
    CHECK(mkdtemp(folder) != NULL, "mkdtemp: %m");
    run_in_child(on_small_file_system, folder);
    CHECK(rmdir(folder) == 0, "rmdir: %m");
}

int main(void) {
    test_events_of_several_threads();
    test_timeline_events();
    test_full_ring();
    test_lasting_events();
    test_run_steps();
    test_time_and_step();
    test_killed_process();
    test_disk_space_is_allocated();
    test_no_disk_space();
    test_recording_off_and_errors();
    test_file_in_use();
    return 0;
}
