// Base library: bitmaps, hash tables, lists, pools, errors, dtypes and the fork detector keep the contracts of their
// headers.
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bits.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/fork_detector.h"
#include "base/hash.h"
#include "base/list.h"
#include "base/pool.h"
#include "check.h"

static void test_bits(void) {
    enum { BITS = 200 };
    static const size_t set[] = {0, 63, 64, 127, 130, 199};
    uint64_t map[4] = {0};
    CHECK(nb_bits_words(0) == 0 && nb_bits_words(64) == 1 && nb_bits_words(65) == 2, "words");
    CHECK(nb_bits_next(map, 0, BITS) == BITS, "a bit is found in an empty map");
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++) {
        nb_bits_set(map, set[i]);
    }
    size_t at = 0;
    for (size_t i = 0; i < sizeof set / sizeof set[0]; i++) {
        at = nb_bits_next(map, at, BITS);
        CHECK(at == set[i] && nb_bits_get(map, at), "bit %zu was found at %zu", set[i], at);
        at++;
    }
    CHECK(nb_bits_next(map, at, BITS) == BITS, "a bit after the last one is found");
    CHECK(nb_bits_next(map, 131, 199) == 199, "a bit beyond the end is found");
    nb_bits_clear(map, 64);
    CHECK(!nb_bits_get(map, 64) && nb_bits_get(map, 63) && nb_bits_next(map, 64, BITS) == 127, "bit 64 is not cleared");
}

struct item {
    int value;
    struct nb_list link;
};

static int list_as_number(struct nb_list *head) {
    int number = 0;
    NB_LIST_EACH(it, head) {
        number = number * 10 + NB_CONTAINER(it, struct item, link)->value;
    }
    return number;
}

static void test_list(void) {
    struct nb_list head;
    struct item items[5];
    nb_list_init(&head);
    CHECK(nb_list_empty(&head), "a new list is not empty");
    for (int i = 0; i < 5; i++) {
        items[i].value = i + 1;
        nb_list_insert(&head, &items[i].link);
    }
    CHECK(list_as_number(&head) == 12345, "wrong list after an insertion before the head: %d", list_as_number(&head));
    nb_list_remove(&items[2].link);
    nb_list_remove(&items[2].link);
    CHECK(list_as_number(&head) == 1245, "wrong list after a node was removed twice: %d", list_as_number(&head));
    nb_list_insert(&items[0].link, &items[2].link);
    CHECK(list_as_number(&head) == 31245, "wrong list after an insertion before a node: %d", list_as_number(&head));
    NB_LIST_EACH_SAFE(it, next, &head) {
        if (NB_CONTAINER(it, struct item, link)->value % 2 == 1) {
            nb_list_remove(it);
        }
    }
    CHECK(list_as_number(&head) == 24, "wrong list after a loop that removes its current node: %d",
          list_as_number(&head));
}

static void test_list_move(void) {
    struct nb_list from;
    struct nb_list to;
    struct item items[4];
    nb_list_init(&from);
    nb_list_init(&to);
    nb_list_move(&from, &to);
    CHECK(nb_list_empty(&from) && nb_list_empty(&to), "moving an empty list adds nodes");
    for (int i = 0; i < 4; i++) {
        items[i].value = i + 1;
        nb_list_insert(i < 2 ? &to : &from, &items[i].link);
    }
    nb_list_move(&from, &to);
    CHECK(nb_list_empty(&from) && list_as_number(&to) == 1234, "moved nodes are not appended: %d", list_as_number(&to));
    nb_list_move(&to, &from);
    CHECK(nb_list_empty(&to) && list_as_number(&from) == 1234, "wrong list after a move to an empty one: %d",
          list_as_number(&from));
}

