"""Shared by all Python tests: rank processes on loopback, the skip rule and the marker of the full matrices."""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "tools"))

from ports import free_port  # noqa: E402
from warm import READ_EARLY, WarmPair, WarmProcess, read_early  # noqa: E402

import skips  # noqa: E402

Process = subprocess.Popen[bytes] | WarmProcess

# Outputs of the papers' own programs, if they are next to the checkout; they are not part of it.
REFERENCE = TESTS.parents[1] / "shared" / "reference"
FULL_LIMIT_S = 300
# Marks of tests that need programs which set-up does not install for all tests.
INSTALLED = ("peers", "frameworks", "nccl")
# Places where a reason of tests/skips.txt is not accepted: see tools/skips.py.
STRICT = pytest.StashKey[list[str]]()
# What only a hang reaches, on a busy machine too.
RANKS_LIMIT_S = 100.0

# Before torch is loaded: threads of its own that spin for a core make a busy machine several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Unbuffered, print writes a line and its end one after the other: ranks that share a pipe would mix theirs.
os.environ.pop("PYTHONUNBUFFERED", None)
# Otherwise every process that a test starts compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Python loads its sitecustomize.py in every process that a test starts; the file says why.
SITE = str(TESTS / "py" / "site")
os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *filter(None, [os.environ.get("PYTHONPATH")])])
# All ranks of a test are on one host. Tests use the network between them, unless a test says otherwise.
os.environ.setdefault("NETBOTTLENECK_SHM", "0")
# Ranks have these as they are now: libraries that tests load set some of them, and a rank would not be forked for it.
EARLY = read_early(os.environ)


def checks(script: Path) -> list[str]:
    """Return the names of all functions of a script that have the decorator `check`, in order.

    Raises ValueError if there is none.
    """
    found = [
        node.name
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(part, ast.Name) and part.id == "check" for part in node.decorator_list)
    ]
    if not found:
        raise ValueError(f"{script} has no checks")
    return found


def inherited() -> dict[str, str]:
    """Return the part of this process's environment that ranks inherit."""
    now = {name: value for name, value in os.environ.items() if not name.startswith(("NETBOTTLENECK", *READ_EARLY))}
    return {**now, "PYTHONPATH": os.environ["PYTHONPATH"], **EARLY}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full matrices too")
    help_text = "run the tests with this mark alone; what peers, frameworks and nccl need must be installed"
    parser.addoption("--only", choices=("full", *INSTALLED), help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        raise pytest.UsageError("pytest-timeout is missing: a test that hangs must fail (requirements/dev.txt)")
    # Told to end, it ends like at Ctrl-C: fixtures are closed, so no rank outlives the run.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    only = config.getoption("--only")
    config.stash[STRICT] = [*(["CI"] if os.environ.get("CI") else []), *([only] if only in INSTALLED else [])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = config.getoption("--only")
    chosen, left_out = [], []
    for item in items:
        full = item.get_closest_marker("full") is not None
        if full and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(FULL_LIMIT_S))
        wanted = item.get_closest_marker(only) is not None if only else not full or config.getoption("--full")
        (chosen if wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def refuse_unlisted_skip(report: pytest.TestReport | pytest.CollectReport, strict: Collection[str]) -> None:
    """Turn a skip that tests/skips.txt does not list into a failure."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    name = report.nodeid.removeprefix("tests/")
    if not skips.may_skip(name, reason, strict):
        report.outcome = "failed"
        where = f" for {' and '.join(strict)}" if strict else ""
        report.longrepr = f"{name}: this skip is not listed in tests/skips.txt{where}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    refuse_unlisted_skip(report, item.config.stash[STRICT])
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    refuse_unlisted_skip(report, collector.config.stash[STRICT])
    return report


@dataclass(frozen=True)
class RankResult:
    """Result of one rank: its exit code (None: killed at the deadline) and its output."""

    rank: int
    code: int | None
    stdout: str
    stderr: str


@dataclass
class RankJob:
    """Running rank processes, each in its own process group."""

    processes: list[Process]
    folder: Path
    closed: bool = field(default=False)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(signum)

    def output(self, rank: int) -> str:
        """Return a rank's stdout so far."""
        return (self.folder / f"{rank}.out").read_text(encoding="utf-8", errors="replace")

    def wait_for_line(self, rank: int, line: str, limit_s: float = RANKS_LIMIT_S) -> None:
        """Wait until a rank has printed this line. Fails if the rank exits first, or at the deadline."""
        deadline = time.monotonic() + limit_s
        while line not in self.output(rank).splitlines():
            ended = self.processes[rank].poll() is not None
            if (ended and line not in self.output(rank).splitlines()) or time.monotonic() > deadline:
                self.close()
                pytest.fail(f"rank {rank} did not print {line!r}\n{self.describe()}", pytrace=False)
            time.sleep(0.01)

    def wait(self, limit_s: float = RANKS_LIMIT_S, *, check: bool = True) -> list[RankResult]:
        """Wait for all ranks; check: fail unless each exits with 0. Ranks that run at the deadline are killed."""
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        ended = [process.returncode for process in self.processes]
        self.close()
        results = [self._result(rank, code) for rank, code in enumerate(ended)]
        codes = [result.code for result in results]
        if check and any(code != 0 for code in codes):
            pytest.fail(
                f"ranks ended with {codes} (None: not done after {limit_s} s)\n{self.describe()}", pytrace=False
            )
        return results

    def _result(self, rank: int, code: int | None) -> RankResult:
        stderr = (self.folder / f"{rank}.err").read_text(encoding="utf-8", errors="replace")
        return RankResult(rank, code, self.output(rank), stderr)

    def describe(self) -> str:
        """Return the output of every rank, as text for a failure."""
        results = [self._result(rank, None) for rank in range(len(self.processes))]
        return "\n".join(f"--- rank {r.rank} stdout\n{r.stdout}--- rank {r.rank} stderr\n{r.stderr}" for r in results)

    def close(self) -> None:
        """Kill every remaining process and its children."""
        if self.closed:
            return
        self.closed = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def by_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in here.items()}}


