// Preflight check: the ranks compare their settings before any of them uses a lane.
#ifndef NB_ENGINE_PREFLIGHT_H
#define NB_ENGINE_PREFLIGHT_H

#include <net/if.h>

#include "base/error.h"
#include "base/sock.h"

struct nb_job;

enum { BINDS_MAX = 8 }; // network interfaces

// The network interfaces that the lanes use.
struct binds {
    int count;
    struct nb_sockaddr at[BINDS_MAX];
    char names[BINDS_MAX][IF_NAMESIZE];
};

// Exchanges with all ranks how their lanes opened (rc, and err on failure), over which interfaces, and how many CPUs
// are named for communication threads. Selects this rank's CPU. Returns 0, or the failure that keeps the job from
// opening.
int nb_job_preflight(struct nb_job *job, const struct binds *binds, int rc, struct nb_error *err);

#endif
