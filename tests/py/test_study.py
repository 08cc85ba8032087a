"""The study: real ranks and output, failures of ranks, and interruption."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck import Evidence, study
from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.lab import Lab, LinkSpec, parse_lab
from netbottleneck.report import Run
from netbottleneck.study import cells, command, report, runner, spec
from netbottleneck.study import ranks as study_ranks
from netbottleneck.study.evidence import facts, values
from netbottleneck.study.ranks import JobError, run_in_lab
from netbottleneck.study.task import SAME_STEPS, Outcome, Task, from_json, to_json, write_schedule
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif.plan import ReplaySchedule

pytest.importorskip("torch")

DEADLINE_S = RANKS_LIMIT_S
TINY = ("--model", "thin_resnet", "--compute-ms", "2", "4", "--block-steps", "3", "--rounds", "2")


def undrawn(folder: Path) -> dict[str, str]:
    """Return variables that hide matplotlib, because drawing takes long."""
    stub = folder / "stub"
    stub.mkdir(exist_ok=True)
    (stub / "matplotlib.py").write_text("raise ImportError('no matplotlib here')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(stub), os.environ.get("PYTHONPATH")]))}


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start a study in a new process and process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "netbottleneck", "study", "--directory", str(folder), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **undrawn(folder.parent)},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], limit_s: float = DEADLINE_S) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr; fails if the process does not end."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the study did not end within {limit_s} s\n{out}\n{err}")
    return process.returncode, out, err


def wait_for(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line contains a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_study_from_end_to_end(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    code, out, err = ended(start(folder, str(small(tmp_path, 2, "a")), "--transports", "stock,tcp"))
    assert code == 0, out + err
    first = out.splitlines()[0]
    assert "simulates its links on this machine" in first
    assert "netbottleneck bench --listen" in first
    assert "the command that it prints" in first
    assert "import netbottleneck" in first
    assert "measured in" in out
    record = json.loads((folder / "study.json").read_text())
    (job,) = record["jobs"]
    assert set(job["steps"]) == {"stock", "tcp", "single"}
    assert job["scaling"]["stock"]["how"] == "measured"
    assert job["outcome"]["equal_on_all_ranks"] is True
    assert record["networks"]["none"]["verified"]["one_flow"]["measured_bps"] > 0
    run = Run(folder / job["folder"])
    assert run.trace.network is not None
    assert run.trace.network.verified["one_flow"] == record["networks"]["none"]["verified"]["one_flow"]
    assert (folder / job["folder"] / "report.txt").exists()
    assert (folder / "report.html").exists()
    assert len(list((folder / "figures").glob("*.csv"))) == 8
    single = {step.rank for step in run.trace.steps if step.arm == "single"}
    assert single == {0}


def test_the_loss_inside_a_host_is_measured_separately(tmp_path: Path) -> None:
    request = small(tmp_path, 2, "a")
    request.write_text(request.read_text() + "ranks = [2, 4]\nranks_per_host = 2\n", encoding="utf-8")
    folder = tmp_path / "s"
    code, out, err = ended(start(folder, str(request)))
    assert code == 0, out + err
    one, two = (values.read(folder / "cells" / f"a-{ranks}-none" / "facts.json") for ranks in (2, 4))
    assert [(cell.ranks, cell.ranks_per_host) for cell in (one, two)] == [(2, 2), (4, 2)]
    inside, across = facts.budgets([one, two])
    assert inside.host_internal > 0
    assert inside.exposed == 0
    assert across.host_internal > 0
    assert across.host_internal + across.inflation + across.exposed + across.other == pytest.approx(across.loss)
    assert facts.NOT_APART not in across.notes


def lab_run(folder: Path, *tasks: Task, env: dict[str, str] | None = None) -> list[Outcome]:
    """Run tasks on two ranks on the loopback."""
    with Lab(2, "none", ways=("loopback",)) as lab:
        return run_in_lab(lab, tasks, lambda *_: None, env=env, limit_s=DEADLINE_S)


def test_training_gives_the_weights_of_a_run_over_stock(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    task = Task("digits", ("stock", "tcp"), str(tmp_path / "ab"), block_steps=11, rounds=2, alone=0)
    again = Task("digits", ("stock",), str(tmp_path / "stock"), block_steps=11, alone=0, exact_steps=SAME_STEPS)
    trained, stock = lab_run(tmp_path, task, again)
    assert trained.accuracy is not None
    assert trained.accuracy >= 0.95
    assert trained.equal
    assert len(trained.digests) == 2
    assert stock.steps == trained.steps
    assert stock.digests == trained.digests


def test_a_job_may_take_longer_than_its_limit_while_it_makes_progress(tmp_path: Path) -> None:
    task = Task("replay", ("stock",), str(tmp_path / "r"))
    code = """
