// A network inside one process, for tests: ranks are threads (or one thread that drives them all, which makes a run
// repeatable), and the weather is drawn from a seed: delays counted in calls of progress(), lanes that overtake each
// other, refused posts, segments that arrive in pieces. Order within one lane and peer is kept.
#ifndef NB_MEM_H
#define NB_MEM_H

#include <stdint.h>

#include "transport/transport.h"

enum { NB_MEM_NAME = 32 };

struct nb_mem_net;

// Both kinds: segments announced by headers, and writes to memory that the receiver opened by a key.
const struct nb_lane_ops *nb_mem_ops(int kind);

// A network of `size` ranks and up to `lanes` lanes each; NULL: no memory. It outlives its lanes.
struct nb_mem_net *nb_mem_net_open(int size, int lanes, uint64_t seed);
void nb_mem_net_close(struct nb_mem_net *net);

// What goes into nb_lane_config.library, by which a lane finds its network.
void nb_mem_net_name(const struct nb_mem_net *net, char name[NB_MEM_NAME]);

// Kills the flow between two ranks on one lane; both sides get lost() from their next progress(). Any thread.
void nb_mem_break(struct nb_mem_net *net, int from, int to, int lane);

// From now on nothing moves between two ranks on one lane, and no rank is notified. For one thread that drives both.
void nb_mem_stall(struct nb_mem_net *net, int from, int to, int lane);

#endif
