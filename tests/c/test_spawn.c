// Spawn: a process that is no child of the one that starts it.
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/spawn.h"
#include "check.h"

static volatile sig_atomic_t signals;

static void count_signal(int signum) {
    (void)signum;
    signals++;
}

// Starts a shell with a socket as its input, and returns what it writes there until it ends.
static pid_t run(char *command, char answer[64]) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair: %m");
    char *argv[] = {"/bin/sh", "-c", command, NULL};
    struct nb_error err = {0};
    pid_t pid = 0;
    int rc = nb_spawn_apart(argv, ends[1], &pid, &err);
    CHECK(rc == 0 && pid > 0, "spawn: %d, %s", rc, err.text);
    close(ends[1]);
    size_t bytes = 0;
    ssize_t got = 1;
    while (got > 0 && bytes < 63) {
        got = read(ends[0], answer + bytes, 63 - bytes);
        bytes += got > 0 ? (size_t)got : 0;
    }
    answer[bytes] = 0;
    close(ends[0]);
    return pid;
}

static void test_it_is_no_child(void) {
    CHECK(signal(SIGCHLD, count_signal) != SIG_ERR, "signal: %m");
    char answer[64];
    pid_t pid = run("echo $$ >&0; test -z \"$(trap)\" && echo $PPID >&0", answer);
    char *rest = NULL;
    CHECK(strtol(answer, &rest, 10) == pid, "its number is %d, it says %s", (int)pid, answer);
    CHECK(strtol(rest, NULL, 10) != getpid(), "its parent is this process: %s", answer);
    errno = 0;
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "there is a child: %m");
    CHECK(signals == 0, "%d signals of children", (int)signals);
    signal(SIGCHLD, SIG_DFL);
}

static void test_another_child_is_waited_for(void) {
    pid_t child = fork();
    if (child == 0) {
        _exit(7);
    }
    char answer[64];
    run("echo x >&0", answer);
    int status = 0;
    CHECK(wait(&status) == child && WEXITSTATUS(status) == 7, "another child was waited for");
}

static void test_failures(void) {
    struct nb_error err = {0};
    pid_t pid = 0;
    char *absent[] = {"/does/not/exist", NULL};
    CHECK(nb_spawn_apart(absent, STDIN_FILENO, &pid, &err) == -ENOENT && strstr(err.text, absent[0]) != NULL,
          "an absent program: %s", err.text);
    struct nb_error adopted = {0};
    char *shell[] = {"/bin/sh", "-c", "exit", NULL};
    CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, "prctl: %m");
    CHECK(nb_spawn_apart(shell, STDIN_FILENO, &pid, &adopted) == -ECHILD, "a process that adopts orphans: %s",
          adopted.text);
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0);
    errno = 0;
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD, "there is a child: %m");
}

int main(void) {
    test_it_is_no_child();
    test_another_child_is_waited_for();
    test_failures();
    return 0;
}
