"""The study on the ranks of a launcher: hosts without a shared folder, failures of single ranks, and caps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, Ranks

from netbottleneck.errors import PeerError
from netbottleneck.lab import LabError, parse_lab
from netbottleneck.report import Run
from netbottleneck.study import hosts, spec, worker
from netbottleneck.study.evidence import values
from netbottleneck.study.ranks import JobError
from netbottleneck.study.task import Outcome, Task, to_json
from netbottleneck.trace import layer_log
from test_replay import recorded

# Each rank has a disk of its own: the folder hosts/RANK. FAILS: a cell that fails on rank 1, and where. late: rank 1
# stays in its task until rank 0 has missed it. interrupt: rank 0 is interrupted in its task.
STUDY = """
import os, sys
from pathlib import Path
from netbottleneck import study
from netbottleneck.config import settings
from netbottleneck.runtime import job, run_folder
from netbottleneck.study import hosts as group
from netbottleneck.study import task, worker

sys.modules["matplotlib"] = None  # drawing takes long
if os.environ["FAILS"] != "training":
    sys.modules["torch"] = sys.modules["sklearn"] = None  # only a training needs them
rank, hosts, fails = (os.environ[name] for name in ("NETBOTTLENECK_RANK", "HOSTS", "FAILS"))
claim, is_free, run, step = run_folder.claim, run_folder._is_free, worker.run, task.Player.step

def here(path):
    return Path(str(path).replace(f"{hosts}/0/", f"{hosts}/{rank}/"))

def failing_run(made, progress):
    if fails == "begin" and "/a-2-" in made.folder and rank == "1":
        raise OSError("no space left")
    if fails == "training" and "/digits-2-" in made.folder and rank == "1":
        from netbottleneck.study import jobs
        jobs.Work.step = failing_training
    if fails == "late" and rank == "0":
        raise OSError("no space left")
    if fails == "late":
        Path(hosts, "missed").read_bytes()
        job.current().comm.exchange(b"alone")
    if fails == "interrupt" and rank == "0":
        raise KeyboardInterrupt(2)
    task.Player.step = failing_step if fails == "step" and "/a-2-" in made.folder and rank == "1" else step
    return run(made, progress)

def failing_training(self):
    # After the last backward pass of a block: rank 0 then asks whether the next arm may begin.
    self.optimizer.zero_grad()
    self.loss().backward()
    self.made = getattr(self, "made", 0) + 1
    if self.made == 2:
        raise OSError("no space left")
    self.optimizer.step()

def missed(self, why):
    try:
        return failure(self, why)
    finally:
        if rank == "0":
            Path(hosts, "missed").write_bytes(b"")

def failing_step(self, recorder):
    raise OSError("no space left")

if fails == "late":
    failure, group._RankWorker._failure = group._RankWorker._failure, missed
    group.STATUS_S = 0.1 - settings().timeout_s
run_folder._is_free = lambda comm, folder, limit_s: is_free(comm, here(folder), limit_s)
run_folder.claim = lambda comm, wanted, limit_s: here(claim(comm, wanted, limit_s))
worker.run = failing_run
sys.exit(study.main([*sys.argv[1:], "--directory", f"{hosts}/{rank}/s"]))
"""


@pytest.fixture
def request_file(tmp_path: Path) -> Path:
    """Provide a study of two replays of four gradients, without torch."""
    layer_log.write(tmp_path / "four.bk.log", layer_log.of_trace(recorded(), 0.03))
    path = tmp_path / "given.toml"
    cells = "".join(f'[[model]]\nfile = "four.bk.log"\nlabel = "{label}"\n' for label in "ab")
    path.write_text(f'transports = ["tcp"]\nrounds = 2\nblock_steps = 3\nalone = 3\n{cells}', encoding="utf-8")
    return path


def studied(plain_ranks: Ranks, disks: Path, *args: str, fails: str = "") -> tuple[int, str, str]:
    """Run a study on two ranks; return rank 0's exit code and output. Rank 1 ends without an error."""
    env: Mapping[str, str] = {"HOSTS": str(disks), "FAILS": fails}
    first, second = plain_ranks(2, STUDY, env, args=args, limit_s=RANKS_LIMIT_S, check=False)
    assert second.code == 0, second.stderr
    return first.code, first.stdout, first.stderr