static void test_pool(void) {
    enum { MANY = 1000 };
    struct nb_pool pool;
    uint64_t *items[MANY];
    nb_pool_init(&pool, sizeof(uint64_t) * 3);
    CHECK(nb_pool_reserve(&pool, 7) && pool.count >= 7, "%zu items", pool.count);
    for (uint64_t round = 0; round < 3; round++) {
        size_t count = pool.count;
        for (size_t i = 0; i < MANY; i++) {
            items[i] = nb_pool_get(&pool);
            CHECK(items[i] != NULL, "item %zu", i);
            items[i][0] = items[i][2] = i + round;
        }
        CHECK(round == 0 || pool.count == count, "%zu items, then %zu", count, pool.count);
        for (size_t i = 0; i < MANY; i++) {
            CHECK(items[i][0] == i + round && items[i][2] == i + round, "item %zu is handed out twice", i);
            nb_pool_give(&pool, items[i]);
        }
    }
    size_t count = pool.count;
    CHECK(nb_pool_reserve(&pool, count) && pool.count == count, "reserving existing items adds some: %zu, %zu", count,
          pool.count);
    CHECK(nb_pool_reserve(&pool, count + 500) && pool.count >= count + 500, "%zu of %zu", pool.count, count + 500);
    nb_pool_fini(&pool);
    CHECK(pool.count == 0 && nb_pool_get(&pool) != NULL, "a closed pool cannot be used again");
    nb_pool_fini(&pool);
}

static void test_error(void) {
    struct nb_error err = {0};
    errno = ECONNREFUSED;
    CHECK(nb_fail_peer(&err, -errno, 3, "rank %d: %m", 3) == -ECONNREFUSED, "the code is not returned");
    CHECK(errno == ECONNREFUSED, "errno has changed");
    CHECK(err.code == -ECONNREFUSED && err.peer == 3, "%d, peer %d", err.code, err.peer);
    CHECK(strcmp(err.text, "rank 3: Connection refused") == 0, "%s", err.text);
    CHECK(nb_fail(&err, NB_EWIRE, "later") == NB_EWIRE, "the later code is not returned");
    CHECK(err.code == -ECONNREFUSED && err.peer == 3 && strstr(err.text, "later") == NULL,
          "a later failure replaces the first");

    struct nb_error other = {0};
    CHECK(nb_fail(&other, NB_EWIRE, "%0600d", 7) == NB_EWIRE, "wrong code with a long text");
    CHECK(other.peer == NB_NO_PEER && strlen(other.text) == NB_ERROR_TEXT - 1, "%zu", strlen(other.text));
    CHECK(nb_fail(NULL, -EINVAL, "no record") == -EINVAL, "wrong code without a record");

    CHECK(strcmp(nb_code_name(NB_EPEER), "peer lost") == 0, "%s", nb_code_name(NB_EPEER));
    CHECK(strcmp(nb_code_name(NB_ETIMEOUT), "timed out") == 0, "%s", nb_code_name(NB_ETIMEOUT));
    CHECK(strcmp(nb_code_name(-ENODEV), "No such device") == 0, "%s", nb_code_name(-ENODEV));
    for (int code = NB_ENOLIB; code <= NB_EPEER; code++) {
        CHECK(strstr(nb_code_name(code), "nknown") == NULL, "code %d has no name", code);
    }
}

// The list of missing ranks ends with an ellipsis if a further rank might not fit.
static void test_ranks_missing(void) {
    static const char all_fit[] = "ranks 0, 2 of 3";
    static const char most[] =
        "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, "
        "23, 24, 25, 26, 27, 28, …";
    uint64_t arrived[2] = {2};
    char text[NB_RANKS_TEXT];
    CHECK(nb_ranks_missing(arrived, 3, text) == 0 && strcmp(text, all_fit) == 0, "%s", text);
    arrived[0] = 5;
    CHECK(nb_ranks_missing(arrived, 3, text) == 1 && strcmp(text, "rank 1 of 3") == 0, "%s", text);
    arrived[0] = 0;
    CHECK(nb_ranks_missing(arrived, 100, text) == 0 && strncmp(text, most, strlen(most)) == 0, "%s", text);
    CHECK(strcmp(text + strlen(text) - 7, " of 100") == 0, "%s", text);
}

