// Spawn: starts a process that is no child of this one. A program that waits for any child, or handles SIGCHLD, never
// sees it.
#ifndef NB_BASE_SPAWN_H
#define NB_BASE_SPAWN_H

#include <sys/types.h>

#include "base/error.h"

// Starts argv[0] (a path) with `input` as its standard input and /dev/null as its output, in a session of its own, with
// this process's environment and standard error. Its parent is init, or the nearest ancestor that adopts orphans. If this
// process would adopt it, nothing is started: -ECHILD. Returns 0 and its number, or a failure.
int nb_spawn_apart(char *const argv[], int input, pid_t *pid, struct nb_error *err);

#endif
