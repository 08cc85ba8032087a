// Shapes: steps, bytes per link and sums of a collective, by algorithm. Formulas only; sim.h describes their use.
//
// N ranks, g of them on a host (g = N if all are on one), h = ceil(N / g) hosts, S bytes, L = floor(log2 N). The ranks
// of a host share its one link. F = 1 if N is no power of two, else 0. l = floor(log2 g), at most L.
//
//   algorithm    steps            bytes out of a host           inside a host                sums
//   ring         2(N-1)           2(N-1)/N S                    2(N-1)/N S                   N-1 of S/N
//   two levels   2(h-1)           2(h-1)/h S                    2(g-1) steps, 2(g-1)/g S     g-1 of S/g, h-1 of S/(gh)
//   tree         2 ceil(log2 h)   2(h-1)/h S                    2(g-1) steps, 2(g-1)/g S     1 of S a level that is there
//   halving      2(L-l) + 2F      2g(2^-l - 2^-L) S + 2F S      2l steps, 2(1 - 2^-l) S      S/2, S/4, … S/2^L, F of S
//   direct       L-l + 2F         g(L-l) S + 2F S               l steps, l S                 L + F of S
//
// ring, two levels: every link carries its share once per phase (reduce-scatter, all-gather). A ring within one host
// has its steps and bytes inside the host. Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for
// clusters of workstations, 2009.
// tree: two binary trees over the hosts, each for half of the bytes, and a chain inside a host, all pipelined. The
// bytes are a mean over the hosts' links, for each direction. Source: Sanders, Speck, Träff: Two-tree algorithms for
// full bandwidth broadcast, reduction and scan, 2009.
// halving (then doubling), direct (recursive doubling; an exchange at 2 ranks): near partners first, as in
// coll/step_schedule.h. If N is no power of two, some ranks pass their buffer to a neighbour and receive the result (F),
// inside a host if g > 1. Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in
// MPICH, 2005, 4.4.
#ifndef NB_SIM_SHAPE_H
#define NB_SIM_SHAPE_H

#include <stdint.h>

#include "sim/sim.h"

struct nb_sim_shape {
    int size;     // N
    int hosts;    // h
    int inside;   // g
    double steps; // between hosts
    double wire;  // bytes out of a host, and into it, per byte of the operation
    double host_steps;
    double host_wire; // bytes inside a host, likewise
};

// Resources that a use occupies, and its time when it is alone; the uses of a phase run at the same time.
enum { NB_SIM_UP = 1, NB_SIM_DOWN = 2, NB_SIM_INNER = 4, NB_SIM_CPU = 8, NB_SIM_RESOURCES = 4 };
enum { NB_SIM_USES = 3, NB_SIM_PHASES = 5 };

struct nb_sim_use {
    unsigned resources;
    int64_t ns;
};

// One part of an operation: a delay, then its uses. It ends when the last use ends; then the next part begins.
struct nb_sim_phase {
    int64_t delay_ns;
    int uses;
    struct nb_sim_use use[NB_SIM_USES];
};

void nb_sim_shape(enum nb_sim_algorithm algorithm, int size, int ranks_per_host, struct nb_sim_shape *shape);

// Time in ns of all sums of an operation of `bytes`, one after the other.
double nb_sim_sums_ns(const struct nb_sim_cost *cost, const struct nb_sim_shape *shape, double bytes);

// Computes the phases of an operation of `members` tensors. Returns their number, at most NB_SIM_PHASES; 0 for a single
// rank; -1 if a phase is longer than NB_SIM_NS_MAX. Each time is rounded to the nearest ns on its own.
int nb_sim_phases(const struct nb_sim_cost *cost, int64_t bytes, int64_t members, struct nb_sim_phase *phases);

// Bytes that leave a host for an operation of `bytes`, rounded.
int64_t nb_sim_wire_bytes(const struct nb_sim_cost *cost, int64_t bytes);

#endif
