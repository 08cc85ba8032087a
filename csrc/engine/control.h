// Control connections: whole messages over the sockets of the bootstrap, or over pipes in shared memory. They never
// block.
#ifndef NB_ENGINE_CONTROL_H
#define NB_ENGINE_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/loop.h"
#include "engine/descriptor.h"
#include "transport/shm_pipe.h"

struct nb_job;

// One connection. A message is a header and its body, as in the bootstrap.
struct control {
    struct nb_watch watch;
    struct nb_job *job;
    int peer;
    bool left;                   // the peer has announced that it leaves
    int failure;                 // -errno of the first send or receive that failed; 0: none
    struct nb_shm_pipe *pipe_in; // messages go through the pipes if all ranks share memory; NULL: through the socket
    struct nb_shm_pipe *pipe_out;
    int64_t received_ns;
    unsigned char *in;
    size_t in_room;
    size_t in_bytes;
    unsigned char *out;
    size_t out_room;
    size_t out_bytes;
};

// Handles a message of a peer: the coordinator's on rank 0, negotiation's on other ranks.
typedef void nb_control_handler_fn(struct nb_job *job, int peer, enum control_type type, const unsigned char *body,
                                   size_t bytes);

// Takes over `fd`, also on failure: nb_control_fini() closes it.
int nb_control_init(struct control *control, struct nb_job *job, int peer, int fd, struct nb_error *err);
void nb_control_fini(struct control *control);
void nb_control_send(struct control *control, enum control_type type, const void *body, size_t bytes);
// Queues a message. It leaves with the next nb_control_send() or nb_control_flush().
void nb_control_queue(struct control *control, enum control_type type, const void *body, size_t bytes);
void nb_control_flush(struct control *control);
// Rank 0: sends to every other rank that is still connected.
void nb_control_broadcast(struct nb_job *job, enum control_type type, const void *body, size_t bytes);
// Announces this rank's failure, once: rank 0 to all ranks, the others to rank 0. Precedes all later messages.
void nb_control_failed(struct nb_job *job);
// Reads messages from shared memory and writes those that had no room there. Returns the number of connections that
// received something.
int nb_control_poll(struct nb_job *job);
// Call before the progress owner sleeps. False: a message has arrived meanwhile, or queued bytes have found room.
bool nb_control_arm(struct nb_job *job);
// Writes what is queued, until deadline_ns at most.
void nb_control_drain(struct control *control, int64_t deadline_ns);

#endif
