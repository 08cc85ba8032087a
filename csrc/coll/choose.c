// Cost of each algorithm, and the choice of the cheapest.
#include "coll/choose.h"

#include <stdbool.h>
#include <stddef.h>

// Algorithms that change peers between steps leave the wire idle in between; a ring does not. Among 4 ranks at 1
// Gbit/s, 16 MB took 1.2 times as long by halving, and 1 MB took 1.2 times the time of its bytes by doubling.
static const double CHANGING_PEERS = 1.2;

bool nb_costs_possible(const struct nb_costs *costs) {
    const double each[] = {costs->alpha_ns, costs->beta_ns, costs->gamma_ns, costs->levels_ns, costs->levels_byte_ns};
    bool all = true;
    for (size_t i = 0; i < sizeof each / sizeof each[0]; i++) {
        all = all && each[i] >= 0 && each[i] <= 1e12; // a NaN fails this
    }
    return all;
}

double nb_cost_ns(const struct nb_costs *costs, enum nb_algorithm_id algorithm, int size, int hosts, size_t bytes) {
    int levels = 0;
    while (2 << levels <= size) {
        levels++;
    }
    double fold = size != 1 << levels;
    double s = (double)bytes;
    double p = (double)size;
    double whole = s * costs->beta_ns;
    double stepped = size > 2 ? CHANGING_PEERS * whole : whole;
    double sums = s * costs->gamma_ns;
    double handed = fold * (2 * costs->alpha_ns + 2 * whole + sums); // to a neighbour and back
    double parts = 2 * (p - 1) / p;                                  // share of the buffer that a rank sends
    switch (algorithm) {
    case NB_ALGORITHM_INLINE:
        return 2 * (p - 1) * (whole + sums);
    case NB_ALGORITHM_DOUBLING:
        return levels * (costs->alpha_ns + stepped + sums) + 2 * sums + handed;
    case NB_ALGORITHM_HALVING:
        return 2 * levels * costs->alpha_ns + parts * stepped + (p - 1) / p * sums + handed;
    case NB_ALGORITHM_TWO_LEVEL:
        return costs->levels_ns + s * costs->levels_byte_ns + 2 * (hosts - 1.0) / hosts * whole;
    default:
        return 2 * (p - 1) * costs->alpha_ns + parts * whole;
    }
}

enum nb_algorithm_id nb_choose(const struct nb_costs *costs, int size, int hosts, size_t bytes) {
    const struct {
        enum nb_algorithm_id algorithm;
        bool possible;
    } others[] = {{NB_ALGORITHM_HALVING, true},
                  {NB_ALGORITHM_DOUBLING, true},
                  {NB_ALGORITHM_INLINE, bytes > 0 && bytes <= NB_INLINE_MAX},
                  {NB_ALGORITHM_TWO_LEVEL, hosts > 1 && bytes > 0 && costs->levels_ns > 0}};
    enum nb_algorithm_id best = NB_ALGORITHM_RING;
    double least = nb_cost_ns(costs, best, size, hosts, bytes);
    for (size_t i = 0; costs->alpha_ns > 0 && i < sizeof others / sizeof others[0]; i++) {
        double cost = nb_cost_ns(costs, others[i].algorithm, size, hosts, bytes);
        if (others[i].possible && cost < least) {
            best = others[i].algorithm;
            least = cost;
        }
    }
    return best;
}
