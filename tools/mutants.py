"""Draws seeded mutants of the C core and of the Python package, and runs the tests of the room for each.

usage: tools/mutants.py [--number N] [--seed S] [--rooms ROOM ...] [--limit-s SECONDS] [--again] [--list]

It works on a copy below build/mutants, one mutant at a time. Results are kept in docs/mutants.jsonl, and a mutant that
has one is not run again while its line stays as it is: a run that was stopped goes on. The rules of mutation:
tools/mutants_rules.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutants_rules
from mutants_rules import Change

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "mutants"
TREE = PLACE / "tree"
RESULTS = ROOT / "docs" / "mutants.jsonl"
TIMES = PLACE / "times.json"
PAGE = ROOT / "docs" / "mutants.md"
SEED = 20261123
NUMBER = 150
# A test hangs if it takes this many times as long as without a mutant, plus these seconds.
SLOWER, MORE_S = 6, 30
GRACE_S = 20
EXTENSION = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
# Variable in the environment of every process of a test, to find processes that a killed test leaves behind.
MARK = "NB_MUTANTS_RUN"


@dataclass(frozen=True)
class Room:
    """Sources, as globs below the root, and the tests that run for a mutant of them, in this order.

    c: programs of tests/c; asan: of these, the ones that are run again under AddressSanitizer where all passed; py:
    files of tests/py, run together. slow: files that are run where all others passed.
    """

    sources: tuple[str, ...]
    c: tuple[str, ...] = ()
    asan: tuple[str, ...] = ()
    py: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


def _python(folder: str, *modules: str) -> tuple[str, ...]:
    """Globs of a folder of the package: of all its modules, or of some."""
    return tuple(f"python/netbottleneck/{folder}/{module}.py" for module in modules or ("*",))


ROOMS: dict[str, Room] = {
    "sim": Room(("csrc/sim/*.c",), c=("test_sim",), asan=("test_sim",), py=("simulate",)),
    "coll": Room(
        ("csrc/coll/*.c",),
        c=(
            "test_ring_schedule",
            "test_step_schedule",
            "test_reduce",
            "test_pair_kernels",
            "test_algorithm_choice",
            "test_twolevel",
            "test_shapes",
        ),
        asan=("test_ring_schedule", "test_step_schedule", "test_reduce"),
    ),
    "bootstrap": Room(
        ("csrc/bootstrap/*.c",),
        c=("test_clock", "test_bootstrap", "test_inline_allreduce", "test_join", "test_control"),
        asan=("test_bootstrap",),
    ),
    "transport": Room(
        ("csrc/transport/*.c",),
        c=(
            *("test_arena_mapping", "test_ofi_double", "test_lanes", "test_lane_rate", "test_transport", "test_shm"),
            *("test_exchange", "test_faults", "test_connection_loss"),
        ),
        asan=("test_lanes",),
        py=("core", "doctor"),
    ),
    "engine": Room(
        ("csrc/engine/*.c",),
        c=(
            *(
                "test_lane_search",
                "test_cancel",
                "test_shm",
                "test_groups",
                "test_control",
                "test_preflight",
                "test_stall",
            ),
            *("test_progress_owner", "test_join", "test_algorithms"),
            *("test_engine", "test_leave", "test_steady_state", "test_faults", "test_twolevel"),
        ),
        asan=("test_groups", "test_join"),
        py=("core",),
    ),
    "cuda": Room(
        ("csrc/cuda/*.c",),
        c=(
            *("test_cuda_driver", "test_cuda_kernels", "test_cuda_grid", "test_cuda_staging", "test_cuda_clock"),
            *("test_cuda_cancel", "test_cuda_engine", "test_cuda_faults"),
        ),
        asan=("test_cuda_staging",),
    ),
    "nccl": Room(
        ("csrc/nccl/*.c",),
        c=("test_nccl_profiler", "test_nccl_early", "test_nccl_links", "test_nccl_open", "test_nccl"),
        asan=("test_nccl_early",),
        py=("nccl_plugin",),
    ),
    "analysis": Room(
        _python("analysis"),
        py=("verdict", "scaling", "report"),
        slow=("forecast", "samples"),
    ),
    "what-if": Room(
        _python(
            "whatif",
            *("questions", "sweeps", "simulate", "plan", "cost", "fit"),
        ),
        py=("plan", "contention", "copies", "cost", "simulate", "whatif", "what_if"),
        slow=("links",),
    ),
    "hooks": Room(
        _python("hooks"),
        py=("imports", "ddp_loops", "calls", "updates", "measured"),
        slow=("hooks", "callbacks", "real_horovod"),
    ),
    "torch": Room(
        _python("torch"),
        py=("ready", "gradients", "hvd", "sync_batch_norm"),
        slow=("hvd_measured", "elastic"),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change in one file. number: constant as long as the changed line is."""

    room: str
    path: str
    change: Change
    number: str


