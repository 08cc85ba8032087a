// libfabric library, loaded at run time, and the choice of a provider. Six of its functions are real symbols; the rest
// of its API is inline and calls through tables in its objects.
#ifndef NB_OFI_LIB_H
#define NB_OFI_LIB_H

#include <rdma/fabric.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/sock.h"
#include "transport/ofi.h"

// The API version to request: the oldest that suffices; newer libraries support it.
enum { NB_OFI_API = FI_VERSION(1, 17) };

struct nb_ofi_lib {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info); // of NULL: an empty one, of the library's own size
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    uint32_t (*version)(void);
    const char *(*strerror)(int error);
    char path[NB_OFI_PATH];
};

// Loads the library for good: a provider may have threads and fork handlers, so it is never unloaded. `library` as in
// nb_lane_config. Errors: NB_ENOLIB naming the path.
int nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err);

// "1.17"
void nb_ofi_lib_version(const struct nb_ofi_lib *lib, char text[NB_OFI_NAME]);

// Finds the endpoint of a lane: of `provider` ("verbs" also finds "verbs;ofi_rxm"), or of the best available, at
// source's address and port if the provider has IP addresses. The caller frees it with lib->freeinfo. *delivery: a
// write can complete when it has landed. Errors: -ENODEV naming the provider, the address and the available providers.
int nb_ofi_info_get(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                    struct fi_info **info, bool *delivery, struct nb_error *err);

#endif
