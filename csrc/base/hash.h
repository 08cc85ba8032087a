// Intrusive chained hash table over 64-bit keys with a fixed number of chains, for tables of names. Zeroed memory is an
// empty table, and a node in no table.
#ifndef NB_BASE_HASH_H
#define NB_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

enum { NB_HASH_CHAINS = 1024 };

struct nb_hash_node {
    struct nb_hash_node *next;
    struct nb_hash_node *
        *at; // the pointer to this node: the chain's, or the `next` of the node before; NULL: in no table
    uint64_t key;
};

struct nb_hash {
    struct nb_hash_node *chains[NB_HASH_CHAINS];
};

static inline struct nb_hash_node **nb_hash_chain(struct nb_hash *hash, uint64_t key) {
    return &hash->chains[(key ^ key >> 32) % NB_HASH_CHAINS];
}

static inline void nb_hash_put(struct nb_hash *hash, struct nb_hash_node *node, uint64_t key) {
    struct nb_hash_node **chain = nb_hash_chain(hash, key);
    *node = (struct nb_hash_node){.next = *chain, .at = chain, .key = key};
    if (node->next != NULL) {
        node->next->at = &node->next;
    }
    *chain = node;
}

static inline struct nb_hash_node *nb_hash_get(struct nb_hash *hash, uint64_t key) {
    struct nb_hash_node *node = *nb_hash_chain(hash, key);
    while (node != NULL && node->key != key) {
        node = node->next;
    }
    return node;
}

// No effect on a node in no table.
static inline void nb_hash_remove(struct nb_hash_node *node) {
    if (node->at == NULL) {
        return;
    }
    *node->at = node->next;
    if (node->next != NULL) {
        node->next->at = node->at;
    }
    node->at = NULL;
}

#endif
