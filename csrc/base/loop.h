// One epoll set for one thread: who owns a file descriptor says what to do when it is ready.
#ifndef NB_BASE_LOOP_H
#define NB_BASE_LOOP_H

#include <stdint.h>
#include <sys/epoll.h>

#include "base/error.h"

enum { NB_LOOP_BATCH = 32 };

struct nb_loop {
    int epoll_fd;
    int wake_fd; // an eventfd: nb_loop_wake() may be called from any thread
    int vain;    // of this batch, that had nothing
    int count;   // events of the batch being handled; a watch that is removed meanwhile is struck out of it
    struct epoll_event batch[NB_LOOP_BATCH];
};

// Embedded in its owner. `ready` gets EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP; it may remove any watch, its own too.
struct nb_watch {
    int fd;
    uint32_t events; // what is asked for now
    void (*ready)(struct nb_watch *watch, uint32_t events);
};

int nb_loop_init(struct nb_loop *loop, struct nb_error *err);
void nb_loop_fini(struct nb_loop *loop);

int nb_loop_add(struct nb_loop *loop, struct nb_watch *watch, uint32_t events, struct nb_error *err);
// No system call where nothing changes.
void nb_loop_change(struct nb_loop *loop, struct nb_watch *watch, uint32_t events);
void nb_loop_remove(struct nb_loop *loop, struct nb_watch *watch);

// Waits up to timeout_ms (-1: until woken), calls what is ready, returns how many events there were, those in vain left out.
int nb_loop_wait(struct nb_loop *loop, int timeout_ms);
// Sleeps until something is ready, and leaves it to nb_loop_wait(). Of any thread.
void nb_loop_sleep(const struct nb_loop *loop, int timeout_ms);
void nb_loop_wake(struct nb_loop *loop);
// Said within `ready`: there was nothing. A descriptor may stay readable for no reason that its owner can see, and who
// counts that as news never sleeps.
void nb_loop_vain(struct nb_loop *loop);

#endif
