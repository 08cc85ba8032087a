// Buffer: locates, scales, reduces and copies ranges of an operation's memory.
#include "engine/buffer.h"

#include <stddef.h>
#include <string.h>
#include <sys/uio.h>

#include "coll/sched.h"
#include "engine/operation.h"

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
