// libfabric library: finds and loads it, and lists its providers.
#ifdef NB_HAVE_OFI

#include "transport/ofi_lib.h"

#include <dlfcn.h>
#include <link.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/sock.h"
#include "transport/ofi.h"

static const char *const usual_places[] = {
    "libfabric.so.1",
    "/opt/amazon/efa/lib/libfabric.so.1",
    "/opt/amazon/efa/lib64/libfabric.so.1",
    NULL,
};

// In order of preference: networks of their own before sockets. A bare "tcp" is one endpoint type from 1.18 on; earlier
// versions need ofi_rxm above it.
static const char *const preferred[] = {"efa", "cxi", "verbs;ofi_rxm", "tcp", "net", "tcp;ofi_rxm", NULL};

// Providers with IP addresses, so that a lane can be bound to an interface and a port.
static const char *const by_ip[] = {"verbs", "tcp", "net", "sockets", "udp", NULL};

// The process's signal handlers. PSM2, below Debian's libfabric, replaces those of SIGINT, SIGTERM and SIGSEGV when it is
// loaded; a Ctrl-C would then end a training without Python. They are restored.
struct signal_handlers {
    struct sigaction of[NSIG];
    bool known[NSIG];
};

enum { DATA_BYTES_MIN = 4 }; // minimum size of completion data

static void save_signal_handlers(struct signal_handlers *saved) {
    for (int i = 1; i < NSIG; i++) {
        saved->known[i] = sigaction(i, NULL, &saved->of[i]) == 0;
    }
}

static void restore_signal_handlers(const struct signal_handlers *saved) {
    for (int i = 1; i < NSIG; i++) {
        struct sigaction now;
        if (saved->known[i] && sigaction(i, NULL, &now) == 0 &&
            (now.sa_handler != saved->of[i].sa_handler || now.sa_flags != saved->of[i].sa_flags)) {
            (void)sigaction(i, &saved->of[i], NULL);
        }
    }
}

static int get_info(const struct nb_ofi_lib *lib, const char *node, const char *service, uint64_t flags,
                    const struct fi_info *hints, struct fi_info **list) {
    struct signal_handlers saved;
    save_signal_handlers(&saved); // the first call loads the providers
    int rc = lib->getinfo(NB_OFI_API, node, service, flags, hints, list);
    restore_signal_handlers(&saved);
    return rc;
}

// Returns NULL where there is no library.
static void *load(const char *library, const char **path) {
    struct signal_handlers saved;
    save_signal_handlers(&saved);
    void *handle = NULL;
    if (library != NULL) {
        handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    }
    for (int i = 0; library == NULL && handle == NULL && usual_places[i] != NULL; i++) {
        *path = usual_places[i];
        handle = dlopen(*path, RTLD_NOW | RTLD_LOCAL);
    }
    restore_signal_handlers(&saved);
    return handle;
}

static int load_symbols(struct nb_ofi_lib *lib, void *handle, const char *path, struct nb_error *err) {
    static const struct {
        const char *name;
        size_t offset;
    } symbols[] = {
        {"fi_getinfo", offsetof(struct nb_ofi_lib, getinfo)}, {"fi_freeinfo", offsetof(struct nb_ofi_lib, freeinfo)},
        {"fi_dupinfo", offsetof(struct nb_ofi_lib, dupinfo)}, {"fi_fabric", offsetof(struct nb_ofi_lib, fabric)},
        {"fi_version", offsetof(struct nb_ofi_lib, version)}, {"fi_strerror", offsetof(struct nb_ofi_lib, strerror)},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (symbol == NULL) {
            nb_fail(err, NB_ENOLIB, "%s is not a libfabric library: it lacks the function %s", path, symbols[i].name);
            return NB_ENOLIB;
        }
        memcpy((char *)lib + symbols[i].offset, &symbol, sizeof symbol);
    }
    return 0;
}

