// libfabric as a library loaded at run time, and the choice of a provider. Six of its functions are real symbols;
// everything else in its API is inline and goes through tables that the objects carry.
#ifndef NB_OFI_LIB_H
#define NB_OFI_LIB_H

#include <rdma/fabric.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sock.h"
#include "transport/ofi.h"

// What is asked of every libfabric: the oldest that serves; a newer one serves its callers.
enum { NB_OFI_API = FI_VERSION(1, 17) };

struct nb_ofi_lib {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info); // of NULL: an empty one, of the size the library knows
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    uint32_t (*version)(void);
    const char *(*strerror)(int error);
    char path[NB_OFI_PATH];
};

// Loads it, for good: a provider may have threads and fork handlers, so it is never unloaded. `library` as in
// nb_lane_config. Errors: NB_ENOLIB naming the path.
int nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err);

// "1.17"
void nb_ofi_lib_version(const struct nb_ofi_lib *lib, char text[NB_OFI_NAME]);

// The endpoint a lane will have: of `provider` ("verbs" also finds "verbs;ofi_rxm"), or of the best there is, at
// source's address and port where the provider has such addresses. Freed with lib->freeinfo. *delivery: a write can be
// completed when it has landed.
// Errors: -ENODEV naming the provider, the address and the providers there are.
int nb_ofi_info_get(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                    struct fi_info **info, bool *delivery, struct nb_error *err);

#endif
