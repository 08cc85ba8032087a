// NCCL net plugin ABI: the tables that NCCL looks up by name, versions 6, 8, 10, 11 and 12, in our own words. NCCL tries
// the newest version that it knows first; version 6 is known to every NCCL from 2.13 on. Sizes and offsets are those of
// the versions' public headers.
#ifndef NB_NCCL_ABI_H
#define NB_NCCL_ABI_H

#include <stddef.h>
#include <stdint.h>

// What every function returns.
enum nccl_result {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6
};

enum {
    NCCL_HANDLE_BYTES = 128, // of a handle, which NCCL carries from listen to connect
    NCCL_PTR_HOST = 1,       // kind of memory
    NCCL_LOG_WARN = 2,       // level of the log
    NCCL_LOG_INFO = 3,
    NCCL_LOG_INIT_NET = 1 | 16 // subsystems of the log
};

typedef void (*nccl_logger)(int level, unsigned long subsystems, const char *file, int line, const char *fmt, ...);
typedef int (*nccl_profiler)(void **event, int type, void *parent, int64_t plugin, void *data);

struct nccl_props_v6 {
    char *name;
    char *pci_path; // NULL: unknown
    uint64_t guid;
    int ptr_support;
    int speed; // Mbit/s; 0: unknown
    int port;
    float latency; // µs; 0: unknown
    int max_comms;
    int max_recvs; // receives of one irecv
};

struct nccl_props_v8 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int device_type; // 0: the host makes progress
    int device_version;
};

struct nccl_props_v10 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int device_type;
    int device_version;
    struct {
        int count;
        int devices[4];
    } parts; // of a device that merges several
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
};

struct nccl_props_v11 {
    struct nccl_props_v10 v10;
    int max_multi_request;
};

struct nccl_props_v12 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int device_type;
    int device_version;
    struct {
        int count;
        int devices[8];
    } parts;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request;
    int16_t rail;  // -1: unknown
    int16_t plane; // -1: unknown
};

// What the tables have in common. `comm` is what connect or accept gave; a NULL request means: call again later.
#define NCCL_TABLE_CLOSE                                                                                               \
    int (*iflush)(void *comm, int count, void **data, int *sizes, void **mhandles, void **request);                    \
    int (*test)(void *request, int *done, int *sizes);                                                                 \
    int (*close_send)(void *comm);                                                                                     \
    int (*close_recv)(void *comm);                                                                                     \
    int (*close_listen)(void *listener)

#define NCCL_TABLE_REGISTER                                                                                            \
    int (*reg_mr)(void *comm, void *data, size_t size, int type, void **mhandle);                                      \
    int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);     \
    int (*dereg_mr)(void *comm, void *mhandle)

#define NCCL_TABLE_DEVICE                                                                                              \
    int (*get_device_mr)(void *comm, void *mhandle, void **device);                                                    \
    int (*irecv_consumed)(void *comm, int count, void *request)

#define NCCL_TABLE_MOVE                                                                                                \
    int (*isend)(void *comm, void *data, size_t size, int tag, void *mhandle, void *profile, void **request);          \
    int (*irecv)(void *comm, int count, void **data, size_t *sizes, int *tags, void **mhandles, void **profiles,       \
                 void **request)

struct nccl_net_v6 {
    const char *name;
    int (*init)(nccl_logger log);
    int (*devices)(int *count);
    int (*get_properties)(int device, struct nccl_props_v6 *props);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **comm);
    int (*accept)(void *listener, void **comm);
    int (*reg_mr)(void *comm, void *data, int size, int type, void **mhandle);
    int (*reg_mr_dma_buf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
    int (*dereg_mr)(void *comm, void *mhandle);
    int (*isend)(void *comm, void *data, int size, int tag, void *mhandle, void **request);
    int (*irecv)(void *comm, int count, void **data, int *sizes, int *tags, void **mhandles, void **request);
    NCCL_TABLE_CLOSE;
};

struct nccl_net_v8 {
    const char *name;
    int (*init)(nccl_logger log);
    int (*devices)(int *count);
    int (*get_properties)(int device, struct nccl_props_v8 *props);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **comm, void **device_comm);
    int (*accept)(void *listener, void **comm, void **device_comm);
    NCCL_TABLE_REGISTER;
    int (*isend)(void *comm, void *data, int size, int tag, void *mhandle, void **request);
    int (*irecv)(void *comm, int count, void **data, int *sizes, int *tags, void **mhandles, void **request);
    NCCL_TABLE_CLOSE;
    NCCL_TABLE_DEVICE;
};

