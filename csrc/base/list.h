// Intrusive, circular, doubly linked list. A node is in at most one list; the head is a node too.
#ifndef NB_BASE_LIST_H
#define NB_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct nb_list {
    struct nb_list *prev;
    struct nb_list *next;
};

#define NB_CONTAINER(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

#define NB_LIST_EACH(it, head) for (struct nb_list *it = (head)->next; it != (head); it = it->next)

// As NB_LIST_EACH; the body may remove `it`.
#define NB_LIST_EACH_SAFE(it, nx, head)                                                                                \
    for (struct nb_list *it = (head)->next, *nx = it->next; it != (head); it = nx, nx = it->next)

static inline void nb_list_init(struct nb_list *head) {
    head->prev = head;
    head->next = head;
}

static inline bool nb_list_empty(const struct nb_list *head) {
    return head->next == head;
}

// Inserts `node` before `at`; before the head means at the end.
static inline void nb_list_insert(struct nb_list *at, struct nb_list *node) {
    node->prev = at->prev;
    node->next = at;
    at->prev->next = node;
    at->prev = node;
}

// Removes `node` from its list. No effect on a node in no list (initialised to itself).
static inline void nb_list_remove(struct nb_list *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    nb_list_init(node);
}

// Moves all nodes of `from` to the end of `to`.
static inline void nb_list_move(struct nb_list *from, struct nb_list *to) {
    if (!nb_list_empty(from)) {
        to->prev->next = from->next;
        from->next->prev = to->prev;
        from->prev->next = to;
        to->prev = from->prev;
        nb_list_init(from);
    }
}

#endif
