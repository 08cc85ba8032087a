// Requests: how a transfer ends, and how it takes the lanes. All with the lock.
#ifndef NB_NCCL_REQUEST_H
#define NB_NCCL_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl/net.h"

// Takes the request off its list and shows its caller the state: NB_REQUEST_DONE or NB_REQUEST_FAILED.
void nb_request_finish(struct nb_net_request *request, int state);
// Sets up the request's flow and adds it to the lanes. False: out of memory, the link fails.
bool nb_request_flow(struct nb_link *link, struct nb_net_request *request, uint64_t op);
// Fails the link for lack of memory for a transfer.
void nb_request_no_memory(struct nb_link *link, size_t bytes);
// Adds a flow whose bytes are read and dropped: its receiving comm was closed. False: out of memory.
bool nb_sink_start(struct nb_link *link, uint64_t op, size_t bytes);
// Frees the sinks of a link whose lanes are closed.
void nb_sinks_drop(struct nb_link *link);

#endif
