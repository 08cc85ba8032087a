// Two-level all-reduce, for a job of several hosts, some with several ranks: the network carries each byte once per
// host, for any number of ranks per host. Only the progress owner calls these functions.
//
// A buffer is cut into as many parts (rails) as the host with the fewest ranks has ranks. Part i has an owner on each
// host: local rank i. The owner processes its part in pieces:
//   fold    the owner adds up, in its own buffer, the terms of its host's ranks, starting with its own
//   ring    the owners of the part on all hosts run a ring all-reduce over the piece, through the lanes
//   spread  the owner writes the result to the buffers of all ranks of its host
// The ring of a piece overlaps the fold of the next and the spread of the one before. The order of additions depends
// only on the hosts' ranks, size and operation.
//
// Buffers in arenas that the ranks of a host have mapped are read and written in place. If a rank's buffer is not in
// such an arena, its host uses staging: all ranks fill in the other ranks' parts, owners fold and spread to their own
// staging, all ranks empty it. The other hosts do not notice.
#ifndef NB_ENGINE_TWO_LEVEL_H
#define NB_ENGINE_TWO_LEVEL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "engine/shared_fold.h"

// `to` and `from`: the owners of this rank's part on the next and the previous host, as ranks of the job; NB_NO_PEER if
// this rank has no part.
int nb_two_level_open(struct shared *shared, int to, int from, struct nb_error *err);
void nb_two_level_close(struct shared *shared);
// Begins an operation that all ranks of the host have described.
void nb_two_level_begin(struct shared *shared, struct nb_work *work);
// Moves what can be moved. True: something has moved.
bool nb_two_level_turn(struct shared *shared);
// True if this rank's share of an operation is done.
bool nb_two_level_done(const struct shared *shared, const struct nb_work *work);
// Ends the rings of an operation. Nothing touches its memory after this returns.
void nb_two_level_cancel(struct shared *shared, struct nb_work *work);
// Bytes that rings have moved so far.
uint64_t nb_two_level_moved(const struct shared *shared);
// True if a ring of the operation is running; then sets work->in.peer and work->out.peer to the peers it waits for.
bool nb_two_level_waits(const struct shared *shared, struct nb_work *work);

#endif
