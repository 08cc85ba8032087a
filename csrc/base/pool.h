// Pool: items of one size that are given out and returned. It allocates memory only when more items are out than ever
// before. Items lie at multiples of their size, for types that need an alignment of at most 8 bytes.
#ifndef NB_BASE_POOL_H
#define NB_BASE_POOL_H

#include <stdbool.h>
#include <stddef.h>

struct nb_pool {
    size_t item_bytes; // a multiple of 8
    size_t count;      // of all items, given out or not
    void *idle;        // items that were returned
    char *fresh;       // items that were never given out
    size_t fresh_count;
    void *chunks;
};

void nb_pool_init(struct nb_pool *pool, size_t item_bytes);
// Frees all items, those given out included.
void nb_pool_fini(struct nb_pool *pool);
// Allocates up to `count` items in all. False: out of memory.
bool nb_pool_reserve(struct nb_pool *pool, size_t count);
// Returns an item, not cleared. NULL: out of memory.
void *nb_pool_get(struct nb_pool *pool);
void nb_pool_give(struct nb_pool *pool, void *item);

#endif
