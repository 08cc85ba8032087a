// The libfabric lane: one RDM endpoint in a domain of its own, and what a `doctor` wants to know about the libfabric
// in use. libfabric is loaded at run time; a build without its headers has the same names, and they fail with
// NB_ENOLIB.
//
// An endpoint has one completion queue, one set of keys and one receive queue for all its peers. So peer_close() ends
// the whole lane: it closes the endpoint and its keys, every request under way gets `sent` with NB_ECLOSED, and every
// other peer `lost`. A peer that dies makes no completion with the tcp providers: the control connection tells.
#ifndef NB_OFI_H
#define NB_OFI_H

#include "base/error.h"
#include "transport/transport.h"

extern const struct nb_lane_ops nb_ofi_ops;

enum { NB_OFI_NAME = 64, NB_OFI_PATH = 512 };

struct nb_ofi_provider {
    char name[NB_OFI_NAME];    // as nb_lane_config.provider takes it: "tcp", "net", "tcp;ofi_rxm", …
    char version[NB_OFI_NAME]; // the provider's own
};

struct nb_ofi_library {
    char path[NB_OFI_PATH];    // of the file that was loaded
    char version[NB_OFI_NAME]; // "1.17"
};

// The providers that can carry a lane, each once, in the order of preference: the first is the one a lane takes by
// itself. Returns how many were written; 0 where libfabric has none. `library` as in nb_lane_config.
// Errors: NB_ENOLIB; negative from libfabric.
int nb_ofi_providers(const char *library, struct nb_ofi_provider *providers, int max, struct nb_error *err);

// Which libfabric `library` (NULL: the usual places) leads to. Errors: NB_ENOLIB.
int nb_ofi_library(const char *library, struct nb_ofi_library *found, struct nb_error *err);

#endif
