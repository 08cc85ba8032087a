// Opening and closing of a job: lanes, addresses, neighbours, control connections, thread.
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/float_mode.h"
#include "base/interrupt.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sock.h"
#include "bootstrap/bootstrap.h"
#include "coll/ring_schedule.h"
#include "engine/autotune.h"
#include "engine/communicator.h"
#include "engine/context.h"
#include "engine/control.h"
#include "engine/coordinator.h"
#include "engine/device.h"
#include "engine/engine.h"
#include "engine/joined_ranks.h"
#include "engine/negotiation.h"
#include "engine/operation.h"
#include "engine/preflight.h"
#include "engine/progress_owner.h"
#include "engine/shared.h"
#include "engine/thread.h"
#include "engine/watchdog.h"
#include "transport/lanes.h"
#include "transport/transport.h"

enum {
    STREAMS_AUTO_MAX = 16,   // opened when streams=auto
    STREAMS_BEFORE_AUTO = 2, // used until the probe: small transfers gain little from more
    SEGMENT_DEFAULT = 256 * 1024,
    IN_FLIGHT_MAX = 8 * 1024 * 1024
};

static int lanes_wanted(const struct nb_job_config *config) {
    return config->streams == NB_STREAMS_AUTO ? (int)STREAMS_AUTO_MAX : config->streams;
}

static int binds_find(struct nb_job *job, struct binds *binds, struct nb_error *err) {
    if (job->config.ifname == NULL || job->config.ifname[0] == 0) {
        binds->at[0] = job->boot.self;
        nb_sock_set_port(&binds->at[0], 0);
        strcpy(binds->names[0], "to rank 0");
        return 1;
    }
    return nb_sock_interfaces(job->config.ifname, 0, binds->at, binds->names, BINDS_MAX, err);
}

static int job_lanes_open(struct nb_job *job, struct binds *binds, struct nb_error *err) {
    const struct nb_job_config *config = &job->config;
    const struct nb_lane_ops *ops = nb_transport_find(config->transport);
    if (ops == NULL) {
        return nb_fail(err, -EINVAL, "unknown transport '%s'", config->transport);
    }
    binds->count = binds_find(job, binds, err);
    if (binds->count < 0) {
        return binds->count;
    }
    struct nb_lanes_config lanes = {.ops = ops,
                                    .lane = {.rank = job->rank,
                                             .size = job->size,
                                             .loop = &job->loop,
                                             .boot = &job->boot,
                                             .ports = config->ports,
                                             .timeout_ms = config->timeout_ms,
                                             .provider = config->provider,
                                             .library = config->library,
                                             .congestion = config->congestion},
                                    .lanes = lanes_wanted(config),
                                    .binds = binds->at,
                                    .bind_count = binds->count,
                                    .segment_bytes = config->segment_bytes,
                                    .in_flight_max = IN_FLIGHT_MAX,
                                    .copy_bytes = NB_COPY_MAX,
                                    .lane_lost = nb_watchdog_lane_lost,
                                    .failed = nb_watchdog_lanes_failed,
                                    .ctx = job};
    int rc = nb_lanes_open(&job->lanes, &lanes, err);
    if (rc == 0) {
        job->info.streams_open = lanes.lanes;
        job->info.streams_used = config->streams == NB_STREAMS_AUTO ? 0 : lanes.lanes;
        job->info.provider = nb_lanes_describe(job->lanes);
        for (int i = 0; i < lanes.lanes; i++) {
            job->info.ports[i] = nb_lanes_port(job->lanes, i);
        }
        nb_lanes_use(job->lanes, config->streams == NB_STREAMS_AUTO ? (int)STREAMS_BEFORE_AUTO : lanes.lanes);
    }
    return rc;
}

// Returns the failure of a lane that broke while the job opens, or NULL.
static const struct nb_error *open_failure(const struct nb_job *job, int next, int prev) {
    if (job->failed) {
        return &job->failure;
    }
    const struct suspicion *s = &job->watchdog.suspicions[next];
    s = s->raised ? s : &job->watchdog.suspicions[prev];
    return s->raised ? &s->why : NULL;
}

static int not_in_time(const struct nb_job *job, int peer, struct nb_error *err) {
    int accept_error = nb_lanes_accept_error(job->lanes);
    if (accept_error == 0) {
        char awaited[NB_LANES_AWAITED_TEXT];
        nb_lanes_peer_awaited(job->lanes, peer, awaited);
        return nb_fail_peer(err, NB_ETIMEOUT, peer, "the lanes to rank %d did not open within %d ms%s", peer,
                            job->config.start_ms, awaited);
    }
    return nb_fail(err, NB_ETIMEOUT, // not the peer's fault
                   "the lanes to rank %d did not open within %d ms: this rank could not accept connections (%s%s)",
                   peer, job->config.start_ms, nb_code_name(accept_error), nb_code_remedy(accept_error));
}

