// The inside of a GradHook: parameters, buckets, and what has happened to them in this step. Everything under the GIL.
#ifndef NB_PY_GRADHOOK_H
#define NB_PY_GRADHOOK_H

#include "py/core.h"   // IWYU pragma: export
#include "py/tensor.h" // IWYU pragma: export

// A submitted bucket is one line: what lies between two gradients that travel directly is one segment more.
enum { GRADHOOK_DIRECT_MAX = (NB_SEGMENTS_MAX - 1) / 2 };

// What a call reads stands in one line of the processor's cache.
struct gradhook_param {
    _Alignas(64) PyObject *parameter; // a weak reference: torch never collects a cycle through a hook of its own
    PyObject *taken;                  // the gradient that was taken, and gets the sum; else NULL
    void *taken_base;                 // where it lay; of one that is `odd`, the tensor itself
    char *memory;                     // in the bucket
    size_t bytes;
    const void *next_hook; // as `next`: the hook's address
    uint32_t next;         // which gradient came after this one when it was last ready
    uint32_t bucket;
    uint32_t left;      // passes until it is ready
    uint16_t element;   // what the view's elements are, as core_tensor_look says; 0: not known
    bool direct : 1;    // it travels from its own memory; else it was copied, and gets a copy back
    bool odd : 1;       // torch copied it: another layout or dtype than the view's, or sparse
    bool dense : 1;     // the view is contiguous, as a gradient that can be copied at once
    bool ordered : 1;   // is in `order`
    bool sparse : 1;    // a gradient was
    PyObject *alias;    // of one that is direct and on its way to a Comm: keeps the memory, see gradhook_hold
    void *storage;      // then: torch's storage that had the memory
    void *storage_base; // and where that began
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
    uint32_t left;          // members that are not ready
    uint32_t direct;        // members that travel directly
    bool sent;              // and not waited for
    bool round;             // was sent since the last complete step
    struct core_hold *hold; // sent to a Comm
    PyObject *future;       // sent to a callable
};

// Which parameter has taken which memory in this pass, and how torch counts the users of memory.
struct gradhook_claims {
    struct gradhook_claim {
        const void *key; // as taken_base
        uint32_t pass;   // an entry of another pass is free
        uint32_t param;
    } *slots; // open addressing
    uint32_t mask;
    uint32_t pass;
    PyObject *count;   // torch's function that counts the users of a storage; NULL: it has none
    PyObject *address; // torch's function that says where a tensor lies, as one who will not write there
    long tensor_uses;  // of a tensor that one owner in C++ and one Python object have
    long storage_uses; // of a storage that one tensor and one Python object have
};

struct core_gradhook {
    PyObject base;
    PyObject *recorder; // or NULL
    PyObject *target;   // a Comm, a callable, or NULL: nowhere
    struct nb_comm *of; // of a Comm: whose operations they are
    PyObject *keep;
    PyObject *on_first;             // called at the first gradient of a pass; or NULL
    struct core_tensor_table table; // of the views' type
    struct gradhook_claims claims;
    bool native; // the target is a Comm
    bool busy;   // waiting without the GIL
    bool paused; // gradients are stamped and left alone
    bool began;  // on_first was called in this pass
    double prescale;
    double postscale;
    int redop;
    size_t direct_bytes;
    uint32_t passes;
    uint32_t param_count;
    struct gradhook_param *params;
    uint32_t bucket_count;
    struct gradhook_bucket *buckets;
    uint32_t *members;
    uint32_t *order; // of readiness in this step
    uint32_t order_count;
    uint32_t *last_order; // in the last complete step
    uint32_t last_count;
    uint32_t pending; // buckets that are sent
    uint32_t recent;  // whose hook was called last
};

// gradhook_open.c: checks the arguments and fills self; 0, or -1 with an exception.
int gradhook_open(struct core_gradhook *self, PyObject *args, PyObject *kwargs);

// What a gradient's memory lets us do.
struct gradhook_found {
    void *base;
    bool plain; // host memory of the view's dtype and size, contiguous
};

// gradhook_place.c: brings the gradient of a parameter to where its bucket is sent from; a missing one becomes zeros.
// arrived: what autograd has just added, or NULL. 0, or -1 with an exception.
int gradhook_place(struct core_gradhook *self, struct gradhook_param *param, PyObject *arrived);
int gradhook_look(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                  struct gradhook_found *out);

// gradhook_back.c: the gradient that was taken gets the sum, and so does the parameter's `grad` where it is another by
// now. 0, or -1 with an exception.
int gradhook_give_back(const struct core_gradhook *self, const struct gradhook_param *param);

// gradhook_claim.c
int gradhook_claims_open(struct core_gradhook *self); // 0, or -1 with an exception
void gradhook_claims_close(struct core_gradhook *self);
// 1: no other tensor has the gradient's memory, at `base`, but what autograd has in hand. 0, or -1 with an exception.
int gradhook_is_alone(const struct core_gradhook *self, const struct gradhook_param *param, PyObject *gradient,
                      PyObject *arrived);
// Keeps the memory of a gradient in place, and what it holds, until gradhook_drop(): also where the gradient is given
// other memory, resized, written to or swapped meanwhile. Notes where it lies. 1; 0: it cannot be kept; -1 with an
// exception.
int gradhook_hold(const struct core_gradhook *self, struct gradhook_param *param, PyObject *gradient);
// Where a gradient that travelled directly has its memory now.
enum gradhook_moved {
    GRADHOOK_STAYED,
    GRADHOOK_REWRITTEN, // its storage has other memory, of the same size: it was written to, or resized
    GRADHOOK_REPLACED,
    GRADHOOK_UNKNOWN // with an exception
};
enum gradhook_moved gradhook_moved(const struct core_gradhook *self, const struct gradhook_param *param, void **now);
// A parameter has taken a gradient: another that took the same one before gets no sum, which would be an older one.
void gradhook_claim(struct core_gradhook *self, struct gradhook_param *param);
// Lets go of the gradient that was to get the sum.
void gradhook_drop(struct core_gradhook *self, struct gradhook_param *param);

// gradhook_bucket.c
// A gradient was accumulated; arrived: as in gradhook_place.
int gradhook_fire(struct core_gradhook *self, uint32_t index, PyObject *arrived);
int gradhook_flush(struct core_gradhook *self);
int gradhook_wait(struct core_gradhook *self);
// Every parameter and bucket as at the start of a step. Nothing may be pending.
void gradhook_rearm(struct core_gradhook *self);
// Leaves what is in flight to the Comm.
void gradhook_abandon(struct core_gradhook *self);

#endif
