// Preflight check: all ranks need the same number of interfaces, and CPUs that exist and suffice. All ranks get the
// same result. The communication thread runs on its configured CPU.
#include <sched.h>
#include <stdint.h>

#include "engine/context.h"
#include "engine/preflight.h"
#include "job.h"

static void runs_on_its_cpu(struct test_rank *me) {
    struct nb_job_info info;
    cpu_set_t set;
    nb_job_info(me->job, &info);
    CHECK(info.cpu == me->cpus[me->rank / 2], "rank %d: CPU %d is reported", me->rank, info.cpu);
    CHECK(pthread_getaffinity_np(me->job->progress.thread, sizeof set, &set) == 0, "affinity: %m");
    CHECK(CPU_COUNT(&set) == 1 && CPU_ISSET((size_t)info.cpu, &set), "rank %d: the thread may run on %d CPUs", me->rank,
          CPU_COUNT(&set));
    test_barrier(me, "pinned");
}

static void runs_on_any_cpu(struct test_rank *me) {
    struct nb_job_info info;
    cpu_set_t own;
    cpu_set_t set;
    nb_job_info(me->job, &info);
    CHECK(info.cpu == -1, "rank %d: CPU %d is reported", me->rank, info.cpu);
    CHECK(sched_getaffinity(0, sizeof own, &own) == 0, "affinity: %m");
    CHECK(pthread_getaffinity_np(me->job->progress.thread, sizeof set, &set) == 0, "affinity: %m");
    CHECK(CPU_EQUAL(&set, &own), "rank %d: the thread may run on %d CPUs", me->rank, CPU_COUNT(&set));
    test_barrier(me, "not pinned");
}

static int first_cpu(void) {
    cpu_set_t own;
    int cpu = 0;
    CHECK(sched_getaffinity(0, sizeof own, &own) == 0, "affinity: %m");
    while (!CPU_ISSET((size_t)cpu, &own)) {
        cpu++;
    }
    return cpu;
}

static void test_pinned_threads(void) {
    cpu_set_t own;
    CHECK(sched_getaffinity(0, sizeof own, &own) == 0, "affinity: %m");
    int cpus[2] = {first_cpu(), first_cpu()};
    for (int cpu = cpus[0] + 1; cpu < CPU_SETSIZE; cpu++) {
        cpus[1] = CPU_ISSET((size_t)cpu, &own) ? cpu : cpus[1];
    }
    // Ranks 0 and 2 are on one host, 1 and 3 on another: each has local rank 0 or 1.
    static const struct test_override overrides[] = {{.rank = 1, .host = "host b"}, {.rank = 3, .host = "host b"}};
    struct test_rank template = test_on("tcp");
    template.size = 4;
    template.overrides = overrides;
    template.override_count = 2;
    template.cpus = cpus;
    template.cpu_count = 2;
    template.run = runs_on_its_cpu;
    CHECK(test_job(&template) == 0, "tcp");
    template.cpu_count = 0;
    template.run = runs_on_any_cpu;
    CHECK(test_job(&template) == 0, "tcp");
}

static void test_too_few_cpus(void) {
    int cpu = first_cpu();
    struct test_rank template = test_on("tcp");
    template.size = 3;
    template.cpus = &cpu;
    template.cpu_count = 1;
    template.run = runs_on_its_cpu;
    test_job_fails(&template, -ENODEV, "rank 1 has local rank 1, but only 1 CPU is named");
}

static void test_unknown_cpu(void) {
    int cpus[3] = {first_cpu(), CPU_SETSIZE - 1, first_cpu()};
    struct test_rank template = test_on("tcp");
    if (sysconf(_SC_NPROCESSORS_CONF) == CPU_SETSIZE) {
        return;
    }
    template.size = 3;
    template.cpus = cpus;
    template.cpu_count = 3;
    template.run = runs_on_its_cpu;
    test_job_fails(&template, -ENODEV, "CPU 1023 of a communication thread does not exist");
}

