// Fork guard: one atfork handler, and the descriptors that it closes. fork() passes the handler no argument, so this
// file holds the core's only mutable state of the process.
#include "base/fork.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DIRECTORY_BYTES = 4096, DIGITS = 10 };

struct owned {
    int fd; // -1: free
    dev_t device;
    ino_t inode;
};

union address {
    struct sockaddr any;
    struct sockaddr_in in4;
    struct sockaddr_in6 in6;
};

struct end { // an address of sockets that a library opened
    const void *owner;
    union address address;
};

struct entry { // a directory entry, as the kernel returns it
    uint64_t inode;
    int64_t offset;
    unsigned short bytes;
    unsigned char type;
    char name[];
};

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    struct owned *owned; // unordered; each descriptor is here once
    size_t count;
    size_t room;
    struct end *ends;
    size_t end_count;
    size_t end_room;
    void (*handlers[NB_FORK_HANDLERS])(void);
    int handler_count;
} guard = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void prepare(void) {
    (void)pthread_mutex_lock(&guard.lock);
}

static void in_parent(void) {
    (void)pthread_mutex_unlock(&guard.lock);
}

// False if the descriptor was closed since and its number reused: the new one belongs to the user.
static bool is_same(const struct owned *owned) {
    struct stat st;
    return fstat(owned->fd, &st) == 0 && st.st_dev == owned->device && st.st_ino == owned->inode;
}

static bool same_address(const union address *a, const union address *b) {
    if (a->any.sa_family == AF_INET) {
        return b->any.sa_family == AF_INET && a->in4.sin_port == b->in4.sin_port &&
               a->in4.sin_addr.s_addr == b->in4.sin_addr.s_addr;
    }
    return a->any.sa_family == AF_INET6 && b->any.sa_family == AF_INET6 && a->in6.sin6_port == b->in6.sin6_port &&
           memcmp(&a->in6.sin6_addr, &b->in6.sin6_addr, sizeof a->in6.sin6_addr) == 0;
}

static bool is_known(const union address *address) {
    for (size_t i = 0; i < guard.end_count; i++) {
        if (same_address(&guard.ends[i].address, address)) {
            return true;
        }
    }
    return false;
}

static void close_library(int fd) {
    union address here = {.any.sa_family = AF_UNSPEC};
    union address there = {.any.sa_family = AF_UNSPEC};
    socklen_t here_bytes = sizeof here;
    socklen_t there_bytes = sizeof there;
    bool known = getsockname(fd, &here.any, &here_bytes) == 0 && is_known(&here);
    known = known || (getpeername(fd, &there.any, &there_bytes) == 0 && is_known(&there));
    if (known) {
        close(fd);
    }
}

// Closes the libraries' sockets among all open descriptors. Allocates no memory: the child of a process with threads
// must not.
static void close_libraries(void) {
    alignas(struct entry) char buffer[DIRECTORY_BYTES];
    int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long bytes = folder < 0 ? 0 : syscall(SYS_getdents64, folder, buffer, sizeof buffer);
    while (bytes > 0) {
        for (long at = 0; at < bytes;) {
            const struct entry *entry = (const struct entry *)(const void *)(buffer + at);
            int fd = 0;
            for (int i = 0; i < DIGITS && entry->name[i] >= '0' && entry->name[i] <= '9'; i++) {
                fd = 10 * fd + (entry->name[i] - '0');
            }
            if (entry->name[0] != '.' && fd != folder) {
                close_library(fd);
            }
            at += entry->bytes;
        }
        bytes = syscall(SYS_getdents64, folder, buffer, sizeof buffer);
    }
    if (folder >= 0) {
        close(folder);
    }
}

static void in_child(void) {
    for (int i = 0; i < guard.handler_count; i++) {
        guard.handlers[i]();
    }
    for (size_t i = 0; i < guard.count; i++) {
        if (guard.owned[i].fd >= 0 && is_same(&guard.owned[i])) {
            close(guard.owned[i].fd);
        }
    }
    if (guard.end_count > 0) {
        close_libraries();
    }
    guard.count = 0;
    guard.end_count = 0;
    (void)pthread_mutex_unlock(&guard.lock);
}

static void start(void) {
    (void)pthread_atfork(prepare, in_parent, in_child); // on ENOMEM, children inherit everything
}

void nb_fork_hold(void) {
    (void)pthread_once(&guard.once, start);
    (void)pthread_mutex_lock(&guard.lock);
}

void nb_fork_release(void) {
    (void)pthread_mutex_unlock(&guard.lock);
}

static struct owned *find(int fd) {
    for (size_t i = 0; i < guard.count; i++) {
        if (guard.owned[i].fd == fd) {
            return &guard.owned[i];
        }
    }
    return NULL;
}

static struct owned *place_for(int fd) {
    struct owned *place = find(fd);
    place = place != NULL ? place : find(-1);
    if (place == NULL && guard.count == guard.room) {
        size_t room = guard.room == 0 ? 32 : 2 * guard.room;
        struct owned *more = realloc(guard.owned, room * sizeof *more);
        if (more == NULL) {
            return NULL; // the child then inherits the descriptor
        }
        guard.owned = more;
        guard.room = room;
    }
    return place != NULL ? place : &guard.owned[guard.count++];
}

static void own(int fd) {
    struct stat st;
    struct owned *place = fd >= 0 && fstat(fd, &st) == 0 ? place_for(fd) : NULL;
    if (place != NULL) {
        *place = (struct owned){.fd = fd, .device = st.st_dev, .inode = st.st_ino};
    }
}

void nb_fork_own_all(const int *fds, int count) {
    int before = errno;
    for (int i = 0; i < count; i++) {
        own(fds[i]);
    }
    nb_fork_release();
    errno = before;
}

int nb_fork_own(int fd) {
    nb_fork_own_all(&fd, 1);
    return fd;
}

void nb_fork_close(int fd) {
    nb_fork_hold();
    struct owned *place = find(fd);
    if (place != NULL) {
        place->fd = -1;
    }
    close(fd);
    nb_fork_release();
}

void nb_fork_own_sockets(const void *owner, const void *address, size_t bytes) {
    struct end end = {.owner = owner};
    memcpy(&end.address, address, bytes < sizeof end.address ? bytes : sizeof end.address);
    sa_family_t family = end.address.any.sa_family;
    if (!(family == AF_INET && bytes == sizeof end.address.in4) &&
        !(family == AF_INET6 && bytes == sizeof end.address.in6)) {
        return;
    }
    nb_fork_hold();
    if (guard.end_count == guard.end_room) {
        size_t room = guard.end_room == 0 ? 16 : 2 * guard.end_room;
        struct end *more = realloc(guard.ends, room * sizeof *more);
        guard.ends = more != NULL ? more : guard.ends;
        guard.end_room = more != NULL ? room : guard.end_room;
    }
    if (guard.end_count < guard.end_room) {
        guard.ends[guard.end_count++] = end;
    }
    nb_fork_release();
}

void nb_fork_disown_sockets(const void *owner) {
    size_t kept = 0;
    nb_fork_hold();
    for (size_t i = 0; i < guard.end_count; i++) {
        if (guard.ends[i].owner != owner) {
            guard.ends[kept++] = guard.ends[i];
        }
    }
    guard.end_count = kept;
    nb_fork_release();
}

void nb_fork_handler(void (*child)(void)) {
    nb_fork_hold();
    if (guard.handler_count < NB_FORK_HANDLERS) {
        guard.handlers[guard.handler_count++] = child;
    }
    nb_fork_release();
}
