// Arena: gradient memory as an object with the writable buffer protocol.
#include "py/core.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "base/arena.h"

// The arena's memory. It is freed after the arena is gone and no job maps it any more.
struct core_room {
    struct nb_arena arena;
    _Atomic int users;
};

struct core_arena {
    PyObject base;
    struct core_room *room;
    struct nb_list mappings; // struct core_mapping
    size_t bytes;            // as requested
};

static struct core_arena *arena_of(PyObject *object) {
    return (struct core_arena *)object;
}

void core_room_release(void *room) {
    struct core_room *self = room;
    if (self != NULL && atomic_fetch_sub(&self->users, 1) == 1) {
        nb_arena_close(&self->arena);
        free(self);
    }
}

const struct nb_arena *core_room_memory(const struct core_room *room) {
    return &room->arena;
}

int core_arena_map(PyObject *arena, PyObject *comm, struct nb_list *mappings,
                   void (*drop)(struct core_mapping *mapping)) {
    struct core_arena *self = arena_of(arena);
    NB_LIST_EACH(it, &self->mappings) {
        if (NB_CONTAINER(it, struct core_mapping, in_arena)->comm == comm) {
            return 0;
        }
    }
    struct core_mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    mapping->comm = comm;
    mapping->drop = drop;
    mapping->room = self->room;
    atomic_fetch_add(&self->room->users, 1);
    nb_list_insert(mappings, &mapping->in_comm);
    nb_list_insert(&self->mappings, &mapping->in_arena);
    return 1;
}

void core_mapping_end(struct core_mapping *mapping) {
    nb_list_remove(&mapping->in_comm);
    nb_list_remove(&mapping->in_arena);
    core_room_release(mapping->room);
    free(mapping);
}

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"nbytes", NULL};
    PyObject *value;
    long bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Arena", (char **)keywords, &value) ||
        core_get_long("nbytes", value, 1, PY_SSIZE_T_MAX, &bytes) < 0) {
        return NULL;
    }
    struct core_arena *self = (struct core_arena *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    struct nb_error err = {0};
    nb_list_init(&self->mappings);
    self->room = calloc(1, sizeof(*self->room));
    if (self->room == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->room->users = 1;
    int rc = nb_arena_open(&self->room->arena, (size_t)bytes, &err);
    if (rc < 0) {
        core_raise(core_state_of((PyObject *)self), rc, &err);
        Py_DECREF(self);
        return NULL;
    }
    self->bytes = (size_t)bytes;
    return (PyObject *)self;
}

static void arena_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    struct core_arena *self = arena_of(object);
    NB_LIST_EACH_SAFE(it, next, &self->mappings) {
        struct core_mapping *mapping = NB_CONTAINER(it, struct core_mapping, in_arena);
        nb_list_remove(&mapping->in_arena);
        mapping->drop(mapping);
    }
    core_room_release(self->room);
    PyObject_Free(object);
    Py_DECREF(type);
}

static int arena_getbuffer(PyObject *object, Py_buffer *view, int flags) {
    struct core_arena *self = (struct core_arena *)object;
    return PyBuffer_FillInfo(view, object, self->room->arena.base, (Py_ssize_t)self->bytes, 0, flags);
}

static PyObject *arena_get_address(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromVoidPtr(arena_of(object)->room->arena.base);
}

static PyObject *arena_get_nbytes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(((struct core_arena *)object)->bytes);
}

static PyObject *arena_get_fd(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromLong(arena_of(object)->room->arena.fd);
}

const struct nb_arena *core_arena_memory(PyObject *arena) {
    return &arena_of(arena)->room->arena;
}

PyTypeObject *core_arena_type(PyObject *module) {
    static const char doc[] =
        "Arena(nbytes)\n--\n\n"
        "Page-aligned, zeroed memory (memfd where the kernel allows), with the writable buffer\n"
        "protocol. It is freed when the last buffer and the object are gone and the jobs that it\n"
        "was mapped for have let go of it, which they do at once.";
    static const PyGetSetDef getset[] = {
        {"address", arena_get_address, NULL, "Address of the first byte.", NULL},
        {"nbytes", arena_get_nbytes, NULL, "Requested size in bytes.", NULL},
        {"fd", arena_get_fd, NULL, "The memfd, -1 for private memory.", NULL},
        {0},
    };
    static const PyType_Slot slots[] = {
        {Py_tp_doc, (void *)doc},
        {Py_tp_new, (void *)arena_new},
        {Py_tp_dealloc, (void *)arena_dealloc},
        {Py_tp_getset, (void *)getset},
        {Py_bf_getbuffer, (void *)arena_getbuffer},
        {0, NULL},
    };
    static const PyType_Spec spec = {
        .name = "netbottleneck._core.Arena",
        .basicsize = sizeof(struct core_arena),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = (PyType_Slot *)slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, (PyType_Spec *)&spec, NULL);
}