int nb_ofi_lib_open(struct nb_ofi_lib *lib, const char *library, struct nb_error *err) {
    const char *path = library;
    void *handle = load(library, &path);
    if (handle == NULL) {
        if (library != NULL) {
            nb_fail(err, NB_ENOLIB, "libfabric at %s: %s", library, dlerror());
        } else {
            nb_fail(err, NB_ENOLIB, "no libfabric library found (%s): %s", usual_places[0],
                    "install libfabric1, or the package mpich from PyPI and give its path");
        }
        return NB_ENOLIB;
    }
    struct nb_ofi_lib found = {0};
    int rc = load_symbols(&found, handle, path, err);
    if (rc < 0) {
        return rc;
    }
    struct link_map *map = NULL;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0] != '\0') {
        path = map->l_name;
    }
    snprintf(found.path, sizeof found.path, "%s", path);
    uint32_t version = found.version();
    if (FI_VERSION_LT(version, (uint32_t)NB_OFI_API)) {
        nb_fail(err, NB_ENOLIB, "libfabric %u.%u at %s is too old: 1.17 or later is needed", FI_MAJOR(version),
                FI_MINOR(version), found.path);
        return NB_ENOLIB;
    }
    *lib = found;
    return 0;
}

void nb_ofi_lib_version(const struct nb_ofi_lib *lib, char text[NB_OFI_NAME]) {
    uint32_t version = lib->version();
    snprintf(text, NB_OFI_NAME, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
}

// The requirements of a lane. `provider` NULL: any.
static struct fi_info *hints_new(const struct nb_ofi_lib *lib, const char *provider, size_t data_bytes) {
    struct fi_info *hints = lib->dupinfo(NULL);
    if (hints == NULL) {
        return NULL;
    }
    hints->caps = FI_MSG | FI_SEND | FI_RECV | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->msg_order = FI_ORDER_SAS;
    hints->rx_attr->msg_order = FI_ORDER_SAS;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->cq_data_size = data_bytes;
    if (provider != NULL) {
        hints->fabric_attr->prov_name = strdup(provider); // freeinfo frees it
        if (hints->fabric_attr->prov_name == NULL) {
            lib->freeinfo(hints);
            return NULL;
        }
    }
    return hints;
}

static bool has_ip_address(const char *provider) {
    size_t core = strcspn(provider, ";");
    for (int i = 0; by_ip[i] != NULL; i++) {
        if (strlen(by_ip[i]) == core && memcmp(by_ip[i], provider, core) == 0) {
            return true;
        }
    }
    return false;
}

// Splits "10.0.0.1:4000" or "[::1]:4000" into node and service.
static void split(const struct nb_sockaddr *source, char text[NB_SOCK_TEXT], const char **node, const char **service) {
    nb_sock_format(source, text);
    char *colon = strrchr(text, ':');
    bool bracket = text[0] == '[';
    colon[bracket ? -1 : 0] = '\0';
    *node = text + bracket;
    *service = colon + 1;
}

// Finds the first endpoint of exactly this provider: libfabric also returns layers above it.
static int find_exact(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                      uint64_t op_flags, size_t data_bytes, struct fi_info **info) {
    struct fi_info *hints = hints_new(lib, provider, data_bytes);
    if (hints == NULL) {
        return -FI_ENOMEM;
    }
    hints->tx_attr->op_flags = op_flags;
    char text[NB_SOCK_TEXT];
    const char *node = NULL;
    const char *service = NULL;
    uint64_t flags = 0;
    if (source != NULL && has_ip_address(provider)) {
        hints->addr_format = source->any.sa_family == AF_INET6 ? FI_SOCKADDR_IN6 : FI_SOCKADDR_IN;
        flags = FI_SOURCE | FI_NUMERICHOST;
        split(source, text, &node, &service);
    }
    struct fi_info *list = NULL;
    int rc = get_info(lib, node, service, flags, hints, &list);
    lib->freeinfo(hints);
    if (rc < 0) {
        return rc;
    }
    rc = -FI_ENODATA;
    for (const struct fi_info *it = list; it != NULL && rc == -FI_ENODATA; it = it->next) {
        if (strcmp(it->fabric_attr->prov_name, provider) == 0) {
            *info = lib->dupinfo(it);
            rc = *info == NULL ? -FI_ENOMEM : 0;
        }
    }
    lib->freeinfo(list);
    return rc;
}

// Completion data of 8 bytes prove an arrival. With 4 bytes the sender reports it after it has landed, so the provider
// must support delivery completion.
static int find(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                struct fi_info **info, bool *delivery) {
    static const struct {
        uint64_t op_flags;
        size_t data_bytes;
    } wanted[] = {
        {FI_DELIVERY_COMPLETE, sizeof(uint64_t)}, {0, sizeof(uint64_t)}, {FI_DELIVERY_COMPLETE, DATA_BYTES_MIN}};
    int rc = -FI_ENODATA;
    for (size_t i = 0; rc != 0 && i < sizeof wanted / sizeof wanted[0]; i++) {
        rc = find_exact(lib, provider, source, wanted[i].op_flags, wanted[i].data_bytes, info);
        *delivery = wanted[i].op_flags != 0;
    }
    if (rc == 0) {
        (*info)->tx_attr->op_flags &= ~FI_DELIVERY_COMPLETE; // requested per write, not for every message
    }
    return rc;
}

static int rank_of(const char *provider) {
    int i = 0;
    while (preferred[i] != NULL && strcmp(preferred[i], provider) != 0) {
        i++;
    }
    return i;
}

// Lists each provider once, in order of preference.
static int list_providers(const struct nb_ofi_lib *lib, struct nb_ofi_provider *out, int max) {
    struct fi_info *hints = hints_new(lib, NULL, DATA_BYTES_MIN);
    if (hints == NULL) {
        return -FI_ENOMEM;
    }
    struct fi_info *list = NULL;
    int rc = get_info(lib, NULL, NULL, 0, hints, &list);
    lib->freeinfo(hints);
    if (rc < 0) {
        return rc == -FI_ENODATA ? 0 : rc;
    }
    int count = 0;
    for (const struct fi_info *it = list; it != NULL && count < max; it = it->next) {
        const char *name = it->fabric_attr->prov_name;
        bool known = false;
        for (int i = 0; i < count && !known; i++) {
            known = strcmp(out[i].name, name) == 0;
        }
        if (known) {
            continue;
        }
        int at = count;
        while (at > 0 && rank_of(out[at - 1].name) > rank_of(name)) {
            out[at] = out[at - 1];
            at--;
        }
        uint32_t version = it->fabric_attr->prov_version;
        snprintf(out[at].name, sizeof out[at].name, "%s", name);
        snprintf(out[at].version, sizeof out[at].version, "%u.%u", FI_MAJOR(version), FI_MINOR(version));
        count++;
    }
    lib->freeinfo(list);
    return count;
}

static int fail_missing(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                        struct nb_error *err) {
    struct nb_ofi_provider there[16];
    int count = list_providers(lib, there, (int)(sizeof there / sizeof there[0]));
    char names[256] = "none";
    for (int i = 0, used = 0; i < count && used < (int)sizeof names; i++) {
        used += snprintf(names + used, sizeof names - (size_t)used, "%s%s", i > 0 ? ", " : "", there[i].name);
    }
    char at[NB_SOCK_TEXT] = "any address";
    if (source != NULL) {
        nb_sock_format(source, at);
    }
    char version[NB_OFI_NAME];
    nb_ofi_lib_version(lib, version);
    return nb_fail(err, -ENODEV, "libfabric %s has no provider %s%sfor remote writes at %s; it has: %s", version,
                   provider != NULL ? provider : "", provider != NULL ? " " : "", at, names);
}

int nb_ofi_info_get(const struct nb_ofi_lib *lib, const char *provider, const struct nb_sockaddr *source,
                    struct fi_info **info, bool *delivery, struct nb_error *err) {
    if (provider == NULL) {
        for (int i = 0; preferred[i] != NULL; i++) {
            if (find(lib, preferred[i], source, info, delivery) == 0) {
                return 0;
            }
        }
        return fail_missing(lib, NULL, source, err);
    }
    int rc = find(lib, provider, source, info, delivery);
    if (rc < 0 && strchr(provider, ';') == NULL) {
        char layered[NB_OFI_NAME];
        snprintf(layered, sizeof layered, "%s;ofi_rxm", provider);
        rc = find(lib, layered, source, info, delivery);
    }
    return rc < 0 ? fail_missing(lib, provider, source, err) : 0;
}

int nb_ofi_providers(const char *library, struct nb_ofi_provider *providers, int max, struct nb_error *err) {
    struct nb_ofi_lib lib;
    int rc = nb_ofi_lib_open(&lib, library, err);
    if (rc < 0) {
        return rc;
    }
    rc = list_providers(&lib, providers, max);
    return rc < 0 ? nb_fail(err, rc, "the providers of %s: %s", lib.path, lib.strerror(-rc)) : rc;
}

int nb_ofi_library(const char *library, struct nb_ofi_library *found, struct nb_error *err) {
    struct nb_ofi_lib lib;
    int rc = nb_ofi_lib_open(&lib, library, err);
    if (rc < 0) {
        return rc;
    }
    memcpy(found->path, lib.path, sizeof found->path);
    nb_ofi_lib_version(&lib, found->version);
    return 0;
}

#else
typedef int nb_ofi_lib_is_empty; // ISO C wants a declaration in every file
#endif
