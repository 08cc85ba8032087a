"""Runs Horovod's own PyTorch tests and examples with this package in place of Horovod, and with Horovod itself.

python benchmarks/horovod_suite.py --horovod DIR: a checkout of Horovod 0.28.1 (PyPI's package has no tests). Each file
runs on real ranks under `netbottleneck run`, started as by horovodrun, torchrun and mpirun; files in test/single run on
one rank. --reference names a folder in which Horovod itself is installed (tools/peers.sh builds one): the tests also
run with Horovod. Horovod does not support torchrun, so there the comparison is with its run under horovodrun.
--examples runs the examples instead.

Exit code: 0 if every test that passes with Horovod passes here (without --reference: if no test fails); 2: a
requirement is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horovod_suite_jobs import STARTERS, Job, mpirun

HERE = Path(__file__).resolve().parent
FILES = (
    "test/parallel/test_torch.py",
    "test/parallel/test_common.py",
    "test/parallel/test_timeline.py",
    "test/parallel/test_adasum_pytorch.py",
    "test/single/test_torch_elastic.py",
)
SHORT = ["--model", "resnet18", "--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "10"]
SHORT += ["--num-iters", "3"]
EXAMPLES = {  # arguments, and the beginning of the last line of output
    "examples/pytorch/pytorch_synthetic_benchmark.py": (SHORT, "Total img/sec on "),
    "examples/pytorch/pytorch_mnist.py": (["--epochs", "2"], "Test set: Average loss: "),
    "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": (SHORT, "Total img/sec on "),
}
FOR_TESTS = ("torch", "pytest", "numpy", "mock", "cloudpickle", "packaging")
FOR_EXAMPLES = ("torch", "numpy", "packaging", "filelock")
RANK = {"passed": 1, "skipped": 0, "failed": 2, "unfinished": 3}  # a test has the highest of its ranks' outcomes


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test over all ranks, with a rank's message."""

    kind: str
    why: str = ""
    absent: int = 0  # ranks that did not reach the test

    @property
    def failed(self) -> bool:
        return self.kind in ("failed", "unfinished")


Outcomes = dict[str, Outcome]


