// Control connections: whole messages over sockets or shared memory, never blocking.
#include "engine/control.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "base/wire.h"
#include "engine/context.h"
#include "engine/descriptor.h"
#include "engine/shared.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/shm_pipe.h"

enum {
    CONTROL_MESSAGE_MAX = 256 * 1024, // the longest message is a list of SUBMITS_MAX operations
    CONTROL_READ = 64 * 1024,
    CONTROL_OUT_MAX = 16 * 1024 * 1024 // queued bytes that a peer may leave unread
};

_Static_assert(SUBMITS_MAX * sizeof(struct op_descriptor) <= CONTROL_MESSAGE_MAX, "a full list of operations fits");

static void control_want(struct control *control) {
    bool waits = control->out_bytes > 0 && control->pipe_out == NULL;
    uint32_t events = (uint32_t)EPOLLIN | (waits ? (uint32_t)EPOLLOUT : 0);
    nb_loop_change(&control->job->loop, &control->watch, events);
}

// Sends as much as fits now. Returns the bytes sent; the rest stays queued.
static ssize_t bytes_put(const struct control *control) {
    if (control->pipe_out != NULL) {
        size_t n = nb_shm_pipe_write(control->pipe_out, control->out, control->out_bytes);
        if (n > 0) {
            nb_shared_wake(control->job, control->peer);
        }
        return (ssize_t)n;
    }
    return send(control->watch.fd, control->out, control->out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
}

// Keeps the errno of a failed send or receive: the kernel reports the cause only once.
static void failure_keep(struct control *control) {
    if (control->failure == 0 && errno != EAGAIN && errno != EINTR) {
        control->failure = -errno;
    }
}

static void control_write(struct control *control) {
    while (control->out_bytes > 0) {
        ssize_t n = bytes_put(control);
        if (n < 0) {
            failure_keep(control); // a broken connection shows on the next read
        }
        if (n <= 0) {
            break;
        }
        control->out_bytes -= (size_t)n;
        memmove(control->out, control->out + n, control->out_bytes);
    }
}

static bool room_for(unsigned char **buffer, size_t *room, size_t bytes) {
    if (bytes <= *room) {
        return true;
    }
    size_t grown = *room == 0 ? 4096 : *room;
    while (grown < bytes) {
        grown *= 2;
    }
    unsigned char *p = realloc(*buffer, grown);
    if (p == NULL) {
        return false;
    }
    *buffer = p;
    *room = grown;
    return true;
}

// A lost message would make a peer or this rank wait forever, so the job fails.
static void fail_unread(const struct control *control) {
    struct nb_error why = {0};
    nb_fail_peer(&why, NB_EWIRE, control->peer, "rank %d does not read its control messages: %zu bytes are queued",
                 control->peer, control->out_bytes);
    nb_job_fail(control->job, &why, true);
}

static void fail_memory(const struct control *control, size_t bytes) {
    struct nb_error why = {0};
    nb_fail(&why, -ENOMEM, "cannot allocate %zu bytes for messages of rank %d and rank %d", bytes, control->job->rank,
            control->peer);
    nb_job_fail(control->job, &why, true);
}

static void queue(struct control *control, enum control_type type, const void *body, size_t bytes) {
    struct wire_control header = {.bytes = (uint32_t)bytes, .type = (uint32_t)type};
    size_t whole = control->out_bytes + sizeof header + bytes;
    if (control->watch.fd < 0) {
        return; // the peer is gone
    }
    if (whole > CONTROL_OUT_MAX) {
        fail_unread(control);
        return;
    }
    if (!room_for(&control->out, &control->out_room, whole)) {
        fail_memory(control, whole);
        return;
    }
    memcpy(control->out + control->out_bytes, &header, sizeof header);
    if (bytes > 0) {
        memcpy(control->out + control->out_bytes + sizeof header, body, bytes);
    }
    control->out_bytes += sizeof header + bytes;
}

void nb_control_queue(struct control *control, enum control_type type, const void *body, size_t bytes) {
    nb_control_failed(control->job);
    queue(control, type, body, bytes);
}

void nb_control_flush(struct control *control) {
    if (control->watch.fd >= 0) {
        control_write(control);
        control_want(control);
    }
}

void nb_control_send(struct control *control, enum control_type type, const void *body, size_t bytes) {
    nb_control_queue(control, type, body, bytes);
    nb_control_flush(control);
}

void nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes) {
    for (int i = 1; i < job->control_count; i++) {
        nb_control_send(&job->controls[i], type, body, bytes);
    }
}

void nb_control_drain(struct control *control, int64_t deadline_ns) {
    control_write(control);
    while (control->watch.fd >= 0 && control->out_bytes > 0 && nb_now_ns() < deadline_ns) {
        struct pollfd p = {.fd = control->watch.fd, .events = POLLOUT};
        if (poll(&p, 1, 10) < 0 || (p.revents & (POLLERR | POLLHUP)) != 0) {
            return;
        }
        control_write(control);
    }
}

void nb_control_failed(struct nb_job *job) {
    struct wire_failure message = {.code = job->failure.code, .peer = job->failure.peer};
    if (!job->failure_due) {
        return;
    }
    job->failure_due = false;
    memcpy(message.text, job->failure.text, sizeof message.text);
    if (job->rank == 0) {
        nb_control_broadcast(job, CTL_ABORT, &message, sizeof message);
    } else {
        nb_control_send(&job->controls[0], CTL_FAIL, &message, sizeof message);
    }
}

