"""Anonymous network namespaces and what starts inside them: the lab's only contact with processes.

A namespace lives as long as its holder (see _space.py), and a holder as long as the write end of one pipe that only the
lab's own process has. Nothing is written to /run/netns, and nothing has to be cleaned up after a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_S = 10.0
_SCRIPT = str(Path(__file__).with_name("_space.py"))
_PYTHON = [sys.executable, "-I", "-S"]


class LabError(OSError):
    """This machine does not allow, or lacks, what a lab needs; the text says what."""


@dataclass(frozen=True)
class Space:
    """A held namespace: its holder, and descriptors of its user (-1: the caller's) and network namespace (-1: none)."""

    holder: subprocess.Popen[bytes]
    user_fd: int
    net_fd: int


class Spaces:
    """The namespaces of one lab. Closed by close(), or by the end of this process however it comes."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.all: list[Space] = []
        self._owner = os.getpid()
        self._alive_read, self._alive_write = os.pipe()  # both closed on exec: only holders are handed the read end

    def hold(self, how: str) -> Space:
        """Start a holder: "root" (as we are), "user" (in one user namespace for all), "loopback" (no namespace).

        Raises LabError with the holder's own words."""
        user_fd = self.all[0].user_fd if self.all else -1
        step = {"root": "new-net", "user": "new-net" if self.all else "new-user", "loopback": "no-space"}[how]
        alive = self._alive_read
        command = ["hold", str(os.getpid()), str(alive), str(user_fd), step, self.mark]
        holder = subprocess.Popen(
            [*_PYTHON, _SCRIPT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[alive, *([user_fd] if user_fd >= 0 else [])],
            start_new_session=True,
        )
        said = _first_line(holder)
        if said != b"ready\n":
            why = _stop(holder)
            raise LabError(why or "the namespace's holder did not start")
        if how == "user" and user_fd < 0:
            user_fd = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        net_fd = -1 if how == "loopback" else os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.all.append(Space(holder, user_fd, net_fd))
        return self.all[-1]

    def popen(
        self, space: Space, argv: Sequence[str], env: Mapping[str, str] | None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """Start a command inside a namespace; the arguments are those of subprocess.Popen."""
        inherited = [fd for fd in (space.user_fd, space.net_fd) if fd >= 0]
        head = ["enter", str(os.getpid()), str(space.user_fd), str(space.net_fd)]
        kw["pass_fds"] = [*kw.get("pass_fds", ()), *inherited]
        return subprocess.Popen([*_PYTHON, _SCRIPT, *head, *argv], env=None if env is None else dict(env), **kw)

    def batch(self, tool: str, commands: Sequence[tuple[Space, str]]) -> None:
        """Feed commands to `ip` or `tc`, in all the given namespaces at once. Raises LabError with the tool's words."""
        with contextlib.ExitStack() as files:
            running = []
            for space, text in commands:
                if text:
                    script = files.enter_context(tempfile.TemporaryFile("w+"))
                    script.write(text)
                    script.seek(0)
                    streams = {"stdin": script, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
                    running.append(self.popen(space, [find_tool(tool), "-batch", "-"], None, **streams))
            errors = [_finish(tool, process) for process in running]
        if any(errors):
            raise LabError(next(filter(None, errors)))

    def close(self) -> None:
        """Let the holders go and wait for them. May be called again; does nothing in a forked child."""
        if os.getpid() != self._owner or self._alive_write < 0:
            return
        os.close(self._alive_write)
        os.close(self._alive_read)
        self._alive_write = -1
        descriptors = {fd for space in self.all for fd in (space.user_fd, space.net_fd) if fd >= 0}
        for descriptor in descriptors:
            os.close(descriptor)
        for space in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                space.holder.wait(READY_S)
            _stop(space.holder)
        self.all.clear()


def find_tool(name: str) -> str:
    """Return the path of `ip` or `tc`, also where a user's PATH leaves out sbin. Raises LabError."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise LabError(f"{name} is not installed (Debian and Ubuntu: apt install iproute2)")
    return path


def _finish(tool: str, process: subprocess.Popen[str]) -> str:
    try:
        _, errors = process.communicate(timeout=READY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{tool} did not finish within {READY_S:.0f} s"
    return f"{tool}: {' '.join(errors.split()) or process.returncode}" if process.returncode != 0 else ""


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    until = time.monotonic() + READY_S
    line = b""
    while not line.endswith(b"\n") and select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
        got = os.read(process.stdout.fileno(), 64)
        if not got:
            break
        line += got
    return line


def _stop(process: subprocess.Popen[bytes]) -> str:
    if process.poll() is None:
        process.kill()
    _, errors = process.communicate()
    return errors.decode(errors="replace").strip()