def by_folder(rank: int, size: int, folder: Path) -> dict[str, str]:
    """Return the variables of a rendezvous without a launcher."""
    names = {"RANK": str(rank), "SIZE": str(size), "RENDEZVOUS": str(folder / "meet")}
    return {f"NETBOTTLENECK_{name}": value for name, value in names.items()}


@dataclass
class Ranks:
    """Starts ranks of one job on 127.0.0.1. See start; calling it starts and waits.

    torchs: the ranks find each other by torchrun's variables, hence by torch's store, and load torch for it; else by
    variables of our own, in a folder. warm: what forks the ranks, where they need not be started.
    """

    folder: Path
    torchs: bool = True
    warm: WarmPair | None = None
    jobs: list[RankJob] = field(default_factory=list)

    def start(
        self,
        n: int,
        target: str | Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    ) -> RankJob:
        """Start n ranks of a script (a Path), of source text (with a line break) or of a module (any other text).

        env is added to each rank's environment, or is a function of the rank that returns what to add. No memory is
        shared between ranks.
        """
        folder = self.folder / f"job{len(self.jobs)}"
        folder.mkdir()
        command = self._command(target, folder)
        port = free_port()
        processes: list[Process] = []
        job = RankJob(processes, folder)
        self.jobs.append(job)
        for rank in range(n):
            extra = env(rank) if callable(env) else (env or {})
            values = {
                **inherited(),
                "NETBOTTLENECK_SHM": "0",
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": "1",
                # torch's store looks up the name of each client, and waits for the name server.
                "RES_OPTIONS": "timeout:1 attempts:1",
                **(by_torchrun(rank, n, port) if self.torchs else by_folder(rank, n, folder)),
                **extra,
            }
            if "PYTHONPATH" in extra:
                values["PYTHONPATH"] = os.pathsep.join([SITE, extra["PYTHONPATH"]])
            processes.append(self._process(rank, [*command, *args], values, folder))
        return job

    def _process(self, rank: int, arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> Process:
        out, err = folder / f"{rank}.out", folder / f"{rank}.err"
        with out.open("wb") as printed, err.open("wb") as errors:
            server = self.warm.of(rank, environ) if self.warm is not None else None
            if server is not None:
                return server.start(arguments, environ, folder, out, err)
            return subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
                env=environ,
                cwd=folder,
                start_new_session=True,
            )

    def _command(self, target: str | Path, folder: Path) -> list[str]:
        if isinstance(target, Path):
            return [str(target)]
        if "\n" not in target:
            return ["-m", target]
        script = folder / "rank.py"
        script.write_text(target, encoding="utf-8")
        return [str(script)]

    def __call__(
        self,
        n: int,
        target: str | Path,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        *,
        args: Sequence[str] = (),
        limit_s: float = RANKS_LIMIT_S,
        check: bool = True,
    ) -> list[RankResult]:
        """Start n ranks, wait for them and return their results, in rank order."""
        return self.start(n, target, args, env).wait(limit_s, check=check)


