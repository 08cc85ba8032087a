"""Place of a process under each launcher, and rendezvous of the ranks."""

from __future__ import annotations

import ctypes
import errno
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import RANKS_LIMIT_S, Ranks, free_port, inherited

from netbottleneck.config import RANKS_MAX, settings
from netbottleneck.errors import Error, PeerError
from netbottleneck.launch import connect, pmi, rendezvous
from netbottleneck.launch import topology as launch_topology
from netbottleneck.launch.connect import Place, detect, topology
from netbottleneck.launch.rendezvous import (
    NONCE_BYTES,
    ChannelExchange,
    Folder,
    Http,
    ManagerExchange,
    Store,
    choose,
    first_host,
    private_folder,
    wait_for,
)
from netbottleneck.launch.topology import with_package
from netbottleneck.runtime import communicators
from netbottleneck.trace.model import SIZE_MAX

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PMIX = {"PMIX_NAMESPACE": "123", "PMIX_RANK": "3", "PMIX_SERVER_URI2": "122.0;tcp4://127.0.0.1:1"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
}


def place(environ: dict[str, str]) -> Place:
    """Return the place that an environment describes."""
    return detect(settings(environ=environ), environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HOROVOD, Place(3, 4, 1, 2, 1, 2, "horovodrun")),
        (TORCHRUN, Place(3, 4, 1, 2, 1, 2, "torchrun")),
        (MPIRUN, Place(3, 4, 1, 2, None, None, "mpirun")),
        (HYDRA, Place(3, 4, 1, 2, None, None, "pmi")),
        (SRUN, Place(3, 4, 1, None, 1, 2, "srun")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, launcher="torchrun")),
        ({}, Place(0, 1, 0, 1, 0, 1, "none")),
    ],
)
def test_each_launcher_is_read(environ: dict[str, str], expected: Place) -> None:
    assert place(environ) == expected


def test_our_own_variables_come_before_any_launcher() -> None:
    found = place({**HOROVOD, "NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_SIZE": "2"})
    assert (found.rank, found.size, found.launcher, found.local_rank) == (0, 2, "explicit", None)


def test_launchers_that_agree_are_read_in_order() -> None:
    assert place({**SRUN, **MPIRUN}).launcher == "mpirun"
    assert place({**MPIRUN, **TORCHRUN, **HOROVOD}).launcher == "horovodrun"


@pytest.mark.parametrize(
    ("environ", "phrases"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"HOROVOD_SIZE": "2"}, ["HOROVOD_SIZE=2", "HOROVOD_RANK"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_SIZE"]),
        ({"NETBOTTLENECK_RANK": "0"}, ["NETBOTTLENECK_SIZE"]),
        ({"NETBOTTLENECK_SIZE": "2"}, ["NETBOTTLENECK_RANK"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["rank 2 of 2"]),
        ({"NETBOTTLENECK_RANK": "2", "NETBOTTLENECK_SIZE": "2"}, ["rank 2 of 2"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK=one", "correct or unset"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1, WORLD_SIZE=2", "correct or unset"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["RANK=0, WORLD_SIZE=0", "correct or unset"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2, LOCAL_WORLD_SIZE=2", "correct or unset"]),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1, LOCAL_WORLD_SIZE=2", "correct or unset"]),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, ["LOCAL_RANK=one", "correct or unset"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5, WORLD_SIZE=4", "correct or unset"]),
        ({**TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "correct or unset"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, ["LOCAL_RANK=-1, WORLD_SIZE=2", "correct or unset"]),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["OMPI_COMM_WORLD_LOCAL_RANK=2"]),
        ({**TORCHRUN, **MPIRUN, "WORLD_SIZE": "1", "RANK": "0"}, ["torchrun: rank 0 of 1", "mpirun: rank 3 of 4"]),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, ["torchrun: rank 0 of 1", "srun: rank 3 of 4"]),
        ({**HOROVOD, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "8"}, ["disagree", "0 of 8"]),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "6"}, ["disagree", "0 of 6"]),
        ({"RANK": "0", "WORLD_SIZE": "10000001"}, ["WORLD_SIZE=10000001", "at most 10000000 ranks"]),
        ({"NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_SIZE": "10000001"}, ["NETBOTTLENECK_SIZE=10000001", "10000000"]),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "4"}, ["disagree", "torchrun: rank 0 of 4", "srun: rank 3 of 4"]),
        ({**MPIRUN, "RANK": "0", "WORLD_SIZE": "4"}, ["disagree", "torchrun: rank 0 of 4", "mpirun: rank 3 of 4"]),
        ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "RANK is not set", "SLURM_NTASKS=4"]),
        ({**MPIRUN, "RANK": "0"}, ["RANK=0", "WORLD_SIZE is not set", "OMPI_COMM_WORLD_RANK=3"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "RANK and WORLD_SIZE is not set"]),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, ["MPI_LOCALNRANKS=2", "PMI_RANK and PMI_SIZE"]),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, ["SLURM_NTASKS=4", "SLURM_PROCID"]),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "SLURM_NTASKS=1"]),
        (PMIX, ["PMIX_RANK=3", "their number is not set", "set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE"]),
    ],
)
def test_incomplete_or_contradicting_launcher_variables_are_refused(
    environ: dict[str, str], phrases: list[str]
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        place(environ)
    assert [phrase for phrase in phrases if phrase not in str(caught.value)] == []


def test_the_variables_found_are_listed_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        place({**SRUN, "RANK": "0", "WORLD_SIZE": "1", "HOME": "/root"})
    message = str(caught.value)
    assert "set NETBOTTLENECK_RANK and NETBOTTLENECK_SIZE" in message
    assert message.endswith(
        "Found: RANK=0 WORLD_SIZE=1 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NNODES=2 "
        "SLURM_STEP_ID=0"
    )


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SRUN, "WORLD_SIZE": "4"}, "srun"),
        ({**MPIRUN, "LOCAL_RANK": "1"}, "mpirun"),
        ({**MPIRUN, **PMIX}, "mpirun"),
        ({**SRUN, **PMIX}, "srun"),
        ({**SRUN, **HYDRA}, "pmi"),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", **PMIX, "PMIX_RANK": "0"}, "none"),
    ],
)
def test_incomplete_variables_that_agree_are_accepted(environ: dict[str, str], launcher: str) -> None:
    assert place(environ).launcher == launcher


