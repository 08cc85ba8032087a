"""Caps on a real interface: they hold, and the old state is restored at any end of the study."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.lab import Lab, LabError

DEADLINE_S = RANKS_LIMIT_S
HOLD = (
    "import sys; from netbottleneck.study.hosts import InterfaceCaps; from netbottleneck.lab import parse_lab\n"
    "with InterfaceCaps('nb0', parse_lab(sys.argv[1])):\n"
    "    print('capped', flush=True)\n"
    "    sys.stdin.read() if sys.argv[2] == 'wait' else sys.exit(sys.argv[2])\n"
)


@pytest.fixture
def lab() -> Generator[Lab]:
    """Provide two hosts whose interfaces stand in for real ones."""
    if os.geteuid() != 0:
        pytest.skip("caps on a real interface need root")
    try:
        made = Lab(2, "none", ways=("root",)).__enter__()
    except LabError as error:
        pytest.skip(f"no namespaces here: {error}")
    yield made
    made.close()


def tc(lab: Lab, *arguments: str) -> str:
    """Run tc on host 0, and return its output."""
    process = lab.popen(0, ["tc", *arguments], stdout=subprocess.PIPE, text=True)
    text: str = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0
    return text


def root(lab: Lab) -> str:
    """Return the interface's current root qdisc."""
    return tc(lab, "qdisc", "show", "dev", "nb0")


def start(lab: Lab, caps: str, then: str) -> subprocess.Popen[str]:
    """Start a process that holds caps on host 0's interface until its input ends, or that ends by itself."""
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process: subprocess.Popen[str] = lab.popen(0, [sys.executable, "-c", HOLD, caps, then], text=True, **pipes)
    return process


def wait_for(lab: Lab, state: str) -> None:
    """Wait until the interface has this state, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while (now := root(lab)) != state:
        assert time.monotonic() < until, f"{now} in place of {state}"
        time.sleep(0.05)


@pytest.mark.parametrize("end", ["input", "exception", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_caps_end_with_their_process_however_it_ends(lab: Lab, end: str | int) -> None:
    tc(lab, "qdisc", "replace", "dev", "nb0", "root", "handle", "77:", "pfifo", "limit", "77")
    before = root(lab)
    process = start(lab, "1gbit/300mbit", "an exception" if end == "exception" else "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "capped\n"
    if end == "input":
        assert "htb" in root(lab)
        assert "rate 300Mbit" in tc(lab, "class", "show", "dev", "nb0", "classid", "6e62:1000").replace("ceil", "rate")
    if isinstance(end, int):
        process.send_signal(end)
    process.communicate(timeout=DEADLINE_S)
    assert (process.returncode == 0) == (end == "input")
    wait_for(lab, before)


def test_the_kernels_default_is_restored(lab: Lab) -> None:
    before = root(lab)
    process = start(lab, "1gbit", "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "capped\n"
    assert root(lab) != before
    process.communicate(timeout=DEADLINE_S)
    assert root(lab) == before


@pytest.mark.parametrize(
    ("caps", "before", "message"),
    [
        ("1gbit", "tbf rate 5gbit burst 1mb latency 50ms", "its queueing discipline (tbf"),
        ("1gbit/300mbit,100mbit", "", "one cap for the link and one cap for all flows"),
    ],
)
def test_a_state_that_cannot_be_restored_is_not_changed(lab: Lab, caps: str, before: str, message: str) -> None:
    if before:
        tc(lab, "qdisc", "replace", "dev", "nb0", "root", *before.split())
    state = root(lab)
    process = start(lab, caps, "wait")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, process.returncode) == ("", 1)
    assert message in err
    assert root(lab) == state


def test_caps_left_by_a_killed_process_are_not_restored(lab: Lab) -> None:
    before = root(lab)
    process = start(lab, "1gbit", "wait")
    assert process.stdout is not None
    process.stdout.readline()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # other processes end meanwhile
            command = path.read_bytes().split(b"\0")
            if any(word.endswith(b"_shape.py") for word in command) and str(process.pid).encode() == parent(path):
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    assert root(lab) != before
    again = start(lab, "2gbit", "wait")
    assert again.stdout is not None
    assert again.stdout.readline() == "capped\n"
    again.communicate(timeout=DEADLINE_S)
    assert root(lab) == before


def parent(cmdline: Path) -> bytes:
    """Return the pid of a process's parent."""
    text = cmdline.with_name("status").read_bytes()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(b"PPid"))
