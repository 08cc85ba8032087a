"""Scenarios that run: a training of two ranks in a lab of network namespaces, with a cause and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from netbottleneck.analysis import findings, usage
from netbottleneck.lab import Lab
from netbottleneck.report import Run
from netbottleneck.trace import model
from netbottleneck.trace.model import Network
from scenario.judge import Judged, decide
from scenario.training import Training

LIMIT_S = 180
TRAIN = Path(__file__).with_name("train.py")


def _shifted(seconds: int) -> list[str]:
    """Return the command that gives another one a monotonic clock of its own, by so much ahead; empty for 0."""
    shift = ["unshare", "--time", "--monotonic", str(seconds), "--fork", "--kill-child"]
    return shift if seconds else []


def train(training: Training, folder: str, seed: int) -> float | None:
    """Run the ranks. Returns the link's rate. Raises RuntimeError with the output of a rank that failed."""
    options = {"seed": seed, "layers": 4, "kib": 256, "ms": 10.0, "steps": 150} | dict(training.options)
    variables = {
        "NETBOTTLENECK": "1",
        "NETBOTTLENECK_TRANSPORT": training.arms,
        "NETBOTTLENECK_DIR": folder,
        "NETBOTTLENECK_START_STEP": "5",
        "NETBOTTLENECK_END_STEP": str(options["steps"] - 5),
        "NETBOTTLENECK_BLOCK_STEPS": "8",
    }
    with Lab(2, training.lab) as lab:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        clocks_s = (0, options.pop("clock_s", 0))
        command = [sys.executable, str(TRAIN), json.dumps(options)]
        ranks = [
            lab.popen(rank, [*_shifted(clock_s), *command], {**os.environ, **variables}, **pipes)
            for rank, clock_s in enumerate(clocks_s)
        ]
        try:
            texts = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        for process, text in zip(ranks, texts, strict=True):
            if process.returncode != 0:
                raise RuntimeError(text)
        return lab.spec.links[0].link_bps


def measure(training: Training, seed: int) -> Judged:
    """Run a training and decide, as its report does, with the lab's link as the network."""
    with tempfile.TemporaryDirectory() as folder:
        link_bps = train(training, folder, seed)
        trace = Run(folder).trace
        hosts = usage.hosts(trace, model.of_run(folder))
    if link_bps:
        trace = replace(trace, network=Network(training.lab, float(link_bps)))
    return decide(findings.find(trace), hosts)