LIGHTNING = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "known"),
    [
        (LIGHTNING, True),
        ({}, False),
        ({**LIGHTNING, "WORLD_SIZE": "4"}, False),
        ({**LIGHTNING, "WORLD_SIZE": "x"}, False),
        ({**LIGHTNING, "RANK": "0"}, False),
        ({**LIGHTNING, "OMPI_COMM_WORLD_RANK": "0"}, False),
        ({**LIGHTNING, "NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_SIZE": "2"}, False),
    ],
)
def test_a_known_place_counts_where_variables_leave_it_open(environ: dict[str, str], known: bool) -> None:
    own = settings(environ=environ)
    expected = (1, 2) if known else (own.rank, own.ranks)
    found = launch_topology.with_known_place(own, Place(1, 2), environ)
    assert (found.rank, found.ranks) == expected


def test_a_launcher_inside_another_is_not_a_disagreement() -> None:
    inner = {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert place({**SRUN, **inner}).size == 8
    assert place({**MPIRUN, **inner}).size == 8
    # After torchrun has gone on without a host.
    assert place({**SRUN, **PMIX, **inner, "RANK": "1", "WORLD_SIZE": "3"}).size == 3
    # Ranks that a task starts by itself.
    assert place({**SRUN, "RANK": "5", "WORLD_SIZE": "8"}).size == 8
    # mpirun reaches its other hosts by a step of srun, one task a host.
    assert place({**SRUN, **MPIRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}).size == 4


def test_a_task_of_srun_with_pmi_may_start_several_ranks() -> None:
    inner = {"RANK": "5", "WORLD_SIZE": "8"}
    assert place({**SRUN, **HYDRA, **inner}) == Place(5, 8, launcher="torchrun")
    with pytest.raises(ValueError, match="disagree"):
        place({**HYDRA, **inner})  # of mpiexec
    with pytest.raises(ValueError, match="disagree"):
        place({**SRUN, **HYDRA, "RANK": "0", "WORLD_SIZE": "6"})


def test_the_local_rank_of_an_elastic_job_is_the_name_of_a_worker() -> None:
    left = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    found = place({f"HOROVOD_{name}": value for name, value in {**left, "ELASTIC": "1"}.items()})
    assert (found.rank, found.size) == (1, 2)


def test_a_local_rank_that_no_rank_has_is_ignored_where_nothing_follows_from_it() -> None:
    assert place({"LOCAL_RANK": "-1"}).size == 1  # a script's own sign of a single process
    assert place({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}).local_rank == 3  # the number of a GPU


def test_a_size_of_one_alone_is_ignored() -> None:
    assert place({"WORLD_SIZE": "1"}).size == 1


def test_a_batch_script_without_a_step_is_a_single_process() -> None:
    environ = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"}
    assert place(environ).size == 1
    assert place({**SRUN, "SLURM_STEP_ID": "4294967290"}).size == 1  # an interactive shell of salloc


def test_topology_follows_from_hosts_alone() -> None:
    hosts = ["a", "b", "a", "b", "a"]
    found = [topology(hosts, rank) for rank in range(5)]
    assert [t.local_rank for t in found] == [0, 0, 1, 1, 2]
    assert [t.local_size for t in found] == [3, 2, 3, 2, 3]
    assert [t.cross_rank for t in found] == [0, 1, 0, 1, 0]
    assert [t.cross_size for t in found] == [2, 2, 2, 2, 1]
    assert not found[0].homogeneous
    assert topology(["x"], 0) == connect.Topology(0, 1, 0, 1, True)


def test_host_ids_tell_simulated_hosts_apart() -> None:
    one = connect.host_digest(settings(environ={"NETBOTTLENECK_HOST_ID": "one"}))
    two = connect.host_digest(settings(environ={"NETBOTTLENECK_HOST_ID": "two"}))
    here = connect.host_digest(settings(environ={}))
    assert len({one, two, here}) == 3
    assert here == connect.machine_digest()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("n[03-06,9]", "n03"),
        ("n[3,5]", "n3"),
        ("rack[1-2]-n,other", "rack1-n"),
        ("r[02-03,7]n[5,9]-ib,r9", "r02n5-ib"),
        ("10.0.0.[4-5]", "10.0.0.4"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "n[", "n[]", "n[1", "n]1", "n[-3]"])
def test_a_list_without_a_host_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
        first_host(nodes)


