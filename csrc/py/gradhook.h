// GradHook internals: parameters, buckets, and their state in this step. Everything runs under the GIL.
#ifndef NB_PY_GRADHOOK_H
#define NB_PY_GRADHOOK_H

#include "py/core.h"   // IWYU pragma: export
#include "py/tensor.h" // IWYU pragma: export

// A submitted bucket is one operation: the memory between two gradients that travel directly is another segment.
enum { GRADHOOK_DIRECT_MAX = (NB_SEGMENTS_MAX - 1) / 2 };

// The fields that a call reads share one cache line.
struct gradhook_param {
    _Alignas(64) PyObject *parameter; // a weak reference: torch never collects a cycle through a hook of its own
    PyObject *taken;                  // the gradient that was taken and receives the sum; else NULL
    void *taken_base;                 // its address; if `converted`, the tensor itself
    char *memory;                     // its place in the bucket
    size_t bytes;
    const void *next_hook; // address of the hook of `next`
    uint32_t next;         // the gradient that last became ready after this one
    uint32_t bucket;
    uint32_t left;      // passes until it is ready
    uint16_t element;   // element type of the view, by core_tensor_look; 0: not known
    bool direct : 1;    // it travels from its own memory; else it is copied, and gets a copy back
    bool converted : 1; // torch copied it: its layout or dtype differs from the view's, or it is sparse
    bool dense : 1;     // the view is contiguous, as is a gradient that memcpy can copy
    bool ordered : 1;   // is in `order`
    bool sparse : 1;    // a gradient was sparse
    bool absent : 1;    // with flags: it had no gradient when its bucket was sent
    PyObject *alias;    // of a direct one in progress on a Comm: keeps the memory, see gradhook_hold
    void *storage;      // with `alias`: torch's storage that had the memory
    void *storage_base; // with `alias`: where that storage began
    PyObject *view;
    PyObject *dtype; // of the view
    size_t offset;
};

struct gradhook_bucket {
    char name[NB_NAME_MAX];
    int dtype;
    int priority;
    char *base;
    size_t bytes;
    uint32_t *members; // parameters, by offset
    uint32_t member_count;
    uint32_t left;                                  // members that are not ready
    uint32_t direct;                                // members that travel directly
    bool sent;                                      // and not waited for
    bool round;                                     // was sent since the last complete step
    struct CUstream_st *streams[NB_OP_STREAMS_MAX]; // of a device: those on which gradients were copied to it
    int stream_count;
    struct core_hold *hold; // sent to a Comm
    PyObject *future;       // sent to a callable
    PyObject *flags;        // a tensor over the end of the memory, an element for each member; or NULL
};

// Tracks which parameter has taken which memory in this pass.
struct gradhook_claims {
    struct gradhook_claim {
        const void *key; // as taken_base
        uint32_t pass;   // an entry of another pass is free
        uint32_t param;
    } *slots; // open addressing
    uint32_t mask;
    uint32_t pass;
};

// What torch says of the users of memory.
struct gradhook_uses {
    PyObject *count;   // torch's function that counts the users of a storage; NULL: missing
    PyObject *address; // torch's function that returns a tensor's address without counting as a write
    long tensor_uses;  // of a tensor with one owner in C++ and one Python object
    long storage_uses; // of a storage with one tensor and one Python object
};

struct core_gradhook {
    PyObject base;
    const struct core_state *state; // of the module
    PyObject *recorder;             // or NULL
    PyObject *target;               // a Comm, a callable, or NULL: nowhere
    struct nb_comm *of;             // of a Comm: the comm of the operations
    PyObject *keep;
    PyObject *on_first;             // called at the first gradient of a pass; or NULL
    struct core_tensor_table table; // of the views' type
    struct core_device device;      // of the views
    struct gradhook_claims claims;
    struct gradhook_uses uses;
    uint32_t busy; // calls that submit or wait without the GIL
    bool native;   // the target is a Comm
    bool paused;   // gradients are only stamped
    bool began;    // on_first was called in this pass
    bool held;     // in this pass nothing is sent before flush()
    bool drops;    // gradients do not get the sums of this pass
    bool sending;  // a thread is sending buckets to a callable
    double prescale;
    double postscale;
    int redop;
    int limit_ms; // of a bucket that other ranks have not submitted; 0: none
    size_t direct_bytes;
    uint32_t passes;
    uint32_t param_count;
    struct gradhook_param *params;
    uint32_t bucket_count;
    struct gradhook_bucket *buckets;
    uint32_t *members;
    uint32_t *order; // parameters in the order in which they became ready in this step
    uint32_t order_count;
    uint32_t *last_order; // the same of the last complete step
    uint32_t last_count;
    uint32_t pending; // number of buckets that are sent
    uint32_t turn;    // next bucket that a callable gets in this pass
    uint32_t recent;  // parameter whose hook was called last
};

