"""Overhead of the package: gradient hooks, measuring, a 4-byte all-reduce, a start. Starts its ranks on this machine.

python benchmarks/overhead.py --json build/overhead.json: each figure against its bar, with a 95 % interval by the
bootstrap over interleaved rounds. Figures that compare with Horovod itself need it installed (tools/peers.sh builds it;
HOROVOD=0 leaves them out).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from judge import Figure, certain, drawn, ratio
from peers.hvd import not_installed, version

from netbottleneck.bench import head

RANK = Path(__file__).with_name("overhead_rank.py")
RANKS = 2
LIMIT_S = 900
POINT, HIGHEST = 0.01, 0.02  # limits of compute inflation: for its median, and for the upper end of its interval
START_S = 0.2
PARAMETERS, BUCKETS = 400, 25  # of overhead_rank.py's tiny model, with small buckets
DDP_SHARE, BUCKET_NS = 0.25, 30_000
COUNTS = {"hooks": 500, "ddp": 500, "observe": 180, "inflation": 96, "latency": 300, "starts": 100}

Times = Mapping[str, list[float]]
Variables = Callable[[int], Mapping[str, str]]
Say = Callable[[str], None]


class Ranks:
    """The processes of a job on this machine. A context manager: they end with the block."""

    def __init__(self, what: str, count: int, horovod: Variables | None = None) -> None:
        self._what = what
        self._folder = tempfile.TemporaryDirectory()
        self._processes = []
        port = free_port()
        for rank in range(RANKS):
            values: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
            values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **{name: str(each) for name, each in values.items()}}
            more = [] if horovod is None else [json.dumps(horovod(rank))]
            command = [sys.executable, str(RANK), what, str(count), self._folder.name, *more]
            pipe = subprocess.PIPE
            self._processes.append(subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True))
        # Kills ranks that hang, also while this process waits for one of them.
        self._timer = threading.Timer(LIMIT_S, self._kill)
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        for process in self._processes:
            process.wait()
        self._folder.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()

    def turn(self) -> list[float]:
        """Let all ranks measure once; return each rank's value. Ranks are stopped (SIGSTOP) between two calls."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)
        if not all(lines):
            raise RuntimeError(f"{self._what}: a rank has exited")
        return [float(text) for text in lines]

    def finish(self) -> Times:
        """Return the times of each round, as means over ranks. Raises RuntimeError if a rank failed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.send_signal(signal.SIGCONT)
        outputs = [process.stdout.read() for process in self._processes if process.stdout is not None]
        codes = [process.wait() for process in self._processes]
        if any(codes):
            raise RuntimeError(f"{self._what}: ranks exited with {codes}")
        times = [json.loads(text.splitlines()[-1]) for text in outputs]
        return {name: np.mean([each[name] for each in times], axis=0).tolist() for name in times[0]}


def started(what: str, count: int, horovod: Variables | None = None) -> Times:
    """Run a job to its end; return the measured times."""
    with Ranks(what, count, horovod) as ranks:
        return ranks.finish()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def absent() -> str:
    """Return why Horovod itself is not available for comparison; "" if it is."""
    return "left out (HOROVOD=0)" if os.environ.get("HOROVOD") == "0" else not_installed()


@contextlib.contextmanager
def rendezvous() -> Generator[Variables, None, None]:
    """Run the rendezvous server of horovodrun; yield a function that returns a rank's variables."""
    hosts = importlib.import_module("horovod.runner.common.util.hosts")
    server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0)
    port = server.start()
    try:
        server.init(hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{RANKS}"), RANKS))

        def variables(rank: int) -> dict[str, str]:
            numbers = {"RANK": rank, "SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_SIZE": RANKS}
            numbers |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "GLOO_RENDEZVOUS_PORT": port}
            texts = {"HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
            texts |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
            return {f"HOROVOD_{name}": str(value) for name, value in (numbers | texts).items()}

        yield variables
    finally:
        server.stop()


def beside_horovod(what: str, count: int) -> tuple[Times | None, str]:
    """Return times that include Horovod itself; None, and the reason, if it is not available."""
    why = absent()
    if why:
        return None, why
    with rendezvous() as variables:
        return started(what, count, variables), ""


def added(times: Times) -> dict[str, list[float]]:
    """Return the time that each way adds to a plain backward pass of the same round, ns per gradient."""
    return {
        name: [each - bare for each, bare in zip(rounds, times["plain"], strict=True)]
        for name, rounds in times.items()
        if name != "plain"
    }


def row(name: str, values: list[float], factor: float, unit: str) -> str:
    """Return one line for a series of rounds: median, 10th and 90th percentile."""
    low, middle, high = np.percentile(np.asarray(values) * factor, [10, 50, 90])
    return f"{name:<46}{middle:9.3f} {unit} (p10 {low:.3f}, p90 {high:.3f}, {len(values)} rounds)"


def hook_figures(count: int, say: Say) -> list[Figure]:
    """CPU time per gradient on the thread that runs the backward pass."""
    found = added(started("hooks", count))
    beside, why = beside_horovod("hooks", count)
    theirs = None if beside is None else added(beside)
    shown = found if theirs is None else {**found, "horovod": theirs["horovod"]}
    for name, values in shown.items():
        say(row(f"added a gradient: {name}", values, 1e-3, "µs"))
    figures = []
    for name, path in {"ours": "our Horovod API", "measured": "the same, stamped"}.items():
        mine = found[name]
        for other, bar in {"empty": 1 / 2.5, "ddp": 2.0}.items():
            title = f"added a gradient by {other} over {path}"
            figures.append(Figure(title, bar, ratio(mine, {other: found[other]}), count))
        title = f"added a gradient by horovod over {path}"
        if theirs is None:
            figures.append(Figure(title, 5.0, reason=why))
        else:
            figures.append(Figure(title, 5.0, ratio(theirs[name], {"horovod": theirs["horovod"]}), count))
    return figures


def inflation_figures(count: int, say: Say) -> list[Figure]:
    """Time that measuring adds to a training step over transport null."""
    found = started("inflation", count)
    for name, values in found.items():
        say(row(f"step: {name}", values, 1e3, "ms"))
    return _inflation(found["measured"], found["bare"], say)


def _inflation(measured: list[float], bare: list[float], say: Say) -> list[Figure]:
    more, count = np.asarray(measured) / np.asarray(bare) - 1, len(bare)
    estimate = drawn(lambda indices: np.median(more[indices], axis=-1), count)
    note = f"inflation {estimate.value:+.2%} [{estimate.low:+.2%}, {estimate.high:+.2%}]"
    say(f"{note}, {count} pairs of blocks")
    return [
        Figure("bare step over measured, the median", 1 / (1 + POINT), certain(1 / (1 + estimate.value)), count, note),
        Figure(
            "bare step over measured, the interval's end", 1 / (1 + HIGHEST), certain(1 / (1 + estimate.high)), count
        ),
        Figure("a bare step over 50 ms", 1.0, certain(statistics.median(bare) / 0.05), count),
    ]


def ddp_figures(count: int, say: Say) -> list[Figure]:
    """CPU time of observing a DDP model on the thread that runs the backward pass."""
    found = added(started("ddp", count))
    for name, values in found.items():
        say(row(f"added a gradient: {name}", values, 1e-3, "µs"))
    per_pass = {name: PARAMETERS * np.asarray(values) for name, values in found.items()}
    ours = per_pass["observed"] - per_pass["ddp"]
    more = per_pass["observed, small buckets"] - per_pass["ddp, small buckets"] - ours
    bucket = more / (BUCKETS - 1)
    say(row("ours, a backward pass", ours.tolist(), 1e-3, "µs"))
    say(row("ours, a bucket", bucket.tolist(), 1e-3, "µs"))

    def share(indices: Any) -> Any:
        return DDP_SHARE * np.median(per_pass["ddp"][indices], axis=-1) / np.median(ours[indices], axis=-1)

    def by_bucket(indices: Any) -> Any:
        return BUCKET_NS / np.median(bucket[indices], axis=-1)

    return [
        Figure(f"{DDP_SHARE} of what DDP adds over what we add to DDP", 1.0, drawn(share, count), count),
        Figure(f"{BUCKET_NS / 1e3:.0f} us over what a bucket costs", 1.0, drawn(by_bucket, count), count),
    ]


def observe_figures(count: int, say: Say) -> list[Figure]:
    """Time that observing adds to a training step, compared with untouched steps of the same run."""
    found = started("observe", count)
    for name, values in found.items():
        say(row(f"step: {name}", values, 1e3, "ms"))
    return _inflation(found["stock"], found["bare"], say)


def latency_figures(count: int, say: Say) -> list[Figure]:
    """Time of a 4-byte all-reduce. The other job is stopped meanwhile, because Horovod's thread polls all the time."""
    why = absent()
    with contextlib.ExitStack() as stack:
        jobs = {"ours": stack.enter_context(Ranks("latency", 0))}
        if not why:
            jobs["horovod"] = stack.enter_context(Ranks("latency", 0, stack.enter_context(rendezvous())))
        found: dict[str, list[float]] = {name: [] for name in jobs}
        for round_ in range(count + 1):
            for name in random.Random(round_).sample(list(jobs), len(jobs)):
                seconds = statistics.mean(jobs[name].turn())
                if round_:
                    found[name].append(seconds)
        for job in jobs.values():
            job.finish()
    for name, values in found.items():
        say(row(f"all-reduce of 4 bytes: {name}", values, 1e6, "µs"))
    title = "an all-reduce of 4 bytes, horovod over ours"
    if why:
        return [Figure(title, 2.0, reason=why)]
    return [Figure(title, 2.0, ratio(found["ours"], {"horovod": found["horovod"]}), count)]


def start_figures(count: int, say: Say) -> list[Figure]:
    """Time of init and shutdown, repeated in one process on one port."""
    found = started("starts", count)
    both = np.asarray(found["init"]) + np.asarray(found["shutdown"])
    for name, values in {**found, "both": both.tolist()}.items():
        say(row(f"start: {name}", values, 1e3, "ms"))
    say("each, ms: " + " ".join(f"{1e3 * seconds:.1f}" for seconds in both))
    note = f"slowest {1e3 * both.max():.1f} ms, all {both.sum():.2f} s"
    estimate = drawn(lambda indices: START_S / np.median(both[indices], axis=-1), count)
    return [Figure(f"0.2 s over init and shutdown, {count} times on one port", 1.0, estimate, count, note)]


PARTS = {
    "hooks": hook_figures,
    "ddp": ddp_figures,
    "observe": observe_figures,
    "inflation": inflation_figures,
    "latency": latency_figures,
    "starts": start_figures,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"rounds ({count})")
    args = parser.parse_args()
    where = head(RANKS)
    where["versions"]["horovod"] = version() if not absent() else "not available"
    print(f"# {where['machine']}, {where['versions']}, load {os.getloadavg()[0]:.2f}", flush=True)

    def say(text: str) -> None:
        print(f"# {text}", flush=True)

    found = {name: PARTS[name](getattr(args, name), say) for name in args.only or PARTS}
    for name, figures in found.items():
        print("\n".join(figure.line(f"{name:<10}") for figure in figures), flush=True)
    if args.json is not None:
        gates = {name: [figure.to_json() for figure in figures] for name, figures in found.items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": 1, "written_wall_ns": time.time_ns(), **where, "gates": gates}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    missed = any(figure.verdict == "fail" for figures in found.values() for figure in figures)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
