// What each algorithm costs, and which costs least.
#include "coll/choose.h"

#include <stddef.h>
#include <string.h>

int nb_algorithm_find(const char *name) {
    static const struct {
        const char *name;
        enum nb_algorithm algorithm;
    } known[] = {{"auto", NB_ALGORITHM_NONE},
                 {"ring", NB_ALGORITHM_RING},
                 {"recursive_doubling", NB_ALGORITHM_DOUBLING},
                 {"halving_doubling", NB_ALGORITHM_HALVING}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(known[i].name, name) == 0) {
            return (int)known[i].algorithm;
        }
    }
    return -1;
}

double nb_cost_ns(const struct nb_costs *costs, enum nb_algorithm algorithm, int size, size_t bytes) {
    int levels = 0;
    while (2 << levels <= size) {
        levels++;
    }
    double fold = size != 1 << levels;
    double s = (double)bytes;
    double p = (double)size;
    double whole = s * costs->beta_ns;
    double sums = s * costs->gamma_ns;
    double handed = fold * (2 * costs->alpha_ns + 2 * whole + sums); // to a neighbour, and back
    double ring = 2 * (p - 1) / p * whole;
    switch (algorithm) {
    case NB_ALGORITHM_STAR:
        return 2 * (p - 1) * (whole + sums);
    case NB_ALGORITHM_DOUBLING:
        return levels * (costs->alpha_ns + whole + sums) + 2 * sums + handed;
    case NB_ALGORITHM_HALVING:
        return 2 * levels * costs->alpha_ns + ring + (p - 1) / p * sums + handed;
    default:
        return 2 * (p - 1) * costs->alpha_ns + ring;
    }
}

enum nb_algorithm nb_choose(const struct nb_costs *costs, int size, size_t bytes) {
    static const enum nb_algorithm others[] = {NB_ALGORITHM_HALVING, NB_ALGORITHM_DOUBLING, NB_ALGORITHM_STAR};
    size_t count = sizeof others / sizeof others[0] - (bytes == 0 || bytes > NB_STAR_MAX);
    enum nb_algorithm best = NB_ALGORITHM_RING;
    if (costs->alpha_ns <= 0) {
        return best;
    }
    for (size_t i = 0; i < count; i++) {
        if (nb_cost_ns(costs, others[i], size, bytes) < nb_cost_ns(costs, best, size, bytes)) {
            best = others[i];
        }
    }
    return best;
}
