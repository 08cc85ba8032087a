// The process's nets: the life of each, its helper thread, and what it writes to NCCL's log (see net.h).
#include "nccl/net.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#include "base/admission.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/fork_detector.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/sha256.h"
#include "nccl/abi.h"

enum {
    EXIT_NAP_NS = 100 * 1000,      // between looks whether peers' kernels have all
    NAP_NS = 4 * 1000 * 1000,      // the helper looks this often whether calls still make progress
    POLL_NAP_NS = 50 * 1000,       // between its passes where nothing can wake it
    LINGER_NS = 200 * 1000 * 1000, // for peers to read what their kernels have
    UNSENT_NS = 2000 * 1000 * 1000 // for peers' kernels to get what was sent
};

// The child of a fork has none.
static struct {
    pthread_mutex_t lock;
    struct nb_net *nets[NB_NET_KINDS];
    int ending;   // nets that are in none of these places and not freed yet
    bool guarded; // the fork handler is registered
} process = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct nb_net_counters nb_net_counts[NB_NET_KINDS];

static void in_child(void) {
    memset(process.nets, 0, sizeof process.nets); // their memory stays: the objects that NCCL holds refer to it
    process.ending = 0;
    pthread_mutex_init(&process.lock, NULL);
}

bool nb_net_is_mine(const struct nb_net *net) {
    return nb_fork_detector_is_opener(&net->fork);
}

struct nb_net *nb_net_current(enum nb_net_kind kind) {
    pthread_mutex_lock(&process.lock);
    struct nb_net *net = process.nets[kind];
    pthread_mutex_unlock(&process.lock);
    return net;
}

// Runs a progress pass. Returns how long to sleep then, in ms; 0: a moment.
static int helper_pass(struct nb_net *net, bool *stop) {
    pthread_mutex_lock(&net->lock);
    *stop = net->stop;
    nb_links_open(net);
    nb_links_progress(net);
    int sleep_ms = nb_links_arm(net);
    pthread_mutex_unlock(&net->lock);
    return sleep_ms;
}

static void *helper_main(void *arg) {
    static const struct timespec nap = {.tv_nsec = NAP_NS};
    static const struct timespec poll_nap = {.tv_nsec = POLL_NAP_NS}; // isend and irecv get the lock meanwhile
    struct nb_net *net = arg;
    uint64_t seen = 0;
    bool stop = false;
    while (!stop) {
        uint64_t calls = atomic_load_explicit(&net->calls, memory_order_relaxed);
        bool needed = atomic_load_explicit(&net->stop, memory_order_relaxed) ||
                      atomic_load_explicit(&net->open_due, memory_order_relaxed);
        if (calls != seen && !needed) {
            seen = calls;
            nanosleep(&nap, NULL); // takes no lock that a call could miss
            continue;
        }
        int sleep_ms = helper_pass(net, &stop);
        if (!stop && sleep_ms == 0) {
            nanosleep(&poll_nap, NULL);
        } else if (!stop) {
            nb_loop_wait(&net->sleep, sleep_ms);
        }
    }
    return NULL;
}

// The pass that follows handles the events.
static void loop_ready(struct nb_watch *watch, uint32_t events) {
    (void)watch;
    (void)events;
}

static int loops_open(struct nb_net *net, struct nb_error *err) {
    int rc = nb_loop_init(&net->loop, err);
    rc = rc == 0 ? nb_loop_init(&net->sleep, err) : rc;
    net->slept = (struct nb_watch){.fd = net->loop.epoll_fd, .ready = loop_ready};
    return rc == 0 ? nb_loop_add(&net->sleep, &net->slept, EPOLLIN, err) : rc;
}

static int helper_start(struct nb_net *net, struct nb_error *err) {
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the program's own
    int rc = -pthread_create(&net->helper, NULL, helper_main, net);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    net->helper_runs = rc == 0;
    return rc < 0 ? nb_fail(err, rc, "cannot start the helper thread (%s)", nb_code_name(rc)) : 0;
}

static void net_free(struct nb_net *net) {
    if (net->helper_runs) {
        pthread_mutex_lock(&net->lock);
        net->stop = true;
        nb_loop_wake(&net->sleep);
        pthread_mutex_unlock(&net->lock);
        pthread_join(net->helper, NULL);
    }
    pthread_mutex_lock(&net->lock);
    bool unsent = false;
    int64_t began = nb_now_ns();
    while (nb_links_leaving(net, &unsent) && nb_now_ns() - began < (unsent ? (int64_t)UNSENT_NS : (int64_t)LINGER_NS)) {
        nb_links_progress(net);
        nb_loop_sleep(&net->loop, 1);
    }
    nb_links_close(net);
    NB_LIST_EACH_SAFE(it, nx, &net->connecting) { // connect() was never called again
        nb_list_remove(it);
        free(NB_CONTAINER(it, struct nb_net_comm, at_listener));
    }
    pthread_mutex_unlock(&net->lock);
    nb_loop_fini(&net->sleep);
    nb_loop_fini(&net->loop);
    pthread_mutex_destroy(&net->lock);
    nb_fork_detector_close(&net->fork);
    free(net);
}