// Opens the lanes to the ring neighbours now, so that the first step does not pay for it.
static int neighbours_open(struct nb_job *job, struct nb_error *err) {
    int next = (job->rank + 1) % job->size;
    int prev = (job->rank + job->size - 1) % job->size;
    int rc = nb_job_peer_ready(job, next, err);
    if (rc == 0) {
        rc = nb_job_peer_ready(job, prev, err);
    }
    int64_t until = nb_now_ns() + (int64_t)job->config.start_ms * 1000000;
    while (rc == 0 && open_failure(job, next, prev) == NULL &&
           !(nb_lanes_peer_ready(job->lanes, next) && nb_lanes_peer_ready(job->lanes, prev))) {
        nb_lanes_progress(job->lanes);
        nb_lanes_tick(job->lanes, nb_now_ns());
        nb_loop_wait(&job->loop, nb_lanes_arm(job->lanes) == -EAGAIN ? 0 : 10);
        if (nb_interrupted(job->boot.interrupt)) {
            rc = nb_fail(err, -EINTR, "interrupted before the lanes to ranks %d and %d were open", next, prev);
        } else if (nb_now_ns() > until) {
            int peer = nb_lanes_peer_ready(job->lanes, next) ? prev : next;
            rc = not_in_time(job, peer, err);
        }
    }
    if (rc == 0 && open_failure(job, next, prev) != NULL) {
        *err = *open_failure(job, next, prev);
        rc = err->code;
    }
    return rc;
}

static int addresses_exchange(struct nb_job *job, struct nb_error *err) {
    size_t bytes = nb_lanes_address_bytes(job->lanes);
    unsigned char *mine = calloc(1, bytes);
    job->addresses = calloc((size_t)job->size, bytes);
    if (mine == NULL || job->addresses == NULL) {
        free(mine);
        return nb_fail(err, -ENOMEM, "cannot allocate lane addresses of %d ranks", job->size);
    }
    nb_lanes_address(job->lanes, mine);
    int rc = nb_boot_allgather(&job->boot, mine, bytes, job->addresses, err);
    free(mine);
    return rc;
}

