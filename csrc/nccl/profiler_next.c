// The profiler that ours passes events on to: loading it, and calling it in its own version (see profiler.h).
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "nccl/abi.h"
#include "nccl/profiler.h"
#include "nccl/profiler_abi.h"

enum { NAME_BYTES = 512 };

static bool is_path(const char *name) {
    size_t bytes = strlen(name);
    bool library = strncmp(name, "lib", 3) == 0 && bytes > 3 && strcmp(name + bytes - 3, ".so") == 0;
    return library || strchr(name, '/') != NULL;
}

static void *load(const char *name) {
    char longer[NAME_BYTES];
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL && !is_path(name)) {
        (void)snprintf(longer, sizeof longer, "libnccl-profiler-%.400s.so", name);
        library = dlopen(longer, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

int nb_next_open(struct nb_next *next, const char *name, int called, struct nb_error *err) {
    void *library = load(name);
    if (library == NULL) {
        return nb_fail(err, NB_ENOLIB, "NETBOTTLENECK_NCCL_PROFILER=%.100s cannot be loaded: %.200s", name, dlerror());
    }
    for (int version = called; version >= NCCL_PROFILER_OLDEST; version--) {
        char symbol[32];
        (void)snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
        const struct nccl_profiler_v5 *table = dlsym(library, symbol);
        if (table != NULL && strcmp(table->name, NB_PROFILER_NAME) != 0) {
            *next = (struct nb_next){.version = version, .called = called, .table = table};
            return 0;
        }
    }
    return nb_fail(err, -ENOTSUP, "NETBOTTLENECK_NCCL_PROFILER=%.100s: it is no other profiler of version %d to %d",
                   name, NCCL_PROFILER_OLDEST, called);
}

bool nb_next_open_comm(struct nb_next *next, void **ctx, const struct nb_profile_about *about, int *nccl_mask) {
    const struct nb_profile_about *a = about;
    int *mask = nccl_mask != NULL ? nccl_mask : &next->own_mask;
    if (next->version == 0) {
        return false;
    }
    if (next->mask != mask) { // it is read without the lock
        __atomic_store_n(&next->mask, mask, __ATOMIC_RELEASE);
    }
    if (next->version == 4) {
        const struct nccl_profiler_v4 *table = next->table;
        return table->init(ctx, mask, a->name, a->id, a->hosts, a->ranks, a->rank, a->log) == NCCL_SUCCESS;
    }
    const struct nccl_profiler_v5 *table = next->table;
    return table->init(ctx, a->id, mask, a->name, a->hosts, a->ranks, a->rank, a->log) == NCCL_SUCCESS;
}

// The functions other than init have the same place and type in every version.
static const struct nccl_profiler_v5 *table_of(const struct nb_next *next) {
    return next->table;
}

void nb_next_close_comm(const struct nb_next *next, void *ctx) {
    if (ctx != NULL) {
        (void)table_of(next)->finalize(ctx);
    }
}

// The types that its version knows.
static uint64_t known(int version) {
    uint64_t last = NCCL_PROFILE_KERNEL_PHASE;
    last = version == 6 ? NCCL_PROFILE_CE_BATCH : last;
    last = version == 5 ? NCCL_PROFILE_KERNEL_LAUNCH : last;
    last = version == 4 ? NCCL_PROFILE_NET_PLUGIN : last;
    return last * 2 - 1;
}

// NCCL reports an event also where only events below it are wanted.
static uint64_t reported_for(uint64_t type) {
    const uint64_t proxy = NCCL_PROFILE_PROXY_STEP | NCCL_PROFILE_NET_PLUGIN;
    const uint64_t task = proxy | NCCL_PROFILE_PROXY_OP | NCCL_PROFILE_KERNEL_CH;
    const uint64_t engines = NCCL_PROFILE_CE_COLL | NCCL_PROFILE_CE_SYNC | NCCL_PROFILE_CE_BATCH;
    switch (type) {
    case NCCL_PROFILE_PROXY_STEP:
        return proxy;
    case NCCL_PROFILE_PROXY_OP:
        return proxy | NCCL_PROFILE_PROXY_OP;
    case NCCL_PROFILE_COLL:
    case NCCL_PROFILE_P2P:
        return task | type;
    case NCCL_PROFILE_GROUP:
        return task | NCCL_PROFILE_COLL | NCCL_PROFILE_P2P | type;
    case NCCL_PROFILE_COLL_API:
        return task | NCCL_PROFILE_COLL | engines | type;
    case NCCL_PROFILE_P2P_API:
        return task | NCCL_PROFILE_P2P | type;
    case NCCL_PROFILE_GROUP_API:
        return ~(uint64_t)NCCL_PROFILE_PROXY_CTRL;
    case NCCL_PROFILE_CE_COLL:
        return engines;
    case NCCL_PROFILE_KERNEL_CH:
        return NCCL_PROFILE_KERNEL_CH | NCCL_PROFILE_KERNEL_PHASE;
    default:
        return type;
    }
}

bool nb_next_wants(const struct nb_next *next, uint64_t type) {
    if (next->version == 0 || (type & known(next->version)) == 0) {
        return false;
    }
    const int *wanted = __atomic_load_n(&next->mask, __ATOMIC_ACQUIRE);
    uint64_t mask = (uint64_t)__atomic_load_n(wanted, __ATOMIC_RELAXED);
    return (mask & known(next->version) & reported_for(type)) != 0;
}

static size_t event_bytes(int version) {
    return version == 4   ? sizeof(struct nccl_event_v4)
           : version == 7 ? sizeof(struct nccl_event_v7)
                          : sizeof(struct nccl_event_v5);
}

void *nb_next_start(const struct nb_next *next, void *ctx, uint64_t type, const void *event, void *parent,
                    void *group) {
    struct nccl_event_v7 copy;
    void *handle = NULL;
    memset(&copy, 0, sizeof copy);
    memcpy(&copy, event, event_bytes(next->called));
    copy.parent = parent;
    if (next->called != 4 && type == NCCL_PROFILE_COLL) {
        copy.coll.v5.group = group;
    } else if (next->called != 4 && type == NCCL_PROFILE_P2P) {
        copy.p2p.v5.group = group;
    }
    if (next->version == 4 && (type & (NCCL_PROFILE_COLL | NCCL_PROFILE_P2P)) != 0) {
        copy.parent = group; // version 4 knows no calls
    }
    return table_of(next)->start_event(ctx, &handle, &copy) == NCCL_SUCCESS ? handle : NULL;
}

void nb_next_state(const struct nb_next *next, void *handle, int state, const union nccl_state_args *args) {
    int last = next->version == 4   ? NCCL_STATE_KERNEL_STOP
               : next->version == 5 ? NCCL_STATE_GROUP_API_END
               : next->version == 6 ? NCCL_STATE_CE_BATCH_END
                                    : INT32_MAX;
    union nccl_state_args copy = {0};
    if (handle == NULL || state > last) {
        return;
    }
    if (args != NULL) {
        copy = *args;
    }
    (void)table_of(next)->record_state(handle, state, args != NULL ? &copy : NULL);
}

void nb_next_stop(const struct nb_next *next, void *handle) {
    if (handle != NULL) {
        (void)table_of(next)->stop_event(handle);
    }
}