static void *run_preflight(void *arg) {
    struct test_rank *me = arg;
    struct nb_boot_config config = {
        .rank = me->rank, .size = me->size, .timeout_ms = TEST_LIMIT_MS, .ifname = "lo", .secret = test_secret};
    struct nb_boot boot = {0};
    struct nb_job *job = calloc(1, sizeof *job);
    struct binds binds = {.count = me->rank == 1 ? 1 : 2, .names = {"net0", "net1"}};
    config.secret_bytes = sizeof test_secret;
    config.tag = "test";
    CHECK(nb_boot_join(&boot, &config, me->listener, me->rank == 0 ? NULL : me->address, &me->err) == 0, "join");
    job->boot = boot;
    job->size = me->size;
    job->rank = me->rank;
    job->info.streams_open = me->streams;
    me->rc = nb_job_preflight(job, &binds, me->rc, &me->err);
    nb_boot_close(&job->boot);
    free(job);
    return NULL;
}

static void run_preflight_on_all(struct test_rank *ranks, int size, int streams, int failing) {
    struct nb_listener listener = {.fd = -1};
    struct nb_error err = {0};
    struct nb_boot_config config = {.size = size, .ifname = "lo", .secret = test_secret, .secret_bytes = 32};
    pthread_t threads[TEST_RANKS_MAX];
    CHECK(nb_listener_open(&listener, &config, NULL, &err) == 0, "listen: %s", err.text);
    for (int r = 0; r < size; r++) {
        ranks[r] = (struct test_rank){.rank = r, .size = size, .streams = streams};
        ranks[r].listener = r == 0 ? &listener : NULL;
        nb_sock_format(&listener.addr, ranks[r].address);
        if (r == failing) {
            ranks[r].rc = nb_fail(&ranks[r].err, -ENODEV, "own error");
        }
        CHECK(pthread_create(&threads[r], NULL, run_preflight, &ranks[r]) == 0, "thread %d", r);
    }
    for (int r = 0; r < size; r++) {
        pthread_join(threads[r], NULL);
    }
    nb_listener_close(&listener);
}

static void test_different_interfaces(void) {
    struct test_rank ranks[3];
    run_preflight_on_all(ranks, 3, 4, -1);
    for (int r = 0; r < 3; r++) {
        CHECK(ranks[r].rc == NB_EMISMATCH, "rank %d: %d %s", r, ranks[r].rc, ranks[r].err.text);
        CHECK(strstr(ranks[r].err.text, "rank 0 spreads its lanes over 2 interfaces (net0,net1), rank 1 over 1 (net0)"),
              "rank %d: %s", r, ranks[r].err.text);
        CHECK(strstr(ranks[r].err.text, "NETBOTTLENECK_IFNAME"), "the advice is missing: %s", ranks[r].err.text);
    }
    run_preflight_on_all(ranks, 3, 1, -1); // one lane uses one interface
    for (int r = 0; r < 3; r++) {
        CHECK(ranks[r].rc == 0, "rank %d: %d %s", r, ranks[r].rc, ranks[r].err.text);
    }
}

static void test_lanes_fail_to_open(void) {
    struct test_rank ranks[3];
    run_preflight_on_all(ranks, 3, 4, 2);
    CHECK(ranks[2].rc == -ENODEV && strcmp(ranks[2].err.text, "own error") == 0, "%s", ranks[2].err.text);
    for (int r = 0; r < 2; r++) {
        CHECK(ranks[r].rc == NB_EPEER && ranks[r].err.peer == 2, "rank %d: %d %s", r, ranks[r].rc, ranks[r].err.text);
    }
}

int main(void) {
    test_pinned_threads();
    test_too_few_cpus();
    test_unknown_cpu();
    test_different_interfaces();
    test_lanes_fail_to_open();
    return 0;
}
