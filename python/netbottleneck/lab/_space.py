"""The lab's helper process: holds one anonymous network namespace, or enters one and becomes the given command.

A script of its own (python -I -S), so that it has one thread, starts fast and imports nothing of ours.
  hold PARENT_PID ALIVE_FD USER_FD new-user|new-net|no-space MARK
  enter PARENT_PID USER_FD NET_FD COMMAND…
A holder says "ready" on its standard output, then waits until the write end behind ALIVE_FD is closed everywhere or
its parent is gone, kills what is left in its namespace (or, without one, what carries MARK in its environment), and
ends."""

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
FIRST_PORT, PORTS = 32768, 2048  # as wide as the table of flow classes: flows to one port never share a class


def libc_call(name: str, *args: int) -> None:
    """Call a libc function that answers 0, or raise OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    """Write a file of /proc."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def new_user() -> None:
    """Become root of a new user namespace in which only the caller's own ids exist."""
    uid, gid = os.geteuid(), os.getegid()
    libc_call("unshare", NEW_USER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/gid_map", f"0 {gid} 1")
    write("/proc/self/uid_map", f"0 {uid} 1")


def network(pid: int | str) -> int:
    """Return the number of a process's network namespace, 0 where it is gone or hidden."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0


def marked(pid: int, mark: bytes) -> bool:
    """Whether a process was started with `mark` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False


def sweep(space: int, mark: bytes) -> None:
    """Kill every other process of namespace `space` (0: every one that carries `mark`) until none is left.

    One look may miss some: a process that is becoming another program has no environment for a moment."""
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
    """Make the namespace, say so, wait for the end of the lab and leave nothing behind."""
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
        if space in (0, outside):  # the sweep must never see the machine's own namespace
            raise OSError("unshare left the process where it was")
        with contextlib.suppress(OSError):  # read-only in many containers: two flows may then share a class
            write(LOCAL_PORTS, f"{FIRST_PORT} {FIRST_PORT + PORTS - 1}")
    os.write(1, b"ready\n")
    os.close(1)
    poll = select.poll()
    poll.register(alive_fd, 0)  # POLLHUP comes unasked
    while os.getppid() == parent and not poll.poll(500):
        pass
    sweep(space, mark)


def enter(parent: int, user_fd: int, net_fd: int, command: list[str]) -> None:
    """Enter the namespaces and become the command; do nothing where the lab is already gone."""
    if user_fd >= 0:
        libc_call("setns", user_fd, NEW_USER)
        os.close(user_fd)
    if net_fd >= 0:
        libc_call("setns", net_fd, NEW_NET)
        os.close(net_fd)
    if os.getppid() != parent:  # after setns: from here on the holder's sweep finds this process
        raise OSError("the lab has ended")
    os.execvp(command[0], command)


def main(args: list[str]) -> int:
    """Run one of the two modes; the reason of a failure goes to standard error."""
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
