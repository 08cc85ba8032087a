// libfabric lane: one RDM endpoint in a domain of its own, and the libfabric facts that `doctor` reports. libfabric is
// loaded at run time. A build without its headers has the same functions, which fail with NB_ENOLIB.
//
// All peers of an endpoint share one completion queue, one set of keys and one receive queue. So peer_close() ends the
// whole lane: it closes the endpoint and its keys, every request in flight gets `sent` with NB_ECLOSED, and every other
// peer gets `lost`. With the tcp providers the death of a peer causes no completion; the control connection reports it.
#ifndef NB_OFI_H
#define NB_OFI_H

#include "base/error.h"
#include "transport/transport.h"

extern const struct nb_lane_ops nb_ofi_ops;

enum { NB_OFI_NAME = 64, NB_OFI_PATH = 512 };

struct nb_ofi_provider {
    char name[NB_OFI_NAME];    // as in nb_lane_config.provider: "tcp", "net", "tcp;ofi_rxm", …
    char version[NB_OFI_NAME]; // of the provider
};

struct nb_ofi_library {
    char path[NB_OFI_PATH];    // of the loaded file
    char version[NB_OFI_NAME]; // "1.17"
};

// Lists the providers that can carry a lane, each once, in order of preference: a lane takes the first by default.
// Returns how many it wrote; 0 if libfabric has none. `library` as in nb_lane_config. Errors: NB_ENOLIB; negative from
// libfabric.
int nb_ofi_providers(const char *library, struct nb_ofi_provider *providers, int max, struct nb_error *err);

// Finds the libfabric that `library` (NULL: the usual paths) selects. Errors: NB_ENOLIB.
int nb_ofi_library(const char *library, struct nb_ofi_library *found, struct nb_error *err);

#endif
