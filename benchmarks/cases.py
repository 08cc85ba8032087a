"""Situations in which all-reduces are measured, beside whom, until each figure has a verdict or a limit is reached."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from judge import Figure
from table import Table

from netbottleneck import config
from netbottleneck.bench import start
from netbottleneck.bench.counters import busy_ns
from netbottleneck.bench.request import Request
from netbottleneck.bench.results import Results
from netbottleneck.errors import Error
from netbottleneck.lab import LabError

SHM = "NETBOTTLENECK_SHM"
QUIET_S = 0.5
BUSY = 0.1  # processors that others may use before it is said

Say = Callable[[str], None]
Judge = Callable[[Table, int], list[Figure]]


@dataclass
class Run:
    """How much is measured, what is told, and all that was measured so far. rounds 0: the gate's own number."""

    say: Say
    rounds: int = 0
    batches: int = 4
    rows: list[dict[str, Any]] = field(default_factory=list)
    heads: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One situation: hosts (lab None: loopback), paths and sizes, and what the figures of a size are.

    shm: whether ranks of one host may share memory; variables: what else the ranks' environment has.
    """

    where: str
    lab: str | None
    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    judge: Judge
    ranks: int = 2
    rounds: int = 8
    streams: tuple[int, ...] = (0,)
    op: str = "sum"
    inner: int = 1
    shm: str = "0"
    variables: tuple[tuple[str, str], ...] = ()


def settle(case: Case, run: Run) -> list[Figure]:
    """Measure a case until every figure has a verdict; those that have one are not measured again.

    What makes it impossible is the figures' reason.
    """
    table = Table(counted=case.shm == "0")
    left = list(case.sizes)
    why = ""
    for _ in range(run.batches):
        try:
            found = measured(case, left, run)
        except (LabError, Error, OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            break
        table.add(found)
        left = [size for size in case.sizes if any(figure.verdict == "undecided" for figure in case.judge(table, size))]
        if not left:
            break
    figures = [figure for size in case.sizes for figure in case.judge(table, size)]
    if why:
        run.say(f"# {case.where}: {why}")
        figures = [_explained(figure, why) for figure in figures]
    return [dataclasses.replace(figure, name=f"{case.where}: {figure.name}") for figure in figures]


def _explained(figure: Figure, why: str) -> Figure:
    return dataclasses.replace(figure, reason=why) if figure.estimate is None else figure


def measured(case: Case, sizes: Sequence[int], run: Run) -> Results:
    """Return one run of a case. Raises LabError where the lab is not what it should be."""
    given: dict[str, Any] = {"shm": (case.shm,)} if "shm" in {row.name for row in dataclasses.fields(Request)} else {}
    request = Request(
        case.transports,
        case.streams,
        tuple(sizes),
        op=case.op,
        iterations=run.rounds or case.rounds,
        inner=case.inner,
        exact=True,
        **given,
    )
    names = dict(case.variables) | ({SHM: case.shm} if has_shm() else {})
    busy = others_busy()
    run.say(f"# {case.where}: {', '.join(case.transports)}")
    if busy > BUSY:
        run.say(f"# the machine is not quiet: before this, others kept {busy:.2f} of its processors busy")
    with environment(names):
        found = start(request, case.ranks, case.lab, say=run.say)
    lab = found.head["lab"]
    if lab is not None and ("namespaces" not in lab["how"] or not lab["ok"]):
        raise LabError(f"the lab is not what it should be: {lab['how']} {lab['why']}")
    run.rows += [{"where": case.where, "others_busy": busy, **row} for row in found.rows]
    run.heads.setdefault("machine", found.head["machine"])
    run.heads.setdefault("versions", found.head["versions"])
    return found


def others_busy() -> float:
    """Return how many processors were busy while nothing of ours ran."""
    began_ns, busy = time.monotonic_ns(), busy_ns()
    time.sleep(QUIET_S)
    return (busy_ns() - busy) / (time.monotonic_ns() - began_ns)


def has_shm() -> bool:
    """Whether ranks of one host can share memory in this build."""
    return any(row.name == SHM for row in config.describe(config.Settings()))


@contextlib.contextmanager
def environment(names: dict[str, str]) -> Generator[None, None, None]:
    """Set variables for the ranks that are started meanwhile."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