import json, time
for step in range(24):
    print(json.dumps({"task": 0, "step": step, "steps": 24, "arm": "stock"}), flush=True)
    time.sleep(0.3)
"""
    seen: list[int] = []
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE) as process:
        rank = study_ranks.Rank(process, tmp_path / "log")
        study_ranks._OutputReader([task], [rank], lambda _, step, *__: seen.append(step), 5.0).run()
    assert seen == list(range(24))  # in 7.2 s


def test_a_job_without_progress_ends_at_its_limit(tmp_path: Path) -> None:
    task = Task("replay", ("stock",), str(tmp_path / "r"), compute_ms=(3.6e6, 50), model="thin_resnet", alone=0)
    with Lab(2, "none", ways=("loopback",)) as lab, pytest.raises(JobError, match="no progress for 3 s"):
        run_in_lab(lab, [task], lambda *_: None, limit_s=3.0)
    assert processes_with(task.folder) == []


@pytest.mark.parametrize(
    ("forward_s", "nbytes", "link", "longest_s"),
    [(1000, 4, "none", 1000), (0, 10**9, "10mbit", 1600), (0, 4, "2gbit/100kbit", 8 * 2 * 96 * 2**20 / 1e5)],
)
def test_a_replay_is_given_the_time_of_its_longest_step(
    tmp_path: Path, forward_s: int, nbytes: int, link: str, longest_s: float
) -> None:
    file = tmp_path / "schedule.json"
    tensors, ready = (("w", nbytes),), ((0, forward_s * 10**9),)
    write_schedule(file, ReplaySchedule("made", tensors, ready, forward_s * 10**9, 0, ((0,),)))
    task = Task("play", (Arm("tcp"),), str(tmp_path / "r"), schedule=str(file))
    assert study_ranks.patience_s(task, parse_lab(link)) >= study_ranks.SILENCE_S + longest_s


def test_a_killed_rank_is_named_first(tmp_path: Path) -> None:
    task = Task("replay", ("stock", "tcp"), str(tmp_path / "r"), rounds=200, compute_ms=(5, 5), model="thin_resnet")

    def kill_rank_1(*_: Any) -> None:
        rank_1 = [pid for pid in processes_with(task.folder) if b"RANK=1" in environ(pid)]
        for pid in rank_1:
            os.kill(pid, signal.SIGKILL)

    with Lab(2, "none", ways=("loopback",)) as lab, pytest.raises(JobError) as failed:
        run_in_lab(lab, [task], kill_rank_1, limit_s=DEADLINE_S)
    assert "rank 1 was killed by SIGKILL" in str(failed.value).splitlines()[0]
    assert processes_with(task.folder) == []


def environ(pid: int) -> list[bytes]:
    """Return the variables of a process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def small(folder: Path, rounds: int, labels: str = "ab") -> Path:
    """Write a study with one cell per label, each a replay of three gradients, and return its file."""
    steps = tuple(
        tr.Step(
            0, number, 0, Arm("single"), at, at + 8_000_000,
            forward=((at, at + 2_000_000),), grad_ready=tuple((2 - k, at + (3 + k) * 1_000_000) for k in range(3)),
        )
        for number in range(3)
        for at in (number * 10_000_000,)
    )  # fmt: skip
    parameters = tuple(tr.Parameter(f"p{k}", 40_000, "float32") for k in range(3))
    made = tr.Trace("r", 1, (Arm("single"),), model="three", ranks=(tr.Rank(0),), parameters=parameters, steps=steps)
    layer_log.write(folder / "three.bk.log", layer_log.of_trace(made, 0.01))
    path = folder / "given.toml"
    cells = "".join(f'[[model]]\nfile = "three.bk.log"\nlabel = "{label}"\n' for label in labels)
    top = f'networks = ["none"]\ntransports = ["tcp"]\nrounds = {rounds}\nblock_steps = 3\nalone = 3\n'
    path.write_text(top + cells, encoding="utf-8")
    return path