static void control_gone(struct control *control) {
    struct nb_job *job = control->job;
    nb_loop_remove(&job->loop, &control->watch);
    close(control->watch.fd);
    control->watch.fd = -1;
    if (!control->left) {
        struct nb_error why = {0};
        if (control->failure < 0) {
            nb_fail_peer(&why, NB_EPEER, control->peer, "rank %d is gone: its control connection failed (%s)",
                         control->peer, nb_code_name(control->failure));
        } else {
            nb_fail_peer(&why, NB_EPEER, control->peer, "rank %d is gone: its control connection closed",
                         control->peer);
        }
        nb_ring_put(job->config.ring, NB_EV_PEER_LOST, 0, (uint64_t)control->peer, (uint64_t)(int64_t)NB_EPEER, 0, 0,
                    0);
        nb_job_fail(job, &why, true);
    }
}

static void control_dispatch(struct control *control) {
    struct nb_job *job = control->job;
    size_t at = 0;
    while (control->in_bytes - at >= sizeof(struct wire_control)) {
        struct wire_control header;
        memcpy(&header, control->in + at, sizeof header);
        if (header.bytes > CONTROL_MESSAGE_MAX) {
            nb_job_wire_fail(job, control->peer, "an oversized control message");
            at = control->in_bytes;
            break;
        }
        if (control->in_bytes - at < sizeof header + header.bytes) {
            break;
        }
        const unsigned char *body = control->in + at + sizeof header;
        job->handle_control(job, control->peer, header.type, body, header.bytes);
        at += sizeof header + header.bytes;
    }
    control->in_bytes -= at;
    memmove(control->in, control->in + at, control->in_bytes);
}

static bool in_room(struct control *control) {
    bool room = room_for(&control->in, &control->in_room, control->in_bytes + CONTROL_READ);
    if (!room) {
        fail_memory(control, control->in_bytes + CONTROL_READ);
    }
    return room;
}

static void handle_received(struct control *control, size_t bytes) {
    control->received_ns = nb_now_ns();
    control->in_bytes += bytes;
    control_dispatch(control);
}

// Reads messages from shared memory. True: there were some.
static bool pipe_read(struct control *control) {
    bool any = false;
    while (control->pipe_in != NULL && !nb_shm_pipe_is_empty(control->pipe_in) && in_room(control)) {
        bool writer_waits;
        long n = nb_shm_pipe_read(control->pipe_in, control->in + control->in_bytes, CONTROL_READ, &writer_waits);
        if (n < 0) {
            control->pipe_in = NULL;
            nb_job_wire_fail(control->job, control->peer, "invalid pipe counters");
            return true;
        }
        if (writer_waits) {
            nb_shared_wake(control->job, control->peer);
        }
        handle_received(control, (size_t)n);
        any = true;
    }
    return any;
}

int nb_control_poll(struct nb_job *job) {
    int any = 0;
    for (int i = 0; i < job->control_count; i++) {
        struct control *control = &job->controls[i];
        if (control->pipe_in != NULL && control->watch.fd >= 0) {
            any += pipe_read(control);
            control_write(control);
        }
    }
    return any;
}

bool nb_control_arm(struct nb_job *job) {
    if (!nb_shared_everywhere(job)) {
        return true;
    }
    nb_shared_sleep(job);
    for (int i = 0; i < job->control_count; i++) {
        struct control *control = &job->controls[i];
        if (control->pipe_in == NULL || control->watch.fd < 0) {
            continue;
        }
        size_t queued = control->out_bytes;
        control_write(control); // the reader may have made room before it could see that this rank sleeps
        if (control->out_bytes < queued || !nb_shm_pipe_is_empty(control->pipe_in)) {
            return false;
        }
    }
    return true;
}

static void control_ready(struct nb_watch *watch, uint32_t events) {
    struct control *control = NB_CONTAINER(watch, struct control, watch);
    if ((events & EPOLLOUT) != 0) {
        control_write(control);
        control_want(control);
    }
    if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) == 0) {
        return;
    }
    if (!in_room(control)) {
        control_gone(control);
        return;
    }
    ssize_t n = recv(watch->fd, control->in + control->in_bytes, CONTROL_READ, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n < 0) {
        failure_keep(control);
    }
    if (n <= 0) {
        (void)pipe_read(control); // the last messages before it ended
        control_gone(control);
        return;
    }
    handle_received(control, (size_t)n);
}

int nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err) {
    control->job = job;
    control->peer = peer;
    control->watch.fd = fd;
    control->watch.ready = control_ready;
    control->received_ns = nb_now_ns();
    nb_sock_tune(fd, job->config.timeout_ms); // until now it had the time limit of the join
    // Room for one read behind the start of a message, and for one write.
    if (!room_for(&control->in, &control->in_room, (size_t)2 * CONTROL_READ) ||
        !room_for(&control->out, &control->out_room, CONTROL_READ)) {
        return nb_fail(err, -ENOMEM, "cannot allocate messages of rank %d", peer);
    }
    if (nb_shared_everywhere(job)) {
        nb_shared_pipes(job, peer, &control->pipe_in, &control->pipe_out);
    }
    return nb_loop_add(&job->loop, &control->watch, EPOLLIN, err);
}

void nb_control_fini(struct control *control) {
    if (control->job != NULL && control->watch.fd >= 0) {
        nb_loop_remove(&control->job->loop, &control->watch);
        close(control->watch.fd);
    }
    free(control->in);
    free(control->out);
}
