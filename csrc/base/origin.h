// Is this the process that made something, or one that was forked off it? Answered without a system call where the
// kernel can empty a page in a forked child (Linux 4.14), else by the process's number.
#ifndef NB_BASE_ORIGIN_H
#define NB_BASE_ORIGIN_H

#include <stdbool.h>
#include <sys/types.h>
#include <unistd.h>

struct nb_origin {
    const volatile unsigned char *page; // not 0 in the process that opened it; NULL: the number has to do
    pid_t pid;
};

// Of this process. Cannot fail.
void nb_origin_open(struct nb_origin *origin);
void nb_origin_close(struct nb_origin *origin);

static inline bool nb_origin_is_here(const struct nb_origin *origin) {
    return origin->page != NULL ? *origin->page != 0 : origin->pid == getpid();
}

#endif
