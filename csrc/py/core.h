// What the files of this room share: the module's state, buffers, failures, and the objects' inner faces. The only
// room that includes Python.h. Everything here runs under the GIL unless it says otherwise.
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
#include "engine/engine.h"       // IWYU pragma: export
#include "trace/event.h"         // IWYU pragma: export
#include "trace/ring.h"          // IWYU pragma: export

// The attributes and methods of a tensor that the gradient hook uses: interned once.
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
    CORE_WORK,
    CORE_COMM,
    CORE_GRADHOOK,
    CORE_HOOK,
    CORE_TYPES
};

// The classes of python/netbottleneck/errors.py.
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
};

// The state of the module that made `self`'s type.
static inline struct core_state *core_state_of(PyObject *self) {
    return PyType_GetModuleState(Py_TYPE(self));
}

// Makes a type of this module and adds it: NULL with an exception set, or a new reference.
PyTypeObject *core_arena_type(PyObject *module);
PyTypeObject *core_listener_type(PyObject *module);
PyTypeObject *core_recorder_type(PyObject *module);
PyTypeObject *core_stamper_type(PyObject *module);
PyTypeObject *core_work_type(PyObject *module);
PyTypeObject *core_comm_type(PyObject *module);
PyTypeObject *core_gradhook_type(PyObject *module);
PyTypeObject *core_hook_type(PyObject *module);

// The functions of the module, by file.
PyObject *core_providers(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_libfabric(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_simulate(PyObject *module, PyObject *args);
PyObject *core_collective_shape(PyObject *module, PyObject *args);
PyObject *core_reduce_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_copy_times(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *core_stamp_at(PyObject *module, PyObject *args, PyObject *kwargs);

// ---- errors.c

// Raises what `code` stands for, with err's text and peer (err may be NULL or empty). Always NULL.
PyObject *core_raise(const struct core_state *state, int code, const struct nb_error *err);
// Raises Error when this process is not the one that made the object: 0, or -1.
int core_here(const struct core_state *state, pid_t pid, const char *what);

// ---- values.c: arguments, checked. Each returns 0, or -1 with an exception that names the argument and its value.

int core_get_long(const char *name, PyObject *value, long low, long high, long *out);
// Any integer of 64 bits, signed or not; as PyArg_Parse's O&.
int core_get_u64(PyObject *value, void *out);
// A finite number that is not 0: the engine takes 0 for 1.
int core_get_scale(const char *name, PyObject *value, double *out);
// Seconds to milliseconds, rounded up; at least `low_ms`.
int core_get_timeout(const char *name, PyObject *value, int low_ms, int *out_ms);
int core_get_dtype(PyObject *value, int *out);
int core_get_redop(PyObject *value, int *out); // NULL: NB_SUM
int core_get_ports(PyObject *value, struct nb_port_range *out);

// ---- memory.c

// The line of memory of an operation, and the buffers that keep it in place. Zeroed: empty.
struct core_memory {
    struct nb_segment *segments;
    int count;
    size_t bytes;
    Py_buffer *views;
    int view_count;
};

// From an object with the buffer protocol, (address, bytes), a sequence of those, or None. ValueError or TypeError
// naming the place and the value. `element_bytes`: what every piece is a multiple of.
int core_memory_parse(struct core_memory *memory, PyObject *object, bool writable, size_t element_bytes);
// May run any Python code.
void core_memory_release(struct core_memory *memory);
int core_memory_visit(const struct core_memory *memory, visitproc visit, void *arg);

// ---- work.c

// An operation under way and what must live as long. Whoever drops one that is not done gives it to
// core_comm_hold(); the engine thread never touches it.
struct core_hold {
    struct nb_list link;
    struct nb_work *work;
    struct core_memory memory;
    PyObject *keep;
};

struct core_hold *core_hold_new(void); // NULL with MemoryError
bool core_hold_done(const struct core_hold *hold);
// Lets go of buffers and `keep`: only when done. May run any Python code.
void core_hold_settle(struct core_hold *hold);
void core_hold_free(struct core_hold *hold); // NULL is fine; only when done or never submitted
int core_hold_visit(const struct core_hold *hold, visitproc visit, void *arg);
// Waits in slices with the GIL released, serving signals. 1: done; 0: not by deadline_ns of nb_now_ns() (INT64_MAX:
// none); -1: an exception, which is the operation's failure where core_hold_done().
int core_hold_wait(PyObject *comm, const struct core_hold *hold, int64_t deadline_ns);

// A Work over a submitted hold, which it takes in every case.
PyObject *core_work_new(const struct core_state *state, PyObject *comm, struct core_hold *hold);

// ---- comm.c

// Submits op with hold as its owner: 0, or -1 with an exception (hold->work stays NULL).
// The comm of a group's number, where `comm` is open; number NULL: of all ranks. NULL: an error is raised.
struct nb_comm *core_comm_group_of(PyObject *comm, PyObject *number);
int core_comm_submit(PyObject *comm, struct nb_comm *of, const struct nb_op *op, struct core_hold *hold);
// Takes a hold that nobody else wants; it is freed once it is seen done.
void core_comm_hold(PyObject *comm, struct core_hold *hold);
// Frees what is done among them.
void core_comm_sweep(PyObject *comm);
// False in a forked child: then nothing of the engine may be touched.
bool core_comm_is_here(PyObject *comm);
// An arena is gone that its job knows: the job takes the mapping, or it ends with the job.
struct core_mapping;
void core_comm_unmap(PyObject *comm, struct core_mapping *mapping);
int core_comm_check(PyObject *comm); // 0, or -1: closed, or made in another process
// Around a wait without the GIL, so that the job is not freed under it. 1: entered, to be left; 0: it is being closed
// this very moment; -1: an exception, as core_comm_check.
int core_comm_enter(PyObject *comm);
void core_comm_leave(PyObject *comm);
// Logs what the user must be told (a stall, a lost lane) to Python's logger "netbottleneck". 0, or -1 with an exception.
int core_comm_tell(PyObject *comm);
// What an operation that is done failed with, `code` by nb_work_test(); also after the job is gone.
void core_comm_failure(PyObject *comm, const struct core_hold *hold, int code, struct nb_error *err);

// ---- arena.c, listener.c, recorder.c

const struct nb_arena *core_arena_memory(PyObject *arena);

// Memory of an arena that the lanes of a Comm know. It outlives the arena where they still do.
struct core_mapping {
    struct nb_list in_comm;
    struct nb_list in_arena;
    PyObject *comm; // borrowed: it takes its mappings apart before it goes
    struct core_room *room;
};

// Notes that a Comm knows an arena. 1; 0: it did before; -1 with an exception.
int core_arena_map(PyObject *arena, PyObject *comm, struct nb_list *mappings);
// Takes a mapping apart: after it the Comm's job must not reach the memory any more.
void core_mapping_end(struct core_mapping *mapping);
const struct nb_arena *core_room_memory(const struct core_room *room);
// Without the GIL, too: lets go of memory that a mapping has kept.
void core_room_release(void *room);
// The listener for a join, during which it cannot be closed: NULL with an exception. core_listener_done() after it.
struct nb_listener *core_listener_use(PyObject *listener);
void core_listener_done(PyObject *listener);

// For stamps under the GIL. Never NULL; a closed one does nothing.
struct nb_ring *core_recorder_ring(PyObject *recorder);
// For the engine thread: the ring stays open until core_recorder_drop(). NULL with an exception when it is closed.
struct nb_ring *core_recorder_take(PyObject *recorder);
void core_recorder_drop(PyObject *recorder);

#endif
