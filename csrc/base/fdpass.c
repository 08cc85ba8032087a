// Descriptor passing: gives memory to another process as a descriptor over a local socket.
#include "base/fdpass.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fork.h"
#include "base/sha256.h"

enum { DRAWN_BYTES = 16 };

static const char prefix[] = "netbottleneck-";

_Static_assert(sizeof prefix + 2 * (size_t)DRAWN_BYTES <= NB_FDPASS_NAME, "a name has room");

// An abstract name begins with a zero byte, and its length is significant.
static socklen_t address_of(const char *name, struct sockaddr_un *addr) {
    size_t length = strnlen(name, NB_FDPASS_NAME - 1);
    memset(addr, 0, sizeof *addr);
    addr->sun_family = AF_UNIX;
    memcpy(addr->sun_path + 1, name, length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

static int socket_open(struct nb_error *err) {
    nb_fork_hold();
    int fd = nb_fork_own(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    return fd >= 0 ? fd : nb_fail(err, -errno, "cannot open a local socket: %m");
}

static bool same_user(int fd) {
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

int nb_fdpass_listen(char name[NB_FDPASS_NAME], int backlog, struct nb_error *err) {
    unsigned char drawn[DRAWN_BYTES];
    struct sockaddr_un addr;
    int rc = nb_random(drawn, sizeof drawn);
    if (rc < 0) {
        return nb_fail(err, rc, "cannot draw random bytes (%s)", nb_code_name(rc));
    }
    size_t at = sizeof prefix - 1;
    memcpy(name, prefix, sizeof prefix);
    for (size_t i = 0; i < sizeof drawn; i++) {
        at += (size_t)snprintf(name + at, NB_FDPASS_NAME - at, "%02x", drawn[i]);
    }
    int fd = socket_open(err);
    if (fd < 0) {
        return fd;
    }
    socklen_t bytes = address_of(name, &addr);
    if (bind(fd, (const struct sockaddr *)&addr, bytes) != 0 || listen(fd, backlog) != 0) {
        rc = nb_fail(err, -errno, "cannot listen on local socket %s: %m", name);
        close(fd);
        return rc;
    }
    return fd;
}

int nb_fdpass_connect(const char *name, struct nb_error *err) {
    struct sockaddr_un addr;
    socklen_t bytes = address_of(name, &addr);
    int fd = socket_open(err);
    if (fd < 0) {
        return fd;
    }
    int rc = 0;
    if (connect(fd, (const struct sockaddr *)&addr, bytes) != 0) {
        rc = nb_fail(err, -errno, "local socket %s: %m", name);
    } else if (!same_user(fd)) {
        rc = nb_fail(err, -EPERM, "local socket %s belongs to another user", name);
    }
    if (rc < 0) {
        close(fd);
        return rc;
    }
    return fd;
}

int nb_fdpass_accept(int listener) {
    nb_fork_hold();
    int fd = nb_fork_own(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd < 0) {
        return errno == EINTR || errno == EWOULDBLOCK ? -EAGAIN : -errno;
    }
    if (!same_user(fd)) {
        close(fd);
        return -EPERM;
    }
    return fd;
}

// Space for descriptors, aligned for its header.
union ancillary {
    struct cmsghdr header;
    char room[CMSG_SPACE(NB_FDPASS_FDS * sizeof(int))];
};

int nb_fdpass_send(int fd, const void *message, size_t bytes, const int *fds, int count) {
    struct iovec iov = {.iov_base = (void *)(uintptr_t)message, .iov_len = bytes};
    union ancillary control = {.room = {0}};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    size_t length = (size_t)count * sizeof *fds;
    if (count > NB_FDPASS_FDS) {
        return -EINVAL;
    }
    if (count > 0) {
        msg.msg_control = control.room;
        msg.msg_controllen = CMSG_SPACE(length);
        struct cmsghdr *header = CMSG_FIRSTHDR(&msg);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(length);
        memcpy(CMSG_DATA(header), fds, length);
    }
    ssize_t n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0) {
        return errno == EINTR || errno == EWOULDBLOCK ? -EAGAIN : -errno;
    }
    return 0;
}

// Extracts the descriptors of a message, at most NB_FDPASS_FDS; returns their number.
static int take_fds(struct msghdr *msg, int *fds) {
    int count = 0;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(msg); header != NULL; header = CMSG_NXTHDR(msg, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t length = header->cmsg_len - CMSG_LEN(0);
        int here = (int)(length / sizeof(int));
        if (count + here <= NB_FDPASS_FDS) {
            memcpy(fds + count, CMSG_DATA(header), (size_t)here * sizeof(int));
            count += here;
        }
    }
    return count;
}

int nb_fdpass_receive(int fd, void *message, size_t bytes, int *fds, int count) {
    struct iovec iov = {.iov_base = message, .iov_len = bytes};
    union ancillary control = {.room = {0}};
    struct msghdr msg = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    int taken[NB_FDPASS_FDS];
    nb_fork_hold();
    ssize_t n = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    int found = n < 0 ? 0 : take_fds(&msg, taken);
    nb_fork_own_all(taken, found);
    if (n < 0) {
        return errno == EINTR || errno == EWOULDBLOCK ? -EAGAIN : -errno;
    }
    bool cut = (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    if ((size_t)n == bytes && found == count && !cut) {
        memcpy(fds, taken, (size_t)count * sizeof *fds);
        return 0;
    }
    for (int i = 0; i < found; i++) {
        nb_fork_close(taken[i]);
    }
    if ((msg.msg_flags & MSG_CTRUNC) != 0 && found < count) {
        return -EMFILE; // what was passed has found no free descriptor here
    }
    return n == 0 && !cut ? -ECONNRESET : NB_EWIRE;
}
