// Descriptor passing between processes of one host, over sockets with a random abstract name. Both sides check that the
// other runs as the same user; the caller checks that it belongs to the job. Nothing here blocks.
#ifndef NB_BASE_FDPASS_H
#define NB_BASE_FDPASS_H

#include <stddef.h>

#include "base/error.h"

enum {
    NB_FDPASS_NAME = 48, // with its final zero
    NB_FDPASS_FDS = 4    // in one message
};

// Opens a listener under a new name, which it writes to `name`. Returns the descriptor.
int nb_fdpass_listen(char name[NB_FDPASS_NAME], int backlog, struct nb_error *err);

// Connects to a listener of this host and network namespace. -ECONNREFUSED: no listener has this name; -EPERM: it
// belongs to another user.
int nb_fdpass_connect(const char *name, struct nb_error *err);

// Accepts the next connection: a descriptor, -EAGAIN, -EPERM if it belongs to another user (closed here), or -errno.
int nb_fdpass_accept(int listener);

// Sends a whole message with descriptors, which remain the caller's. 0, -EAGAIN if there is no room, or -errno.
int nb_fdpass_send(int fd, const void *message, size_t bytes, const int *fds, int count);

// Receives the next message, which must have `bytes` bytes and carry `count` descriptors. The descriptors, closed on
// exec, become the caller's, who closes them by nb_fork_close(). 0, -EAGAIN, -ECONNRESET at the end, -EMFILE without a
// free descriptor for them, NB_EWIRE for any other message.
int nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count);

#endif
