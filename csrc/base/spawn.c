#include "base/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"

enum { STACK_BYTES = 256 * 1024 };

// What the process in between runs, on this process's memory, while the thread that made it is stopped.
struct between {
    char *const *argv;
    const posix_spawn_file_actions_t *files;
    const posix_spawnattr_t *attributes;
    pid_t pid;
    int error;
};

__attribute__((no_sanitize("thread"))) static int between_main(void *arg) {
    struct between *between = arg;
    between->error =
        posix_spawn(&between->pid, between->argv[0], between->files, between->attributes, between->argv, environ);
    return 0;
}

static bool adopts_orphans(void) {
    int subreaper = 0;
    return getpid() == 1 || (prctl(PR_GET_CHILD_SUBREAPER, &subreaper, 0, 0, 0) == 0 && subreaper != 0);
}

// The process in between has no signal at its end, so it is none of those that wait() without __WCLONE returns.
static int orphan(struct between *between, struct nb_error *err) {
    char *stack = malloc(STACK_BYTES);
    if (stack == NULL) {
        return nb_fail(err, -ENOMEM, "no memory for a stack");
    }
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a handler would run on memory that is not its own
    pid_t child = clone(between_main, stack + STACK_BYTES, CLONE_VM | CLONE_VFORK, between);
    int rc = child < 0 ? nb_fail(err, -errno, "clone: %m") : 0;
    while (child > 0 && waitpid(child, NULL, __WCLONE) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    free(stack);
    if (rc == 0 && between->error != 0) {
        errno = between->error;
        rc = nb_fail(err, -errno, "%s: %m", between->argv[0]);
    }
    return rc;
}

int nb_spawn_apart(char *const argv[], int input, pid_t *pid, struct nb_error *err) {
    if (adopts_orphans()) {
        return nb_fail(err, -ECHILD, "this process adopts orphans, and would wait for it as for a child");
    }
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
    sigset_t none;
    sigemptyset(&none);
    int error = posix_spawn_file_actions_init(&files);
    if (error != 0) {
        return nb_fail(err, -error, "no memory for a process");
    }
    error = posix_spawnattr_init(&attributes);
    if (error != 0) {
        posix_spawn_file_actions_destroy(&files);
        return nb_fail(err, -error, "no memory for a process");
    }
    error = posix_spawn_file_actions_adddup2(&files, input, STDIN_FILENO);
    error = error != 0 ? error : posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    error = error != 0 ? error : posix_spawnattr_setsigmask(&attributes, &none);
    error = error != 0 ? error : posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
    struct between between = {.argv = argv, .files = &files, .attributes = &attributes, .error = error};
    int rc = error != 0 ? nb_fail(err, -error, "no memory for a process") : orphan(&between, err);
    *pid = between.pid;
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    return rc;
}
