// Event loop: waits on one epoll set and calls the owner of each ready descriptor.
#include "base/loop.h"

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"

int nb_loop_init(struct nb_loop *loop, struct nb_error *err) {
    int rc;
    loop->count = 0;
    nb_fork_hold();
    loop->epoll_fd = nb_fork_own(epoll_create1(EPOLL_CLOEXEC));
    if (loop->epoll_fd < 0) {
        return nb_fail(err, -errno, "epoll_create: %m");
    }
    nb_fork_hold();
    loop->wake_fd = nb_fork_own(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (loop->wake_fd < 0) {
        rc = nb_fail(err, -errno, "eventfd: %m");
        goto err_epoll;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = loop}; // no watch has the loop's address
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, loop->wake_fd, &event) != 0) {
        rc = nb_fail(err, -errno, "epoll_ctl: %m");
        goto err_wake;
    }
    return 0;

err_wake:
    nb_fork_close(loop->wake_fd);
err_epoll:
    nb_fork_close(loop->epoll_fd);
    loop->epoll_fd = -1;
    loop->wake_fd = -1;
    return rc;
}

void nb_loop_fini(struct nb_loop *loop) {
    if (loop->epoll_fd >= 0) {
        nb_fork_close(loop->epoll_fd);
        nb_fork_close(loop->wake_fd);
    }
    loop->epoll_fd = -1;
    loop->wake_fd = -1;
    loop->count = 0;
}

int nb_loop_add(struct nb_loop *loop, struct nb_watch *watch, uint32_t events, struct nb_error *err) {
    struct epoll_event event = {.events = events, .data.ptr = watch};
    if (epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, watch->fd, &event) != 0) {
        return nb_fail(err, -errno, "epoll_ctl of descriptor %d: %m", watch->fd);
    }
    watch->events = events;
    return 0;
}

void nb_loop_change(struct nb_loop *loop, struct nb_watch *watch, uint32_t events) {
    if (watch->events == events) {
        return;
    }
    struct epoll_event event = {.events = events, .data.ptr = watch};
    (void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, watch->fd, &event);
    watch->events = events;
}

void nb_loop_remove(struct nb_loop *loop, struct nb_watch *watch) {
    (void)epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, watch->fd, NULL);
    watch->events = 0;
    for (int i = 0; i < loop->count; i++) {
        if (loop->batch[i].data.ptr == watch) {
            loop->batch[i].data.ptr = NULL;
        }
    }
}

static void drain(int fd) {
    uint64_t count;
    (void)!read(fd, &count, sizeof count);
}

int nb_loop_wait(struct nb_loop *loop, int timeout_ms) {
    int n = epoll_wait(loop->epoll_fd, loop->batch, NB_LOOP_BATCH, timeout_ms);
    if (n <= 0) {
        return 0; // a signal counts as a wake-up
    }
    int events = 0;
    loop->count = n;
    loop->empty = 0;
    for (int i = 0; i < n; i++) {
        void *owner = loop->batch[i].data.ptr;
        if (owner == loop) {
            drain(loop->wake_fd);
        } else if (owner != NULL) {
            struct nb_watch *watch = owner;
            events++;
            watch->ready(watch, loop->batch[i].events);
        }
    }
    loop->count = 0;
    return events - loop->empty;
}

void nb_loop_sleep(const struct nb_loop *loop, int timeout_ms) {
    // Requested events are level-triggered: nb_loop_wait() gets them again. The end of a connection that requests none is
    // edge-triggered (tcp_stream.c), and reported again once it requests some.
    struct epoll_event event;
    (void)epoll_wait(loop->epoll_fd, &event, 1, timeout_ms);
}

void nb_loop_count_empty(struct nb_loop *loop) {
    loop->empty++;
}

void nb_loop_wake(struct nb_loop *loop) {
    uint64_t one = 1;
    (void)!write(loop->wake_fd, &one, sizeof one); // full: the thread is already awake
}
