// Comm internals: the state shared by comm.c, comm_open.c, comm_job.c and comm_submit.c.
#ifndef NB_PY_COMM_H
#define NB_PY_COMM_H

#include "py/core.h" // IWYU pragma: export

struct core_comm {
    PyObject base;
    struct nb_job *job;      // NULL: not open, or closed
    bool other_driver;       // another CUDA driver than the usual one is named
    bool closing;            // the job is being closed and is no longer in `job`
    int waiters;             // threads that wait on the job without the GIL
    bool recording;          // the communication thread uses `recorder`
    PyObject *recorder;      // or NULL
    PyObject *clock;         // the recorder that gets the clock's measurements too, or NULL
    PyObject *strings;       // the strings that the job's configuration points to
    struct nb_list mappings; // struct core_mapping: arenas that are registered with the lanes
    PyObject *last_info;     // values at close()
    PyObject *last_notices;  //
    struct nb_list holds;    // dropped operations that are not done yet
    struct nb_error failure; // the job's failure at close()
    int rank;
    int size;
    pid_t pid; // process that created it
    int64_t clock_offset_ns;
    uint64_t exchanges;
};

// Checks the arguments, joins, measures the clock, opens the job: 0, or -1 with an exception.
int core_comm_open(struct core_comm *self, PyObject *args, PyObject *kwargs);

// comm_submit.c: the methods of these names.
PyObject *core_comm_submit_method(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *core_comm_group(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *core_comm_missing(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *core_comm_exchange(PyObject *object, PyObject *args, PyObject *kwargs);

#endif
