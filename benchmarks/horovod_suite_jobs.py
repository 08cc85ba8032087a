"""Starts the ranks of horovod_suite.py on this machine: with horovodrun's variables, or by torchrun or mpirun."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OTHERS = ("NETBOTTLENECK", "HOROVOD_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "_NETBOTTLENECK")
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 5.0


@dataclass(frozen=True)
class Job:
    """A job to start. `environ` is added to an environment without launcher variables."""

    command: Sequence[str]
    size: int
    environ: Mapping[str, str]
    folder: Path
    limit_s: float
    news: Path | None = None  # a folder whose files grow while the job makes progress
    quiet_s: float = 0.0  # seconds without growth after which the job counts as hanging


@dataclass(frozen=True)
class End:
    """The end of a job. code: the worst exit code, None at the deadline; output: stdout and stderr."""

    code: int | None
    output: str


class Rendezvous:
    """A server like horovodrun's: keys in scopes; a scope is removed once all its ranks have finished with it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.scopes: dict[str, dict[str, bytes]] = {}
        self.finished: dict[str, int] = {}
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def left(self, scope: str, key: str) -> None:
        """Handle DELETE: for Horovod's scopes, a rank has finished with the scope; for others, remove the key."""
        kind = scope.partition("_")[0]
        sizes = {"global": self.size, "local": self.size, "cross": 1}
        with self.lock:
            if kind not in sizes:
                self.scopes.get(scope, {}).pop(key, None)
                return
            self.finished[scope] = self.finished.get(scope, 0) + 1
            if self.finished[scope] == sizes[kind]:
                self.scopes.pop(scope, None)
                del self.finished[scope]

    def _handler(rendezvous) -> type[http.server.BaseHTTPRequestHandler]:
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Log nothing."""

            def place(self) -> tuple[str, str]:
                scope, _, key = self.path.removeprefix("/").partition("/")
                return scope, key

            def answer(self, value: bytes | None) -> None:
                self.send_response(404 if value is None else 200)
                self.send_header("Content-Length", str(len(value or b"")))
                self.end_headers()
                self.wfile.write(value or b"")

            def do_GET(self) -> None:
                scope, key = self.place()
                with rendezvous.lock:
                    value = rendezvous.scopes.get(scope, {}).get(key)
                self.answer(value)

            def do_PUT(self) -> None:
                scope, key = self.place()
                value = self.rfile.read(int(self.headers["Content-Length"]))
                with rendezvous.lock:
                    rendezvous.scopes.setdefault(scope, {})[key] = value
                self.answer(b"")

            def do_DELETE(self) -> None:
                rendezvous.left(*self.place())
                self.answer(b"")

        return Handler


def horovodrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank, if all ranks are on one host."""
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    chosen = {"HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    where = {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port}
    return {f"HOROVOD_{name}": str(value) for name, value in {**place, **chosen, **where}.items()}


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this environment without launcher variables, plus `environ`."""
    here = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS) and name not in TORCHRUNS}
    # torch's store looks up the name of each client, and waits for the name server.
    return {**here, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **environ}


def by_horovodrun(job: Job) -> End:
    """Start each rank with horovodrun's variables and a rendezvous server."""
    server = Rendezvous(job.size)
    try:
        port = server.server.server_address[1]
        return _end(job, [(job.command, horovodrun_variables(rank, job.size, port)) for rank in range(job.size)])
    finally:
        server.close()


def by_torchrun(job: Job) -> End:
    """Start the ranks by torchrun."""
    where = ["--nproc-per-node", str(job.size), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return _end(job, [([sys.executable, "-m", "torch.distributed.run", *where, "--no-python", *job.command], {})])


def mpirun() -> str:
    """Return the path of Open MPI's mpirun, not of an MPI next to this Python; "" if there is none."""
    beside = str(Path(sys.executable).parent)
    elsewhere = os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != beside)
    return shutil.which("mpirun", path=elsewhere) or ""


def by_mpirun(job: Job) -> End:
    """Start the ranks by Open MPI's mpirun."""
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(job.size)]
    return _end(job, [([mpirun(), *options, *job.command], {})])


STARTERS = {"horovodrun": by_horovodrun, "torchrun": by_torchrun, "mpirun": by_mpirun}


def _end(job: Job, starts: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> End:
    """Start processes, wait for them, and return the end of the job. No process is left running."""
    output = job.folder / "output"
    with output.open("wb") as out, _ended(processes := []):
        for command, extra in starts:
            environ = clean({**job.environ, **extra})
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=job.folder,
                start_new_session=True,
            )  # fmt: skip
            processes.append(process)
        _wait(job, processes)
        codes = [process.poll() for process in processes]
    worst = None if None in codes else next((code for code in codes if code), 0)
    return End(worst, output.read_text(encoding="utf-8", errors="replace"))


def _wait(job: Job, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all processes, at most until the deadline or until the job makes no progress."""
    deadline = time.monotonic() + job.limit_s
    known, changed = -1, time.monotonic()
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if job.news is not None:
            now = sum(path.stat().st_size for path in job.news.iterdir())
            if now != known:
                known, changed = now, time.monotonic()
            elif time.monotonic() - changed > job.quiet_s:
                return
        time.sleep(0.05)


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Generator[None, None, None]:
    """At exit, end the remaining processes: first by SIGTERM, so that launchers end their ranks, then by SIGKILL."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
