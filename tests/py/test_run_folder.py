"""The run folder of several ranks: on a file system of its own, out of reach of a rank, and after a failed exchange."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import Ranks

pytest.importorskip("torch")

from netbottleneck import config
from netbottleneck.report import Run
from netbottleneck.runtime import run_folder
from ringwriter import FakeRun

TRAINING = """
import os
import sys

if "PLACE" in os.environ:
    os.chdir(os.environ["PLACE"])
import netbottleneck, torch, torch.distributed as dist
from netbottleneck.hooks import ddp
from netbottleneck.runtime import session as sessions
from torch.nn.parallel import DistributedDataParallel


def full(*_):
    raise OSError(28, "No space left on device")


if "full" in sys.argv:
    sessions._meet = full
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
session = ddp.measured_by(model).session
if session.joining is not None:
    session.joining.settle()
print("records in", session.folder, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
MEASURED = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("mine", "mine"),
        ("mine/2", "mine-2"),
        ("mine/rank1-2", "mine-rank1-2"),
        ("study/cells/resnet50-2-1gbit/run", "resnet50-2-1gbit-run"),
        ("study/cells/resnet50-2-1gbit/run/2", "resnet50-2-1gbit-run-2"),
        ("study/cells/resnet50-2-1gbit/stock-x4", "resnet50-2-1gbit-stock-x4"),
    ],
)
def test_a_run_is_named_by_the_first_folder_that_is_its_own(tmp_path: Path, folder: str, name: str) -> None:
    assert run_folder.run_id(tmp_path / folder) == name


