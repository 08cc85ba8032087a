// The inside of a Comm: shared by comm.c, comm_open.c, which joins the job, and comm_submit.c.
#ifndef NB_PY_COMM_H
#define NB_PY_COMM_H

#include "py/core.h" // IWYU pragma: export

struct core_comm {
    PyObject base;
    struct nb_job *job;      // NULL: not open, or closed
    bool closing;            // the job is being closed, and was taken out of `job`
    int waiters;             // threads that wait on the job without the GIL
    bool recording;          // `recorder` is taken for the communication thread
    PyObject *recorder;      // or NULL
    PyObject *strings;       // what the job's configuration points to
    struct nb_list mappings; // struct core_mapping: arenas whose memory the lanes know
    PyObject *last_info;     // as it was when it was closed
    PyObject *last_notices;  //
    struct nb_list holds;    // operations that nobody waits for any more
    struct nb_error failure; // what had ended the job when it was closed
    int rank;
    int size;
    pid_t pid; // that made it
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