def ranks_in(run: Run) -> set[int]:
    """Return the ranks with steps over a transport."""
    return {step.rank for step in run.trace.steps if step.arm == "tcp"}


def test_records_of_other_hosts_come_to_rank_0_and_a_started_cell_is_run_again(
    plain_ranks: Ranks, tmp_path: Path, request_file: Path
) -> None:
    disks = tmp_path / "hosts"
    cell = disks / "0" / "s" / "cells" / "a-2-here"
    code, out, err = studied(plain_ranks, disks, str(request_file))
    assert code == 0, out + err
    assert ranks_in(Run(cell / "run")) == {0, 1}
    assert not (disks / "1" / "s" / "study.toml").exists()
    (cell / "facts.json").unlink()  # as after a kill: rank 1's disk still has its records
    for complete in (1, 2):
        code, out, err = studied(plain_ranks, disks)
        assert code == 0, out + err
        assert f"{complete} of 2 cells are already complete" in out
    assert ranks_in(Run(cell / "run" / "2")) == {0, 1}
    (job, _) = json.loads((disks / "0" / "s" / "study.json").read_text())["jobs"]
    assert job["folder"] == "cells/a-2-here/run/2"
    assert values.read(cell / "facts.json").ranks == 2


@pytest.mark.parametrize("fails", ["begin", "step"])
def test_a_cell_that_fails_on_one_rank_leaves_the_others_to_run(
    plain_ranks: Ranks, tmp_path: Path, request_file: Path, fails: str
) -> None:
    disks = tmp_path / "hosts"
    code, out, err = studied(plain_ranks, disks, str(request_file), fails=fails)
    assert code == 1, out + err
    assert "a-2-here: rank 1: OSError: no space left" in err
    study = disks / "0" / "s"
    assert list(json.loads((study / "study.json").read_text())["failed"]) == ["a-2-here"]
    assert (study / "cells" / "b-2-here" / "facts.json").exists()
    assert (study / "report.html").exists()


def test_a_training_that_fails_on_one_rank_leaves_the_others_to_run(
    plain_ranks: Ranks, tmp_path: Path, request_file: Path
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    training = '[[model]]\njob = "digits"\nblock_steps = 2\nalone = 1\n'
    request_file.write_text(request_file.read_text().replace("[[model]]", f"{training}[[model]]", 1), encoding="utf-8")
    disks = tmp_path / "hosts"
    code, out, err = studied(plain_ranks, disks, str(request_file), fails="training")
    assert code == 1, out + err
    study = json.loads((disks / "0" / "s" / "study.json").read_text())
    assert study["failed"] == {"digits-2-here": "rank 1: OSError: no space left"}
    assert (disks / "0" / "s" / "cells" / "b-2-here" / "facts.json").exists()


@pytest.mark.parametrize(("fails", "code"), [("late", 1), ("interrupt", 130)])
def test_all_ranks_end_if_they_do_not_leave_a_cell_together(
    plain_ranks: Ranks, tmp_path: Path, request_file: Path, fails: str, code: int
) -> None:
    env = {"HOSTS": str(tmp_path), "FAILS": fails}
    os.mkfifo(tmp_path / "missed")
    first, second = plain_ranks(2, STUDY, env, args=[str(request_file)], limit_s=RANKS_LIMIT_S, check=False)
    assert first.code == code, first.stderr
    assert second.code != 0
    assert "rank 0 " + ("lost" if fails == "late" else "left the study") in second.stderr


def test_a_package_that_a_rank_lacks_fails_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(_task: object, _progress: object) -> Outcome:
        raise ModuleNotFoundError("No module named 'sklearn'")

    monkeypatch.setattr(worker, "run", lacking)
    control: Any = Control()
    with pytest.raises(JobError, match="rank 0: ModuleNotFoundError: No module named 'sklearn'"):
        hosts._RankWorker(control, True, ExitStack()).task(to_json([Task("digits", ("bare",), "f")]), "")


class Control:
    """A control communicator of two ranks that answer alike; `sent` has what this rank sent."""

    rank, size = 0, 2

    def __init__(self, lost: bool = False) -> None:
        self.sent: list[bytes] = []
        self.lost = lost

    def abort(self, why: str) -> None:
        """Lose the other rank."""
        self.lost = True

    def exchange(self, blob: bytes, *, limit_s: float = 0.0) -> list[bytes]:
        """Return the blob of each rank."""
        self.sent.append(blob)
        if self.lost:
            raise PeerError(104, "rank 1 left")
        return [blob, blob]


def ranks_of(control: Any) -> hosts._LauncherRanks:
    """Return rank 0's view of all ranks, with caps on eth7."""
    return hosts._LauncherRanks(hosts._RankWorker(control, True, ExitStack()), "eth7")


CAPPED = spec.parse('networks = ["1gbit"]\ninterface = "eth7"\n[[model]]\nname = "resnet50"', "s.toml", hosts=2).cells[
    0
]


def test_lost_ranks_fail_a_network_and_not_the_study() -> None:
    ranks = ranks_of(Control(lost=True))
    with pytest.raises(LabError, match="rank 1 left"), ranks.open_ranks(CAPPED):
        pass
    with pytest.raises(LabError, match="rank 1 left"):
        ranks.verify(0.1)


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyboardInterrupt("signal"), "^signal$"), (LabError("no flows"), "^no flows; then .*rank 1 left")],
)
def test_an_error_in_a_capped_network_is_raised_although_a_rank_has_ended(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, text: str
) -> None:
    monkeypatch.setattr(hosts, "InterfaceCaps", lambda _interface, _link: ExitStack())
    control = Control()

    def fail() -> None:
        with ranks_of(control).open_ranks(CAPPED):
            control.lost = True
            raise error

    with pytest.raises(type(error), match=text):
        fail()


