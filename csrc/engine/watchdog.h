// Watchdog: detects peers that are gone, silent or late, broken lanes, and bytes that do not move.
#ifndef NB_ENGINE_WATCHDOG_H
#define NB_ENGINE_WATCHDOG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

struct nb_job;

struct suspicion { // a peer with a broken lane: it may be dead, or it left because another rank died
    bool raised;
    int64_t since_ns;
    uint64_t lanes; // bitmap of lanes that broke since
    struct nb_error why;
};

struct nb_watchdog {              // of the progress owner
    bool *peer_left;              // by rank
    int left_rank;                // a rank that left, or NB_NO_PEER
    struct suspicion *suspicions; // by rank
    int64_t next_ping_ns;
    int64_t ticked_ns;    // time of the last tick
    bool accept_reported; // a notice says why this rank could not accept connections
};

int nb_watchdog_open(struct nb_job *job, struct nb_error *err);
void nb_watchdog_close(struct nb_job *job);
void nb_watchdog_tick(struct nb_job *job, int64_t now);
// True if nothing has arrived on the rank's control connection for the time limit. Only rank 0 has one to each rank.
bool nb_watchdog_is_silent(const struct nb_job *job, int rank, int64_t now);
// Fails the job because of a silent rank.
void nb_watchdog_silent(struct nb_job *job, int rank, int64_t now);
// Records that a rank has left in good order.
void nb_watchdog_left(struct nb_job *job, int rank);
// Fails the job if an operation waits for a rank that has left.
void nb_watchdog_check(struct nb_job *job);
// Callbacks of the lanes; ctx is the job.
void nb_watchdog_lane_lost(void *ctx, int peer, int lane, const struct nb_error *why, int lanes_left);
void nb_watchdog_lanes_failed(void *ctx, const struct nb_error *why);

#endif
