// All-reduce in two levels, in a job of several hosts some of which have several ranks: so the wire carries each byte once
// a host, however many ranks it has. Of the communication thread alone.
//
// A line is cut into as many parts as the host with the fewest ranks has (rails), so part i has an owner on each host: its
// rank i. A part goes in pieces, which follow each other:
//   fold    the owner adds up, in its own line, what the ranks of its host have there, beginning with its own term
//   ring    the owners of the part on all hosts run a ring all-reduce over the piece, through the lanes
//   spread  the owner writes what came of it to the lines of all ranks of its host
// so that the ring of one piece goes on beside the fold of the next and the spread of the one before. The order of
// additions is a function of the hosts' ranks, size and op.
//
// What lies in arenas that the ranks of a host have mapped is read and written where it is. Where some rank's line does
// not, that host goes through staging: all fill in others' parts, owners fold, spread to their own staging, all empty it.
// Other hosts need not know.
#ifndef NB_ENGINE_TWOLEVEL_H
#define NB_ENGINE_TWOLEVEL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"
#include "engine/local_share.h"

// `to` and `from`: the owners of this rank's part on the next host and on the one before, in ranks of the job; NB_NO_PEER
// where this rank has no part.
int nb_two_level_open(struct local *local, int to, int from, struct nb_error *err);
void nb_two_level_close(struct local *local);
// All ranks of the host have described the operation.
void nb_two_level_begin(struct local *local, struct nb_work *work);
// Moves what can be moved. True: something has moved.
bool nb_two_level_turn(struct local *local);
// Whether this rank's share of an operation is done.
bool nb_two_level_done(const struct local *local, const struct nb_work *work);
// The ring of a piece is over.
void nb_two_level_landed(struct nb_work *ring);
// Ends the rings of an operation. Nothing touches its memory any more from here.
void nb_two_level_cancel(struct local *local, struct nb_work *work);
// Bytes of a whole piece.
size_t nb_two_level_piece(const struct local *local);
// Bytes that rings have moved so far.
uint64_t nb_two_level_moved(const struct local *local);
// Whether a ring of the operation is under way; then work->in.peer and work->out.peer are whom it waits for.
bool nb_two_level_waits(const struct local *local, struct nb_work *work);

#endif
