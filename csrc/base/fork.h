// Fork guard: what a forked child keeps of the core. The core's only pthread_atfork handler is here. In the child it
// closes every descriptor of the core, so that a rank's connections end with the rank and its ports become free. It
// also makes the core's shared memory private (see arena.h).
//
// A child made by vfork, posix_spawn or clone does not run the handler. It must call exec, which closes the
// descriptors. Any thread may call these functions.
#ifndef NB_BASE_FORK_H
#define NB_BASE_FORK_H

#include <stddef.h>

enum { NB_FORK_HANDLERS = 4 };

// Until nb_fork_own, nb_fork_own_all or nb_fork_release, no other thread forks. Nothing in between may block.
void nb_fork_hold(void);
void nb_fork_release(void);

// Registers a descriptor that was opened since nb_fork_hold(), so that a forked child closes it, and releases the hold.
// Returns `fd`, also a negative one, and keeps errno. The child recognises sockets and files by their inode, so close()
// is enough for them. All other descriptors (epoll, eventfd) must be closed by nb_fork_close().
int nb_fork_own(int fd);
void nb_fork_own_all(const int *fds, int count);
void nb_fork_close(int fd);

// Registers the sockets that a library opens by itself (libfabric's providers for IP networks), by an address. The
// address is that of the library's endpoint, which its accepted sockets share, or that of a peer that it connects to. A
// forked child closes the sockets with this address at either end. Ignores addresses other than sockaddr_in and
// sockaddr_in6. An `owner` may register any number of addresses.
void nb_fork_own_sockets(const void *owner, const void *address, size_t bytes);
void nb_fork_disown_sockets(const void *owner);

// Runs `child` in every forked child, with the hold taken and before descriptors are closed. `child` may only make
// system calls and change memory.
void nb_fork_handler(void (*child)(void));

#endif
