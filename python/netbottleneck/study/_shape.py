"""Keeper of caps: limits what one interface of this host sends, and restores its old state when the caller ends.

A separate script (python -I -S), run as root: _shape.py TC INTERFACE HANDLE ALIVE_FD. It reads the tc commands that set
the caps from standard input. It writes "ready" once they are set, waits until every copy of the write end behind
ALIVE_FD is closed, and restores the old state. It replaces only a state that it can restore exactly: the kernel's
default, or a simple queue without classes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

SIMPLE = ("pfifo", "bfifo")  # tc accepts its own output for these, without rounding


def tc(tool: str, *arguments: str, text: str | None = None) -> str:
    """Run tc and return its output; raise OSError with its error text."""
    done = subprocess.run([tool, *arguments], input=text, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"tc {' '.join(arguments)}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout


def state(tool: str, interface: str) -> list[str]:
    """Return the fields of tc's line on an interface's root qdisc; [] if there is none."""
    for line in tc(tool, "qdisc", "show", "dev", interface).splitlines():
        fields = line.split()
        if "root" in fields:
            return fields
    return []


def recreation(fields: list[str], handle: str) -> list[str]:
    """Return the arguments that recreate a root qdisc; [] for the kernel's default. Raises OSError if not possible."""
    if not fields or fields[2] in ("0:", handle):  # handle: our qdisc, possibly left by a killed keeper
        return []
    kind = fields[1]
    if kind not in SIMPLE:
        raise OSError(f"its queueing discipline ({kind} {fields[2]}) could not be restored afterwards")
    rest = fields[fields.index("root") + 1 :]
    if rest[:1] == ["refcnt"]:
        rest = rest[2:]
    plain = [word[:-1] if word.endswith("p") and word[:-1].isdigit() else word for word in rest]
    return ["handle", fields[2], kind, *plain]


def restore(tool: str, interface: str, arguments: list[str], handle: str) -> None:
    """Restore an interface's root qdisc. Raises OSError if the result differs from the old state."""
    now = state(tool, interface)
    if now and now[2] == handle:
        tc(tool, "qdisc", "del", "dev", interface, "root")
    if arguments:
        tc(tool, "qdisc", "replace", "dev", interface, "root", *arguments)
    if recreation(state(tool, interface), handle) != arguments:
        raise OSError(f"its old queueing discipline was not restored: {' '.join(arguments)}")


def main(args: list[str]) -> int:
    """Hold the caps until the caller ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tool, interface, handle, alive = args[0], args[1], args[2], int(args[3])
    try:
        arguments = recreation(before := state(tool, interface), handle)
        if before and before[2] != "0:":
            tc(tool, "qdisc", "del", "dev", interface, "root")
        try:
            tc(tool, "-batch", "-", text=sys.stdin.read())
            os.write(1, b"ready\n")
            poll = select.poll()
            poll.register(alive, 0)  # poll always reports POLLHUP
            while not poll.poll():
                pass
        finally:
            restore(tool, interface, arguments, handle)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{interface}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
