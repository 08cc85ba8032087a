// Buffer: locates, scales, reduces and copies ranges of an operation's memory, and packs memory in many pieces.
#include "engine/buffer.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/clock.h"
#include "base/error.h"
#include "coll/ring_schedule.h"
#include "engine/engine.h"
#include "engine/operation.h"
#include "trace/event.h"
#include "trace/ring.h"
#include "transport/transport.h"

enum { PIECES_MAX = NB_LANE_IOV_MAX - 1 }; // pieces of memory of one block

// Returns the piece that holds byte `offset` of the buffer.
static int piece_at(const struct nb_work *work, size_t offset) {
    int low = 0;
    int high = work->piece_count - 1;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (work->starts[mid] <= offset) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    return low;
}

int nb_buffer_memory(const struct nb_work *work, struct nb_range range, struct iovec *iov, int max) {
    int n = 0;
    for (int p = piece_at(work, range.offset); range.bytes > 0; p++) {
        if (n == max) {
            return max + 1;
        }
        size_t skip = range.offset - work->starts[p];
        size_t room = work->pieces[p].bytes - skip;
        size_t take = room < range.bytes ? room : range.bytes;
        iov[n++] = (struct iovec){.iov_base = (char *)work->pieces[p].base + skip, .iov_len = take};
        range.offset += take;
        range.bytes -= take;
    }
    return n;
}

struct nb_range nb_buffer_all(const struct nb_work *work) {
    return (struct nb_range){.offset = 0, .bytes = work->starts[work->piece_count]};
}

// Returns the first piece of a range and removes it from the range.
static struct iovec piece_next(const struct nb_work *work, struct nb_range *range) {
    struct iovec iov = {0};
    nb_buffer_memory(work, *range, &iov, 1);
    range->offset += iov.iov_len;
    range->bytes -= iov.iov_len;
    return iov;
}

void nb_buffer_scale(const struct nb_work *work, struct nb_range range, double factor) {
    while (factor != 1 && range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        work->scale(piece.iov_base, piece.iov_len / work->element_bytes, factor);
    }
}

void nb_buffer_reduce(const struct nb_work *work, struct nb_range range, const void *data) {
    const char *from = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        work->reduce(piece.iov_base, from, piece.iov_len / work->element_bytes);
        from += piece.iov_len;
    }
}

void nb_buffer_place(const struct nb_work *work, struct nb_range range, const void *data) {
    const char *from = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        memcpy(piece.iov_base, from, piece.iov_len);
        from += piece.iov_len;
    }
}

void nb_buffer_read(const struct nb_work *work, struct nb_range range, void *data) {
    char *to = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        memcpy(to, piece.iov_base, piece.iov_len);
        to += piece.iov_len;
    }
}

void nb_buffer_move(const struct nb_work *work, struct nb_range from, struct nb_range to) {
    while (from.bytes > 0) {
        struct iovec piece = piece_next(work, &from);
        nb_buffer_place(work, (struct nb_range){to.offset, piece.iov_len}, piece.iov_base);
        to.offset += piece.iov_len;
    }
}

// Records that pieces were joined into one buffer, or (`parted`) copied back, from begin_ns until now.
static void record_pack(const struct nb_work *work, int64_t begin_ns, bool parted) {
    nb_ring_put_at(work->ring, begin_ns, NB_EV_OP_PACK, work->desc.key, work->round, work->desc.bytes, parted,
                   (uint64_t)(nb_now_ns() - begin_ns), 0);
}

// True if a block of the buffer lies in more pieces than one segment can carry.
static bool too_scattered(const struct nb_work *work) {
    size_t block = work->block_bytes;
    int first = 0;
    for (int i = 0; block > 0 && i < work->piece_count; i++) {
        while (work->starts[first + 1] + block <= work->starts[i]) {
            first++;
        }
        if (i - first + 1 > PIECES_MAX) {
            return true;
        }
    }
    return false;
}

// Copies the buffer to one piece of memory of the engine.
static int fuse(struct nb_work *work, struct nb_error *err) {
    int64_t begin_ns = nb_now_ns();
    size_t bytes = work->starts[work->piece_count];
    work->fused = malloc(bytes);
    if (work->fused == NULL) {
        return nb_fail(err, -ENOMEM, "%s: cannot allocate %zu bytes to join %d pieces", work->desc.name, bytes,
                       work->piece_count);
    }
    for (int i = 0; i < work->piece_count; i++) {
        memcpy((char *)work->fused + work->starts[i], work->pieces[i].base, work->pieces[i].bytes);
    }
    work->pieces[0] = (struct nb_segment){.base = work->fused, .bytes = bytes};
    work->piece_count = 1;
    work->starts[1] = bytes;
    record_pack(work, begin_ns, false);
    return 0;
}

int nb_buffer_pack(struct nb_work *work, struct nb_error *err) {
    return work->piece_count > 1 && too_scattered(work) ? fuse(work, err) : 0;
}

void nb_buffer_unpack(const struct nb_work *work) {
    if (work->fused == NULL) {
        return;
    }
    int64_t begin_ns = nb_now_ns();
    size_t at = 0;
    for (int i = 0; i < work->segment_count; i++) {
        if (work->segments[i].bytes > 0) {
            memcpy(work->segments[i].base, (char *)work->fused + at, work->segments[i].bytes);
        }
        at += work->segments[i].bytes;
    }
    record_pack(work, begin_ns, true);
}
