"""Progress: shows the run so far on rank 0, while it goes on."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from netbottleneck.config import Settings
from netbottleneck.launch import topology

LOG_EVERY = 6  # lines of progress for one in the log
TERMINAL = 80  # columns of a terminal that does not tell
PROGRESS_END_S = 1.0  # time for the end of the progress line

logger = logging.getLogger("netbottleneck")


def is_shown(settings: Settings) -> bool:
    """Return True if the user asked for the progress, or would see it: on a terminal, or in the log."""
    seen = "progress_s" in settings.sources or _is_terminal() or logger.isEnabledFor(logging.INFO)
    return settings.progress_s > 0 and seen


class Progress:
    """Shows the run so far every period_s seconds, and warns if the cause changes. On rank 0.

    Another process, `netbottleneck top`, reads the rings and computes; a thread here waits for its lines. Both begin
    after the first period. On a terminal a line replaces the one before; else every LOG_EVERY-th is logged. A failure
    ends the display, with one line in the log.
    """

    def __init__(self, folder: Path, period_s: float) -> None:
        self._folder = folder
        self._period_s = period_s
        self._pid = os.getpid()
        self._ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # `close` and the start of the process exclude each other
        self._shown = 0  # width of the line on the terminal
        self._thread = threading.Thread(target=self._follow, name="netbottleneck-progress", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            logger.warning("the progress of the run is not shown: %s", error)

    def close(self) -> None:
        """End the process and the thread, and clear the line."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._ended.set()
            if self._process is not None:
                self._process.kill()  # it only reads
        if self._thread.is_alive():
            self._thread.join(PROGRESS_END_S)
        self._show("")

    def _follow(self) -> None:
        if self._ended.wait(self._period_s):
            return
        try:
            with self._lock:
                if self._ended.is_set():
                    return
                process = self._process = self._begin()
            with process:
                try:
                    assert process.stdout is not None
                    for number, text in enumerate(process.stdout):
                        self._say(json.loads(text), number)
                except BaseException:
                    process.kill()
                    raise
            if not self._ended.is_set():
                code = process.returncode
                logger.info("the progress of the run is no longer shown: its process ended with code %d", code)
        except Exception as error:
            logger.warning("the progress of the run is not shown: %s: %s", type(error).__name__, error)

    def _begin(self) -> "subprocess.Popen[str]":
        values = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
        values = topology.with_package(values) | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        arguments = ["top", str(self._folder), f"--refresh={self._period_s}", f"--of={self._pid}"]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "netbottleneck", *arguments],
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=values,
            text=True,
            start_new_session=True,  # Ctrl-C and kills of the process group are for the rank
        )

    def _say(self, message: Mapping[str, str], number: int) -> None:
        if self._ended.is_set():
            return
        if message["alarm"]:
            self._show("")
            logger.warning("%s", message["alarm"])
        if _is_terminal():
            self._show(message["line"])
        elif number % LOG_EVERY == 0:
            logger.info("%s", message["line"])

    def _show(self, line: str) -> None:
        """Replace the line on the terminal. The cursor stays at its begin, so the script's next line overwrites it."""
        if not (line or self._shown):
            return
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            room = max(1, (os.get_terminal_size(sys.stderr.fileno()).columns or TERMINAL) - 1)
            text = line if len(line) <= room else f"{line[: room - 1]}…"
            sys.stderr.write(f"\r{text.ljust(min(self._shown, room))}\r")
            sys.stderr.flush()
            self._shown = len(text)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):  # replaced or closed
        return False