struct nccl_net_v10 {
    const char *name;
    int (*init)(nccl_logger log, nccl_profiler profile);
    int (*devices)(int *count);
    int (*get_properties)(int device, struct nccl_props_v10 *props);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *config, void *handle, void **comm, void **device_comm);
    int (*accept)(void *listener, void **comm, void **device_comm);
    NCCL_TABLE_REGISTER;
    NCCL_TABLE_MOVE;
    NCCL_TABLE_CLOSE;
    NCCL_TABLE_DEVICE;
    int (*make_virtual_device)(int *device, void *props);
};

// Versions 11 and 12 differ in their properties only.
#define NCCL_NET_V11(name_, props_)                                                                                    \
    struct name_ {                                                                                                     \
        const char *name;                                                                                              \
        int (*init)(void **ctx, uint64_t comm_id, void *config, nccl_logger log, nccl_profiler profile);               \
        int (*devices)(int *count);                                                                                    \
        int (*get_properties)(int device, struct props_ *props);                                                       \
        int (*listen)(void *ctx, int device, void *handle, void **listener);                                           \
        int (*connect)(void *ctx, int device, void *handle, void **comm, void **device_comm);                          \
        int (*accept)(void *listener, void **comm, void **device_comm);                                                \
        NCCL_TABLE_REGISTER;                                                                                           \
        NCCL_TABLE_MOVE;                                                                                               \
        NCCL_TABLE_CLOSE;                                                                                              \
        NCCL_TABLE_DEVICE;                                                                                             \
        int (*make_virtual_device)(int *device, void *props);                                                          \
        int (*finalize)(void *ctx);                                                                                    \
        int (*set_net_attr)(void *ctx, void *attributes);                                                              \
    }

NCCL_NET_V11(nccl_net_v11, nccl_props_v11);
NCCL_NET_V11(nccl_net_v12, nccl_props_v12);

_Static_assert(sizeof(struct nccl_props_v6) == 48 && offsetof(struct nccl_props_v6, ptr_support) == 24, "v6");
_Static_assert(offsetof(struct nccl_props_v6, speed) == 28 && offsetof(struct nccl_props_v6, max_recvs) == 44, "v6");
_Static_assert(sizeof(struct nccl_props_v8) == 64 && offsetof(struct nccl_props_v8, speed) == 32, "v8");
_Static_assert(offsetof(struct nccl_props_v8, latency) == 40 && offsetof(struct nccl_props_v8, max_recvs) == 48, "v8");
_Static_assert(sizeof(struct nccl_props_v10) == 104 && offsetof(struct nccl_props_v10, speed) == 36, "v10");
_Static_assert(offsetof(struct nccl_props_v10, max_recvs) == 52 && offsetof(struct nccl_props_v10, parts) == 64, "v10");
_Static_assert(offsetof(struct nccl_props_v10, max_p2p_bytes) == 88, "v10");
_Static_assert(sizeof(struct nccl_props_v11) == 112, "v11");
_Static_assert(offsetof(struct nccl_props_v11, max_multi_request) == 104, "v11");
_Static_assert(sizeof(struct nccl_props_v12) == 128 && offsetof(struct nccl_props_v12, max_p2p_bytes) == 104, "v12");
_Static_assert(offsetof(struct nccl_props_v12, max_multi_request) == 120, "v12");
_Static_assert(offsetof(struct nccl_props_v12, rail) == 124 && offsetof(struct nccl_props_v12, plane) == 126, "v12");
_Static_assert(sizeof(struct nccl_net_v6) == 17 * sizeof(void *), "v6");
_Static_assert(offsetof(struct nccl_net_v6, isend) == 10 * sizeof(void *), "v6");
_Static_assert(offsetof(struct nccl_net_v6, close_listen) == 16 * sizeof(void *), "v6");
_Static_assert(sizeof(struct nccl_net_v8) == 19 * sizeof(void *), "v8");
_Static_assert(offsetof(struct nccl_net_v8, close_listen) == 16 * sizeof(void *), "v8");
_Static_assert(sizeof(struct nccl_net_v10) == 20 * sizeof(void *), "v10");
_Static_assert(offsetof(struct nccl_net_v10, isend) == 10 * sizeof(void *), "v10");
_Static_assert(sizeof(struct nccl_net_v11) == 22 * sizeof(void *), "v11");
_Static_assert(offsetof(struct nccl_net_v11, test) == 13 * sizeof(void *), "v11");
_Static_assert(sizeof(struct nccl_net_v12) == 22 * sizeof(void *), "v12");

// The symbols that the library exports, beside version 6 (net.h).
extern const struct nccl_net_v8 ncclNetPlugin_v8;
extern const struct nccl_net_v10 ncclNetPlugin_v10;
extern const struct nccl_net_v11 ncclNetPlugin_v11;
extern const struct nccl_net_v12 ncclNetPlugin_v12;

#endif