// True if a peer's kernel may lack what the net sent.
static bool net_unsent(struct nb_net *net) {
    if (!nb_net_is_mine(net)) {
        return false;
    }
    if (pthread_mutex_trylock(&net->lock) != 0) {
        return true;
    }
    nb_links_progress(net);
    bool unsent = nb_links_unsent(net) || net->opening != NULL;
    pthread_mutex_unlock(&net->lock);
    return unsent;
}

// The same for the process, of which other threads may run.
static bool process_unsent(void) {
    if (pthread_mutex_trylock(&process.lock) != 0) {
        return true;
    }
    bool unsent = process.ending > 0;
    for (int kind = 0; kind < NB_NET_KINDS; kind++) {
        unsent = (process.nets[kind] != NULL && net_unsent(process.nets[kind])) || unsent;
    }
    pthread_mutex_unlock(&process.lock);
    return unsent;
}

// A process may exit right after its last send. Its kernel then resets connections that have unread input, such as
// grants, and drops what the peer does not have.
__attribute__((destructor)) static void at_exit(void) {
    static const struct timespec nap = {.tv_nsec = EXIT_NAP_NS};
    int64_t until = nb_now_ns() + UNSENT_NS;
    while (process_unsent() && nb_now_ns() < until) {
        nanosleep(&nap, NULL);
    }
}

static int net_new(struct nb_net **out, enum nb_net_kind kind, const struct nb_link_up *up, nccl_logger log,
                   struct nb_error *err) {
    struct nb_net *net = calloc(1, sizeof *net);
    if (net == NULL) {
        return nb_fail(err, -ENOMEM, "cannot allocate a net");
    }
    net->kind = kind;
    net->log = log;
    net->up = up;
    net->listener.fd = -1;
    net->loop.epoll_fd = net->sleep.epoll_fd = -1;
    nb_list_init(&net->gate.link);
    nb_list_init(&net->links);
    nb_list_init(&net->listeners);
    nb_list_init(&net->connecting);
    nb_admission_init(&net->admission);
    nb_fork_detector_open(&net->fork);
    pthread_mutex_init(&net->lock, NULL);
    int rc = nb_net_settings_read(&net->settings, kind, err);
    if (rc == 0) {
        rc = nb_random(net->process, sizeof net->process);
        rc = rc < 0 ? nb_fail(err, rc, "no random bytes") : loops_open(net, err);
    }
    if (rc == 0) {
        rc = helper_start(net, err);
    }
    if (rc < 0) {
        net_free(net);
        return rc;
    }
    *out = net;
    return 0;
}

int nb_net_open(struct nb_net **out, enum nb_net_kind kind, const struct nb_link_up *up, nccl_logger log,
                struct nb_error *err) {
    int rc = 0;
    struct nb_net **mine = &process.nets[kind];
    pthread_mutex_lock(&process.lock);
    if (!process.guarded) {
        process.guarded = true;
        nb_fork_handler(in_child);
    }
    bool is_new = *mine == NULL;
    if (is_new) {
        rc = net_new(mine, kind, up, log, err);
    }
    struct nb_net *net = *mine;
    if (rc == 0) {
        pthread_mutex_lock(&net->lock);
        net->users++;
        pthread_mutex_unlock(&net->lock);
    }
    pthread_mutex_unlock(&process.lock);
    if (rc < 0) {
        return rc;
    }
    rc = nb_net_settings_check(&net->settings, err); // here NCCL may wait
    if (rc < 0) {
        nb_net_close(net);
        return rc;
    }
    if (is_new) {
        nb_net_log(net, NCCL_LOG_INFO, net->settings.tag);
    }
    *out = net;
    return 0;
}

void nb_net_close(struct nb_net *net) {
    if (net == NULL || !nb_net_is_mine(net)) {
        return;
    }
    pthread_mutex_lock(&process.lock);
    pthread_mutex_lock(&net->lock);
    bool last = --net->users == 0;
    pthread_mutex_unlock(&net->lock);
    if (last) {
        process.nets[net->kind] = NULL;
        process.ending++;
    }
    pthread_mutex_unlock(&process.lock);
    if (last) {
        net_free(net); // may wait for peers
        pthread_mutex_lock(&process.lock);
        process.ending--;
        pthread_mutex_unlock(&process.lock);
    }
}
