"""Runs a training in a lab of network namespaces, and judges it by its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from netbottleneck.lab import Lab
from netbottleneck.lab.lab import SCRIPT
from netbottleneck.report import Run
from scenario.judge import Judged
from scenario.training import Training

LIMIT_S = 180
TRAIN = Path(__file__).with_name("train.py")
DEFAULTS = {"layers": 4, "kib": 256, "ms": 10.0, "steps": 150}


def _shifted(seconds: int) -> list[str]:
    """Return the command that gives another one a monotonic clock of its own, by so much ahead; empty for 0."""
    shift = ["unshare", "--time", "--monotonic", str(seconds), "--fork", "--kill-child"]
    return shift if seconds else []


def _start_others(lab: Lab, flows: int) -> None:
    """Start another job between the first and the last host, until the lab ends."""
    ends = (0, lab.size - 1)
    script = [sys.executable, SCRIPT]
    receive = [*script, "receive", lab.address(lab.hosts - 1), str(flows), "0", str(LIMIT_S), str(LIMIT_S)]
    receiver = lab.popen(ends[1], receive, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    send = [*script, "send", lab.address(lab.hosts - 1), port, str(flows), str(LIMIT_S)]
    lab.popen(ends[0], send, stderr=subprocess.DEVNULL)


def train(training: Training, folder: str, seed: int) -> None:
    """Run the ranks. Raises RuntimeError with the output of a rank that failed."""
    options = {"seed": seed, **DEFAULTS, **training.options}
    clock_s = options.pop("clock_s", 0)
    variables = {
        "NETBOTTLENECK": "1",
        "NETBOTTLENECK_TRANSPORT": training.arms,
        "NETBOTTLENECK_DIR": folder,
        "NETBOTTLENECK_START_STEP": "5",
        "NETBOTTLENECK_END_STEP": str(options["steps"] - 5),
        "NETBOTTLENECK_BLOCK_STEPS": "8",
        "NETBOTTLENECK_INSECURE": "1",  # the network is the lab's own
        **training.env,
    }
    with Lab(training.hosts, training.lab, training.ranks_per_host, flow=training.flow) as lab:
        link_bps = lab.spec.links[0].link_bps
        if link_bps:
            variables["NETBOTTLENECK_LINK_GBPS"] = str(link_bps / 1e9)
        if training.lost:
            lab.drop(training.hosts - 1, training.lost)
        if training.slow_link:
            lab.set_caps(training.slow_link[1], training.slow_link[0])
        if training.other_flows:
            _start_others(lab, training.other_flows)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, str(TRAIN), json.dumps(options)]
        ranks = [
            lab.popen(
                rank,
                [*_shifted(clock_s if rank == lab.size - 1 else 0), *command],
                {**os.environ, **variables, **training.host_env.get(lab.host(rank), {})},
                **pipes,
            )
            for rank in range(lab.size)
        ]
        try:
            texts = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        for process, text in zip(ranks, texts, strict=True):
            if process.returncode != 0:
                raise RuntimeError(text)


def measure(training: Training, seed: int) -> Judged:
    """Run a training, and judge it as its report does."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "weights")
        train(training.but(weights=str(weights)) if training.options.get("learn") else training, folder, seed)
        run, equal = Run(folder), weights.read_text(encoding="ascii") if weights.exists() else ""
        return Judged(run.findings, run.verdict, run.hosts, run.connections, equal)
