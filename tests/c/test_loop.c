// Event loop: it calls ready watches and never removed ones, and another thread can wake it.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/list.h"
#include "base/loop.h"
#include "check.h"

enum { LIMIT_MS = 60000 };

struct end {
    struct nb_watch watch;
    struct nb_loop *loop;
    struct end *other;
    int write_fd;
    int called;
    uint32_t seen;
};

static void on_ready(struct nb_watch *watch, uint32_t events) {
    struct end *end = NB_CONTAINER(watch, struct end, watch);
    char byte;
    end->called++;
    end->seen = events;
    if ((events & EPOLLIN) != 0) {
        CHECK(read(watch->fd, &byte, 1) == 1, "no byte to read");
    }
}

// Removes both watches; only the first one is called.
static void on_ready_remove(struct nb_watch *watch, uint32_t events) {
    struct end *end = NB_CONTAINER(watch, struct end, watch);
    end->called++;
    end->seen = events;
    nb_loop_remove(end->loop, &end->other->watch);
    close(end->other->watch.fd);
    nb_loop_remove(end->loop, &end->watch);
}

static void end_open(struct end *end, struct nb_loop *loop, void (*ready)(struct nb_watch *, uint32_t)) {
    int fds[2];
    CHECK(pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0, "pipe: %m");
    *end = (struct end){.watch = {.fd = fds[0], .ready = ready}, .loop = loop, .write_fd = fds[1]};
    CHECK(nb_loop_add(loop, &end->watch, EPOLLIN, NULL) == 0, "add: %m");
}

static void end_write(const struct end *end) {
    CHECK(write(end->write_fd, "x", 1) == 1, "write: %m");
}

static void test_ready_watches(void) {
    struct nb_loop loop;
    struct end a;
    CHECK(nb_loop_init(&loop, NULL) == 0, "init: %m");
    end_open(&a, &loop, on_ready);
    CHECK(nb_loop_wait(&loop, 0) == 0 && a.called == 0, "a watch is called without an event");
    end_write(&a);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 1 && a.called == 1 && a.seen == EPOLLIN, "called %d times", a.called);
    nb_loop_change(&loop, &a.watch, 0);
    CHECK(a.watch.events == 0, "the watch does not have the requested events");
    end_write(&a);
    CHECK(nb_loop_wait(&loop, 0) == 0 && a.called == 1, "a watch without requested events is called");
    nb_loop_change(&loop, &a.watch, EPOLLIN);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 1 && a.called == 2,
          "the watch is not called after its events are requested again");
    close(a.write_fd);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 1 && (a.seen & EPOLLHUP) != 0,
          "the close of the other end is not reported: %x", a.seen);
    nb_loop_remove(&loop, &a.watch);
    CHECK(nb_loop_wait(&loop, 0) == 0 && a.called == 3, "a removed watch is called");
    close(a.watch.fd);
    CHECK(nb_loop_add(&loop, &a.watch, EPOLLIN, NULL) < 0, "a closed descriptor is accepted");
    nb_loop_fini(&loop);
}

static void test_watch_removed_during_dispatch(void) {
    struct nb_loop loop;
    struct end a;
    struct end b;
    CHECK(nb_loop_init(&loop, NULL) == 0, "init: %m");
    end_open(&a, &loop, on_ready_remove);
    end_open(&b, &loop, on_ready_remove);
    a.other = &b;
    b.other = &a;
    end_write(&a);
    end_write(&b);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 1, "not exactly one watch was handled");
    CHECK(a.called + b.called == 1, "called: %d, %d", a.called, b.called);
    CHECK(nb_loop_wait(&loop, 0) == 0, "an event is left");
    close(a.called != 0 ? a.watch.fd : b.watch.fd); // the handler closed the other one
    close(a.write_fd);
    close(b.write_fd);
    nb_loop_fini(&loop);
}

// The descriptor is readable, but the handler finds no usable data.
static void on_ready_empty(struct nb_watch *watch, uint32_t events) {
    struct end *end = NB_CONTAINER(watch, struct end, watch);
    (void)events;
    end->called++;
    nb_loop_count_empty(end->loop);
}

static void test_empty_events(void) {
    struct nb_loop loop;
    struct end a;
    struct end b;
    CHECK(nb_loop_init(&loop, NULL) == 0, "init: %m");
    end_open(&a, &loop, on_ready_empty);
    end_open(&b, &loop, on_ready);
    end_write(&a);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 0 && a.called == 1, "an empty event was counted");
    end_write(&b);
    CHECK(nb_loop_wait(&loop, LIMIT_MS) == 1 && a.called == 2 && b.called == 1, "the event with data was not counted");
    close(a.watch.fd);
    close(a.write_fd);
    close(b.watch.fd);
    close(b.write_fd);
    nb_loop_fini(&loop);
}

static void *wake(void *arg) {
    nb_loop_wake(arg);
    return NULL;
}

static void test_wake(void) {
    struct nb_loop loop;
    struct end a;
    pthread_t thread;
    CHECK(nb_loop_init(&loop, NULL) == 0, "init: %m");
    end_open(&a, &loop, on_ready);
    CHECK(pthread_create(&thread, NULL, wake, &loop) == 0, "thread");
    CHECK(nb_loop_wait(&loop, -1) == 0 && a.called == 0, "a wake-up calls a watch");
    CHECK(pthread_join(thread, NULL) == 0, "join");
    nb_loop_wake(&loop);
    nb_loop_wake(&loop);
    end_write(&a);
    while (a.called == 0) {
        CHECK(nb_loop_wait(&loop, LIMIT_MS) <= 1, "the wake-up counts as an event");
    }
    (void)nb_loop_wait(&loop, 0);
    struct pollfd poller = {.fd = loop.epoll_fd, .events = POLLIN};
    CHECK(poll(&poller, 1, 0) == 0, "the wake-up is not cleared");
    nb_loop_remove(&loop, &a.watch);
    close(a.watch.fd);
    close(a.write_fd);
    nb_loop_fini(&loop);
}

int main(void) {
    test_ready_watches();
    test_watch_removed_during_dispatch();
    test_empty_events();
    test_wake();
    return 0;
}
