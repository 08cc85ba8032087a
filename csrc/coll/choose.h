// Choice of an all-reduce's algorithm: the one with the lowest cost by what this job has measured.
#ifndef NB_COLL_CHOOSE_H
#define NB_COLL_CHOOSE_H

#include <stdbool.h>
#include <stddef.h>

// Algorithms of operations. The numbers appear in the trace.
enum nb_algorithm_id {
    NB_ALGORITHM_NONE = 0, // no byte moves. In a configuration: rank 0 chooses by measured costs
    NB_ALGORITHM_RING = 1,
    NB_ALGORITHM_RING_ALLGATHER = 2,
    NB_ALGORITHM_RING_REDUCESCATTER = 3,
    NB_ALGORITHM_CHAIN = 4,     // broadcast
    NB_ALGORITHM_DOUBLING = 5,  // recursive doubling; at 2 ranks a direct exchange
    NB_ALGORITHM_HALVING = 6,   // recursive halving, then doubling
    NB_ALGORITHM_PAIRWISE = 7,  // all-to-all
    NB_ALGORITHM_INLINE = 8,    // all to rank 0 and back, with negotiation
    NB_ALGORITHM_JOIN = 9,      // the end of a join: no byte moves
    NB_ALGORITHM_SHARED = 32,   // in memory that all ranks share
    NB_ALGORITHM_STAGED = 33,   // the same through staging
    NB_ALGORITHM_TWO_LEVEL = 34 // in the memory of each host, and between hosts
};

enum { NB_INLINE_MAX = 16 * 1024 }; // largest inline all-reduce, in bytes

struct nb_costs {
    double alpha_ns;       // of a step, for any size; 0: not measured
    double beta_ns;        // of a byte on the wire
    double gamma_ns;       // of a byte that is added or copied
    double levels_ns;      // of two levels, without the cost of their bytes; 0: not measured
    double levels_byte_ns; // of a byte in two levels, without its time on the wire
};

// True if all values are possible measurements: 0 to 1000 s each.
bool nb_costs_possible(const struct nb_costs *costs);

// Returns the time in ns of an all-reduce of `bytes` among `size` ranks. With alpha, beta, gamma as above, p ranks, S
// bytes, L = log2 p:
//   ring      2(p-1) alpha + 2(p-1)/p S beta; its additions overlap the wire
//   doubling  L (alpha + S beta + S gamma) + 2 S gamma (two copies)
//   halving   2L alpha + 2(p-1)/p S beta + (p-1)/p S gamma
//   inline    2(p-1) S beta + 2(p-1) S gamma at rank 0; negotiation carries its messages
//   two-level levels_ns + S levels_byte_ns + 2(h-1)/h S beta, over h hosts
// If p is not a power of two, doubling and halving add two exchanges of S. Above 2 ranks their S beta counts 1.2 times,
// because they change peers. Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations
// in MPICH, 2005, 4.4.
double nb_cost_ns(const struct nb_costs *costs, enum nb_algorithm_id algorithm, int size, int hosts, size_t bytes);

// Returns the algorithm with the lowest cost; RING if nothing is measured. `hosts`: 1 if two levels are not possible.
enum nb_algorithm_id nb_choose(const struct nb_costs *costs, int size, int hosts, size_t bytes);

#endif
