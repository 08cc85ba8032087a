// Module internals: the module's state, and the functions by which the files of this folder use each other. The only
// folder that includes Python.h. Everything runs under the GIL unless stated otherwise.
#ifndef NB_PY_CORE_H
#define NB_PY_CORE_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/arena.h"          // IWYU pragma: export
#include "base/dtype.h"          // IWYU pragma: export
#include "base/error.h"          // IWYU pragma: export
#include "base/list.h"           // IWYU pragma: export
#include "base/sock.h"           // IWYU pragma: export
#include "bootstrap/bootstrap.h" // IWYU pragma: export
#include "cuda/clock.h"          // IWYU pragma: export
#include "engine/engine.h"       // IWYU pragma: export
#include "trace/event.h"         // IWYU pragma: export
#include "trace/ring.h"          // IWYU pragma: export

// The attributes and methods of a tensor that the gradient hook uses, interned once.
enum core_name {
    CORE_GRAD,
    CORE_DATA_PTR,
    CORE_DTYPE,
    CORE_IS_CONTIGUOUS,
    CORE_IS_CPU,
    CORE_NBYTES,
    CORE_COPY_,
    CORE_DETACH,
    CORE_LAZY_CLONE,
    CORE_REQUIRES_GRAD,
    CORE_IS_SPARSE,
    CORE_TO_DENSE,
    CORE_WAIT,
    CORE_NAMES
};

enum core_type {
    CORE_ARENA,
    CORE_LISTENER,
    CORE_RECORDER,
    CORE_STAMPER,
    CORE_OPERATION,
    CORE_WORK,
    CORE_COMM,
    CORE_GRADHOOK,
    CORE_HOOK,
    CORE_TYPES
};

// Indices of the classes of python/netbottleneck/errors.py.
enum core_class {
    CORE_ERROR,
    CORE_PEER_ERROR,
    CORE_WIRE_ERROR,
    CORE_MISMATCH_ERROR,
    CORE_CLOSED_ERROR,
    CORE_DEADLINE_ERROR,
    CORE_CLASSES
};

struct core_state {
    PyTypeObject *types[CORE_TYPES];
    PyObject *classes[CORE_CLASSES];
    PyObject *names[CORE_NAMES];
    struct nb_cuda_kept_streams kept_streams;
};

// The state of the module that made `self`'s type.
static inline struct core_state *core_state_of(PyObject *self) {
    return PyType_GetModuleState(Py_TYPE(self));
}

// Each creates a type of this module and adds it to the module: a new reference, or NULL with an exception.
PyTypeObject *core_arena_type(PyObject *module);
PyTypeObject *core_listener_type(PyObject *module);
PyTypeObject *core_recorder_type(PyObject *module);
PyTypeObject *core_stamper_type(PyObject *module);
PyTypeObject *core_operation_type(PyObject *module);
PyTypeObject *core_work_type(PyObject *module);
PyTypeObject *core_comm_type(PyObject *module);
PyTypeObject *core_gradhook_type(PyObject *module);
PyTypeObject *core_hook_type(PyObject *module);

