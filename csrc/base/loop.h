// Event loop: one epoll set for one thread; the owner of a descriptor handles its events.
#ifndef NB_BASE_LOOP_H
#define NB_BASE_LOOP_H

#include <stdint.h>
#include <sys/epoll.h>

#include "base/error.h"

enum { NB_LOOP_BATCH = 32 };

struct nb_loop {
    int epoll_fd;
    int wake_fd; // an eventfd: nb_loop_wake() may be called from any thread
    int empty;   // events of this batch that turned out to be empty
    int count;   // events of the batch being handled; removing a watch deletes its events here
    struct epoll_event batch[NB_LOOP_BATCH];
};

// Embedded in its owner. `ready` gets EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP; it may remove any watch, its own too.
struct nb_watch {
    int fd;
    uint32_t events; // events that are requested now
    void (*ready)(struct nb_watch *watch, uint32_t events);
};

int nb_loop_init(struct nb_loop *loop, struct nb_error *err);
void nb_loop_fini(struct nb_loop *loop);

int nb_loop_add(struct nb_loop *loop, struct nb_watch *watch, uint32_t events, struct nb_error *err);
// Makes no system call if nothing changes.
void nb_loop_change(struct nb_loop *loop, struct nb_watch *watch, uint32_t events);
void nb_loop_remove(struct nb_loop *loop, struct nb_watch *watch);

// Waits up to timeout_ms (-1: until woken) and handles the ready events. Returns their number without the empty ones.
int nb_loop_wait(struct nb_loop *loop, int timeout_ms);
// Sleeps until something is ready, and leaves it to nb_loop_wait(). Any thread may call it.
void nb_loop_sleep(const struct nb_loop *loop, int timeout_ms);
void nb_loop_wake(struct nb_loop *loop);
// Marks the current event as empty; called within `ready`. A descriptor may stay readable for no reason that its owner
// can see; if that counted as an event, the thread would never sleep.
void nb_loop_count_empty(struct nb_loop *loop);

#endif