@dataclass
class Result:
    """verdict: killed, survived, invalid (does not compile) or equal (compiles to the same code)."""

    number: str
    room: str
    path: str
    line: int
    rule: str
    before: str
    after: str
    verdict: str
    by: str
    seconds: float


def mutants(room: str) -> list[Mutant]:
    """Return all mutants of a room, in the order of files and lines."""
    found = []
    paths = sorted({path for glob in ROOMS[room].sources for path in ROOT.glob(glob)})
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        seen: Counter[str] = Counter()
        for change in mutants_rules.changes(path):
            place = f"{name} {change.rule} {change.before.strip()} {change.after.strip()}"
            seen[place] += 1
            number = hashlib.sha256(f"{place} {seen[place]}".encode()).hexdigest()[:8]
            found.append(Mutant(room, name, change, number))
    return found


def drawn(rooms: Sequence[str], seed: int) -> Iterator[Mutant]:
    """Yield mutants in a random order given by the seed, one of each room in turn."""
    orders = []
    for room in rooms:
        order = mutants(room)
        random.Random(f"{seed} {room}").shuffle(order)
        orders.append(iter(order))
    while orders:
        for order in list(orders):
            mutant = next(order, None)
            if mutant is None:
                orders.remove(order)
            else:
                yield mutant


def copy_tree() -> None:
    """Update the copy from the working tree; build results in it are kept."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    names += [path.relative_to(ROOT).as_posix() for path in (ROOT / "python").glob("netbottleneck/**/*.so")]
    for name in names:
        source, target = ROOT / name, TREE / name
        if not target.is_file() or source.read_bytes() != target.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    kept = set(names)
    for folder in ("csrc", "python", "tests"):
        for path in (TREE / folder).rglob("*.[chp]*"):
            name = path.relative_to(TREE).as_posix()
            if path.suffix in (".c", ".h", ".py") and name not in kept:
                path.unlink()
    shared = TREE.parent / "shared"
    if (ROOT.parent / "shared").exists() and not shared.is_symlink():
        shared.symlink_to(ROOT.parent / "shared")


def end_marked(token: str) -> None:
    """Kill the processes that a test left behind, found by its mark."""
    needle = f"{MARK}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def run(argv: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in the copy; return its exit code (None on timeout) and the end of its output."""
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    path = os.pathsep.join([str(TREE / "python"), str(TREE / "tests" / "py")])
    log = PLACE / "test.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            argv,
            cwd=TREE,
            env={**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", MARK: token},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            end_marked(token)
            process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-4000:]


class Tests:
    """The tests of the rooms, and their durations without a mutant, which are kept until the test changes."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._known: dict[str, float] = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}
        self._took: dict[tuple[str, ...], float] = {}

    def steps(self, room: Room) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield (name, command) of each step, in order."""
        ctest = (sys.executable, "tools/ctest.py", "--jobs", "1", "--filter")
        for name in room.c:
            yield name, (*ctest, name)
        for name in room.asan:
            yield f"{name} under ASan", (*ctest, name, "--flavour", "asan")
        if room.c and room.py:
            yield "the extension", EXTENSION
        pytest = (sys.executable, "-m", "pytest", "-x", "-q")
        if room.py:
            yield " ".join(room.py), (*pytest, *(f"tests/py/test_{name}.py" for name in room.py))
        for name in room.slow:
            yield name, (*pytest, f"tests/py/test_{name}.py")

    def measure(self, rooms: Sequence[str]) -> None:
        """Run all tests without a mutant. Raises SystemExit if one fails."""
        for room in rooms:
            for name, command in self.steps(ROOMS[room]):
                named = self._name(command)
                if named in self._known:
                    self._took[command] = self._known[named]
                    continue
                began = time.monotonic()
                code, output = run(command, self.limit_s)
                if code != 0:
                    raise SystemExit(f"without a mutant, {name} ends with {code}:\n{output}")
                self._took[command] = self._known[named] = time.monotonic() - began
                TIMES.write_text(json.dumps(self._known, indent=1), encoding="utf-8")
                print(f"{room}: {name} takes {self._took[command]:.1f} s", flush=True)

    @staticmethod
    def _name(command: Sequence[str]) -> str:
        """Name of a command, with its tests."""
        files = [TREE / word for word in command if word.endswith(".py")]
        files += [TREE / "tests" / "c" / f"{word}.c" for word in command if word.startswith("test_")]
        content = b"".join(path.read_bytes() for path in files)
        return f"{' '.join(command[1:])} {hashlib.sha256(content).hexdigest()[:8]}"

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Return the verdict on the mutant in the copy, and the test that killed it."""
        for name, command in self.steps(ROOMS[mutant.room]):
            code, output = run(command, min(self.limit_s, SLOWER * self._took[command] + MORE_S))
            if "the core does not build" in output:
                return "invalid", ""
            if code is None:
                return "killed", f"{name} (time)"
            if code != 0:
                return "killed", name
        return "survived", ""


def same_code(mutant: Mutant) -> bool | None:
    """Return True if a mutant compiles to the same code, None if it does not compile."""
    path = TREE / mutant.path
    if path.suffix == ".py":
        return mutants_rules.same_bytecode(mutant.change.original, mutant.change.text)
    flags = subprocess.run(
        [sys.executable, "tools/cbuild.py", "flags"], cwd=TREE, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    made = []
    for text in (mutant.change.original, mutant.change.text):
        path.write_text(text, encoding="utf-8")
        target = PLACE / "same.o"
        command = ["gcc", *flags, "-O2", "-c", str(path), "-o", str(target)]
        if subprocess.run(command, cwd=TREE, capture_output=True, check=False).returncode != 0:
            return None
        made.append(target.read_bytes())
    return made[0] == made[1]


def try_one(tests: Tests, mutant: Mutant) -> Result:
    """Write a mutant to the copy, run the tests, and restore the original and the extension.

    Raises SystemExit if the original does not build.
    """
    path = TREE / mutant.path
    began = time.monotonic()
    try:
        same = same_code(mutant)
        if same is None or same:
            verdict, by = ("invalid", "") if same is None else ("equal", "")
        else:
            path.write_text(mutant.change.text, encoding="utf-8")
            verdict, by = tests.judge(mutant)
    finally:
        path.write_text(mutant.change.original, encoding="utf-8")
        if path.suffix == ".c" and ROOMS[mutant.room].py:
            code, output = run(EXTENSION, tests.limit_s)
            if code != 0:
                raise SystemExit(f"without the mutant, the extension does not build:\n{output}")
    change = mutant.change
    return Result(
        mutant.number,
        mutant.room,
        mutant.path,
        change.line,
        change.rule,
        change.before.strip(),
        change.after.strip(),
        verdict,
        by,
        round(time.monotonic() - began, 1),
    )


def read_results() -> dict[str, Result]:
    """Return the known results by number; the last result of a mutant counts.

    It counts also where the mutant's line has changed since.
    """
    if not RESULTS.exists():
        return {}
    rows: list[dict[str, Any]] = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    return {row["number"]: Result(**row) for row in rows}


def keep(result: Result) -> None:
    """Append a result to the file, and print it."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    print(f"{result.verdict:<8} {result.number} {result.path}:{result.line} {result.rule} {result.by}", flush=True)
    if result.verdict == "survived":
        print(f"    - {result.before}\n    + {result.after}", flush=True)


