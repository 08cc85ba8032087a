// TCP network: its table of operations.
#ifndef NB_TRANSPORT_TCP_H
#define NB_TRANSPORT_TCP_H

#include "transport/transport.h"

extern const struct nb_lane_ops nb_tcp_ops;

#endif