def on_ranks(comms: Sequence[Any], work: Callable[[Any], Any], limit_s: float = RANKS_LIMIT_S) -> list[Any]:
    """Run work on every rank concurrently, in threads, and return the results; the first exception is raised."""
    results: list[Any] = [None] * len(comms)
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = work(comms[index])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(comms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results


@pytest.fixture(scope="session")
def paper1() -> Path:
    """Provide the folder of the first paper's numbers."""
    folder = REFERENCE / "paper1"
    if not folder.is_dir():
        pytest.skip("no reference outputs of the papers beside the checkout")
    return folder


@pytest.fixture
def ranks(tmp_path: Path) -> Generator[Ranks, None, None]:
    """Provide rank processes as torchrun starts them; none outlives the test."""
    yield from _made(Ranks(tmp_path / "ranks"))


@pytest.fixture(scope="session")
def warm() -> Generator[WarmPair, None, None]:
    """Provide the process that forks ranks."""
    pair = WarmPair(inherited())
    yield pair
    pair.close()


@pytest.fixture
def warm_ranks(tmp_path: Path, warm: WarmPair) -> Generator[Ranks, None, None]:
    """Provide rank processes as torchrun starts them, but forked with torch loaded; none outlives the test.

    For tests that do not depend on when torch is loaded: they take a third of the time.
    """
    yield from _made(Ranks(tmp_path / "warm", warm=warm))


@pytest.fixture
def plain_ranks(tmp_path: Path) -> Generator[Ranks, None, None]:
    """Provide rank processes that load torch only if their script does; none outlives the test."""
    yield from _made(Ranks(tmp_path / "plain", torchs=False))


def _made(maker: Ranks) -> Generator[Ranks, None, None]:
    maker.folder.mkdir()
    yield maker
    for job in maker.jobs:
        job.close()


@pytest.fixture
def many_open_files() -> Generator[None, None, None]:
    """The next descriptors are above those that select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    while opened[-1] < 1024:
        opened.append(os.dup(opened[0]))
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def fake_driver() -> Path:
    """Compile the fake CUDA driver of tests/cuda; return its path."""
    root = TESTS.parent
    folder = root / "build" / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    include = [f"-I{root / 'csrc'}", f"-I{TESTS / 'c'}", f"-I{TESTS / 'cuda'}"]
    options = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", *include]
    made = folder / f"libcuda.{os.getpid()}"
    sources = [str(path) for path in sorted((TESTS / "cuda").glob("*.c"))]
    subprocess.run(["gcc", *options, *sources, "-o", str(made)], check=True)
    return made.replace(folder / "libcuda.so.1")


@pytest.fixture(scope="session")
def device(fake_driver: Path) -> dict[str, str]:
    """Compile the device, unless it is there; return the environment of a program that uses them."""
    torch = pytest.importorskip("torch")
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = TESTS.parent / "build" / "torch_device" / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    env = {"NETBOTTLENECK_CUDA_LIBRARY": str(fake_driver), "DEVICE_FOLDER": str(folder)}
    places = [*cpp_extension.include_paths(), sysconfig.get_path("include"), str(TESTS.parent / "csrc")]
    name = "-DTORCH_EXTENSION_NAME=nb_torch_device"
    options = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", name, *(f"-I{place}" for place in places)]
    libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    target, made = folder / "nb_torch_device.so", folder / f"nb_torch_device.{os.getpid()}"
    sources = [*(TESTS / "cuda").glob("torch_*"), *(TESTS.parent / "csrc" / "cuda").glob("*.h")]
    if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        subprocess.run(
            ["g++", *options, str(TESTS / "cuda" / "torch_device.cpp"), "-o", str(made), *libraries], check=True
        )
        made.replace(target)
    return env


@pytest.fixture(autouse=True)
def figures_closed() -> Generator[None]:
    """Close the figures of a test: matplotlib warns where a process keeps many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
