// What a collective needs by its algorithm: steps, bytes on each link, sums. Formulas only; sim.h says what they are for.
//
// N ranks, g of them on a host (g = N where all fit on one), h = ceil(N / g) hosts, S bytes, L = floor(log2 N). A host has
// one link, which its ranks share. F = 1 where N is no power of two, else 0. l = floor(log2 g), at most L.
//
//   algorithm    steps            bytes out of a host           inside a host                sums
//   ring         2(N-1)           2(N-1)/N S                    2(N-1)/N S                   N-1 of S/N
//   two levels   2(h-1)           2(h-1)/h S                    2(g-1) steps, 2(g-1)/g S     g-1 of S/g, h-1 of S/(gh)
//   tree         2 ceil(log2 h)   2(h-1)/h S                    2(g-1) steps, 2(g-1)/g S     1 of S a level that is there
//   halving      2(L-l) + 2F      2g(2^-l - 2^-L) S + 2F S      2l steps, 2(1 - 2^-l) S      S/2, S/4, … S/2^L, F of S
//   direct       L-l + 2F         g(L-l) S + 2F S               l steps, l S                 L + F of S
//
// ring, two levels: every link carries its share once a phase (reduce-scatter, all-gather); Patarasuk, Yuan: Bandwidth
// optimal all-reduce algorithms for clusters of workstations, 2009; a ring within one host has its steps and bytes there.
// tree: two binary trees over the hosts, each for half of the bytes, a chain inside, all of it a pipeline; Sanders, Speck,
// Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; a mean over the hosts' links, each
// direction. halving (then doubling), direct (recursive doubling; at 2 ranks an exchange), near partners first, as
// coll/steps.h makes them: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005,
// 4.4. Where N is no power of two, ranks hand their line to a neighbour and get it back (F), inside a host where g > 1.
#ifndef NB_SIM_SHAPE_H
#define NB_SIM_SHAPE_H

#include <stdint.h>

#include "sim/sim.h"

struct nb_sim_shape {
    int size;     // N
    int hosts;    // h
    int inside;   // g
    double steps; // between hosts
    double wire;  // bytes out of a host, and into it, for a byte of the operation
    double host_steps;
    double host_wire; // bytes inside it
};

// What uses which resource for how long, when alone; all at the same time.
enum { NB_SIM_UP = 1, NB_SIM_DOWN = 2, NB_SIM_INNER = 4, NB_SIM_CPU = 8, NB_SIM_RESOURCES = 4 };
enum { NB_SIM_USES = 3, NB_SIM_PHASES = 5 };

struct nb_sim_use {
    unsigned resources;
    int64_t ns;
};

// The parts of an operation, one after the other: a delay, then its uses; over when the last of them is.
struct nb_sim_phase {
    int64_t delay_ns;
    int uses;
    struct nb_sim_use use[NB_SIM_USES];
};

void nb_sim_shape(enum nb_sim_algorithm algorithm, int size, int ranks_per_host, struct nb_sim_shape *shape);

// Ns of all sums of an operation of `bytes`, one after the other.
double nb_sim_sums_ns(const struct nb_sim_cost *cost, const struct nb_sim_shape *shape, double bytes);

// The phases of an operation of `members` tensors: their number, at most NB_SIM_PHASES; 0 where one rank is alone. Each
// time is rounded to the nearest ns by itself. -1: one of them is longer than NB_SIM_NS_MAX.
int nb_sim_phases(const struct nb_sim_cost *cost, int64_t bytes, int64_t members, struct nb_sim_phase *phases);

// Bytes that leave a host for an operation of `bytes`, rounded.
int64_t nb_sim_wire_bytes(const struct nb_sim_cost *cost, int64_t bytes);

#endif
