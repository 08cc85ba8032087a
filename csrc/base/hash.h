// Intrusive chained hash table over 64-bit keys with a fixed number of chains, for tables of names.
#ifndef NB_BASE_HASH_H
#define NB_BASE_HASH_H

#include <stdint.h>

#include "base/list.h"

enum { NB_HASH_CHAINS = 1024 };

struct nb_hash {
    struct nb_list chains[NB_HASH_CHAINS];
};

struct nb_hash_node {
    struct nb_list link;
    uint64_t key;
};

static inline void nb_hash_init(struct nb_hash *hash) {
    for (int i = 0; i < NB_HASH_CHAINS; i++) {
        nb_list_init(&hash->chains[i]);
    }
}

static inline struct nb_list *nb_hash_chain(struct nb_hash *hash, uint64_t key) {
    return &hash->chains[(key ^ key >> 32) % NB_HASH_CHAINS];
}

static inline void nb_hash_put(struct nb_hash *hash, struct nb_hash_node *node, uint64_t key) {
    node->key = key;
    nb_list_insert(nb_hash_chain(hash, key), &node->link);
}

static inline struct nb_hash_node *nb_hash_get(struct nb_hash *hash, uint64_t key) {
    struct nb_list *chain = nb_hash_chain(hash, key);
    NB_LIST_EACH(it, chain) {
        struct nb_hash_node *node = NB_CONTAINER(it, struct nb_hash_node, link);
        if (node->key == key) {
            return node;
        }
    }
    return NULL;
}

#endif
