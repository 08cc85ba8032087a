// Descriptors handed from one process of a host to another, over sockets that have a drawn name and no place in the file
// system. Both sides check that the other runs as the same user; whether it belongs is for the caller to find out.
// Nothing here blocks.
#ifndef NB_BASE_HANDOVER_H
#define NB_BASE_HANDOVER_H

#include <stddef.h>

#include "base/error.h"

enum {
    NB_HANDOVER_NAME = 48, // with its final zero
    NB_HANDOVER_FDS = 4    // in one message
};

// A listener under a name of its own, which it writes down. Returns the descriptor.
int nb_handover_listen(char name[NB_HANDOVER_NAME], int backlog, struct nb_error *err);

// To a listener of this host and network namespace. -ECONNREFUSED: there is none of this name; -EPERM: another user's.
int nb_handover_connect(const char *name, struct nb_error *err);

// The next one that came: a descriptor, -EAGAIN, -EPERM for one of another user (closed), or -errno.
int nb_handover_accept(int listener);

// A whole message with descriptors, which stay the caller's. 0, -EAGAIN where there is no room, or -errno.
int nb_handover_send(int fd, const void *message, size_t bytes, const int *fds, int count);

// The next message, which has to be of `bytes` and carry `count` descriptors: they are the caller's then, to be closed
// by nb_fork_close(); closed on exec. 0, -EAGAIN, -ECONNRESET at the end, NB_EWIRE for any other message.
int nb_handover_receive(int fd, void *message, size_t bytes, int *fds, int count);

#endif
