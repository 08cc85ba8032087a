// libfabric lane of a build without libfabric's headers: every function fails.
#ifndef NB_HAVE_OFI

#include <stddef.h>

#include "transport/ofi.h"

static int fail(struct nb_error *err) {
    return nb_fail(err, NB_ENOLIB, "built without libfabric's headers: install libfabric-dev and build again");
}

static int lane_open(const struct nb_lane_config *config, struct nb_lane **lane, struct nb_error *err) {
    (void)config;
    (void)lane;
    return fail(err);
}

// No lane is ever opened, so nothing else of the table is called.
const struct nb_lane_ops nb_ofi_ops = {.name = "ofi", .kind = NB_LANE_RMA, .open = lane_open};

int nb_ofi_providers(const char *library, struct nb_ofi_provider *providers, int max, struct nb_error *err) {
    (void)library;
    (void)providers;
    (void)max;
    (void)err;
    return 0;
}

int nb_ofi_library(const char *library, struct nb_ofi_library *found, struct nb_error *err) {
    (void)library;
    (void)found;
    return fail(err);
}

#else
typedef int nb_ofi_none_is_empty; // ISO C wants a declaration in every file
#endif
