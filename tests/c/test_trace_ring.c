// Events of several threads all arrive, a full ring counts what it drops, and a killed rank's file is readable.
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

#include "base/clock.h"
#include "check.h"
#include "trace/ring.h"

enum { PATH_BYTES = 64, THREADS = 2, EACH = 5000 };

// A file without a name; path leads to it.
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

// As a reader in another process maps it.
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

// Every thread's events are whole and in its order, none twice.
static void check_events(const struct view *view, uint64_t count) {
    uint64_t next[THREADS] = {0};
    for (uint64_t i = 0; i < count; i++) {
        const struct nb_event *event = &view->events[i];
        CHECK(__atomic_load_n(&event->kind, __ATOMIC_ACQUIRE) == NB_EV_OP_DONE, "event %llu is not written",
              (unsigned long long)i);
        CHECK(event->key < THREADS, "key");
        uint64_t a = next[event->key]++;
        CHECK(event->a == a && event->b == a + 1 && event->c == a + 2 && event->d == a + 3 && event->e == ~a,
              "event %llu of thread %llu", (unsigned long long)a, (unsigned long long)event->key);
        CHECK(event->time_ns >= view->header->opened_mono_ns && event->time_ns <= nb_now_ns(), "its time");
    }
}

static void test_room_for_all(void) {
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, (uint64_t)THREADS * EACH + 100, 3, NULL) == 0, "open: %m");
    write_from_threads(&ring);
    CHECK(nb_ring_dropped(&ring) == 0, "nothing is dropped");
    struct view view = view_open(file);
    CHECK(view_count(&view) == (uint64_t)THREADS * EACH, "all are there before the close");
    check_events(&view, view_count(&view));
    CHECK(memcmp(view.header->magic, NB_RING_MAGIC, sizeof view.header->magic) == 0, "magic");
    CHECK(view.header->version == NB_RING_VERSION && view.header->event_bytes == 64, "version");
    CHECK(view.header->rank == 3 && view.header->pid == (uint32_t)getpid(), "rank and pid");
    CHECK(view.header->opened_wall_ns > view.header->opened_mono_ns, "the wall clock began before the boot");
    CHECK(atomic_load(&view.header->closed) == 0, "not closed");
    view_close(&view);

    nb_ring_close(&ring);
    view = view_open(file);
    CHECK(view.bytes == NB_RING_HEADER + (size_t)THREADS * EACH * 64, "cut to what was written: %zu", view.bytes);
    CHECK(atomic_load(&view.header->closed) == 1, "closed");
    check_events(&view, view_count(&view));
    view_close(&view);
    (void)fclose(file);
}

// Only a ring that is for a timeline has what nothing else needs.
static void test_for_a_timeline(void) {
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

static void test_full(void) {
    enum { CAPACITY = 777 };
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, CAPACITY, 0, NULL) == 0, "open: %m");
    write_from_threads(&ring);
    CHECK(nb_ring_dropped(&ring) == THREADS * EACH - CAPACITY, "dropped %llu",
          (unsigned long long)nb_ring_dropped(&ring));
    nb_ring_close(&ring);
    struct view view = view_open(file);
    CHECK(view.bytes == NB_RING_HEADER + CAPACITY * 64 && view_count(&view) == CAPACITY, "%zu bytes", view.bytes);
    check_events(&view, CAPACITY);
    view_close(&view);
    (void)fclose(file);
}

static void test_stamps(void) {
    struct nb_ring ring;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, 8, 0, NULL) == 0, "open: %m");
    nb_ring_put_at(&ring, 12345, NB_EV_STEP_BEGIN, 0, 0, 0, 0, 0, 0);
    atomic_store(&ring.step, 41);
    nb_ring_put_at(&ring, -1, NB_EV_STEP_END, 9, 0, 0, 0, 0, 0);
    CHECK(ring.events[0].time_ns == 12345 && ring.events[0].step == 0, "the time given, step 0");
    CHECK(ring.events[1].time_ns == -1 && ring.events[1].step == 41 && ring.events[1].key == 9, "step 41");
    nb_ring_close(&ring);
    (void)fclose(file);
}

static void test_killed(void) {
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
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status), "the child was killed: %x", status);
    struct view view = view_open(file);
    CHECK(view_count(&view) == EACH && atomic_load(&view.header->closed) == 0, "all that was written, and not closed");
    CHECK(view.header->pid == (uint32_t)child, "written by the child");
    check_events(&view, EACH);
    CHECK(view.events[EACH].kind == NB_EV_NONE, "the next is not written");
    view_close(&view);
    (void)fclose(file);
}