// The functions of the module, by file.
PyObject *core_spawn_apart(PyObject *module, PyObject *args);
PyObject *core_providers(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_libfabric(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_cuda(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_simulate(PyObject *module, PyObject *args);
PyObject *core_collective_shape(PyObject *module, PyObject *args);
PyObject *core_reduce_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_copy_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_kernel_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_staging_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_stamp_at(PyObject *module, PyObject *args, PyObject *kwargs);

// A list of floats; NULL with an exception.
PyObject *core_floats(const double *values, long count);

// ---- errors.c

// Raises the exception for `code`, with err's text and peer (err may be NULL or empty). Always returns NULL.
PyObject *core_raise(const struct core_state *state, int code, const struct nb_error *err);
// A text of the core. Bytes that are not UTF-8, as where a text was cut, are replaced.
PyObject *core_text(const char *text);
// Raises Error if another process made the object: 0, or -1.
int core_here(const struct core_state *state, pid_t pid, const char *what);

// ---- arguments.c: checks of arguments. Each returns 0, or -1 with an exception that names the argument and its value.

int core_get_long(const char *name, PyObject *value, long low, long high, long *out);
// Any 64-bit integer, signed or not; a converter for PyArg_Parse's O&.
int core_get_u64(PyObject *value, void *out);
// A finite number; 1 if `value` is NULL.
int core_get_scale(const char *name, PyObject *value, double *out);
// Seconds to milliseconds, rounded up; at least `low_ms`.
int core_get_timeout(const char *name, PyObject *value, int low_ms, int *out_ms);
int core_get_dtype(PyObject *value, int *out);
int core_get_redop(PyObject *value, int *out); // NULL: NB_SUM
int core_get_ports(PyObject *value, struct nb_port_range *out);

// ---- memory.c

// A device as DLPack names it: `type` 0 is the host.
struct core_device {
    int32_t type;
    int32_t number;
    int (*stream)(int32_t type, int32_t number, void **out); // the current stream: 0, or -1 with an exception
};

// The memory of an operation, and the Python buffers that keep it in place. Zeroed: empty.
struct core_memory {
    struct nb_segment *segments;
    int count;
    size_t bytes;
    Py_buffer *views; // of a tensor: only a reference
    int view_count;
    struct core_device device; // all segments are there
};

// Parses a tensor, an object with the buffer protocol, (address, bytes), a sequence of those, or None. ValueError or TypeError
// naming the position and the value. The size of every piece is a multiple of `element_bytes`.
int core_memory_parse(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes);
// The same. ValueError for memory of a device.
int core_memory_parse_host(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes);
// May run any Python code.
void core_memory_release(struct core_memory *memory);
int core_memory_visit(const struct core_memory *memory, visitproc visit, void *arg);

// An operation in progress, and the objects that must live as long. To drop one that is not done, pass it to
// core_comm_hold(). The engine thread never touches it.
struct core_hold {
    struct nb_list link;
    struct nb_work *work;
    struct core_memory memory;
    struct core_device device; // of the operation
    PyObject *keep;
};

struct core_hold *core_hold_new(void); // NULL with MemoryError
bool core_hold_done(const struct core_hold *hold);
// Releases the buffers and `keep`. Call only when done. May run any Python code.
void core_hold_settle(struct core_hold *hold);
void core_hold_free(struct core_hold *hold); // accepts NULL; only when done or never submitted
int core_hold_visit(const struct core_hold *hold, visitproc visit, void *arg);

// ---- comm_job.c

// Submits op with hold as its owner: 0, or -1 with an exception (hold->work stays NULL). hold->device: where the memory
// is; its memory is submitted without the GIL. op->streams: those that wrote it; none: the current one.
int core_comm_submit(PyObject *comm, struct nb_comm *of, const struct nb_op *op, struct core_hold *hold);
// Makes the current stream wait for the result of a device operation that is done: 0, or -1 with an exception.
int core_comm_follow(PyObject *comm, const struct core_hold *hold);
// Takes over a dropped hold, and frees it in a sweep after it is done.
void core_comm_hold(PyObject *comm, struct core_hold *hold);
// Frees the dropped holds that are done.
void core_comm_sweep(PyObject *comm);
// False in a forked child, which must not touch the engine.
bool core_comm_is_here(PyObject *comm);
int core_comm_check(PyObject *comm); // 0, or -1: closed, or made in another process
// Enters a wait without the GIL, so that the job is not freed meanwhile. 1: entered, leave it after the wait; 0: the
// job is being closed now; -1: an exception, as core_comm_check.
int core_comm_enter(PyObject *comm);
void core_comm_leave(PyObject *comm);
// Logs notices for the user (a stall, a lost lane) to Python's logger "netbottleneck". 0, or -1 with an exception.
int core_comm_log_notices(PyObject *comm);
// The failure of an operation that is done, `code` by nb_work_test(). Also works after the job is gone.
void core_comm_failure(PyObject *comm, const struct core_hold *hold, int code, struct nb_error *err);

// ---- work.c

// Waits in slices with the GIL released, and handles signals. 1: done; 0: not done by deadline_ns of nb_now_ns()
// (INT64_MAX: none); -1: an exception, which is the operation's failure if core_hold_done().
int core_hold_wait(PyObject *comm, const struct core_hold *hold, int64_t deadline_ns);

// A Work over a submitted hold. Takes over the hold, also on failure.
PyObject *core_work_new(const struct core_state *state, PyObject *comm, struct core_hold *hold);
// True if waiting for a Work would not wait.
int core_work_done(PyObject *object);

// ---- comm_submit.c

// The comm of a group's number, if `comm` is open; number NULL: all ranks. NULL: an exception is set.
struct nb_comm *core_comm_group_of(PyObject *comm, PyObject *number);

// ---- arena.c, listener.c, recorder.c

const struct nb_arena *core_arena_memory(PyObject *arena);

// Memory of an arena that is registered with the lanes of a Comm. It outlives the arena while they use it.
struct core_mapping {
    struct nb_list in_comm;
    struct nb_list in_arena;
    PyObject *comm; // borrowed: it ends its mappings before it goes
    struct core_room *room;
    void (*drop)(struct core_mapping *mapping); // set by the Comm; called when the arena is gone
};

// Records that a Comm maps an arena. 1: recorded; 0: it was already; -1 with an exception.
int core_arena_map(PyObject *arena, PyObject *comm, struct nb_list *mappings,
                   void (*drop)(struct core_mapping *mapping));
// Ends a mapping. The Comm's job must not use the memory afterwards.
void core_mapping_end(struct core_mapping *mapping);
const struct nb_arena *core_room_memory(const struct core_room *room);
// Releases memory that a mapping has kept. Needs no GIL.
void core_room_release(void *room);
// The listener for a join, which cannot be closed until core_listener_release(). NULL with an exception.
struct nb_listener *core_listener_acquire(PyObject *listener);
void core_listener_release(PyObject *listener);

// The ring for stamps under the GIL. Never NULL; the ring of a closed recorder ignores stamps.
struct nb_ring *core_recorder_ring(PyObject *recorder);
// Stamps an event now, under the GIL; recorder NULL: no effect.
void core_recorder_stamp(PyObject *recorder, enum nb_event_kind kind, uint64_t key);
// The ring for the engine thread; it stays open until core_recorder_release(). NULL with an exception if it is closed.
struct nb_ring *core_recorder_acquire(PyObject *recorder);
void core_recorder_release(PyObject *recorder);

#endif
