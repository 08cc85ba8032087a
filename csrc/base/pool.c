// Pool: many small items of one size, allocated in chunks.
#include "base/pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

enum { CHUNK_ITEMS = 128 };

union link { // at the start of a chunk and of an idle item
    union link *next;
    double align;
};

void nb_pool_init(struct nb_pool *pool, size_t item_bytes) {
    *pool = (struct nb_pool){.item_bytes = item_bytes};
}

void nb_pool_fini(struct nb_pool *pool) {
    union link *chunk = pool->chunks;
    while (chunk != NULL) {
        union link *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    nb_pool_init(pool, pool->item_bytes);
}

static void *fresh_take(struct nb_pool *pool) {
    void *item = pool->fresh;
    pool->fresh += pool->item_bytes;
    pool->fresh_count--;
    return item;
}

bool nb_pool_reserve(struct nb_pool *pool, size_t count) {
    if (count <= pool->count) {
        return true;
    }
    size_t more = count - pool->count > CHUNK_ITEMS ? count - pool->count : CHUNK_ITEMS;
    union link *chunk = malloc(sizeof *chunk + more * pool->item_bytes);
    if (chunk == NULL) {
        return false;
    }
    while (pool->fresh_count > 0) {
        nb_pool_give(pool, fresh_take(pool));
    }
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    pool->fresh = (char *)(chunk + 1);
    pool->fresh_count = more;
    pool->count += more;
    return true;
}

void *nb_pool_get(struct nb_pool *pool) {
    union link *item = pool->idle;
    if (item != NULL) {
        pool->idle = item->next;
        return item;
    }
    bool any = pool->fresh_count > 0 || nb_pool_reserve(pool, pool->count + 1);
    return any ? fresh_take(pool) : NULL;
}

void nb_pool_give(struct nb_pool *pool, void *item) {
    union link *link = item;
    link->next = pool->idle;
    pool->idle = link;
}