def summary(results: Sequence[Result]) -> int:
    """Print counts by room, survivors that the page does not explain, and totals. Returns 1 if there are any."""
    counted = [result for result in results if result.verdict in ("killed", "survived")]
    for room in ROOMS:
        own = [result.verdict for result in counted if result.room == room]
        if own:
            print(f"{room:<10} {len(own):>4} mutants, {own.count('killed'):>4} killed")
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    survivors = [result for result in counted if result.verdict == "survived"]
    unexplained = [result for result in survivors if result.number not in page]
    for result in unexplained:
        print(f"not explained in docs/mutants.md: {result.number} {result.path}:{result.line} {result.rule}")
        print(f"    - {result.before}\n    + {result.after}")
    print(f"{len(counted)} mutants, {len(counted) - len(survivors)} killed, {len(survivors)} survived")
    return 1 if unexplained else 0


def chosen(options: argparse.Namespace, known: dict[str, Result]) -> Iterator[Mutant]:
    """Yield the mutants to run: survivors again, or new ones up to the requested number."""
    if options.again:
        known_here = {mutant.number: mutant for room in options.rooms for mutant in mutants(room)}
        for number, result in known.items():
            if result.verdict == "survived" and number in known_here:
                yield known_here[number]
        return
    there = {mutant.number for room in options.rooms for mutant in mutants(room)}
    count = sum(r.verdict in ("killed", "survived") and r.number in there for r in known.values())
    for mutant in drawn(options.rooms, options.seed):
        if count >= options.number:
            return
        if mutant.number not in known:
            yield mutant
            count += known[mutant.number].verdict in ("killed", "survived")


def main() -> int:
    """Run the requested mutants, then print the summary."""
    parser = argparse.ArgumentParser(description="Draw mutants and run the tests of their rooms.")
    parser.add_argument(
        "--number", type=int, default=NUMBER, help="mutants that compile, with earlier ones of today's lines"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--rooms", nargs="+", choices=list(ROOMS), default=list(ROOMS))
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of one test command")
    parser.add_argument("--again", action="store_true", help="run the mutants that survived again")
    parser.add_argument("--list", action="store_true", help="print only the summary of the results")
    options = parser.parse_args()
    known = read_results()
    if not options.list:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.nice(10)
        TREE.mkdir(parents=True, exist_ok=True)
        copy_tree()
        tests = Tests(options.limit_s)
        tests.measure(options.rooms)
        for mutant in chosen(options, known):
            known[mutant.number] = try_one(tests, mutant)
            keep(known[mutant.number])
    return summary([result for result in known.values() if result.room in options.rooms])


if __name__ == "__main__":
    sys.exit(main())
