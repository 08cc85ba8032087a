"""Cases of the gates: all-reduces and their peers, measured until each figure has a verdict or a limit is reached."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from judge import Figure
from table import Table

from netbottleneck import config
from netbottleneck.bench import Request, start
from netbottleneck.bench.values import Results
from netbottleneck.bench.worker import busy_ns
from netbottleneck.errors import Error
from netbottleneck.lab import LabError
from netbottleneck.runtime.horovod_common import env

PEERS = str(Path(__file__).with_name("peers"))
SHM = "NETBOTTLENECK_SHM"
QUIET_S = 0.5
BUSY = 0.1  # CPUs that other processes may use without a warning

Say = Callable[[str], None]
Judge = Callable[[Table, int], list[Figure]]


@dataclass
class Run:
    """The limits of a run, its output, and all rows measured so far. rounds 0: the gate's own number."""

    say: Say
    rounds: int = 0
    batches: int = 4
    rows: list[dict[str, Any]] = field(default_factory=list)
    heads: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One case: hosts (lab None: loopback), paths, sizes, and the function that returns the figures of a size.

    shm: value of NETBOTTLENECK_SHM; variables: further variables of the ranks' environment. measure: what measures the
    case in place of `measured`.
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
    measure: Callable[[Case, Sequence[int], Run], Results] | None = None


def settle(case: Case, run: Run) -> list[Figure]:
    """Measure a case until every figure has a verdict. A size whose figures have verdicts is not measured again.

    An error of the lab or of a rank becomes the reason of the figures.
    """
    table = Table(counted=case.shm == "0")
    left = list(case.sizes)
    why = ""
    for _ in range(run.batches):
        try:
            found = (case.measure or measured)(case, left, run)
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
    """Return one run of a case. Raises LabError if the lab does not match its specification."""
    given: dict[str, Any] = {"shm": (case.shm,)} if "shm" in {row.name for row in dataclasses.fields(Request)} else {}
    request = Request(
        case.transports,
        case.streams,
        tuple(sizes),
        op=case.op,
        iterations=run.rounds or case.rounds,
        inner=case.inner,
        exact=True,
        peers=PEERS,
        **given,
    )
    names = dict(case.variables) | ({SHM: case.shm} if has_shm() else {})
    busy = others_busy()
    run.say(f"# {case.where}: {', '.join(case.transports)}")
    if busy > BUSY:
        run.say(f"# other processes kept {busy:.2f} CPUs busy before this measurement")
    with env(**names):
        found = start(request, case.ranks, case.lab, say=run.say)
    lab = found.head["lab"]
    if lab is not None and ("namespaces" not in lab["how"] or not lab["ok"]):
        raise LabError(f"the lab does not match its specification: {lab['how']} {lab['why']}")
    run.rows += [{"where": case.where, "others_busy": busy, **row} for row in found.rows]
    run.heads.setdefault("machine", found.head["machine"])
    run.heads.setdefault("versions", found.head["versions"])
    return found


def others_busy() -> float:
    """Return the number of CPUs that other processes keep busy."""
    began_ns, busy = time.monotonic_ns(), busy_ns()
    time.sleep(QUIET_S)
    return (busy_ns() - busy) / (time.monotonic_ns() - began_ns)


def has_shm() -> bool:
    """Return True if ranks of one host can share memory in this build."""
    return any(row.name == SHM for row in config.describe(config.Settings()))
