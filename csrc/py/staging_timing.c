// Staging timing: how long a GPU's memory takes to pinned memory and back, by the engine's own staging, without an
// operation between the ranks.
#include "py/core.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/staging.h"

enum { SAMPLES_MAX = 10000 };
static const int64_t limit_ns = 60000000000; // of a sample

static const struct way {
    const char *name;
    struct nb_staging_parts out;
    struct nb_staging_parts back;
} ways[] = {{"out", {0, 1}, {0, 0}}, {"back", {0, 0}, {0, 1}}, {"both", {0, 1}, {0, 1}}};

// A staging of the engine's size, on streams of its own.
struct staged {
    struct nb_cuda_driver driver;
    struct nb_cuda_device device;
    struct nb_staging *staging;
    struct CUstream_st *out;
    struct CUstream_st *back;
};

static int on_device(const struct staged *staged, struct nb_error *err) {
    return nb_cuda_enter(&staged->device, err);
}

static int streams_create(struct staged *staged, struct nb_error *err) {
    const struct nb_cuda_driver *driver = &staged->driver;
    int rc = on_device(staged, err);
    if (rc < 0) {
        return rc;
    }
    struct CUstream_st **streams[] = {&staged->out, &staged->back};
    for (size_t i = 0; rc == 0 && i < sizeof streams / sizeof *streams; i++) {
        rc = nb_cuda_check(&staged->device, driver->stream_create(streams[i], NB_CUDA_STREAM_NON_BLOCKING),
                           "cuStreamCreate", 0, err);
    }
    nb_cuda_leave(&staged->device);
    return rc;
}

static int staged_open(struct staged *staged, const char *library, int device, struct nb_error *err) {
    int rc = nb_cuda_driver_open(&staged->driver, library, err);
    rc = rc < 0 ? rc : nb_cuda_device_open(&staged->device, &staged->driver, device, err);
    rc = rc < 0 ? rc : streams_create(staged, err);
    if (rc < 0) {
        return rc;
    }
    const struct nb_staging_config config = {.chunk_bytes = NB_STAGING_CHUNK_BYTES,
                                             .chunks = NB_STAGING_CHUNKS,
                                             .image = nb_cuda_image(),
                                             .out = staged->out,
                                             .back = staged->back};
    if ((rc = nb_staging_open(&staged->staging, &staged->device, &config, err)) < 0) {
        return rc;
    }
    const char *why = nb_staging_unpinned(staged->staging);
    return why != NULL ? nb_fail(err, -ENOTSUP, "the memory of the staging cannot be pinned: %s", why) : 0;
}

static void staged_close(struct staged *staged) {
    struct nb_error ignored = {0};
    nb_staging_close(staged->staging);
    if (staged->device.context != NULL && on_device(staged, &ignored) == 0) {
        if (staged->out != NULL) {
            (void)staged->driver.stream_destroy(staged->out);
        }
        if (staged->back != NULL) {
            (void)staged->driver.stream_destroy(staged->back);
        }
        nb_cuda_leave(&staged->device);
    }
    nb_cuda_device_close(&staged->device);
}

// Returns chunks as they come, until the transfer is done.
static int chunks_move(struct staged *staged, struct nb_staging_transfer *transfer, int64_t until_ns,
                       struct nb_error *err) {
    int rc = 0;
    while (rc >= 0 && !transfer->done) {
        struct nb_staging_chunk chunk;
        rc = nb_staging_poll(staged->staging, err);
        while (rc >= 0 && (rc = nb_staging_take(staged->staging, transfer, &chunk, err)) > 0) {
            rc = nb_staging_return(staged->staging, transfer, chunk.index, err);
        }
        if (rc >= 0 && !transfer->done && nb_now_ns() > until_ns) {
            rc = nb_fail(err, -ETIMEDOUT, "CUDA: copies of %zu bytes have not ended after %lld s",
                         transfer->request.pieces->bytes, (long long)(limit_ns / 1000000000));
        }
    }
    return rc < 0 ? rc : 0;
}

// Writes the ns until all copies of a transfer are done.
static int sample(struct staged *staged, const struct nb_staging_request *request, double *ns, struct nb_error *err) {
    struct nb_staging_transfer transfer = {0};
    const int64_t began_ns = nb_now_ns();
    int rc = nb_staging_start(staged->staging, &transfer, request, err);
    if (rc < 0) {
        return rc;
    }
    rc = chunks_move(staged, &transfer, began_ns + limit_ns, err);
    if (rc < 0) {
        nb_staging_cancel(staged->staging, &transfer);
        return rc;
    }
    rc = on_device(staged, err);
    if (rc == 0) {
        rc = nb_cuda_check(&staged->device, staged->driver.stream_synchronize(staged->back), "cuStreamSynchronize", 0,
                           err);
        nb_cuda_leave(&staged->device);
    }
    *ns = (double)(nb_now_ns() - began_ns);
    return rc;
}

static const struct way *way_of(const char *name) {
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (strcmp(ways[i].name, name) == 0) {
            return &ways[i];
        }
    }
    return NULL;
}

struct asked {
    const struct way *way;
    const char *library;
    int device;
    struct nb_staging_piece piece;
    long samples;
};

static int measure(const struct asked *asked, double *ns, struct nb_error *err) {
    struct staged staged = {0};
    const struct nb_staging_request request = {.pieces = &asked->piece,
                                               .piece_count = 1,
                                               .parts = 1,
                                               .element_bytes = 1,
                                               .out = asked->way->out,
                                               .back = asked->way->back};
    int rc = staged_open(&staged, asked->library, asked->device, err);
    for (long i = -1; rc == 0 && i < asked->samples; i++) { // one for warmth
        rc = sample(&staged, &request, &ns[i < 0 ? 0 : i], err);
    }
    staged_close(&staged);
    return rc;
}

PyObject *core_staging_times(PyObject *module, PyObject *args, PyObject *kwargs) {
    static const char *const keywords[] = {"way", "device", "address", "nbytes", "samples", "library", NULL};
    struct nb_error err = {0};
    struct asked asked = {.samples = 1};
    unsigned long long address;
    const char *name;
    Py_ssize_t bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "siKn|lz:staging_times", (char **)keywords, &name, &asked.device,
                                     &address, &bytes, &asked.samples, &asked.library)) {
        return NULL;
    }
    asked.way = way_of(name);
    asked.piece = (struct nb_staging_piece){address, (size_t)bytes};
    if (asked.way == NULL || bytes < 1 || asked.samples < 1 || asked.samples > SAMPLES_MAX) {
        return PyErr_Format(PyExc_ValueError,
                            "%s of %zd bytes, %ld samples: must be out, back or both of at least one byte, and 1 to %d",
                            name, bytes, asked.samples, SAMPLES_MAX);
    }
    double *ns = calloc((size_t)asked.samples, sizeof(*ns));
    if (ns == NULL) {
        return PyErr_NoMemory();
    }
    PyThreadState *saved = PyEval_SaveThread();
    int rc = measure(&asked, ns, &err);
    PyEval_RestoreThread(saved);
    PyObject *list = rc < 0 ? core_raise(PyModule_GetState(module), rc, &err) : core_floats(ns, asked.samples);
    free(ns);
    return list;
}
