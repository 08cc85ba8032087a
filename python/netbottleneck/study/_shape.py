"""Caps what one interface of this host sends, and gives its old state back, whatever becomes of the caller.

A script of its own (python -I -S), as root: _shape.py TC INTERFACE HANDLE ALIVE_FD, and on standard input the commands
that make the caps. It says "ready" once they hold, waits until the write end behind ALIVE_FD is closed everywhere, and
undoes them. Only what can be given back exactly is replaced: the kernel's default, or a simple queue without classes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

SIMPLE = ("pfifo", "bfifo")  # what tc prints of these, it also takes, and nothing is rounded


def tc(tool: str, *words: str, text: str | None = None) -> str:
    """Run tc and return what it prints; raise OSError with its words."""
    done = subprocess.run([tool, *words], input=text, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise OSError(f"tc {' '.join(words)}: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout


def state(tool: str, interface: str) -> list[str]:
    """Return the words that tc prints of an interface's root."""
    for line in tc(tool, "qdisc", "show", "dev", interface).splitlines():
        words = line.split()
        if "root" in words:
            return words
    return []


def again(words: list[str], handle: str) -> list[str]:
    """Return the words that make a root again; none for the kernel's default. Raises OSError for what cannot be."""
    if not words or words[2] in ("0:", handle):  # the handle is ours: of a study whose keeper was killed, too
        return []
    kind = words[1]
    if kind not in SIMPLE:
        raise OSError(f"it has a queueing discipline of its own ({kind} {words[2]}), which could not be given back")
    rest = words[words.index("root") + 1 :]
    if rest[:1] == ["refcnt"]:
        rest = rest[2:]
    plain = [word[:-1] if word.endswith("p") and word[:-1].isdigit() else word for word in rest]
    return ["handle", words[2], kind, *plain]


def restore(tool: str, interface: str, words: list[str], handle: str) -> None:
    """Make an interface's root what it was. Raises OSError where it is not."""
    now = state(tool, interface)
    if now and now[2] == handle:
        tc(tool, "qdisc", "del", "dev", interface, "root")
    if words:
        tc(tool, "qdisc", "replace", "dev", interface, "root", *words)
    if again(state(tool, interface), handle) != words:
        raise OSError(f"its old queueing discipline is not what it was: {' '.join(words)}")


def main(args: list[str]) -> int:
    """Hold the caps until the caller is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tool, interface, handle, alive = args[0], args[1], args[2], int(args[3])
    try:
        words = again(before := state(tool, interface), handle)
        if before and before[2] != "0:":
            tc(tool, "qdisc", "del", "dev", interface, "root")
        try:
            tc(tool, "-batch", "-", text=sys.stdin.read())
            os.write(1, b"ready\n")
            poll = select.poll()
            poll.register(alive, 0)  # POLLHUP comes unasked
            while not poll.poll():
                pass
        finally:
            restore(tool, interface, words, handle)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{interface}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
