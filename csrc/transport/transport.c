// Transport: the list of networks. The native rows of python/netbottleneck/trace/transports.py have the same names.
#include "transport/transport.h"

#include <string.h>

#include "transport/ofi.h"
#include "transport/tcp.h"

const struct nb_lane_ops *const nb_transports[] = {&nb_tcp_ops, &nb_ofi_ops, NULL};

const struct nb_lane_ops *nb_transport_find(const char *name) {
    for (int i = 0; nb_transports[i] != NULL; i++) {
        if (strcmp(nb_transports[i]->name, name) == 0) {
            return nb_transports[i];
        }
    }
    return NULL;
}
