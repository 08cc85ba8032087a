// Where bytes of a line lie, and what is done to them there.
#include "engine/line.h"

#include <stddef.h>
#include <string.h>
#include <sys/uio.h>

#include "coll/sched.h"
#include "engine/internal.h"

// The piece that holds byte `offset` of the line.
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

int nb_line_memory(const struct nb_work *work, struct nb_range range, struct iovec *iov, int max) {
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

struct nb_range nb_line_all(const struct nb_work *work) {
    return (struct nb_range){.offset = 0, .bytes = work->starts[work->piece_count]};
}

// The first piece of a range, which goes on behind it.
static struct iovec piece_next(const struct nb_work *work, struct nb_range *range) {
    struct iovec iov = {0};
    nb_line_memory(work, *range, &iov, 1);
    range->offset += iov.iov_len;
    range->bytes -= iov.iov_len;
    return iov;
}

void nb_line_scale(const struct nb_work *work, struct nb_range range, double factor) {
    while (factor != 1 && range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        work->scale(piece.iov_base, piece.iov_len / work->element_bytes, factor);
    }
}

void nb_line_reduce(const struct nb_work *work, struct nb_range range, const void *data) {
    const char *from = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        work->reduce(piece.iov_base, from, piece.iov_len / work->element_bytes);
        from += piece.iov_len;
    }
}

void nb_line_place(const struct nb_work *work, struct nb_range range, const void *data) {
    const char *from = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        memcpy(piece.iov_base, from, piece.iov_len);
        from += piece.iov_len;
    }
}

void nb_line_read(const struct nb_work *work, struct nb_range range, void *data) {
    char *to = data;
    while (range.bytes > 0) {
        struct iovec piece = piece_next(work, &range);
        memcpy(to, piece.iov_base, piece.iov_len);
        to += piece.iov_len;
    }
}

void nb_line_move(const struct nb_work *work, struct nb_range from, struct nb_range to) {
    while (from.bytes > 0) {
        struct iovec piece = piece_next(work, &from);
        nb_line_place(work, (struct nb_range){to.offset, piece.iov_len}, piece.iov_base);
        to.offset += piece.iov_len;
    }
}
