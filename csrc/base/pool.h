// Items of one size that come and go: what is given back is given out again, and memory is asked for only where more are out
// than ever before. Items lie at multiples of their size, for types that need no more than 8 bytes.
#ifndef NB_BASE_POOL_H
#define NB_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>

struct nb_pool {
    size_t item_bytes; // a multiple of 8
    size_t count;      // of items, given out or not
    void *idle;        // given back
    char *fresh;       // never given out,
    size_t fresh_count;
    void *chunks;
};

void nb_pool_init(struct nb_pool *pool, size_t item_bytes);
// Items that are out are gone too.
void nb_pool_fini(struct nb_pool *pool);
// So many in all. False: there is no memory.
bool nb_pool_reserve(struct nb_pool *pool, size_t count);
// Not cleared. NULL: there is no memory.
void *nb_pool_get(struct nb_pool *pool);
void nb_pool_give(struct nb_pool *pool, void *item);

#endif