class Suite:
    """Horovod's tests, copied to a folder without the package `horovod`."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.count = 0

    def job(self, command: Sequence[str], size: int, environ: dict[str, str], reference: bool) -> Job:
        """Return a job with its own folder. environ: additional variables."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        more = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [str(HERE), *(str(Path(each).resolve()) for each in more if each)]
        if reference:
            path.insert(0, str(Path(self.args.reference).resolve()))
        own = {"PYTHONPATH": os.pathsep.join(path), "NETBOTTLENECK_DIR": str(folder / "run")}
        start = [] if reference else ["-m", "netbottleneck", "run"]
        return Job([sys.executable, *start, *command], size, {**own, **environ}, folder, self.args.limit)

    def file(self, file: str, size: int, environment: str, reference: bool) -> Outcomes:
        """Run a file of tests; return their outcomes. After a test that hangs, the remaining tests run again."""
        found: Outcomes = {}
        while True:
            more = self._part(file, size, environment, reference, tuple(found))
            hangs = [test for test, outcome in more.items() if outcome.kind == "unfinished" and not outcome.absent]
            if not hangs:
                return found | more
            # Tests that not all ranks had reached did not cause the hang.
            found |= {test: outcome for test, outcome in more.items() if not outcome.absent}

    def _part(self, file: str, size: int, environment: str, reference: bool, but: Sequence[str]) -> Outcomes:
        runner = Path(self.args.horovod).resolve() / "horovod" / "runner"
        options = ["-q", "-p", "horovod_suite_plugin", "-p", "no:cacheprovider", "-o", "addopts="]
        chosen = ["-k", self.args.tests] if self.args.tests else []
        environ = {"HOROVOD_SUITE_RUNNER": "" if reference else str(runner), "HOROVOD_SUITE_BUT": json.dumps(but)}
        job = self.job(["-m", "pytest", *options, *chosen, file], size, environ, reference)
        shutil.copytree(Path(self.args.horovod) / "test", job.folder / "test")
        out = job.folder / "out"
        out.mkdir()
        (job.folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        environ = {**job.environ, "HOROVOD_SUITE_OUT": str(out)}
        end = STARTERS[environment](replace(job, environ=environ, news=out, quiet_s=self.args.quiet))
        found = merged([lines(path) for path in out.glob("*.jsonl")], size, reference, end.output)
        return found if found or but else {"(start)": Outcome("failed", f"no test began: exit code {end.code}")}

    def example(self, script: str, size: int, environment: str) -> Outcome:
        """Run an example, unmodified."""
        options, sign = EXAMPLES[script]
        job = self.job([str((Path(self.args.horovod) / script).resolve()), *options], size, {}, reference=False)
        if importlib.util.find_spec("torchvision") is None:
            shutil.copy(HERE / "horovod_suite_vision.py", job.folder / "torchvision.py")
            path = f"{job.folder}{os.pathsep}{job.environ['PYTHONPATH']}"
            job = replace(job, environ={**job.environ, "PYTHONPATH": path})
        end = STARTERS[environment](job)
        last = next((line for line in reversed(end.output.splitlines()) if line.startswith(sign)), "")
        measured = "Verdict: " in end.output and (job.folder / "run" / "summary.json").exists()
        if end.code != 0 or not last or not measured:
            why = next((line for line in reversed(end.output.splitlines()) if "Error" in line), "")
            late = f"not complete after {job.limit_s:g} s" if end.code is None else f"exit code {end.code}"
            return Outcome("failed", why or (late if end.code != 0 else "no report" if last else f"no line {sign}…"))
        return Outcome("passed", last.strip())


def lines(path: Path) -> list[dict[str, Any]]:
    """Return a rank's lines; incomplete lines are ignored."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def merged(ranks: Sequence[list[dict[str, Any]]], size: int, reference: bool, output: str) -> Outcomes:
    """Return each test's outcome over all ranks. RuntimeError if a rank did not start or used the other package."""
    of = {line["horovod"].split(".")[0] for rank in ranks for line in rank if line.get("horovod")}
    if len(ranks) != size or of - {"horovod" if reference else "netbottleneck"}:
        raise RuntimeError(
            f"{len(ranks)} of {size} ranks began, with {', '.join(of) or 'no Horovod'}:\n{output[-2000:]}"
        )
    found: Outcomes = {}
    for rank in ranks:
        here: Outcomes = {}
        for line in rank:
            if "test" in line:
                here[line["test"]] = worse(
                    here.get(line["test"]), Outcome(line["outcome"], line["why"]), same_rank=True
                )
        for test, outcome in here.items():
            found[test] = worse(found.get(test), outcome)
    for test in found:
        absent = sum(all(line.get("test") != test for line in rank) for rank in ranks)
        if absent:
            found[test] = Outcome("unfinished", f"{absent} of {size} ranks did not reach it", absent)
    return found


def worse(one: Outcome | None, other: Outcome, same_rank: bool = False) -> Outcome:
    """Return the outcome that counts. same_rank: a later line of the same rank replaces "unfinished"."""
    if one is None or (same_rank and one.kind == "unfinished"):
        return other
    return other if RANK[other.kind] > RANK[one.kind] else one


def counted(outcomes: Outcomes) -> str:
    """Return the numbers of passed, skipped and failed tests as cells."""
    kinds = [outcome.kind for outcome in outcomes.values()]
    failed = sum(outcome.failed for outcome in outcomes.values())
    return f"{kinds.count('passed')} | {kinds.count('skipped')} | {failed}"


def listed(title: str, tests: Sequence[str]) -> None:
    print(f"\n{title}: {'none' if not tests else ''}")
    for test in tests:
        print(f"* {test}")


FAILS, LOST, GAINED, BETTER, BOTH = (
    "Fails here",
    "Passes with Horovod, not here",
    "Skipped with Horovod, passes here",
    "Fails with Horovod, passes here",
    "Fails in both",
)


def beside(own: Outcome, theirs: Outcome) -> str:
    """Return the list for a test, by its outcomes with this package and with Horovod; "" for none."""
    if theirs.kind == "passed":
        return LOST if own.kind != "passed" else ""
    if own.kind == "passed":
        return BETTER if theirs.failed else GAINED
    return BOTH if own.failed and theirs.failed else ""


def compare(args: argparse.Namespace, suite: Suite) -> int:
    """Run all files; print the table and the lists."""
    print(
        "| file | ranks | started by | whose | passed | skipped | failed |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    lists: dict[str, list[str]] = {name: [] for name in (FAILS, LOST, GAINED, BETTER, BOTH)}
    there: dict[tuple[str, int, str], Outcomes] = {}
    alone = {file for file in args.files if file.startswith("test/single/")}  # on one rank, as in Horovod's own CI
    chosen = [
        (ranks, environment, file) for ranks in args.ranks for environment in args.environment for file in args.files
    ]
    for ranks, environment, file in chosen:
        if file in alone and ranks != args.ranks[0]:
            continue
        size = 1 if file in alone else ranks
        like = "horovodrun" if environment == "torchrun" else environment
        here = suite.file(file, size, environment, reference=False)
        row = f"| {Path(file).name} | {size} |"
        print(f"{row} {environment} | netbottleneck | {counted(here)} |", flush=True)
        if args.reference and (like, size, file) not in there:
            there[like, size, file] = suite.file(file, size, like, reference=True)
            print(f"{row} {like} | Horovod | {counted(there[like, size, file])} |", flush=True)
        where = f"{Path(file).name}, {size} ranks, {environment}"
        lists[FAILS] += [f"{test} ({where}): {own.why}" for test, own in here.items() if own.failed]
        for test, theirs in there.get((like, size, file), {}).items():
            own = here.get(test, Outcome("unfinished", "did not run"))
            name = beside(own, theirs)
            if name:
                lists[name].append(f"{test} ({where}): here {own.kind}: {own.why}; there {theirs.kind}: {theirs.why}")
    for name, tests in lists.items():
        if args.reference or name == FAILS:
            listed(name, tests)
    return int(bool(lists[LOST if args.reference else FAILS]))


def examples(args: argparse.Namespace, suite: Suite) -> int:
    """Run the examples; print their outcomes."""
    real = importlib.util.find_spec("torchvision") is not None
    print(f"torchvision: {'as installed' if real else 'a stand-in, horovod_suite_vision.py'}\n")
    print("| example | ranks | started by | | last line |\n| --- | --- | --- | --- | --- |")
    failed = 0
    for size in args.ranks:
        for environment in args.environment:
            for script in EXAMPLES:
                outcome = suite.example(script, size, environment)
                failed += outcome.failed
                print(f"| {Path(script).name} | {size} | {environment} | {outcome.kind} | {outcome.why} |", flush=True)
    return int(failed > 0)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. Exits with 2 and a message if a requirement is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--horovod", metavar="DIR", required=True, help="a checkout of Horovod 0.28.1")
    parser.add_argument("--ranks", type=lambda text: [int(size) for size in text.split(",")], default=[2, 4])
    starters = [name for name in STARTERS if name != "mpirun" or mpirun()]
    parser.add_argument("--environment", type=lambda text: text.split(","), default=starters)
    parser.add_argument("--reference", metavar="DIR", help="folder in which Horovod itself is installed")
    parser.add_argument("--examples", action="store_true", help="run the examples, not the tests")
    parser.add_argument("--files", nargs="+", default=FILES, help="files of the checkout to run")
    parser.add_argument("--tests", metavar="WORDS", help="run only tests that match this pytest -k expression")
    parser.add_argument("--limit", type=float, default=900, help="time limit of each run, in seconds")
    parser.add_argument(
        "--quiet", type=float, default=90, help="seconds without output after which a test counts as hanging"
    )
    args = parser.parse_args(argv)
    for file in EXAMPLES if args.examples else args.files:
        if not (Path(args.horovod) / file).is_file():
            parser.error(
                f"--horovod {args.horovod}: no {file} in it: a checkout of Horovod's repository at v0.28.1 has it"
            )
    for name in args.environment:
        if name not in starters:
            parser.error(f"--environment {name}: must be one of {', '.join(starters)}")
    if args.reference and not (Path(args.reference) / "horovod" / "torch").is_dir():
        parser.error(f"--reference {args.reference}: no horovod/torch in it: tools/peers.sh builds build/peers/horovod")
    needed = FOR_EXAMPLES if args.examples else FOR_TESTS
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        parser.error(f"missing: {', '.join(absent)}: pip install {' '.join(absent)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested tests or examples."""
    args = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="horovod-suite-") as folder:
        suite = Suite(args, Path(folder))
        return examples(args, suite) if args.examples else compare(args, suite)


if __name__ == "__main__":
    sys.exit(main())
