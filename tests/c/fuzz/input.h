// Input of one fuzzer run, read piece by piece.
#ifndef NB_FUZZ_INPUT_H
#define NB_FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct input {
    const uint8_t *data;
    size_t bytes;
};

// Reads the next bytes; zeros beyond the end.
static inline void take(struct input *in, void *out, size_t bytes) {
    size_t n = in->bytes < bytes ? in->bytes : bytes;
    memset(out, 0, bytes);
    memcpy(out, in->data, n);
    in->data += n;
    in->bytes -= n;
}

static inline uint8_t take_byte(struct input *in) {
    uint8_t byte;
    take(in, &byte, sizeof byte);
    return byte;
}

#endif
