"""Caps on a real interface of this host, for as long as they are wanted; the old state comes back however that ends."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from netbottleneck.lab import LabError, LinkSpec
from netbottleneck.lab.network import interface_caps
from netbottleneck.lab.spaces import find_tool

MAJOR = 0x6E62  # of our handle: "nb", which nobody else takes by chance
READY_S = 30.0
_SCRIPT = str(Path(__file__).with_name("_shape.py"))


class Shaped:
    """An interface that sends no faster than a link's and a flow's cap. A context manager.

    A keeper of its own, in its own session, has made the caps and undoes them once this process has ended or leaves the
    context: after SIGKILL, too. Raises LabError where they cannot be: not root, no tc, several caps for flows, or an
    interface with a queueing discipline that could not be given back.
    """

    def __init__(self, interface: str, spec: LinkSpec) -> None:
        self._interface = interface
        self._spec = spec
        self._alive = -1
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not self._spec.capped:
            return self
        if os.geteuid() != 0:
            raise LabError(f'caps on {self._interface} need root; without: networks = ["none"]')
        if len(self._spec.flow_bps) > 1 or self._spec.more_bps:
            raise LabError(f"{self._spec}: a real interface takes one cap for the link and one for each flow")
        commands = interface_caps(self._interface, self._spec, bool(self._spec.flow_bps), MAJOR)
        read, self._alive = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", _SCRIPT, find_tool("tc"), self._interface, f"{MAJOR:x}:", str(read)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[read],
                start_new_session=True,
            )
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(commands.encode())
            self._keeper.stdin.close()
            said = _line(self._keeper)
        except BaseException:
            self._close()
            raise
        finally:
            os.close(read)
        if said != b"ready\n":
            raise LabError(self._close() or f"the keeper of {self._interface} did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (why := self._close()) and kind is None:
            raise LabError(f"the old state could not be given back: {why}")

    def _close(self) -> str:
        """Let the keeper undo the caps; returns what it says of a failure."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return ""
        keeper.stdin = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, errors = keeper.communicate(timeout=READY_S)
            return errors.decode(errors="replace").strip() if keeper.returncode else ""
        return f"its keeper (process {keeper.pid}) does not end"


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    until, line = time.monotonic() + READY_S, b""
    while not line.endswith(b"\n") and select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
        got = os.read(process.stdout.fileno(), 64)
        if not got:
            break
        line += got
    return line
