// Device stamps: stamps of a training on a GPU get the time at which the current stream reaches them. They are written
// to the ring after the device has passed them. Everything runs under the GIL.
#ifndef NB_PY_DEVICE_STAMPS_H
#define NB_PY_DEVICE_STAMPS_H

#include "py/core.h" // IWYU pragma: export

struct core_device_stamps;

// For the device of a tensor. `library`: the driver in place of libcuda.so.1, or NULL. NULL with an exception.
struct core_device_stamps *core_device_stamps_open(struct core_state *state, PyObject *tensor, const char *library);
// Waits at most `limit_ns` for the device, writes what it has passed, and counts the rest as dropped. Accepts NULL.
void core_device_stamps_close(struct core_device_stamps *self, struct nb_ring *ring, int64_t limit_ns);

// The device, whose current stream a stamp needs. False: an event of this kind is not stamped.
bool core_device_stamps_takes(const struct core_device_stamps *self, uint32_t kind, struct core_device *where);
// Stamps an event of the present step on a stream; NULL: torch does not say which one is current. A failure ends the
// stamps and is reported by core_device_stamps_read(): a stamp must not disturb the training. Runs no Python.
void core_device_stamps_put(struct core_device_stamps *self, const struct nb_ring *ring, struct nb_event event,
                            void *const *stream);
// Writes the stamps that the device has passed. Returns the number that is left; -1 with an exception for a failure.
Py_ssize_t core_device_stamps_read(struct core_device_stamps *self, const struct core_state *state,
                                   struct nb_ring *ring);

// False: stamps of single gradients are left out, because each costs an event on the device.
void core_device_stamps_detail(struct core_device_stamps *self, bool detailed);
// Address of a stream that waits for nothing that the training does. It lives as long as the process.
void *core_device_stamps_stream(const struct core_device_stamps *self);

#endif