@pytest.mark.parametrize(
    ("environ", "phrases"),
    [
        ({**HOROVOD, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h"}, ["ADDR=h is set, no HOROVOD_GLOO_RENDEZVOUS_PORT"]),
        ({**TORCHRUN, "MASTER_ADDR": "h"}, ["MASTER_ADDR=h is set, no MASTER_PORT"]),
        (TORCHRUN, ["no MASTER_ADDR and MASTER_PORT"]),
        ({**TORCHRUN, "MASTER_ADDR": "h", "MASTER_PORT": "x"}, ["MASTER_PORT=x: must be a port"]),
        (MPIRUN, ["pmix: no PMIX_NAMESPACE", "torch: no MASTER_ADDR", "folder: the launcher sets no job id"]),
        (HYDRA, ["pmi: no PMI_FD", "4 ranks, started by pmi"]),
        (SRUN, ["folder: not all ranks are on this host", "first host: no SLURM_STEP_NODELIST"]),
    ],
)
def test_the_reason_against_each_rendezvous_method_is_listed(
    environ: dict[str, str], phrases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_managers", {})
    with pytest.raises(ValueError, match=r".") as caught:
        meeting(environ)
    assert [phrase for phrase in phrases if phrase not in str(caught.value)] == []


def test_a_process_manager_is_joined_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class ProcessManager:
        name = "a board"

        def share(self, value: bytes, wanted: Sequence[int], limit_s: float) -> list[bytes]:
            return [value for _ in wanted]

    manager = ProcessManager()
    monkeypatch.setattr(rendezvous, "_managers", {"pmix": "no server", "pmi": manager})
    assert meeting(HYDRA).manager is meeting(HYDRA).manager is manager
    assert meeting({**HYDRA, **HOROVOD}).manager is manager  # whoever has set Horovod's variables has no server for it
    assert meeting({**HYDRA, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).manager is manager


def test_a_folder_carries_values_between_ranks(tmp_path: Path) -> None:
    here, there = Folder(tmp_path / "meet"), Folder(tmp_path / "meet")
    assert there.get("job/0/address") is None
    here.put("job/0/address", b"value\n\x00")
    assert wait_for(there, "job/0/address", time.monotonic() + RANKS_LIMIT_S) == b"value\n\x00"
    here.delete("job/0/address")
    assert there.get("job/0/address") is None


def test_site_packages_are_not_put_before_the_standard_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that this one starts finds this package, and no backport of a standard module beside it."""
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    given = {"PYTHONPATH": "/a:/b"}
    monkeypatch.setattr(launch_topology, "PACKAGES", tmp_path)
    assert with_package({}) == {}
    assert with_package(given) == given
    monkeypatch.setattr(launch_topology, "PACKAGES", Path("/b"))
    assert with_package(given) == given
    monkeypatch.setattr(launch_topology, "PACKAGES", Path("/source/python"))
    assert with_package({}) == {"PYTHONPATH": "/source/python"}
    assert with_package(given) == {"PYTHONPATH": "/source/python:/a:/b"}


def test_a_file_that_nfs_has_just_replaced_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.put("key", b"value")

    def failing(code: int) -> Callable[[Path], bytes]:
        def read(path: Path) -> bytes:
            raise OSError(code, os.strerror(code), str(path))

        return read

    monkeypatch.setattr(Path, "read_bytes", failing(errno.ESTALE))
    assert folder.get("key") is None
    monkeypatch.setattr(Path, "read_bytes", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        folder.get("key")


def test_a_private_folder_ignores_values_of_ended_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_folder("job 1")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    code = (
        "import sys; from pathlib import Path; from netbottleneck.launch.rendezvous import Folder; "
        "Folder(Path(sys.argv[1]), private=True).put('key', b'stale')"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=RANKS_LIMIT_S)
    assert (path / "key").exists()
    assert folder.get("key") is None
    folder.put("key", b"fresh")
    assert folder.get("key") == b"fresh"
    folder.delete("key")
    assert list(tmp_path.iterdir()) == []


def test_without_the_users_runtime_folder_ranks_meet_in_that_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "file").touch()
    for named in ("", str(tmp_path / "removed" / "0"), str(tmp_path / "file")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", named)
        assert Path(private_folder("job 1").name).parent == tmp_path / "temporary"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "temporary"]


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(PermissionError, match="NETBOTTLENECK_MASTER"):
        Folder(open_to_all, private=True)


def test_waiting_for_a_key_ends_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 did not store some/key at .*NETBOTTLENECK_START_TIMEOUT_S"):
        wait_for(Folder(tmp_path), "some/key", time.monotonic())


# A rank that joins a job, prints "joined", and leaves it.
JOIN = """
from netbottleneck.config import RANKS_MAX, settings
from netbottleneck.launch.connect import connect, detect
chosen = settings()
comm = connect(chosen, detect(chosen))
comm.exchange(b"")
print("joined")
comm.close()
"""


def started(folder: Path, rank: int, **environ: str) -> subprocess.Popen[str]:
    """Start a rank of two that meet in a folder."""
    ours = {
        "NETBOTTLENECK_RANK": str(rank),
        "NETBOTTLENECK_SIZE": "2",
        "NETBOTTLENECK_RENDEZVOUS": str(folder),
        "NETBOTTLENECK_IFNAME": "=lo",
        **environ,
    }
    return subprocess.Popen(
        [sys.executable, "-c", JOIN],
        env={**inherited(), **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + RANKS_LIMIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failed_start(folder: Path) -> None:
    """Start rank 0 alone until it gives up."""
    alone = started(folder, 0, NETBOTTLENECK_START_TIMEOUT_S="0.1")
    assert "rank 1 did not reach" in alone.communicate(timeout=RANKS_LIMIT_S)[0]


def killed_start(folder: Path) -> None:
    """Kill rank 0 after it has sent its address, before any other rank connects."""
    first = started(folder, 0)
    try:
        exchange = ChannelExchange(Folder(folder), "netbottleneck/2/0", 1, 2, RANKS_LIMIT_S)
        assert exchange.ask(connect._report(settings(environ={}))).startswith(b"127.0.0.1:")
    finally:
        first.kill()
        first.communicate(timeout=RANKS_LIMIT_S)


def good_start(folder: Path) -> None:
    """Start both ranks, which leave no value."""
    both = [started(folder, rank) for rank in (0, 1)]
    outputs = [one.communicate(timeout=RANKS_LIMIT_S)[0] for one in both]
    assert outputs == ["joined\n"] * 2


def values(folder: Path) -> dict[Path, bytes]:
    """Return the values in a folder."""
    return {path: path.read_bytes() for path in folder.glob("[!.]*")}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before", [failed_start, killed_start, good_start])
def test_a_folder_can_be_used_again(before: Callable[[Path], None], first: int, tmp_path: Path) -> None:
    before(tmp_path)
    left = values(tmp_path)
    ranks = {first: started(tmp_path, first)}
    if left or first == 0:  # the other rank starts once this one has stored a value, or has ended too early
        wait_until(lambda: values(tmp_path) != left or ranks[first].poll() is not None)
    ranks[1 - first] = started(tmp_path, 1 - first)
    outputs = {rank: one.communicate(timeout=RANKS_LIMIT_S)[0] for rank, one in ranks.items()}
    assert outputs == {0: "joined\n", 1: "joined\n"}
    assert list(tmp_path.iterdir()) == []


def test_a_value_of_an_earlier_start_is_not_a_report(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for nonce in (b"", b"0" * NONCE_BYTES):
        folder.put("job/ready.1", nonce + b"1" * NONCE_BYTES + b"another machine")
        with pytest.raises(TimeoutError, match="rank 1 did not reach"):
            ChannelExchange(folder, "job", 0, 2, 0.0).reports()


def test_a_rank_that_comes_after_a_failure_names_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    failed = ChannelExchange(folder, "job", 0, 2, 0.0)
    with pytest.raises(TimeoutError):
        failed.reports()
    failed.answer(b"!no such interface")
    with pytest.raises(TimeoutError, match=r"rank 0 did not publish .*; rank 0 failed there before: no such interface"):
        ChannelExchange(folder, "job", 1, 2, -5.0).ask(b"")


class KeyValue(http.server.BaseHTTPRequestHandler):
    """A server like horovodrun's: PUT and GET of /scope/key."""

    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        value = self.kept.get(self.path)
        self.send_response(404 if value is None else 200)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[KeyValue]) -> Iterator[int]:
    """Run an empty server, and yield its port."""
    handler.kept = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def key_value_port() -> Iterator[int]:
    with serving(KeyValue) as port:
        yield port


def test_horovodruns_server_carries_values(key_value_port: int) -> None:
    channel = Http("127.0.0.1", key_value_port)
    assert channel.get("netbottleneck/0/0/address") is None
    channel.put("netbottleneck/0/0/address", b"here")
    assert channel.get("netbottleneck/0/0/address") == b"here"
    assert list(KeyValue.kept) == ["/netbottleneck.0.0/address"]


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:1 does not answer"):
        Http("127.0.0.1", 1).get("a/b")


def test_a_server_of_another_protocol_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def speak() -> None:
            other, _ = server.accept()
            with other:
                other.recv(4096)
                other.sendall(b"hello\r\n\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port} does not answer"):
            Http("127.0.0.1", port).get("a/b")
        thread.join(RANKS_LIMIT_S)


def meeting(environ: dict[str, str]) -> rendezvous.Rendezvous:
    """Return the rendezvous of an environment's ranks."""
    return choose(settings(environ=environ), place(environ), environ)


def test_ranks_use_the_launchers_rendezvous(key_value_port: int, tmp_path: Path) -> None:
    server = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": str(key_value_port)}
    assert isinstance(meeting({**HOROVOD, **server}).channel, Http)
    folder = meeting({**HOROVOD, **server, "NETBOTTLENECK_RENDEZVOUS": str(tmp_path)})
    assert isinstance(folder.channel, Folder)
    assert folder.channel.name == str(tmp_path)


def test_one_host_under_mpirun_meets_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    mpirun = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "123"}
    first, same = meeting(mpirun).channel, meeting(mpirun).channel
    other = meeting({**mpirun, "PMIX_NAMESPACE": "124"}).channel
    assert isinstance(first, Folder)
    assert first.name == same.name != other.name  # type: ignore[union-attr]


def test_a_job_without_a_rendezvous_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="set NETBOTTLENECK_MASTER=HOST:PORT"):
        meeting({**MPIRUN, "PMIX_NAMESPACE": "123"})


def test_an_address_without_a_secret_is_for_loopback_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ranks = {"NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_SIZE": "2"}
    far = {**ranks, "NETBOTTLENECK_MASTER": "192.0.2.1:5000"}
    with pytest.raises(ValueError, match="set NETBOTTLENECK_SECRET"):
        meeting(far)
    assert meeting({**far, "NETBOTTLENECK_SECRET": "0123456789abcdef"}).address == "192.0.2.1:5000"
    assert meeting({**far, "NETBOTTLENECK_INSECURE": "1"}).channel is None
    near = meeting({**ranks, "NETBOTTLENECK_MASTER": "127.0.0.1:5000"})
    assert near.address == "127.0.0.1:5000"
    assert isinstance(near.channel, Folder)


OWN_NAME = {"NETBOTTLENECK_SIZE": "2", "NETBOTTLENECK_MASTER": "node1:5000"}


@pytest.fixture
def _debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this host the name node1 with a loopback address, as Debian's /etc/hosts does."""
    known = {"node1": "127.0.1.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr("socket.gethostbyname", lambda host: known.get(host, host))


@pytest.mark.usefixtures("_debian")
def test_the_loopback_address_of_a_hosts_own_name_is_for_ranks_of_one_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="node1:5000 has no secret"):
        meeting({**OWN_NAME, "NETBOTTLENECK_RANK": "0"})
    here = {**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "NETBOTTLENECK_MASTER": "node1:5000"}
    assert isinstance(meeting(here).channel, Folder)
    assert isinstance(
        meeting({**OWN_NAME, "NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_MASTER": "localhost:1"}).channel, Folder
    )


@pytest.mark.usefixtures("_debian")
@pytest.mark.parametrize(
    ("interface", "listens", "reached"),
    [("10.0.0.1", "0.0.0.0", "10.0.0.1:5000"), ("fd00::1", "[::]", "[fd00::1]:5000")],
)
def test_rank_0_at_its_hosts_own_name_is_reached_from_other_hosts(
    interface: str, listens: str, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, tuple[object, object]] = {}

    def comm(rank: int, _size: int, *, listener: object, address: object, **_: object) -> None:
        made[rank] = (listener, address)

    core = SimpleNamespace(Listener=lambda *where: where, Comm=comm, interfaces=lambda _: [("eth0", interface)])
    monkeypatch.setattr(connect, "core", lambda: core)
    for rank in (0, 1):
        chosen = settings(environ={**OWN_NAME, "NETBOTTLENECK_RANK": str(rank), **OWN})
        connect._meet_directly(core, chosen, detect(chosen, {}), "node1:5000", {})  # type: ignore[arg-type]
    assert made == {0: ((listens, None, (5000, 5000)), None), 1: (None, reached)}
    assert connect.host_of_rank_0(chosen, detect(chosen, {})) == interface


@pytest.mark.parametrize(
    ("environ", "text", "named"),
    [
        ({"IFNAME": "lo"}, "rank 1: the connection was closed", ""),
        ({"IFNAME": "^lo"}, "no interface that is up matches '^lo'; there is: lo", "NETBOTTLENECK_IFNAME=^lo: "),
        ({"IFNAME": "a,b"}, "no interface that is up matches 'b' of 'a,b'; there is: a", "NETBOTTLENECK_IFNAME=a,b: "),
        ({"PROVIDER": "tcp"}, "tcp: connection of lane 1 refused", ""),
        (
            {"PROVIDER": "psm3"},
            "libfabric 1.17 has no provider psm3 for remote writes at x",
            "NETBOTTLENECK_PROVIDER=psm3: ",
        ),
        ({"LIBFABRIC": "/opt/f"}, "libfabric at /opt/f: cannot open", "NETBOTTLENECK_LIBFABRIC=/opt/f: "),
        ({"LIBFABRIC": "/opt/f"}, "libfabric at /opt/fab: cannot open", ""),
        ({"CONGESTION": "cubi"}, "congestion control 'cubi': no such file", "NETBOTTLENECK_CONGESTION=cubi: "),
        ({"CONGESTION": "reno"}, "congestion control 'renown': this host allows: reno", ""),
        ({"PORTS": "7000-7001"}, "listen on ::1: no port of 7000-7001 is free", "NETBOTTLENECK_PORTS=7000-7001: "),
        ({"PORTS": "7000-7000"}, "listen on ::1, port 7000: Address already in use", "NETBOTTLENECK_PORTS=7000-7000: "),
        ({}, "listen on ::1, port 7000: Address already in use", ""),
        ({"MASTER": "a:7000"}, "listen on ::1, port 7000: Address already in use", "NETBOTTLENECK_MASTER=a:7000: "),
        ({"MASTER": "a:7000"}, "listen on ::1, port 7001: Address already in use", ""),
    ],
)
def test_an_error_names_the_variable_that_it_is_about_and_its_peer(
    environ: dict[str, str], text: str, named: str
) -> None:
    chosen = settings(environ={f"NETBOTTLENECK_{name}": value for name, value in environ.items()})
    error = PeerError(5, text)
    error.peer = 3
    with pytest.raises(PeerError) as caught, connect._named_variable(chosen):
        raise error
    assert (caught.value.strerror, caught.value.peer) == (named + text, 3)


def test_an_error_names_the_variable_of_horovod_that_it_is_about() -> None:
    chosen = settings(environ={"HOROVOD_GLOO_IFACE": "eth7"})
    with pytest.raises(PeerError) as caught, connect._named_variable(chosen):
        raise PeerError(5, "no interface that is up matches '=eth7'")
    assert str(caught.value.strerror).startswith("NETBOTTLENECK_IFNAME==eth7 (from HOROVOD_GLOO_IFACE): no interface")


class Exposed:
    """A channel that is exposed or not; all other ranks are on one machine, and have a secret of their own or not."""

    name = "MASTER_ADDR:MASTER_PORT=192.0.2.1:29500"

    def __init__(self, exposed: bool, machine: bytes = b"another machine", own: bool = False) -> None:
        self.exposed = exposed
        self.report = machine + (b"1" if own else b"0")
        self.left: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.left[key] = value

    def get(self, key: str) -> bytes | None:
        job, ready, _ = key.partition("/ready")
        if ready:
            return self.left[f"{job}/address"][:NONCE_BYTES] + bytes(NONCE_BYTES) + self.report
        return self.left.get(key)

    def delete(self, key: str) -> None:
        """Keep the key: the test reads it after the rendezvous."""


def opened(monkeypatch: pytest.MonkeyPatch, address: str, exposed: bool, environ: dict[str, str]) -> str:
    """Let rank 0 open a job that listens at the address; return its answer to the others."""
    monkeypatch.setattr(connect, "_process", connect._Process())
    machine = b"another machine" if address == FAR else connect.machine_digest()
    channel = Exposed(exposed, machine, OWN.items() <= environ.items())
    core = SimpleNamespace(Listener=lambda *_: SimpleNamespace(address=address), Comm=lambda *_, **__: None)
    chosen = settings(environ=environ)
    rank0 = place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    for key in ("first", "second"):
        exchange = ChannelExchange(channel, key, 0, 4, 1.0)
        connect._accept_all(core, chosen, rank0, None, exchange, {})  # type: ignore[arg-type]
    return channel.left["first/address"][4 * NONCE_BYTES :].decode()


FAR, NEAR = "192.0.2.1:5000", "127.0.0.1:5000"
OWN = {"NETBOTTLENECK_SECRET": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [({"NETBOTTLENECK_IFNAME": "lo"}, "NETBOTTLENECK_IFNAME=lo"), ({}, "NETBOTTLENECK_IFNAME is not set")],
)
def test_rank_0_on_a_loopback_fails_at_once_on_all_ranks_if_they_are_on_several_hosts(
    environ: dict[str, str], named: str
) -> None:
    channel, closed = Exposed(False), []
    listener = SimpleNamespace(address=NEAR, close=lambda: closed.append(NEAR))
    core = SimpleNamespace(Listener=lambda *_: listener, Comm=lambda *_, **__: None)
    rank0 = place({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    text = f"{named}: 127.0.0.1 is a loopback, and not all ranks are on this host"
    with pytest.raises(ValueError, match=text):
        connect._accept_all(
            core,  # type: ignore[arg-type]
            settings(environ=environ),
            rank0,
            None,
            ChannelExchange(channel, "job", 0, 4, 1.0),
            {},
        )
    assert channel.left["job/address"][4 * NONCE_BYTES :].startswith(rendezvous.FAILED + text.encode())
    assert closed == [NEAR]


def test_an_exposed_secret_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address, _, shown = opened(monkeypatch, FAR, True, {}).partition(" ")
    assert (address, len(bytes.fromhex(shown))) == (FAR, 32)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    message = caplog.records[0].getMessage()
    assert Exposed.name in message
    assert "NETBOTTLENECK_SECRET_FILE" in message
    assert shown not in message


@pytest.mark.parametrize(
    ("address", "exposed", "environ"),
    [
        (NEAR, True, {}),
        ("[::1]:5000", True, {}),
        (FAR, False, {}),
        (FAR, True, OWN),
        (FAR, True, {"NETBOTTLENECK_INSECURE": "1"}),
    ],
    ids=["loopback", "loopback of IPv6", "a channel of this user alone", "a secret of the user's", "trusted"],
)
def test_no_warning_if_the_secret_is_safe_or_the_network_is_trusted(
    address: str,
    exposed: bool,
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = opened(monkeypatch, address, exposed, environ)
    assert caplog.records == []
    assert (warning == f"{address} ") == ("NETBOTTLENECK_SECRET" in environ), (
        "a secret of the user's is never passed on"
    )


def test_servers_that_answer_anyone_count_as_exposed_and_folders_of_a_user_do_not() -> None:
    assert Store.exposed
    assert Http.exposed
    assert not Folder.exposed
    assert not ManagerExchange.exposed


def test_two_hosts_under_srun_need_a_secret() -> None:
    srun = {**SRUN, "SLURM_STEP_NODELIST": "192.0.2.7"}
    with pytest.raises(ValueError, match="set NETBOTTLENECK_SECRET"):
        meeting(srun)
    found = meeting({**srun, "NETBOTTLENECK_SECRET": "0123456789abcdef"})
    assert str(found.address).startswith("192.0.2.7:")


def test_without_torch_a_torchrun_job_fails_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    environ = {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    with pytest.raises(ImportError, match="set NETBOTTLENECK_MASTER=HOST:PORT"):
        meeting(environ)


STORE_RANK = """
from netbottleneck.config import RANKS_MAX, settings
from netbottleneck.launch.connect import connect, detect
import torch
import torch.distributed as dist
chosen = settings()
place = detect(chosen)
def meet():
    comm = connect(chosen, place)
    assert comm.exchange(bytes([place.rank])) == [b"\\x00", b"\\x01"]
    comm.close()
def group():
    dist.init_process_group("gloo")
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [2.0, 2.0]
for _ in range(20):
    meet()
for _ in range(3):
    group()
    meet()
    dist.barrier()
    dist.destroy_process_group()
    meet()
group()
dist.destroy_process_group()
"""


def test_a_torch_store_serves_many_jobs_and_torch_distributed(warm_ranks) -> None:  # type: ignore[no-untyped-def]
    warm_ranks(2, STORE_RANK)


NAMELESS_RANK = """
import socket
import torch
from netbottleneck.runtime import communicators
from netbottleneck.config import RANKS_MAX, settings
from netbottleneck.launch.connect import connect, detect
known = socket.gethostbyname
socket.gethostbyname = lambda host: "127.0.1.1" if host == "node1" else known(host)
socket.gethostname = lambda: "node1"  # which no other host knows
chosen = settings()
place = detect(chosen)
control = connect(chosen, place)
stock = communicators.Stock(communicators.stock_group(chosen, place, control.exchange), place.size, None)
value = torch.ones(2)
stock.reduce(value).wait()
assert value.tolist() == [2.0, 2.0]
stock.close()
control.close()
"""


@pytest.mark.parametrize("ifname", ["", "lo"])
@pytest.mark.parametrize("meets", ["in a folder", "at the name of the host"])
def test_ranks_meet_where_no_other_host_knows_the_name_of_rank_0s(plain_ranks: Ranks, meets: str, ifname: str) -> None:
    env = {"NETBOTTLENECK_IFNAME": ifname}
    if meets != "in a folder":
        env |= {"NETBOTTLENECK_MASTER": f"node1:{free_port()}", **OWN}
    plain_ranks(2, NAMELESS_RANK, env)


STOCK_RANK = """
import contextlib, os, stat, time
from pathlib import Path
import torch
import torch.distributed as dist
from netbottleneck.runtime import communicators
from netbottleneck.config import RANKS_MAX, settings
from netbottleneck.launch.connect import connect, detect
def threads():
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            names.append(file.read_text().strip())
    return names.count("pt_gloo_runloop")
def open_files():
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            os.fstat(number)
            yield number
def sockets():
    return sum(stat.S_ISSOCK(os.fstat(number).st_mode) for number in open_files())
chosen = settings()
place = detect(chosen)
control = connect(chosen, place)
dist.init_process_group("gloo")
deadline = time.monotonic() + 100
def wait_for(count):
    while threads() != count:  # a thread names itself once it runs, and is listed until the kernel has removed it
        assert time.monotonic() < deadline, threads()
wait_for(2)
stock = communicators.Stock(communicators.stock_group(chosen, place, control.exchange), place.size, None)
stock.barrier()
stock.reduce(torch.ones(2)).wait()
wait_for(4)
connected = sockets()
stock.close()
wait_for(2)
assert sockets() < connected
control.close()
dist.destroy_process_group()
"""


def test_the_threads_and_connections_of_a_stock_group_end_with_it(warm_ranks) -> None:  # type: ignore[no-untyped-def]
    warm_ranks(2, STOCK_RANK)


@pytest.mark.parametrize(
    ("master", "same", "ifname", "listens"),
    [
        ("192.0.2.7", False, None, "192.0.2.7"),
        ("fd00::7", False, None, "fd00::7"),
        ("192.0.2.7", False, "eth0", None),
        ("192.0.2.7", True, None, "127.0.0.1"),
        ("localhost", False, None, None),
        ("0.0.0.0", False, None, None),
        ("192.0.2.8", False, None, None),  # another host's
        ("", False, None, None),
    ],
)
def test_rank_0_listens_at_master_addr_if_it_is_an_address_of_its_own(
    master: str, same: bool, ifname: str | None, listens: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe:
        def __init__(self, _family: int) -> None: ...
        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...
        def bind(self, where: tuple[str, int]) -> None:
            if where[0] == "192.0.2.8":
                raise OSError(errno.EADDRNOTAVAIL, "not here")

    monkeypatch.setattr(connect.socket, "socket", Probe)
    monkeypatch.setenv("MASTER_ADDR", master)
    chosen = settings(environ={} if ifname is None else {"NETBOTTLENECK_IFNAME": ifname})
    assert connect._listening_host(chosen, same) == listens


def test_rank_0_of_several_hosts_publishes_no_loopback_for_the_stock_path(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(connect, "host_of_rank_0", lambda *_: "127.0.0.2")  # stands for the address of an interface
    chosen = settings(environ={**OWN_NAME, "NETBOTTLENECK_RANK": "0"})

    def published(other: bytes) -> str:
        sent: list[bytes] = []

        def exchange(mine: bytes) -> list[bytes]:
            sent.append(mine)
            return [mine, other if mine == connect.machine_digest() else mine]

        communicators.gloo_store(chosen, detect(chosen, {}), exchange, timedelta(seconds=60))
        return next(text for text in sent if len(text) == communicators.WHERE_BYTES).decode().rpartition(":")[0]

    assert published(b"another host's..") == "127.0.0.2"
    assert published(connect.machine_digest()) == "localhost"


def test_a_master_that_is_no_address_of_rank_0_is_named_with_its_remedy() -> None:
    chosen = settings(
        environ={**OWN_NAME, "NETBOTTLENECK_RANK": "0", **OWN, "NETBOTTLENECK_MASTER": "192.0.2.200:5000"}
    )
    named = (
        "NETBOTTLENECK_MASTER=192.0.2.200:5000: listen on 192.0.2.200, port 5000: .*: set it to an address of rank 0"
    )
    with pytest.raises(Error, match=named):
        connect.connect(chosen, detect(chosen, {}))


@pytest.mark.parametrize(("with_it", "here", "there"), [(0, "set", "not"), (1, "not set", "set")])
def test_a_secret_on_some_ranks_only_fails_at_once_on_all_ranks(
    with_it: int, here: str, there: str, tmp_path: Path
) -> None:
    ranks = [started(tmp_path, rank, **(OWN if rank == with_it else {})) for rank in (0, 1)]
    text = rf"NETBOTTLENECK_SECRET .* is {here} on rank 0, but {there} on rank 1: set it on all ranks or on none"
    for rank in ranks:
        assert re.search(text, rank.communicate(timeout=RANKS_LIMIT_S)[0])


HALF_A_MESH = """
import os
from netbottleneck.runtime import communicators
from netbottleneck.config import settings
from netbottleneck.launch.connect import connect, detect
chosen = settings()
place = detect(chosen)
control = connect(chosen, place)
if place.rank == 1:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
try:
    communicators.stock_group(chosen, place, control.exchange)
except ValueError as error:
    print(error)
control.close()
"""


def test_a_rank_that_cannot_open_the_stock_path_fails_it_on_all_ranks(warm_ranks) -> None:  # type: ignore[no-untyped-def]
    """By the start's time limit, and not by that of an operation, which is half an hour."""
    for result in warm_ranks(2, HALF_A_MESH, {"NETBOTTLENECK_START_TIMEOUT_S": "12"}):
        assert re.search(r"rank 1: no gloo group of all ranks: .*nosuch0", result.stdout), result.stdout


def test_a_rendezvous_that_refuses_is_an_error_and_no_missing_key() -> None:
    class Refusing(KeyValue):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(503)

        def do_GET(self) -> None:
            self.send_error(403)

    with serving(Refusing) as port:
        channel = Http("127.0.0.1", port)
        with pytest.raises(ConnectionError, match="answers 503 to PUT scope/key"):
            channel.put("scope/key", b"value")
        with pytest.raises(ConnectionError, match="answers 403 to GET scope/key"):
            channel.get("scope/key")


class Library:
    """libpmix as far as share() uses it. kind: type of the values that it returns; None: it returns none.

    `failing`: the function that returns an error.
    """

    failing = ""

    def __init__(self, kind: int | None) -> None:
        self._blob = ctypes.create_string_buffer(pmi.VALUE_BYTES)
        self._text = ctypes.create_string_buffer(b"theirs")
        self._kind = kind
        if kind is not None:
            pmi.BLOB.pack_into(self._blob, 0, kind, ctypes.addressof(self._text), len(b"theirs"))

    def PMIx_Put(self, *_: object) -> int:
        return pmi.PMIX_SUCCESS

    PMIx_Commit = PMIx_Put

    @staticmethod
    def PMIx_Error_string(_: int) -> bytes:
        return b"NOT-FOUND"

    def PMIx_Fence(self, *_: object) -> int | None:
        """None: as in _call_with_limit, the server does not answer."""
        return None if self.failing == "PMIx_Fence" else pmi.PMIX_SUCCESS

    def PMIx_Get(self, *arguments: Any) -> int:
        if self.failing == "PMIx_Get":
            return -46
        arguments[-1]._obj.value = None if self._kind is None else ctypes.addressof(self._blob)
        return pmi.PMIX_SUCCESS


def pmix(kind: int | None) -> pmi.Pmix:
    made = object.__new__(pmi.Pmix)
    made._library = cast(Any, Library(kind))
    made._namespace, made._rounds, made._lost = b"job", 0, ""
    return made


def test_a_value_of_pmix_is_used_only_if_it_is_one_of_bytes() -> None:
    assert pmix(pmi.BYTES).share(b"mine", [1], RANKS_LIMIT_S) == [b"theirs"]
    with pytest.raises(pmi.Unusable, match="PMIx returned type 3 for the value of rank 1"):
        pmix(3).share(b"mine", [1], RANKS_LIMIT_S)
    with pytest.raises(pmi.Unusable, match=r"PMIx_Get of netbottleneck.1 returned no value"):
        pmix(None).share(b"mine", [1], RANKS_LIMIT_S)


@pytest.mark.parametrize(
    ("failing", "error"),
    [("PMIx_Fence", "not all 2 ranks reached PMIx of job 7"), ("PMIx_Get", "PMIx_Get failed: NOT-FOUND")],
)
def test_ranks_that_pmix_does_not_join_are_told_how_a_second_program_meets(failing: str, error: str) -> None:
    made = pmix(pmi.BYTES)
    made.name, made._size, made._rank = "PMIx of job 7", 2, 0
    cast(Any, made._library).failing = failing
    with pytest.raises(OSError, match=f"{error}.*; for a second program .*, set NETBOTTLENECK_MASTER or"):
        made.share(b"mine", [1], RANKS_LIMIT_S)


class Present:
    """A channel in which all ranks but some have a value."""

    name = "the channel"
    exposed = False

    def __init__(self, absent: Sequence[int]) -> None:
        self.absent = {f"key.{rank}" for rank in absent}
        self.looks = 0

    def put(self, key: str, value: bytes) -> None:
        raise AssertionError

    def get(self, key: str) -> bytes | None:
        self.looks += 1
        return None if key in self.absent else b"value"

    def delete(self, key: str) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("absent", "naming_s", "said", "looks"),
    [
        ((2,), 100.0, "of 1000 ranks, rank 2 did not", 999),
        ((2, 5), 100.0, "of 1000 ranks, ranks 2, 5 did not", 999),
        (range(1, 1000), 100.0, "of 1000 ranks, ranks 1, 2, 3, 4, 5, 6, 7, 8 and perhaps others did not", 8),
        ((2,), 0.0, "of 1000 ranks, rank 2 and perhaps others did not", 2),
    ],
)
def test_few_missing_ranks_are_named_in_little_time(
    absent: Sequence[int], naming_s: float, said: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "NAMING_S", naming_s)
    channel = Present(absent)
    with pytest.raises(TimeoutError, match=said):
        rendezvous.gather(channel, "key", 1000, 0.0)
    assert channel.looks == looks


def test_a_job_has_no_more_ranks_than_a_trace_can_hold() -> None:
    assert RANKS_MAX == SIZE_MAX


def test_a_rendezvous_that_is_no_folder_to_write_to_is_named_with_its_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere"), Path("/proc")):
        with pytest.raises(ValueError, match=f"NETBOTTLENECK_RENDEZVOUS={path}: .* a folder that all ranks can write"):
            meeting({**TORCHRUN, "NETBOTTLENECK_RENDEZVOUS": str(path)})


def test_an_unknown_host_of_rank_0_is_named_with_its_variable() -> None:
    master = {"NETBOTTLENECK_MASTER": "nosuchhost.invalid:80", "NETBOTTLENECK_SECRET": "0" * 32}
    for rank, limit_s in ((0, "600"), (1, "1")):
        chosen = settings(environ={**master, "NETBOTTLENECK_START_TIMEOUT_S": limit_s})
        with pytest.raises(ValueError, match=r"NETBOTTLENECK_MASTER=nosuchhost.invalid:80: no such host"):
            connect.connect(chosen, Place(rank, 2), environ={})


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_rank_waits_for_the_name_of_rank_0s_host_to_appear(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def by_name(host: str) -> str:
        looked_up.append(host)
        if len(looked_up) < 3:
            raise socket.gaierror(code, "not yet")
        return "192.0.2.7"

    def none(*_: object) -> None:
        raise socket.gaierror(code, "not yet")

    monkeypatch.setattr("socket.gethostbyname", by_name)
    monkeypatch.setattr("socket.getaddrinfo", none)
    monkeypatch.setattr(connect, "LOOK_UP_S", 0.001)
    core = SimpleNamespace(Comm=lambda *_, address, **__: address)
    monkeypatch.setattr(connect, "core", lambda: core)
    chosen = settings(environ={"NETBOTTLENECK_MASTER": "train-0.train:5000", **OWN})
    assert connect.connect(chosen, Place(1, 2), environ={}) == "192.0.2.7:5000"  # type: ignore[comparison-overlap]
