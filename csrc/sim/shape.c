// Shapes: the table of shape.h, and the phases of an operation that follow from it.
#include "sim/shape.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "sim/sim.h"

static int log2_floor(int x) {
    int levels = 0;
    while (levels < 30 && 2 << levels <= x) {
        levels++;
    }
    return levels;
}

static int log2_ceil(int x) {
    int levels = log2_floor(x);
    return 1 << levels == x ? levels : levels + 1;
}

static bool is_power(int x) {
    return x == 1 << log2_floor(x);
}

static void ring_shape(struct nb_sim_shape *shape) {
    double n = shape->size;
    double share = 2 * (n - 1) / n;
    bool local = shape->hosts == 1;
    shape->steps = local ? 0 : 2 * (n - 1);
    shape->host_steps = local ? 2 * (n - 1) : 0;
    shape->wire = local ? 0 : share;
    shape->host_wire = shape->inside > 1 ? share : 0;
}

static void level_shape(struct nb_sim_shape *shape, double steps) {
    double h = shape->hosts;
    double g = shape->inside;
    shape->steps = steps;
    shape->wire = 2 * (h - 1) / h;
    shape->host_steps = 2 * (g - 1);
    shape->host_wire = 2 * (g - 1) / g;
}

// Each halving step is done twice, once in each half of the all-reduce; each doubling step once.
static void exchange_shape(struct nb_sim_shape *shape, bool halving) {
    int levels = log2_floor(shape->size);
    int near = log2_floor(shape->inside);
    double g = shape->inside;
    double passes = halving ? 2 : 1;
    near = near < levels && shape->hosts > 1 ? near : levels - (shape->hosts > 1);
    shape->steps = passes * (levels - near);
    shape->host_steps = passes * near;
    shape->wire = halving ? 2 * g * (ldexp(1, -near) - ldexp(1, -levels)) : g * (levels - near);
    shape->host_wire = halving ? 2 * (1 - ldexp(1, -near)) : near;
    if (!is_power(shape->size)) {
        double *steps = shape->inside > 1 ? &shape->host_steps : &shape->steps;
        double *wire = shape->inside > 1 ? &shape->host_wire : &shape->wire;
        *steps += 2;
        *wire += 2;
    }
}

void nb_sim_shape(enum nb_sim_algorithm algorithm, int size, int ranks_per_host, struct nb_sim_shape *shape) {
    int inside = ranks_per_host < size ? ranks_per_host : size;
    *shape = (struct nb_sim_shape){.size = size, .inside = inside, .hosts = size / inside + (size % inside != 0)};
    if (size < 2) {
        return;
    }
    switch (algorithm) {
    case NB_SIM_TWO_LEVEL:
        level_shape(shape, 2 * (shape->hosts - 1.0));
        break;
    case NB_SIM_TREE:
        level_shape(shape, 2.0 * log2_ceil(shape->hosts));
        break;
    case NB_SIM_HALVING:
    case NB_SIM_DIRECT:
        exchange_shape(shape, algorithm == NB_SIM_HALVING);
        break;
    default:
        ring_shape(shape);
    }
}

static double table_at(const struct nb_sim_table *table, double bytes) {
    const double *x = table->bytes;
    const double *y = table->ns;
    int last = table->count - 1;
    if (bytes <= x[0] || last == 0) {
        return y[0];
    }
    int low = 0;
    int high = last;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        *(x[middle] <= bytes ? &low : &high) = middle;
    }
    if (bytes > x[last] && (table->clamped || y[high] < y[low])) {
        return y[last];
    }
    return y[low] + (bytes - x[low]) * (y[high] - y[low]) / (x[high] - x[low]);
}

// Rounds the product separately: the compiler must not fuse it with a later addition, or machines would differ.
__attribute__((noinline)) static double product(double a, double b) {
    return a * b;
}

static double sums(const struct nb_sim_cost *cost, double count, double bytes) {
    return product(count, cost->add.count > 0 ? table_at(&cost->add, bytes) : product(bytes, cost->add_byte_ns));
}