static void test_off_and_errors(void) {
    struct nb_ring off = {0};
    struct nb_ring ring;
    struct nb_error err = {0};
    nb_ring_put(&off, NB_EV_STEP_END, 1, 2, 3, 4, 5, 6);
    nb_ring_put(NULL, NB_EV_STEP_END, 1, 2, 3, 4, 5, 6);
    CHECK(nb_ring_dropped(&off) == 0, "recording is off: nothing is dropped");
    nb_ring_close(&off);
    CHECK(nb_ring_open(&ring, "/proc/no/such/place", 8, 0, &err) == -ENOENT, "no such folder: %d", err.code);
    CHECK(strstr(err.text, "/proc/no/such/place") != NULL, "%s", err.text);
    CHECK(nb_ring_open(&ring, "/proc/no/such/place", UINT64_MAX / 64, 0, NULL) == -EFBIG, "too many events");
}

// Room is kept for every event before the first is written.
static void test_room_is_kept(void) {
    enum { CAPACITY = 100000 };
    struct nb_ring ring;
    struct stat stat;
    char path[PATH_BYTES];
    FILE *file = file_open(path);
    CHECK(nb_ring_open(&ring, path, CAPACITY, 0, NULL) == 0, "open: %m");
    CHECK(fstat(fileno(file), &stat) == 0, "fstat: %m");
    CHECK(stat.st_size == NB_RING_HEADER + CAPACITY * 64 && stat.st_blocks * 512 >= stat.st_size,
          "%lld bytes have %lld blocks", (long long)stat.st_size, (long long)stat.st_blocks);
    nb_ring_close(&ring);
    (void)fclose(file);
}

// Where there is no room, opening says so, gives back what it took, and what fits still opens.
static void check_no_room(const char *path, int code) {
    struct nb_ring ring;
    struct nb_error err = {0};
    struct stat stat_after;
    CHECK(nb_ring_open(&ring, path, 1000000, 0, &err) == code, "%d: %s", err.code, err.text);
    CHECK(strstr(err.text, path) != NULL && strstr(err.text, "64004096 bytes") != NULL &&
              strstr(err.text, strerror(-code)) != NULL && strstr(err.text, "NETBOTTLENECK_DIR") != NULL &&
              strstr(err.text, "NETBOTTLENECK_TRACE_EVENTS") != NULL,
          "%s", err.text);
    CHECK(stat(path, &stat_after) == 0 && stat_after.st_blocks == 0, "%lld blocks are left",
          (long long)stat_after.st_blocks);
    CHECK(nb_ring_open(&ring, path, EACH, 0, NULL) == 0, "one that fits: %m");
    struct writer writer = {&ring, 0};
    (void)write_events(&writer);
    CHECK(nb_ring_dropped(&ring) == 0, "all are there");
    nb_ring_close(&ring);
}

static void in_a_child(void (*run)(const char *path), const char *path) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        run(path);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with %x", status);
}

static void on_a_small_file(const char *path) {
    struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = 1 << 20};
    (void)signal(SIGXFSZ, SIG_IGN); // as Python does
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit: %m");
    check_no_room(path, -EFBIG);
}

static bool put(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    bool written = file != NULL && fputs(text, file) >= 0;
    return file != NULL && fclose(file) == 0 && written;
}

// Into namespaces of its own, as root there.
static bool move_out(void) {
    char users[32];
    char groups[32];
    (void)snprintf(users, sizeof users, "0 %u 1", geteuid());
    (void)snprintf(groups, sizeof groups, "0 %u 1", getegid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && put("/proc/self/uid_map", users) &&
           put("/proc/self/setgroups", "deny") && put("/proc/self/gid_map", groups);
}

// A disk of 1 MiB, where this process may have one.
static void on_a_small_disk(const char *folder) {
    char path[PATH_BYTES];
    if (!move_out() || mount("none", folder, "tmpfs", 0, "size=1m") != 0) {
        (void)fprintf(stderr, "no disk of its own (%m): the limit on a file's size stands for it\n");
        return;
    }
    (void)snprintf(path, sizeof path, "%s/ring", folder);
    check_no_room(path, -ENOSPC);
}

static void test_no_room(void) {
    char path[PATH_BYTES];
    char folder[] = "/tmp/test_ring.XXXXXX";
    FILE *file = file_open(path);
    in_a_child(on_a_small_file, path);
    (void)fclose(file);
    CHECK(mkdtemp(folder) != NULL, "mkdtemp: %m");
    in_a_child(on_a_small_disk, folder);
    CHECK(rmdir(folder) == 0, "rmdir: %m");
}

int main(void) {
    test_room_for_all();
    test_for_a_timeline();
    test_full();
    test_stamps();
    test_killed();
    test_room_is_kept();
    test_no_room();
    test_off_and_errors();
    return 0;
}
