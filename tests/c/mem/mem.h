// In-process network for tests. Ranks are threads, or one thread drives all ranks, which makes a run reproducible. A
// seed determines the network's behaviour: delays counted in calls of progress(), lanes that overtake each other,
// refused posts, and segments that arrive in pieces. Order within one lane and peer is kept; on RMA lanes a message may
// overtake writes that completed after the message before it.
#ifndef NB_MEM_H
#define NB_MEM_H

#include <stdint.h>

#include "transport/transport.h"

enum { NB_MEM_NAME = 32 };

struct nb_mem_net;

// Operations for each kind of lane: STREAM announces segments by headers, RMA writes to memory that the receiver
// mapped.
const struct nb_lane_ops *nb_mem_ops(int kind);

// Opens a network of `size` ranks with up to `lanes` lanes each; NULL: no memory. Close its lanes first.
struct nb_mem_net *nb_mem_net_open(int size, int lanes, uint64_t seed);
void nb_mem_net_close(struct nb_mem_net *net);

// Writes the network's name. A lane finds its network by this name in nb_lane_config.library.
void nb_mem_net_name(const struct nb_mem_net *net, char name[NB_MEM_NAME]);

// Breaks the flow between two ranks on one lane: both sides get lost() in their next progress(). Any thread may call
// this.
void nb_mem_break(struct nb_mem_net *net, int from, int to, int lane);

// Stops all data between two ranks on one lane, without a notification. One thread must drive both ranks.
void nb_mem_stall(struct nb_mem_net *net, int from, int to, int lane);

#endif
