"""Helper process of the lab: holds one anonymous network namespace, or enters one and execs the given command.

A separate script (python -I -S), so that it has one thread, starts fast and imports nothing of this package.
  hold PARENT_PID ALIVE_FD USER_FD new-user|new-net|no-space MARK
  enter PARENT_PID USER_FD NET_FD COMMAND…
A holder writes "ready" to its standard output. It then waits until ALIVE_FD, the read end of a pipe, is readable, every
copy of the write end is closed, or its parent is gone. At the end it kills all other processes in its namespace
(without a namespace: those with MARK in their environment) and exits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

NEW_USER, NEW_NET = 0x10000000, 0x40000000
LOCAL_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
CLEAR_LOOKS = 3
FIRST_PORT, PORTS = 32768, 2048  # as many ports as flow classes: flows to one port never share a class


def libc_call(name: str, *args: int) -> None:
    """Call a libc function that returns 0 on success, or raise OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    """Write a file under /proc."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def new_user() -> None:
    """Become root of a new user namespace that maps only the caller's own ids."""
    uid, gid = os.geteuid(), os.getegid()
    libc_call("unshare", NEW_USER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"0 {gid} 1")
    write("/proc/self/uid_map", f"0 {uid} 1")


def network(pid: int | str) -> int:
    """Return the inode of a process's network namespace, 0 if it is gone or hidden."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def marked(pid: int, mark: bytes) -> bool:
    """Return whether a process was started with `mark` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False


def sweep(space: int, mark: bytes) -> None:
    """Kill every other process of namespace `space` (0: every one that carries `mark`) until none is left.

    A single scan may miss some: a process has no environment for a moment during exec."""
    clear = 0
    for _ in range(50):
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        left = [pid for pid in others if (network(pid) == space if space else marked(pid, mark))]
        clear = 0 if left else clear + 1
        if clear == CLEAR_LOOKS:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        select.select([], [], [], 0.01)


def hold(parent: int, alive_fd: int, user_fd: int, how: str, mark: bytes) -> None:
    """Create the namespace, report it, wait for the end of the lab and clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outside = network("self")
    if how == "new-user":
        new_user()
    elif user_fd >= 0:
        libc_call("setns", user_fd, NEW_USER)
    space = 0
    if how != "no-space":
        libc_call("unshare", NEW_NET)
        space = network("self")
        if space in (0, outside):  # the sweep must never match the machine's own namespace
            raise OSError("unshare did not create a namespace")
        with contextlib.suppress(OSError):  # read-only in many containers: two flows may then share a class
            write(LOCAL_PORTS, f"{FIRST_PORT} {FIRST_PORT + PORTS - 1}")
    os.write(1, b"ready\n")
    os.close(1)
    poll = select.poll()
    poll.register(alive_fd, select.POLLIN)  # left unread, as all holders share it; poll also reports POLLHUP
    while os.getppid() == parent and not poll.poll(500):
        pass
    sweep(space, mark)


def enter(parent: int, user_fd: int, net_fd: int, command: list[str]) -> None:
    """Enter the namespaces and exec the command; raise OSError if the lab has ended."""
    if user_fd >= 0:
        libc_call("setns", user_fd, NEW_USER)
        os.close(user_fd)
    if net_fd >= 0:
        libc_call("setns", net_fd, NEW_NET)
        os.close(net_fd)
    if os.getppid() != parent:  # after setns, the holder's sweep finds this process
        raise OSError("the lab has ended")
    os.execvp(command[0], command)


def main(args: list[str]) -> int:
    """Run one of the two modes; write the reason of a failure to standard error."""
    try:
        if args[0] == "hold":
            hold(int(args[1]), int(args[2]), int(args[3]), args[4], args[5].encode())
        else:
            enter(int(args[1]), int(args[2]), int(args[3]), args[4:])
    except OSError as error:
        who = "" if args[0] == "hold" else f"netbottleneck.lab: {args[4]}: "
        sys.stderr.write(f"{who}{error.strerror or error}\n")
        return 127
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
