// Fork detector: distinguishes the process that made an object from its forked children. Needs no system call where the
// kernel can wipe a page on fork (Linux 4.14), else compares process ids.
#ifndef NB_BASE_FORK_DETECTOR_H
#define NB_BASE_FORK_DETECTOR_H

#include <stdbool.h>
#include <sys/types.h>
#include <unistd.h>

struct nb_fork_detector {
    const volatile unsigned char *page; // not 0 in the process that opened it; NULL: compare `pid`
    pid_t pid;
};

// Records this process. Cannot fail.
void nb_fork_detector_open(struct nb_fork_detector *detector);
void nb_fork_detector_close(struct nb_fork_detector *detector);

static inline bool nb_fork_detector_is_opener(const struct nb_fork_detector *detector) {
    return detector->page != NULL ? *detector->page != 0 : detector->pid == getpid();
}

#endif