// gradhook_open.c: checks the arguments and fills self; 0, or -1 with an exception.
int gradhook_open(struct core_gradhook *self, PyObject *args, PyObject *kwargs);

// gradhook_place.c

// How a gradient's memory may be used.
struct gradhook_found {
    void *base;
    bool plain; // host memory of the view's dtype and size, contiguous
    bool stays; // plain, and the gradient can be sent from there
};

// Finds a gradient's memory; sets no `stays`. 0, or -1 with an exception.
int gradhook_look(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                  struct gradhook_found *out);
// Learns torch's use counts. A torch that lacks them has every gradient copied.
void gradhook_uses_open(struct core_gradhook *self);
void gradhook_uses_close(struct core_gradhook *self);
// What happened to the memory of a gradient that travelled directly.
enum gradhook_moved {
    GRADHOOK_STAYED,
    GRADHOOK_REWRITTEN, // its storage has other memory of the same size: it was written to or resized
    GRADHOOK_REPLACED,
    GRADHOOK_UNKNOWN // with an exception
};
enum gradhook_moved gradhook_moved(const struct core_gradhook *self, const struct gradhook_param *param, void **now);

// Brings the gradient of a parameter to the memory from which its bucket is sent. A missing gradient is sent as zeros;
// without flags, it also becomes zeros. arrived: the gradient that autograd has just accumulated, or NULL. 0, or -1 with
// an exception.
int gradhook_place(struct core_gradhook *self, struct gradhook_param *param, PyObject *arrived);
// Notes the stream on which the memory of a bucket is written. 0, or -1 with an exception.
int gradhook_note_stream(const struct core_gradhook *self, struct gradhook_bucket *bucket);
// Releases the gradient that was to receive the sum.
void gradhook_drop(struct core_gradhook *self, struct gradhook_param *param);
int gradhook_is_sparse(const struct core_gradhook *self, PyObject *tensor); // 1, 0, or -1 with an exception
int gradhook_claims_open(struct core_gradhook *self);                       // 0, or -1 with an exception
void gradhook_claims_close(struct core_gradhook *self);

// gradhook_result.c: writes the sum to the gradient that was taken, and to the parameter's `grad` if that is another
// tensor by now. 0, or -1 with an exception.
int gradhook_give_back(const struct core_gradhook *self, const struct gradhook_param *param);

// gradhook_flags.c: a bucket ends with a flag for each member, summed with the gradients: not zero if a rank has that
// gradient. Each returns 0, or -1 with an exception.

// Takes a tensor for each bucket.
int gradhook_flags_open(struct core_gradhook *self, PyObject *flags);
// Writes this rank's flags before the bucket is sent.
int gradhook_flags_write(const struct core_gradhook *self, struct gradhook_bucket *bucket);
// Sets the gradient of an absent member to the sum, if another rank has that gradient.
int gradhook_flags_give(const struct core_gradhook *self, const struct gradhook_bucket *bucket, uint32_t member);

// gradhook.c

// A new callable for a hook of parameter `index`, or NULL.
PyObject *gradhook_hook_new(PyObject *gradhook, uint32_t index);

// gradhook_bucket.c

// Sends a bucket whose gradients are all there: to a Comm, which negotiates an order with the other ranks, at once; to a
// callable, after the buckets before it. 0, or -1 with an exception.
int gradhook_complete(struct core_gradhook *self, struct gradhook_bucket *bucket);
int gradhook_flush(struct core_gradhook *self);
int gradhook_wait(struct core_gradhook *self);
// Ends a pass that has failed: sends what is missing, waits, and gives no gradient its sum. 0, or -1 with an exception.
int gradhook_discard(struct core_gradhook *self);
// True from the first complete gradient of a step until its wait(), whether or not its bucket was sent.
bool gradhook_begun(const struct core_gradhook *self);
// Resets every parameter and bucket to the start of a step. Nothing may be pending.
void gradhook_rearm(struct core_gradhook *self);
// Leaves operations in progress to the Comm.
void gradhook_abandon(struct core_gradhook *self);

#endif
