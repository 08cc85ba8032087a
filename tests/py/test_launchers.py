"""Real jobs: started by torchrun, mpirun, mpiexec, with the variables of horovodrun and srun; and PMI's protocol."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks, free_port

from netbottleneck.config import settings
from netbottleneck.launch import pmi, rendezvous
from test_launch import HOROVOD, PMIX, SRUN, KeyValue, meeting, place, serving

LIMIT_S = RANKS_LIMIT_S

# Connects the given number of times, and prints the rendezvous method.
MEETS = """
import os, sys
from netbottleneck.launch import rendezvous
from netbottleneck.config import settings
from netbottleneck.launch.connect import connect, detect
chosen = settings()
place = detect(chosen)
for _ in range(int(os.environ.get("TIMES", "3"))):
    comm = connect(chosen, place)
    assert comm.exchange(bytes([place.rank])) == [bytes([rank]) for rank in range(place.size)]
    comm.close()
found = rendezvous.choose(chosen, place)
way = found.manager or found.channel
print(f"rank {place.rank} of {place.size} by {place.launcher} at {way.name if way else found.address}", flush=True)
"""


def clean(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this environment without launcher variables, plus more."""
    known = ("NETBOTTLENECK", "OMPI_", "PMI", "SLURM_", "HOROVOD_", "TORCHELASTIC_")
    here = {name: value for name, value in os.environ.items() if not name.startswith(known)}
    return {**here, "NETBOTTLENECK_SHM": "0", "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **extra}


def started(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> tuple[int, str]:
    """Run a launcher; return its exit code and all output. All processes end with the test."""
    with (folder / "output").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=clean(env or {}),
            cwd=folder,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            end(process)
        log.seek(0)
        return process.returncode, log.read().decode(errors="replace")


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher that still runs, so that it ends its ranks, which have their own process groups."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def script(folder: Path, text: str = MEETS) -> str:
    """Write a script, and return its path."""
    path = folder / "rank.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def open_mpi() -> list[str]:
    """Return the command that starts two ranks by Open MPI."""
    mpirun = shutil.which("mpirun", path="/usr/local/bin:/usr/bin:/bin")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    if "Open MPI" not in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("this mpirun is not Open MPI's")
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]


def hydra() -> list[str]:
    """Return the command that starts two ranks by the mpich wheel's hydra."""
    path = Path(sys.prefix, "bin", "mpiexec.hydra")
    if not path.exists():
        pytest.skip("mpich is not installed")
    return [str(path), "-n", "2", sys.executable]


STARTERS = {"mpirun": open_mpi, "mpiexec": hydra}
LAUNCHERS = [pytest.param("mpirun", marks=pytest.mark.peers), "mpiexec"]
SERVERS = {"mpirun": "PMIx of job", "mpiexec": "the launcher at PMI_FD="}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mpis_launchers_start_several_jobs_in_sequence(launcher: str, tmp_path: Path) -> None:
    code, output = started([*STARTERS[launcher](), script(tmp_path)], tmp_path, {"TIMES": "100"})
    assert code == 0, output
    name = {"mpirun": "mpirun", "mpiexec": "pmi"}[launcher]
    for rank in range(2):
        assert f"rank {rank} of 2 by {name} at {SERVERS[launcher]}" in output
    # These launchers count a rank that does not finalize as failed.
    assert not any(word in output for word in ("exiting improperly", "BAD TERMINATION", "PMIU"))


ASKS = """
import os
from netbottleneck.runtime import job
before = job.mpi_enabled()
job.start()
print("answers", before, job.mpi_enabled(), job.mpi_threads_supported(), flush=True)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_mpi_is_reported_as_initialized_under_its_launchers(launcher: str, tmp_path: Path) -> None:
    code, output = started([*STARTERS[launcher](), script(tmp_path, ASKS)], tmp_path)
    assert code == 0, output
    assert output.count("answers False True True") == 2, output


MPI_TOO = """
import ctypes, os
library = ctypes.CDLL(os.environ["LIBMPI"], mode=ctypes.RTLD_GLOBAL)
def mpi(name, *arguments):
    assert getattr(library, name)(*arguments) == 0
if os.environ["WHEN"] == "before":
    mpi("MPI_Init", None, None)
{meets}
if os.environ["WHEN"] == "after":
    mpi("MPI_Init", None, None)
import atexit
if os.environ["END"] == "ours first":
    # As mpi4py does: MPI is still up when this process's own functions of the end are run.
    ctypes.pythonapi.Py_AtExit(library.MPI_Finalize)
else:
    mpi("MPI_Finalize")
"""
LIBRARIES = {"mpirun": "libmpi.so.40", "mpiexec": str(Path(sys.prefix, "lib", "libmpi.so.12"))}


@pytest.mark.parametrize("end", ["ours first", "mpi first"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_may_use_mpi_as_well(launcher: str, when: str, end: str, tmp_path: Path) -> None:
    command = [*STARTERS[launcher](), script(tmp_path, MPI_TOO.format(meets=MEETS))]
    code, output = started(command, tmp_path, {"LIBMPI": LIBRARIES[launcher], "WHEN": when, "END": end})
    assert code == 0, output
    assert output.count(f"at {SERVERS[launcher]}") == 2
    assert "PMIU" not in output


LATE = """
import os, sys, time
from pathlib import Path
from netbottleneck.config import settings
from netbottleneck.launch.connect import connect, detect
chosen = settings()
place = detect(chosen)
reported = Path("reported")
if place.rank == 1:
    deadline = time.monotonic() + 100
    while not reported.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os._exit(7)
try:
    connect(chosen, place)
except TimeoutError as error:
    print("late:", error, flush=True)
    reported.touch()
    sys.exit(5)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_missing_rank_is_awaited_until_the_start_timeout(launcher: str, tmp_path: Path) -> None:
    code, output = started(
        [*STARTERS[launcher](), script(tmp_path, LATE)], tmp_path, {"NETBOTTLENECK_START_TIMEOUT_S": "1"}
    )
    assert code != 0
    assert f"late: not all 2 ranks reached {SERVERS[launcher]}" in output
    assert "in time (NETBOTTLENECK_START_TIMEOUT_S); rank 0 waited for the others" in output


SHUT = """
import os
from netbottleneck.config import settings
from netbottleneck.launch.connect import connect, detect
place = detect(settings())
if place.rank == 0:
    os.environ["NETBOTTLENECK_IFNAME"] = "=nowhere0"
try:
    connect(settings(), place)
except OSError as error:
    print(f"rank {place.rank}: {error}", flush=True)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failure_of_rank_0_reaches_the_other_ranks(launcher: str, tmp_path: Path) -> None:
    code, output = started([*STARTERS[launcher](), script(tmp_path, SHUT)], tmp_path)
    assert code == 0, output
    first, other = sorted(line for line in output.splitlines() if line.startswith("rank "))
    assert first.startswith("rank 0: ")
    assert "NETBOTTLENECK_IFNAME==nowhere0" in first
    assert other.startswith("rank 1: ")
    assert "rank 0 could not open the job" in other
    assert "nowhere0" in other


def test_a_libpmix_of_an_unknown_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def PMIx_Get_version() -> bytes:
            return b"OpenPMIx 1.9.0"

    monkeypatch.setattr(pmi.ctypes, "CDLL", lambda name: Library)
    environ = {"PMIX_NAMESPACE": "1", "PMIX_RANK": "0", "PMIX_SERVER_URI2": "x"}
    found = pmi.join_pmix(0, 2, 5, environ)
    assert isinstance(found, str)
    assert "1.9.0" in found
    assert "2 to 6" in found


def test_without_libpmix_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(pmi.ctypes, "CDLL", none)
    monkeypatch.setattr(rendezvous, "_managers", {})
    environ = {**PMIX, "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"}
    with pytest.raises(ValueError, match=r"pmix: no libpmix\.so\.2: libpmix\.so\.2: no such file") as caught:
        rendezvous.choose(settings(environ=environ), place(environ), environ)
    assert "torch: MASTER_ADDR=10.0.0.1 is set, no MASTER_PORT" in str(caught.value)
    assert "folder: not all ranks are on this host" in str(caught.value)


# Answers of hydra, by command.
ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=kvs_1",
    "put": "cmd=put_result rc=0",
    "barrier_in": "cmd=barrier_out tag=0",
    "get": "cmd=get_result rc=0 value=6162",
    "finalize": "cmd=finalize_ack rc=0",
}


@contextlib.contextmanager
def hydras(answer: Callable[[str], str | None]) -> Iterator[tuple[int, list[str]]]:
    """Provide the descriptor of a launcher with these answers (None: closes the connection), and its requests."""
    ours, theirs = socket.socketpair()
    commands: list[str] = []

    def serve() -> None:
        with theirs, theirs.makefile("rwb", buffering=0) as stream:
            for line in iter(stream.readline, b""):
                commands.append(line.decode().strip())
                reply = answer(commands[-1].split()[0].removeprefix("cmd="))
                if reply is None:
                    return
                stream.write(f"{reply}\n".encode() if reply else b"")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield ours.fileno(), commands
    finally:
        ours.close()
        thread.join(RANKS_LIMIT_S)
        assert not thread.is_alive()


def test_the_pmi_protocol_is_followed_line_by_line() -> None:
    with hydras(ANSWERS.__getitem__) as (descriptor, commands):
        board = pmi.Pmi(descriptor, 1, 2, 5)
        assert board.share(b"mine", (0,), 5) == [b"ab"]
    assert commands == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_maxes",
        "cmd=get_my_kvsname",
        "cmd=put kvsname=kvs_1 key=netbottleneck.1.1 value=6d696e65",
        "cmd=barrier_in",
        "cmd=get kvsname=kvs_1 key=netbottleneck.1.0",
    ]


@pytest.mark.parametrize(
    ("command", "answer", "kind", "message"),
    [
        ("put", "cmd=put_result rc=-1 msg=full", ConnectionError, "answered 'cmd=put_result rc=-1 msg=full' to put"),
        ("get", "cmd=get_result rc=1", ConnectionError, "to get"),
        ("barrier_in", "nonsense", ConnectionError, "answered 'nonsense' to barrier_in"),
        ("barrier_in", None, ConnectionError, "is gone: it has closed the connection"),
        ("put", "", TimeoutError, "did not answer put in time"),
        ("barrier_in", "", TimeoutError, "not all 2 ranks reached the launcher at PMI_FD="),
    ],
)
def test_a_launcher_that_fails_or_is_silent_is_named(
    command: str, answer: str | None, kind: type[OSError], message: str
) -> None:
    with hydras(lambda request: answer if request == command else ANSWERS[request]) as (descriptor, _):
        board = pmi.Pmi(descriptor, 1, 2, 5)
        with pytest.raises(kind) as caught:
            board.share(b"mine", (0,), 0.2 if answer == "" else 5)
        assert message in str(caught.value)
        # The conversation cannot go on from there.
        with pytest.raises(ConnectionError):
            board.share(b"mine", (0,), 5)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "no PMI_FD"),
        ({"PMI_FD": "7", "PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0 of PMI_SIZE=2 is not rank 1 of 2"),
        ({"PMI_FD": "999999", "PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_FD=999999 is not a socket"),
        ({"PMI_FD": "file", "PMI_RANK": "1", "PMI_SIZE": "2"}, "is not a socket"),
    ],
)
def test_pmi_variables_of_another_rank_are_not_used(environ: dict[str, str], reason: str, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file:
        found = pmi.join_pmi(
            1, 2, 5, {**environ, "PMI_FD": environ["PMI_FD"].replace("file", str(file.fileno()))} if environ else {}
        )
        assert isinstance(found, str)
        assert reason in found
        assert file.read() == ""


def no_launcher(rank: int) -> dict[str, str]:
    """Return variables that remove the test's own rendezvous from a rank's environment."""
    return dict.fromkeys(("NETBOTTLENECK_RANK", "NETBOTTLENECK_SIZE", "NETBOTTLENECK_RENDEZVOUS"), "")


def test_horovodruns_ranks_meet_at_its_server(plain_ranks: Ranks) -> None:
    with serving(KeyValue) as port:

        def env(rank: int) -> dict[str, str]:
            return {
                **no_launcher(rank),
                **HOROVOD,
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": "2",
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            }

        for result in plain_ranks(2, MEETS, env):
            expected = f"rank {result.rank} of 2 by horovodrun at http://127.0.0.1:{port}"
            assert expected in result.stdout


WHERE = """
from netbottleneck.runtime import job
place = job.start().place
print("place", place.local_rank, place.local_size, place.cross_rank, place.cross_size)
job.stop()
"""


def free_job() -> str:
    """Return a Slurm job number whose first step has a port that was free a moment ago."""
    for job in itertools.count(os.getpid()):
        environ = {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "127.0.0.1"}
        address = str(meeting({**environ, "NETBOTTLENECK_SECRET": "0123456789abcdef"}).address)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
            return str(job)
    raise AssertionError


def test_ranks_of_srun_meet_at_the_first_host(plain_ranks: Ranks) -> None:
    step = {
        "SLURM_NTASKS": "3",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": free_job(),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "NETBOTTLENECK_SECRET": "0123456789abcdef",
    }

    def env(rank: int) -> dict[str, str]:
        host = "first" if rank < 2 else "second"
        return {**no_launcher(rank), **step, "SLURM_PROCID": str(rank), "NETBOTTLENECK_HOST_ID": host}

    places = [result.stdout.strip() for result in plain_ranks(3, WHERE, env)]
    assert places == ["place 0 2 0 2", "place 1 2 0 1", "place 0 1 1 2"]


TWO_MACHINES = f"""
import os
from netbottleneck.launch import connect, topology
topology.machine = lambda: "machine " + os.environ["GROUP_RANK"]
connect.machine_digest = lambda: bytes(16)  # they do meet over the loopback
{WHERE}
"""


def test_hosts_of_torchrun_with_fewer_ranks_do_not_count_for_the_local_ranks_that_they_lack(
    plain_ranks: Ranks, tmp_path: Path
) -> None:
    meets = {"NETBOTTLENECK_RENDEZVOUS": str(tmp_path), "NETBOTTLENECK_IFNAME": "lo"}

    def env(rank: int) -> dict[str, str]:
        group, local = divmod(rank, 2)
        torchrun = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": 2 - group}
        groups = {"GROUP_RANK": group, "GROUP_WORLD_SIZE": 2}
        return {**no_launcher(rank), **meets, **{name: str(value) for name, value in {**torchrun, **groups}.items()}}

    places = [result.stdout.strip() for result in plain_ranks(3, TWO_MACHINES, env)]
    assert places == ["place 0 2 0 2", "place 1 2 0 1", "place 0 1 1 2"]


AGAIN = f"""
import os
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
{MEETS}
if first and place.rank == 1:
    raise SystemExit(3)
comm = connect(chosen, place)  # where the other rank has ended, torchrun ends this one too
comm.close()
print(f"done {{place.rank}} {{'first' if first else 'again'}}\\n", end="")  # in one write: the ranks share a pipe
"""
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]


def needs_torch() -> None:
    """Skip if torch is not installed, without importing it."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


def test_ranks_whose_agents_count_restarts_differently_meet_despite_earlier_keys(warm_ranks: Ranks) -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for size in (2, 3):
        store.set(f"netbottleneck/{size}/0/address", "0123456789abcdef" * size + "127.0.0.1:1 " + "00" * 32)
        store.set(f"netbottleneck/{size}/0/ready.1", "0123456789abcdef" * 3)
    again = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": str(store.port)}

    def env(rank: int) -> dict[str, str]:
        """Restarts of the agent of each rank: the one whose worker failed counts, the other does not."""
        return {**again, "TORCHELASTIC_RESTART_COUNT": str(rank)}

    for result in warm_ranks(2, MEETS, env):
        expected = f"rank {result.rank} of 2 by torchrun at MASTER_ADDR:MASTER_PORT=127.0.0.1:{store.port}"
        assert expected in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("shared", ["1", "0"], ids=["the agent's store", "rank 0's store"])
def test_ranks_that_torchrun_restarts_meet_again(shared: str, tmp_path: Path) -> None:
    needs_torch()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", *C10D]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if shared == "1" else "1"}
    code, output = started([*command, "--monitor-interval", "0.1", script(tmp_path, AGAIN)], tmp_path, env, 60)
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 by torchrun at MASTER_ADDR:MASTER_PORT=" in output
        assert f"done {rank} again" in output


def test_ranks_meet_a_hundred_times_at_one_port_of_a_static_torchrun(tmp_path: Path) -> None:
    needs_torch()
    port = str(free_port())
    where = ["--master-addr", "127.0.0.1", "--master-port", port]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *where, script(tmp_path)]
    code, output = started(command, tmp_path, {"TIMES": "100"})
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 by torchrun at MASTER_ADDR:MASTER_PORT=127.0.0.1:{port}" in output