def test_an_observed_run_is_recorded_in_a_folder_on_a_file_system_of_its_own(warm_ranks: Ranks, tmp_path: Path) -> None:
    mounted = Path("/dev/shm")
    if not mounted.is_dir() or mounted.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is not a file system of its own")
    run = tmp_path / "here" / "run"
    run.parent.mkdir()
    with tempfile.TemporaryDirectory(dir=mounted) as other:
        run.symlink_to(other)
        results = warm_ranks(2, TRAINING, {**MEASURED, "NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(run)})
        for result in results:
            assert f"records in {run}\n" in result.stdout, result.stderr
        assert {step.rank for step in Run(run).trace.steps} == {0, 1}
        assert list(run.parent.iterdir()) == [run]
        assert list(run.glob(".*")) == []


@pytest.fixture
def two_hosts(tmp_path: Path) -> list[Mapping[str, str]]:
    """Provide the variables of two ranks. /proc/self/cwd/results is a folder of rank 0 alone, as on another host."""
    places = [tmp_path / "host0", tmp_path / "host1"]
    for place in places:
        place.mkdir()
    (places[0] / "results").mkdir()
    (places[1] / "results").touch()
    folders = ["/proc/self/cwd/results/run", str(tmp_path / "own")]
    return [
        {**MEASURED, "PLACE": str(place), "NETBOTTLENECK_DIR": folder}
        for place, folder in zip(places, folders, strict=True)
    ]


@pytest.mark.parametrize("transports", ["stock", "stock,tcp"])
def test_a_rank_that_cannot_create_rank_0s_folder_writes_to_its_own_and_is_copied(
    warm_ranks: Ranks, tmp_path: Path, two_hosts: list[Mapping[str, str]], transports: str
) -> None:
    variables = {"NETBOTTLENECK_TRANSPORT": transports}
    results = warm_ranks(2, TRAINING, lambda rank: {**two_hosts[rank], **variables})
    assert f"records in {tmp_path / 'own'}\n" in results[1].stdout, results[1].stderr
    run = Run(tmp_path / "host0" / "results" / "run")
    assert {step.rank for step in run.trace.steps} == {0, 1}
    assert not any("alone" in note for note in run.trace.notes)


def test_a_rank_that_cannot_record_after_the_ranks_have_joined_says_so(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**MEASURED, "NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    results = warm_ranks(2, TRAINING, env, args=["full"])
    for result in results:
        line = f"rank {result.rank} joined the run, but not all ranks began to record it ([Errno 28]"
        assert line in result.stderr
    notes = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["notes"]
    assert [note for note in notes if "not all ranks began to record it" in note]


GIVEN_UP = """
import os
import time
from pathlib import Path

os.chdir(os.environ["PLACE"])
from netbottleneck import config
from netbottleneck.runtime import session

session.AGREE_S = 0.2
opened = session.open_session(config.settings({"transports": "tcp,null"}))
given_up = Path(os.environ["GIVEN_UP"])
while opened.place.rank == 1 and not given_up.exists():
    time.sleep(0.01)
assert not opened.agree()
opened.stay(opened.arm)
given_up.touch()
opened.close()
opened.bring()
"""


def test_records_are_copied_after_the_ranks_have_stopped_taking_turns(
    plain_ranks: Ranks, tmp_path: Path, two_hosts: list[Mapping[str, str]]
) -> None:
    variables = {"GIVEN_UP": str(tmp_path / "given-up")}
    results = plain_ranks(2, GIVEN_UP, lambda rank: {**two_hosts[rank], **variables})
    for result in results:
        assert "all further steps use tcp" in result.stderr
        assert "could not be copied" not in result.stderr
    ranks = tmp_path / "host0" / "results" / "run" / "ranks"
    assert {path.name for path in ranks.iterdir()} >= {"1.meta.json", "1.train.ring", "1.tcp.ring"}


INTERRUPTED = """
import os, signal
from netbottleneck import config
from netbottleneck.runtime import session


def late(*_):
    raise {raised}


def failing():
    raise ZeroDivisionError("of the measurement")


signal.signal(signal.SIGUSR1, late)
opened = session.open_session(config.settings({{"transports": "null", "start_step": 0}}))
opened.begin()
opened.end()
called = []
opened.on_close += [failing, lambda: signal.raise_signal(signal.SIGUSR1), lambda: called.append("last")]
try:
    opened.close()
except {caught} as error:
    print("raised", error, called)
"""


@pytest.mark.parametrize("raised", ["TimeoutError('a limit of the script')", "KeyboardInterrupt('a key')"])
def test_the_records_are_complete_where_a_signal_handler_ends_the_end_of_the_run(
    raised: str, warm_ranks: Ranks, tmp_path: Path
) -> None:
    script = INTERRUPTED.format(raised=raised, caught=raised.partition("(")[0])
    (result,) = warm_ranks(1, script, {"NETBOTTLENECK_DIR": str(tmp_path / "run")})
    assert "['last']" in result.stdout, result.stdout + result.stderr
    assert result.stderr.count("of the measurement") == 1
    meta = json.loads((tmp_path / "run" / "ranks" / "0.meta.json").read_text(encoding="utf-8"))
    assert meta["finished"]


def test_a_folder_that_cannot_be_made_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/ranks: cannot create the folder \(.*\): set NETBOTTLENECK_DIR to one"):
        run_folder.open_ring(tmp_path / "file", 0, "train", config.settings(environ={}))


def test_a_ring_of_another_rank_is_not_read(tmp_path: Path) -> None:
    ranks = FakeRun(tmp_path, blocks=2).write() / "ranks"
    shutil.copy(ranks / "0.train.ring", ranks / "1.train.ring")
    assert "rank 1 is left out: ranks/1.train.ring cannot be read" in Run(tmp_path).trace.notes


def test_a_pipe_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    ranks = FakeRun(tmp_path, blocks=2).write() / "ranks"
    (ranks / "1.train.ring").unlink()
    for name in ("1.train.ring", "0.net.counters"):
        os.mkfifo(ranks / name)
    run = Run(tmp_path)
    run.write_all()
    notes = run.summary["notes"]
    assert "rank 1 is left out: ranks/1.train.ring cannot be read" in notes
    assert f"left out: {ranks / '0.net.counters'}: not a file of counters" in notes
