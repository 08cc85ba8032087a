// Which algorithm moves an all-reduce soonest, by what this job has measured.
#ifndef NB_COLL_CHOOSE_H
#define NB_COLL_CHOOSE_H

#include <stdbool.h>
#include <stddef.h>

// How an operation travels. The numbers stand in the record.
enum nb_algorithm {
    NB_ALGORITHM_NONE = 0, // no byte moves. Asked for: rank 0 chooses by what this job has measured
    NB_ALGORITHM_RING = 1,
    NB_ALGORITHM_RING_ALLGATHER = 2,
    NB_ALGORITHM_RING_REDUCESCATTER = 3,
    NB_ALGORITHM_CHAIN = 4,     // broadcast
    NB_ALGORITHM_DOUBLING = 5,  // recursive doubling; at 2 ranks a direct exchange
    NB_ALGORITHM_HALVING = 6,   // recursive halving, then doubling
    NB_ALGORITHM_PAIRWISE = 7,  // all-to-all
    NB_ALGORITHM_STAR = 8,      // all to rank 0 and back, with the agreement
    NB_ALGORITHM_TWO_LEVEL = 34 // in the memory of each host, and between hosts
};

enum { NB_STAR_MAX = 16 * 1024 }; // bytes that may travel with the agreement

struct nb_costs {
    double alpha_ns;       // of a step, whatever its size; 0: nothing is known
    double beta_ns;        // of a byte on the wire
    double gamma_ns;       // of a byte that is added to another, or copied
    double levels_ns;      // of two levels beside what their bytes cost; 0: nothing is known
    double levels_byte_ns; // of a byte there, beside its time on the wire
};

// Whether they are numbers that can have been measured: 0 to 1000 s each.
bool nb_costs_possible(const struct nb_costs *costs);

// The time of an all-reduce of `bytes` among `size` ranks (alpha, beta, gamma as above, p ranks, S bytes, L = log2 p):
// ring 2(p-1) alpha + 2(p-1)/p S beta, its sums hidden behind the wire; doubling L (alpha + S beta + S gamma) and two
// copies; halving 2L alpha + 2(p-1)/p S beta + (p-1)/p S gamma. Where p is no power of two the last two pay for two more
// exchanges of S. Among more than 2 ranks S beta of these two counts 1.2 times: they change peers. A star has its messages
// from the agreement: what it adds is 2(p-1) S beta at rank 0, (p-1) S gamma and as many copies. Two levels over h hosts
// cost levels_ns + S levels_byte_ns + 2(h-1)/h S beta. Thakur, Rabenseifner, Gropp: Optimization of collective
// communication operations in MPICH, 2005, 4.4.
double nb_cost_ns(const struct nb_costs *costs, enum nb_algorithm algorithm, int size, int hosts, size_t bytes);

// What can be asked for, by name: "auto" is NONE. A negative number: no such name.
int nb_algorithm_find(const char *name);

// RING where nothing is known. `hosts`: 1 where two levels cannot be had.
enum nb_algorithm nb_choose(const struct nb_costs *costs, int size, int hosts, size_t bytes);

#endif