def holders(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that hold namespaces for a study."""
    return [pid for pid in processes_with("_space.py") if str(process.pid) in words_of(pid)]


def words_of(pid: int) -> list[str]:
    """Return a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def stopped_on_record(cell: Path) -> list[int]:
    """Wait until a cell has a step on record; return its processes, which are stopped.

    They are stopped for every look, so that the cell cannot end between a look and what the test does.
    """
    until = time.monotonic() + DEADLINE_S
    while True:
        pids = processes_with(str(cell))
        send(pids, signal.SIGSTOP)
        if recorded(cell / "run") > 0:
            return pids
        send(pids, signal.SIGCONT)
        assert time.monotonic() < until, f"no step of {cell} on record within {DEADLINE_S} s"
        time.sleep(0.02)


def send(pids: Sequence[int], signum: int) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the folder of a study that was killed in its second cell, after all its processes have ended."""
    base = tmp_path_factory.mktemp("killed")
    folder = base / "s"
    process = start(folder, str(small(base, 25)))
    assert stopped_on_record(folder / "cells" / "b-2-none")
    assert holders(process)
    process.kill()
    process.communicate()
    wait_for(lambda: not processes_with(str(folder)) and not holders(process), "the end of all its processes")
    return folder


def test_a_killed_study_leaves_no_process_and_keeps_complete_cells(killed: Path) -> None:
    assert (killed / "cells" / "a-2-none" / "facts.json").exists()
    assert not (killed / "cells" / "b-2-none" / "facts.json").exists()


def test_a_killed_study_is_resumed(killed: Path) -> None:
    done = (killed / "cells" / "a-2-none" / "facts.json").read_bytes()
    code, out, err = ended(start(killed))
    assert code == 0, out + err
    assert "1 of 2 cells are already complete" in out
    assert (killed / "cells" / "a-2-none" / "facts.json").read_bytes() == done
    assert (killed / "cells" / "b-2-none" / "facts.json").exists()
    assert recorded(killed / "aside" / "b-2-none.1" / "run") > 0
    assert [job["key"] for job in json.loads((killed / "study.json").read_text())["jobs"]] == ["a-2-none", "b-2-none"]


def test_a_failed_cell_is_reported_and_the_others_run(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    process = start(folder, str(small(tmp_path, 40)))
    pids = stopped_on_record(folder / "cells" / "a-2-none")
    send([pid for pid in pids if b"RANK=1" in environ(pid)], signal.SIGKILL)
    send(pids, signal.SIGCONT)
    code, out, err = ended(process)
    assert code == 1, out + err
    assert "a-2-none: play: rank 1 was killed by SIGKILL" in err
    assert "a-2-none" in json.loads((folder / "study.json").read_text())["failed"]
    assert (folder / "cells" / "b-2-none" / "facts.json").exists()
    assert not (folder / "cells" / "a-2-none" / "facts.json").exists()


def test_a_folder_with_another_study_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    text = small(tmp_path, 3).read_text()
    (folder / "study.toml").write_text(text.replace("three.bk.log", str(tmp_path / "three.bk.log")))
    spec_path = tmp_path / "given.toml"
    spec_path.write_text(text.replace("rounds = 3", "rounds = 4"))
    assert study.main([str(spec_path), "--directory", str(folder)]) == 2
    assert "holds another study" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["study.toml"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_and_a_readable_record(tmp_path: Path, signum: int, code: int) -> None:
    folder = tmp_path / "s"
    process = start(folder, str(small(tmp_path, 5000)))
    run = folder / "cells" / "a-2-none" / "run"
    wait_for(lambda: recorded(run) > 0, "a step on record")
    process.send_signal(signum)
    found, out, err = ended(process)
    assert found == code, out + err
    assert f"--directory {folder}" in "".join(out.split("\n"))
    assert processes_with(str(folder)) == []
    assert recorded(run) > 0
    assert json.loads((folder / "study.json").read_text())["failure"] == "interrupted"


def recorded(folder: Path) -> int:
    """Return the number of readable steps in a run folder."""
    try:
        return len(Run(folder).trace.steps)
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize(
    "args",
    [
        ("--networks", "fast"),
        ("--transports", "carrier-pigeon"),
        ("--transports", "bare"),
        ("--jobs", "digits,digits"),
        ("--compute", "nap"),
    ],
)
def test_an_invalid_argument_is_quoted_in_the_error(args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(args) == 2
    assert repr(args[1]) in capsys.readouterr().err


def test_tasks_survive_json() -> None:
    tasks = [Task("digits", ("bare", "stock"), "f", notes=("n",)), Task("replay", ("tcp",), "g", network={"how": "x"})]
    assert from_json(to_json(tasks)) == tasks


def test_batches_share_an_epoch_among_the_ranks() -> None:
    from netbottleneck.study.jobs import batches

    ranks = [batches(100, rank, 2, 16) for rank in range(2)]
    seen = [int(index) for _ in range(3) for rank in ranks for index in next(rank)]
    assert len(seen) == len(set(seen)) == 96


def test_under_a_launcher_the_study_uses_its_ranks_and_network(warm_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    args = ["--jobs", "replay", "--directory", str(folder), "--transports", "stock,tcp", *TINY]
    # Hooks that the environment asks for must not measure the study's own models.
    given = {"NETBOTTLENECK_TRANSPORT": "tcp", **undrawn(tmp_path)}
    results = warm_ranks(2, "netbottleneck", given, args=["study", *args], limit_s=DEADLINE_S)
    assert "uses the network between the" in results[0].stdout
    assert results[1].stdout == ""
    record = json.loads((folder / "study.json").read_text())
    (job,) = record["jobs"]
    assert (job["network"], job["ranks"]) == ("here", 2)
    assert job["outcome"]["equal_on_all_ranks"] is True
    assert set(job["steps"]) == {"stock", "tcp", "single"}


def test_a_moved_study_finds_all_its_runs(tmp_path: Path) -> None:
    (cell, _) = spec.parse(small(tmp_path, 2).read_text(), str(tmp_path / "given.toml")).cells
    old, new = cells.StudyFolder(tmp_path / "old"), cells.StudyFolder(tmp_path / "new")
    runs = [old.cell_folder(cell.key) / name for name in ("run", "run/2", "stock-x4")]
    outcome, again = (Outcome(str(run), 9, ("a", "a")) for run in runs[:2])
    old.write_result(cells.CellResult(cell, outcome, again, str(runs[2]), 1.0))
    old.path.rename(new.path)
    found = new.read_result(cell.key)
    assert found.stock_alone is not None
    now = [found.outcome.folder, found.stock_alone.folder, found.tuned]
    assert now == [str(new.cell_folder(cell.key) / name) for name in ("run", "run/2", "stock-x4")]


def test_a_resumed_study_describes_a_network_by_the_cells_that_use_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s" / "study.toml"
    file.parent.mkdir()
    file.write_text(
        'networks = ["1gbit"]\ntransports = ["tcp"]\n'
        '[[model]]\nname = "resnet50"\nranks_per_host = 2\n[[model]]\nname = "resnet50"\n'
    )
    arguments = ["--directory", str(file.parent)]
    request = cells.parse_request(command.parser().parse_args(arguments), arguments)
    networks = {}
    for cell in request.spec.cells:
        folder = request.folder.cell_folder(cell.key)
        request.folder.write_result(cells.CellResult(cell, Outcome(str(folder / "run"), 9, ("a", "a"))))
        (folder / "facts.json").write_text("{}")
        networks[str(folder / "run")] = tr.Network("a lab", cell.link.link_bps)
    monkeypatch.setattr(report, "Run", lambda path: SimpleNamespace(trace=SimpleNamespace(network=networks[path])))
    for order in (request.spec.cells, request.spec.cells[::-1]):
        resumed = report.Study(replace(request, spec=replace(request.spec, cells=order)))
        resumed.load_complete()
        assert resumed.failed == {}
        assert resumed.networks["1gbit"]["link_bps"] == 1e9


def test_a_resumed_study_that_is_interrupted_keeps_its_complete_cells(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(killed, folder)
    for path in (folder / "study.json", folder / "evidence.json", folder / "cells" / "b-2-none" / "facts.json"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "aside", ignore_errors=True)
    process = start(folder)
    wait_for((folder / "aside").exists, "the second cell begins again")
    wait_for(lambda: recorded(folder / "cells" / "b-2-none" / "run") > 0, "a step of it on record")
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert code == 143, out + err
    record = json.loads((folder / "study.json").read_text())
    assert (record["failure"], [job["key"] for job in record["jobs"]]) == ("interrupted", ["a-2-none"])
    assert [cell.key for cell in Evidence.read(folder / "evidence.json").cells] == ["a-2-none"]


def test_a_cell_whose_record_cannot_be_read_has_failed_and_the_others_run(killed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shutil.copytree(killed, folder)
    (folder / "cells" / "a-2-none" / "cell.json").write_text("{")
    code, out, err = ended(start(folder))
    assert code == 1, out + err
    assert "a-2-none failed" in err
    assert (folder / "cells" / "b-2-none" / "facts.json").exists()


class Loopback:
    """Ranks on the loopback that run nothing."""

    how, why, interface, caps = "loopback", "no namespaces here", "", (LinkSpec(),)

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def verify(self, _seconds: float) -> None:
        """Measure nothing."""

    def run(self, tasks: Sequence[Task], *_: Any) -> list[Outcome]:
        """Keep the tasks."""
        self.tasks += tasks
        raise JobError("not run")


class Broken(Loopback):
    """Ranks that fail in a way that nothing expects."""

    def run(self, tasks: Sequence[Task], *_: Any) -> list[Outcome]:
        """Fail the first time; then as Loopback."""
        if not self.tasks:
            self.tasks += tasks
            raise KeyError("surprise")
        return super().run(tasks)


def test_an_unexpected_error_fails_its_cell_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks, arguments = Broken(), [str(small(tmp_path, 2, "ab")), "--directory", str(tmp_path / "s")]
    request = cells.parse_request(command.parser().parse_args(arguments), arguments)
    assert runner.run(request, lambda _: nullcontext(ranks), "a test", request.spec.cells) == 1
    assert len(ranks.tasks) == 2
    failed = json.loads((tmp_path / "s" / "study.json").read_text())["failed"]
    assert failed == {"a-2-none": "KeyError: 'surprise'", "b-2-none": "not run"}
    assert f"Written: {tmp_path / 's' / 'study.json'}.\n" in capsys.readouterr().out  # and no report


def test_a_folder_has_one_study_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    arguments = [str(small(tmp_path, 2, "a")), "--directory", str(folder)]
    with cells.StudyFolder(folder).held():
        assert study.main(arguments) == 1
        assert f"{folder}: process {os.getpid()} runs the study in this folder: wait" in capsys.readouterr().err
        assert [path.name for path in folder.iterdir()] == [cells.LOCK]
    with cells.StudyFolder(folder).held():
        pass


def test_ranks_do_not_inherit_the_job_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_MCA_btl", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK", "SLURM_PROCID"),
        *("NETBOTTLENECK_RANK", "NETBOTTLENECK_SIZE", "NETBOTTLENECK_MASTER", "NETBOTTLENECK_IFNAME"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NETBOTTLENECK_TRANSPORT"),
    )
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NETBOTTLENECK_TIMEOUT_S", "7")
    kept = study_ranks.environment({"GLOO_SOCKET_IFNAME": "nb0,nb0"})
    assert {name for name in names if name in kept} == {"GLOO_SOCKET_IFNAME"}
    assert (kept["GLOO_SOCKET_IFNAME"], kept["NETBOTTLENECK_TIMEOUT_S"]) == ("nb0,nb0", "7")
    with Lab(2, "none", ways=("loopback",)) as lab:
        assert lab.variables(1, study_ranks.environment())["NETBOTTLENECK_IFNAME"] == "=lo"


def test_a_run_says_why_its_network_is_not_simulated(tmp_path: Path) -> None:
    ranks, arguments = Loopback(), [str(small(tmp_path, 2, "a")), "--directory", str(tmp_path / "s")]
    request = cells.parse_request(command.parser().parse_args(arguments), arguments)
    assert runner.run(request, lambda _: nullcontext(ranks), "a test", request.spec.cells) == 1
    (task,) = ranks.tasks
    assert task.network == {"how": "loopback", "link_bps": None, "flow_bps": [], "verified": {}}
    assert "loopback: no namespaces here" in task.notes


def test_only_caps_that_exist_are_recorded_and_links_add_up() -> None:
    with Lab(2, "2gbit", ways=("loopback",)) as lab:
        assert study_ranks.described_network(lab.how, lab.caps, None)["link_bps"] is None
    two = study_ranks.described_network("a lab", Lab(2, "1gbit+250mbit/100mbit").caps, None)
    assert two == {"how": "a lab", "link_bps": 1_250_000_000, "flow_bps": [100_000_000], "verified": {}}


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.86, 1.10, "tcp: the step is 1.02 times as fast (0.91 to 1.16) as over stock, "),
        (0.975, 0.985, "on this network: do nothing; stock is as good"),
    ],
)
def test_do_nothing_needs_an_interval_below_a_relevant_gain(tmp_path: Path, low: float, high: float, said: str) -> None:
    pair = Paired(Arm("stock"), Arm("tcp"), 6, 60, Estimate(-2e6, -14e6, 10e6), Estimate(0.98, low, high))
    findings = SimpleNamespace(base=Arm("stock"), comparisons=(pair,), handicap=None, handicapped=False)
    (cell, _) = spec.parse(small(tmp_path, 2).read_text(), str(tmp_path / "given.toml")).cells
    done = cells.CellResult(cell, Outcome("f", 9, ("a", "a")))
    found = report.CellReport(done, SimpleNamespace(findings=findings))  # type: ignore[arg-type]
    lines = report.result_lines(found)
    assert found.nothing_to_do == (high < 1)
    assert ("do nothing" in lines[-1]) == (high < 1)
    assert lines[-1].startswith(said)
    assert ("inconclusive" in " ".join(lines)) == (high > 1)
    assert lines[0] == "sums equal on all ranks, bit for bit"
    apart, nothing = (replace(found, done=replace(done, outcome=Outcome("f", 9, of))) for of in (("a", "b"), ()))
    assert report.result_lines(apart)[0] == "SUMS DIFFER BETWEEN RANKS"
    assert report.result_lines(nothing)[0] == "sums not compared: no arm reduces them"