static int controls_open(struct nb_job *job, struct nb_error *err) {
    job->handle_control = job->rank == 0 ? nb_coordinator_message : nb_negotiation_message;
    job->control_count = job->rank == 0 ? job->size : 1;
    job->controls = calloc((size_t)job->control_count, sizeof *job->controls);
    if (job->controls == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate %d control connections", job->control_count);
    }
    for (int i = 0; i < job->control_count; i++) {
        job->controls[i].watch.fd = -1;
    }
    for (int i = job->rank == 0; i < job->control_count; i++) {
        int fd = job->boot.control[i];
        job->boot.control[i] = -1; // the job owns it now
        int rc = nb_control_init(&job->controls[i], job, i, fd, err);
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

static int network_open(struct nb_job *job, struct nb_error *err) {
    struct binds binds = {0};
    int rc = nb_job_preflight(job, &binds, job_lanes_open(job, &binds, err), err);
    if (rc == 0) {
        rc = addresses_exchange(job, err);
    }
    if (rc == 0) {
        rc = nb_shared_open(job, err);
        rc = rc == 0 ? neighbours_open(job, err) : rc;
        rc = nb_boot_agree(&job->boot, rc, err);
    }
    return rc == 0 ? controls_open(job, err) : rc;
}

static void job_free(struct nb_job *job) {
    nb_shared_close(job);
    nb_lanes_close(job->lanes);
    nb_devices_close(job);
    for (int i = 0; job->controls != NULL && i < job->control_count; i++) {
        nb_control_fini(&job->controls[i]);
    }
    free(job->controls);
    free(job->addresses);
    nb_negotiation_close(job);
    nb_coordinator_close(job);
    nb_groups_close(job);
    nb_autotune_close(job);
    nb_rounds_close(job);
    NB_LIST_EACH_SAFE(it, nx, &job->inbox.maps) {
        struct map_request *request = NB_CONTAINER(it, struct map_request, link);
        nb_shared_map(job, NULL, 0, request->fd);
        if (request->gone != NULL) {
            request->gone(request->ctx);
        }
        free(request);
    }
    nb_loop_fini(&job->loop);
    nb_boot_close(&job->boot);
    pthread_cond_destroy(&job->finished);
    pthread_cond_destroy(&job->progress.thread_wakes);
    pthread_mutex_destroy(&job->devices.lock);
    pthread_mutex_destroy(&job->lock);
    free(job->ops.spare);
    free(job->peer_open);
    nb_join_close(job);
    nb_watchdog_close(job);
    free(job);
}

static int job_init(struct nb_job *job, const struct nb_job_config *config, struct nb_error *err) {
    job->config = *config;
    job->boot = *config->boot;
    job->rank = job->boot.rank;
    job->size = job->boot.size;
    job->world = (struct nb_comm){.job = job, .rank = job->rank, .size = job->size};
    job->config.segment_bytes = config->segment_bytes == 0 ? SEGMENT_DEFAULT : config->segment_bytes;
    job->config.pending_max = config->pending_max <= 0 ? (int)PENDING_MAX : config->pending_max;
    job->config.timeout_ms = config->timeout_ms <= 0 ? 30000 : config->timeout_ms;
    job->config.start_ms = config->start_ms <= 0 ? job->config.timeout_ms : config->start_ms;
    job->peer_open = calloc((size_t)job->size, sizeof *job->peer_open);
    job->info.cpu = -1;
    job->progress.float_mode = nb_float_mode(); // which the communication thread inherits
    nb_job_lists_init(job);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&job->finished, &attr);
    pthread_cond_init(&job->progress.thread_wakes, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&job->lock, NULL);
    pthread_mutex_init(&job->devices.lock, NULL);
    job->loop.epoll_fd = -1;
    job->loop.wake_fd = -1;
    if (job->peer_open == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a job of %d ranks", job->size);
    }
    int rc = nb_loop_init(&job->loop, err);
    if (rc == 0) {
        rc = nb_watchdog_open(job, err);
    }
    if (rc == 0) {
        rc = nb_join_open(job, err);
    }
    if (rc == 0) {
        rc = nb_negotiation_open(job, err);
    }
    if (rc == 0) {
        rc = nb_autotune_open(job, err);
    }
    return rc == 0 && job->rank == 0 ? nb_coordinator_open(job, err) : rc;
}

// Starts the communication thread on its configured CPU, if it has one.
static int thread_start(struct nb_job *job, struct nb_error *err) {
    pthread_attr_t attr;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    pthread_attr_init(&attr);
    if (job->info.cpu >= 0) {
        CPU_SET((size_t)job->info.cpu, &cpus);
        pthread_attr_setaffinity_np(&attr, sizeof cpus, &cpus);
    }
    job->progress.callers_may_own = job->info.cpu < 0; // a pinned thread runs all passes on its CPU
    int rc = -pthread_create(&job->progress.thread, &attr, nb_thread_main, job);
    pthread_attr_destroy(&attr);
    job->progress.thread_runs = rc == 0;
    if (rc < 0 && job->info.cpu >= 0) {
        rc = rc == -EINVAL ? -ENODEV : rc; // the CPU exists, but this process may not use it
        return nb_fail(err, rc, "the communication thread cannot run on CPU %d (%s)", job->info.cpu, nb_code_name(rc));
    }
    return rc < 0 ? nb_fail(err, rc, "cannot start the communication thread (%s)", nb_code_name(rc)) : 0;
}

int nb_job_open(struct nb_job **out, const struct nb_job_config *config, struct nb_error *err) {
    if (config->streams < 0 || config->streams > NB_LANES_MAX) {
        return nb_fail(err, -EINVAL, "streams must be 1 to %d, or auto, not %d", NB_LANES_MAX, config->streams);
    }
    if (config->segment_bytes != 0 &&
        (config->segment_bytes < NB_BLOCK_MIN || config->segment_bytes > NB_SEGMENT_MAX / 2)) {
        return nb_fail(err, -EINVAL, "segments must have %d to %d bytes, not %zu bytes", NB_BLOCK_MIN,
                       NB_SEGMENT_MAX / 2, config->segment_bytes);
    }
    struct nb_job *job = calloc(1, sizeof *job);
    if (job == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a job");
    }
    int rc = job_init(job, config, err);
    *config->boot = (struct nb_boot){.rank = job->rank, .size = job->size}; // the job owns the connections now
    if (rc == 0 && job->size > 1) {
        rc = network_open(job, err);
    }
    job->config.cpus = NULL; // the caller's memory
    job->boot.interrupt = NULL;
    if (rc == 0 && job->size > 1) {
        rc = thread_start(job, err);
    }
    if (rc < 0) {
        job_free(job);
        return rc;
    }
    *out = job;
    return 0;
}

void nb_job_close(struct nb_job *job) {
    if (job == NULL) {
        return;
    }
    pthread_mutex_lock(&job->lock);
    nb_progress_end(job);
    pthread_mutex_unlock(&job->lock);
    if (job->progress.thread_runs) {
        pthread_join(job->progress.thread, NULL);
    }
    pthread_mutex_lock(&job->lock);
    while (job->progress.waiters > 0) { // every work is done: the waiters are about to return
        pthread_cond_wait(&job->finished, &job->lock);
    }
    pthread_mutex_unlock(&job->lock);
    job_free(job);
}