class Alone(Control):
    """A control communicator of one rank."""

    size = 1

    def exchange(self, blob: bytes, *, limit_s: float = 0.0) -> list[bytes]:
        """Return the blob of this rank."""
        return [blob]


def test_flows_of_a_launcher_are_counted() -> None:
    control: Any = Alone()
    counted = hosts._RankWorker(control, True, ExitStack()).flows(2, 0.1, "lo")
    assert len(counted["flow_bps"]) == 2


@pytest.mark.parametrize(
    ("address", "said"),
    [("", "rank 0 has no IPv4 address on eth7"), ("192.0.2.1", "receive flows at 192.0.2.1: ")],
)
def test_flows_that_did_not_run_say_why_in_one_line(monkeypatch: pytest.MonkeyPatch, address: str, said: str) -> None:
    monkeypatch.setattr(hosts, "InterfaceCaps", lambda _interface, _link: ExitStack())
    monkeypatch.setattr(hosts, "_address", lambda _interface: address)
    ranks = ranks_of(Alone())
    with pytest.raises(LabError, match="flows that verify the caps did not run: ") as raised, ranks.open_ranks(CAPPED):
        ranks.verify(0.1)
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert hosts._LauncherRanks(ranks._member, "").verify(0.1) is None  # without caps, nothing is verified


def test_the_interface_to_cap_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = []

    class Caps(ExitStack):
        def __init__(self, interface: str, link: object) -> None:
            super().__init__()
            capped.append((interface, str(link)))

    monkeypatch.setattr(hosts, "InterfaceCaps", Caps)
    control = Control()
    with ranks_of(control).open_ranks(CAPPED):
        pass
    commands = [json.loads(blob) for blob in control.sent if blob.startswith(b"{")]
    assert [(one["what"], one["interface"], one["text"]) for one in commands] == [
        ("caps", "eth7", "1gbit"),
        ("caps", "eth7", "none"),
    ]
    assert capped == [("eth7", "1gbit"), ("eth7", "none")]


def test_the_reason_of_a_refused_cap_is_given_however_long_its_commands_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "tc"
    tool.write_text("#!/bin/sh\necho no such device >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts, "find_tool", lambda _name: str(tool))
    monkeypatch.setattr(hosts, "interface_caps", lambda *_: "x" * (1 << 20))
    with pytest.raises(LabError, match="no such device"), hosts.InterfaceCaps("eth7", parse_lab("1gbit")):
        pass