double nb_sim_sums_ns(const struct nb_sim_cost *cost, const struct nb_sim_shape *shape, double bytes) {
    double n = shape->size;
    double g = shape->inside;
    double h = shape->hosts;
    int levels = log2_floor(shape->size);
    double total = 0;
    if (shape->size < 2) {
        return 0;
    }
    switch (cost->algorithm) {
    case NB_SIM_TWO_LEVEL:
        return sums(cost, g - 1, bytes / g) + sums(cost, h - 1, bytes / (g * h));
    case NB_SIM_TREE:
        return sums(cost, (g > 1) + (h > 1), bytes);
    case NB_SIM_HALVING:
        for (int i = 1; i <= levels; i++) {
            total += sums(cost, 1, ldexp(bytes, -i));
        }
        return total + sums(cost, !is_power(shape->size), bytes);
    case NB_SIM_DIRECT:
        return sums(cost, levels + !is_power(shape->size), bytes);
    default:
        return sums(cost, n - 1, bytes / n);
    }
}

// 0, or -1 if the value is too long.
static int to_ns(double value, int64_t *ns) {
    if (!(value >= 0 && value <= (double)NB_SIM_NS_MAX)) {
        return -1;
    }
    *ns = llround(value);
    return 0;
}

// The phases of data transfer and sums: at the same time, or one after the other.
static int moves(const struct nb_sim_cost *cost, const struct nb_sim_shape *shape, double bytes,
                 struct nb_sim_phase *phases) {
    double sent = bytes / cost->ratio;
    bool ring = cost->algorithm == NB_SIM_RING;
    const struct {
        unsigned resources;
        double ns;
        bool together; // at the same time as the previous use
    } uses[NB_SIM_USES] = {
        {NB_SIM_UP | NB_SIM_DOWN, sent * shape->wire * cost->byte_ns, true},
        {NB_SIM_INNER, sent * shape->host_wire * cost->host_byte_ns, cost->pipelined || ring},
        {NB_SIM_CPU, nb_sim_sums_ns(cost, shape, cost->whole_sums ? bytes : sent), cost->pipelined},
    };
    int count = 1;
    phases[0] = (struct nb_sim_phase){0};
    for (int i = 0; i < NB_SIM_USES; i++) {
        if (!uses[i].together) {
            phases[count++] = (struct nb_sim_phase){0};
        }
        struct nb_sim_phase *phase = &phases[count - 1];
        struct nb_sim_use *use = &phase->use[phase->uses++];
        use->resources = uses[i].resources;
        if (to_ns(uses[i].ns, &use->ns) < 0) {
            return -1;
        }
    }
    return count;
}

int nb_sim_phases(const struct nb_sim_cost *cost, int64_t bytes, int64_t members, struct nb_sim_phase *phases) {
    struct nb_sim_shape shape;
    nb_sim_shape(cost->algorithm, cost->size, cost->ranks_per_host, &shape);
    if (shape.size < 2) {
        return 0;
    }
    double whole = (double)bytes;
    double copy = members > 1 ? cost->copy_byte_ns : 0;
    struct nb_sim_phase before = {.uses = 1, .use = {{.resources = NB_SIM_CPU}}};
    struct nb_sim_phase after = before;
    int64_t between = 0;
    int64_t inside = 0;
    int64_t fixed = 0;
    if (to_ns(whole * (copy + cost->encode_byte_ns), &before.use[0].ns) < 0 ||
        to_ns(whole * (copy + cost->decode_byte_ns), &after.use[0].ns) < 0 || to_ns(cost->fixed_ns, &fixed) < 0 ||
        to_ns(shape.steps * cost->alpha_ns, &between) < 0 ||
        to_ns(shape.host_steps * cost->host_alpha_ns, &inside) < 0) {
        return -1;
    }
    phases[0] = before;
    int count = moves(cost, &shape, whole, phases + 1);
    if (count < 0) {
        return -1;
    }
    phases[1].delay_ns = fixed + between + inside;
    phases[count + 1] = after;
    return count + 2;
}

int64_t nb_sim_wire_bytes(const struct nb_sim_cost *cost, int64_t bytes) {
    struct nb_sim_shape shape;
    nb_sim_shape(cost->algorithm, cost->size, cost->ranks_per_host, &shape);
    double wire = (double)bytes / cost->ratio * shape.wire;
    return wire < 9e18 ? llround(wire) : INT64_MAX;
}
