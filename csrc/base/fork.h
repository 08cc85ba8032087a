// Fork guard: what a forked child gets of the core. The core has one pthread_atfork handler, and it is here. In the child
// it closes every descriptor of the core, so that the connections of a rank end with the rank and its ports are free
// again, and it makes the core's shared memory private (see arena.h).
//
// A child made by vfork, posix_spawn or clone runs no such handler. It has to call exec, which closes the descriptors.
// Any thread may call these functions.
#ifndef NB_BASE_FORK_H
#define NB_BASE_FORK_H

#include <stddef.h>

enum { NB_FORK_HANDLERS = 4 };

// From here to nb_fork_own, nb_fork_own_all or nb_fork_release no other thread forks. Nothing in between may block.
void nb_fork_hold(void);
void nb_fork_release(void);

// Registers a descriptor that was opened since nb_fork_hold(), and releases: a forked child closes it. Returns `fd` and
// keeps errno; a negative number is passed through. The child recognises sockets and files by their inode, so close()
// is enough for them. All other descriptors (epoll, eventfd) have to be closed by nb_fork_close().
int nb_fork_own(int fd);
void nb_fork_own_all(const int *fds, int count);
void nb_fork_close(int fd);

// Sockets that a library opens by itself (libfabric's providers for IP networks), known by an address: its endpoint's
// own, which what it accepts has too, or a peer's that it connects to. A forked child closes the sockets at either end
// of which the address is. The address is a sockaddr_in or sockaddr_in6; others are passed over. `owner` has any number.
void nb_fork_own_sockets(const void *owner, const void *address, size_t bytes);
void nb_fork_disown_sockets(const void *owner);

// Runs `child` in every forked child, with the hold taken and before descriptors are closed. It may only make system
// calls and change memory.
void nb_fork_handler(void (*child)(void));

#endif