static void test_dtype(void) {
    CHECK(nb_dtype_size(NB_F32) == 4 && nb_dtype_size(NB_BF16) == 2 && nb_dtype_size(NB_F64) == 8, "sizes");
    CHECK(nb_dtype_size(-1) == 0 && nb_dtype_size(NB_DTYPES) == 0, "an unknown dtype has a size");
    CHECK(strcmp(nb_dtype_name(NB_BF16), "bfloat16") == 0 && strcmp(nb_dtype_name(NB_DTYPES), "?") == 0, "names");
    for (int i = 0; i < NB_DTYPES; i++) {
        CHECK(nb_dtype_size(i) > 0 && nb_dtype_name(i)[0] != '?', "dtype %d", i);
        for (int j = 0; j < i; j++) {
            CHECK(strcmp(nb_dtype_name(i), nb_dtype_name(j)) != 0, "dtypes %d and %d share a name", i, j);
        }
    }
    for (int i = 0; i < NB_REDOPS; i++) {
        CHECK(nb_redop_name(i)[0] != '?', "reduction %d", i);
    }
    CHECK(strcmp(nb_redop_name(NB_MAX), "max") == 0 && nb_redop_name(NB_REDOPS)[0] == '?', "names");
}

static bool child_is_opener(const struct nb_fork_detector *detector) {
    pid_t child = fork();
    CHECK(child >= 0, "fork: %m");
    if (child == 0) {
        _exit(nb_fork_detector_is_opener(detector) ? 1 : 0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status), "the child ended with status %x", status);
    return WEXITSTATUS(status) != 0;
}

// Keys whose difference is a multiple of the number of chains share a chain.
static void test_hash(void) {
    static struct nb_hash table;
    struct nb_hash_node nodes[3] = {0};
    nb_hash_remove(&nodes[0]);
    CHECK(nb_hash_get(&table, 7) == NULL, "a zeroed table is not empty");
    for (uint64_t i = 0; i < 3; i++) {
        nb_hash_put(&table, &nodes[i], 7 + i * NB_HASH_CHAINS);
    }
    for (uint64_t removed = 0; removed < 4;
         removed++) { // removes the middle of the chain, its end, its beginning, then nothing
        for (uint64_t i = 0; i < 3; i++) {
            const struct nb_hash_node *found = nb_hash_get(&table, 7 + i * NB_HASH_CHAINS);
            bool gone = removed == 3 || (removed > 0 && i == 1) || (removed > 1 && i == 0);
            CHECK(found == (gone ? NULL : &nodes[i]), "key %d after %d removals", (int)i, (int)removed);
        }
        nb_hash_remove(&nodes[removed < 3 ? (int[]){1, 0, 2}[removed] : 2]);
    }
    nb_hash_put(&table, &nodes[1], 9);
    CHECK(nb_hash_get(&table, 9) == &nodes[1] && nb_hash_get(&table, 8) == NULL,
          "a removed node cannot be inserted again");
}

static void test_fork_detector(void) {
    struct nb_fork_detector detector;
    nb_fork_detector_open(&detector);
    struct nb_fork_detector by_number = {.pid = detector.pid};
    CHECK(nb_fork_detector_is_opener(&detector) && nb_fork_detector_is_opener(&by_number),
          "the opener is not detected");
    CHECK(!child_is_opener(&detector) && !child_is_opener(&by_number), "a child counts as the opener");
    CHECK(nb_fork_detector_is_opener(&detector), "after forks, the opener is not detected");
    nb_fork_detector_close(&detector);
    nb_fork_detector_close(&detector);
}

int main(void) {
    test_bits();
    test_hash();
    test_list();
    test_list_move();
    test_pool();
    test_error();
    test_ranks_missing();
    test_dtype();
    test_fork_detector();
    return 0;
}
