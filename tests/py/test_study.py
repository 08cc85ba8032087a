"""The study: real ranks, real words, and what it does when a rank fails or somebody interrupts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from netbottleneck import study
from netbottleneck.lab import Lab, LinkSpec, parse_lab
from netbottleneck.report import Run
from netbottleneck.study.ranks import JobError, run_in_lab
from netbottleneck.study.task import AS_BEFORE, Outcome, Task, from_json, to_json

pytest.importorskip("torch")

DEADLINE_S = 18.0
TINY = ("--model", "thin_resnet", "--compute-ms", "2", "4", "--block-steps", "3", "--rounds", "2")


def start(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a study as a process of its own, in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "netbottleneck.study", "--directory", str(folder), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], limit_s: float = DEADLINE_S) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr; fails where the process does not end."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the study did not end within {limit_s} s\n{out}\n{err}")
    return process.returncode, out, err


def wait_for(true: Callable[[], bool], what: str) -> None:
    """Wait for a state, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line holds a text."""
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
    words = ("--quick", "--networks", "none", "--jobs", "replay", "--transports", "stock,tcp", *TINY)
    code, out, err = ended(start(folder, *words))
    assert code == 0, out + err
    first = out.splitlines()[0]
    assert "made here, on this machine" in first
    assert "netbottleneck bench --listen" in first
    assert "--connect" in first
    assert "import netbottleneck" in first
    assert "measured in" in out
    told = json.loads((folder / "study.json").read_text())
    (job,) = told["jobs"]
    assert set(job["steps"]) == {"bare", "stock", "tcp", "single"}
    assert job["scaling"]["stock"]["how"] == "measured"
    assert job["outcome"]["equal_on_all_ranks"] is True
    assert told["networks"]["none"]["verified"]["one_flow"]["measured_bps"] > 0
    run = Run(folder / job["folder"])
    assert run.trace.network is not None
    assert run.trace.network.verified["one_flow"] == told["networks"]["none"]["verified"]["one_flow"]
    assert (folder / job["folder"] / "report.txt").exists()
    single = {step.rank for step in run.trace.steps if step.transport == "single"}
    assert single == {0}


def lab_run(folder: Path, *tasks: Task, env: dict[str, str] | None = None) -> list[Outcome]:
    """Run tasks on two ranks on the loopback."""
    with Lab(2, "none", ways=("loopback",)) as lab:
        return run_in_lab(lab, tasks, lambda *_: None, env=env, limit_s=DEADLINE_S)


def test_ranks_learn_and_end_with_the_weights_of_a_run_over_stock(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    task = Task("digits", ("stock", "tcp"), str(tmp_path / "ab"), block_steps=11, rounds=2, alone=0)
    again = Task("digits", ("stock",), str(tmp_path / "stock"), block_steps=11, alone=0, exact_steps=AS_BEFORE)
    trained, stock = lab_run(tmp_path, task, again)
    assert trained.accuracy is not None
    assert trained.accuracy >= 0.95
    assert trained.equal
    assert len(trained.digests) == 2
    assert stock.steps == trained.steps
    assert stock.digests == trained.digests


def test_a_rank_that_fails_is_named_with_its_own_words_and_ends_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    words = ("--quick", "--networks", "none", "--jobs", "replay", "--transports", "stock,tcp", *TINY)
    code, out, err = ended(start(folder, *words, "--model", "no_such_model"))
    assert code == 1, out + err
    assert "rank" in err
    assert "no_such_model" in err
    assert json.loads((folder / "study.json").read_text())["failure"]
    assert processes_with(str(folder)) == []


def test_a_rank_that_is_killed_is_told_from_those_that_lost_it(tmp_path: Path) -> None:
    task = Task("replay", ("stock", "tcp"), str(tmp_path / "r"), rounds=200, compute_ms=(5, 5), model="thin_resnet")

    def kill_rank_1(*_: Any) -> None:
        rank_1 = [pid for pid in processes_with(task.folder) if b"RANK=1" in environ(pid)]
        for pid in rank_1:
            os.kill(pid, signal.SIGKILL)

    with Lab(2, "none", ways=("loopback",)) as lab, pytest.raises(JobError) as failed:
        run_in_lab(lab, [task], kill_rank_1, limit_s=DEADLINE_S)
    assert "rank 1 was ended by SIGKILL" in str(failed.value).splitlines()[0]
    assert processes_with(task.folder) == []


def environ(pid: int) -> list[bytes]:
    """Return the variables of a process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_process_and_a_readable_record(tmp_path: Path, signum: int, code: int) -> None:
    folder = tmp_path / "s"
    words = ("--networks", "none", "--jobs", "replay", "--transports", "stock,tcp", *TINY, "--rounds", "500")
    process = start(folder, *words)
    ring = folder / "none" / "replay" / "ranks" / "0.train.ring"
    wait_for(ring.exists, "a record")
    wait_for(lambda: recorded(ring.parent.parent) > 0, "a step on record")
    process.send_signal(signum)
    found, out, err = ended(process)
    assert found == code, out + err
    assert processes_with(str(folder)) == []
    assert recorded(ring.parent.parent) > 0
    assert json.loads((folder / "study.json").read_text())["failure"] == "interrupted"


def recorded(folder: Path) -> int:
    """Return how many steps a run folder holds, as far as it can be read."""
    try:
        return len(Run(folder).trace.steps)
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize(
    "words",
    [("--networks", "fast"), ("--transports", "carrier-pigeon"), ("--jobs", "digits,digits"), ("--compute", "nap")],
)
def test_a_wrong_argument_is_refused_by_its_own_text(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(words) == 2
    assert repr(words[1]) in capsys.readouterr().err


def test_tasks_travel_as_text() -> None:
    tasks = [Task("digits", ("bare", "stock"), "f", notes=("n",)), Task("replay", ("tcp",), "g", network={"how": "x"})]
    assert from_json(to_json(tasks)) == tasks


@pytest.mark.parametrize(("text", "name"), [("2gbit/500mbit", "2gbit-500mbit"), ("none", "none")])
def test_a_network_names_its_folder(text: str, name: str) -> None:
    assert study.slug(str(parse_lab(text))) == name


def test_every_network_gives_a_claim_enough_pairs_and_steps() -> None:
    for quick in (["--quick"], []):
        args = study.parsed([*quick, "--transports", "stock,tcp"])
        for text in args.networks:
            for job in args.jobs:
                task = study.make_task(job, args, parse_lab(text), Path("f"), None)
                assert task.rounds >= 2
                assert task.rounds * (task.block_steps - 1) >= 5
    assert study.make_task("replay", args, LinkSpec(), Path("f"), None).compute_ms == (133.0, 267.0)


def test_batches_share_an_epoch_among_the_ranks() -> None:
    from netbottleneck.study.jobs import batches

    ranks = [batches(100, rank, 2, 16) for rank in range(2)]
    seen = [int(index) for _ in range(3) for rank in ranks for index in next(rank)]
    assert len(seen) == len(set(seen)) == 96


def test_under_a_launcher_the_study_uses_its_ranks_and_makes_no_network(ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    words = ["--jobs", "replay", "--directory", str(folder), "--transports", "stock,tcp", *TINY]
    # Hooks that the environment asks for must not measure the study's own models.
    results = ranks(2, "netbottleneck.study", {"NETBOTTLENECK_TRANSPORT": "tcp"}, args=words, limit_s=DEADLINE_S)
    assert "none is made here" in results[0].stdout
    assert results[1].stdout == ""
    told = json.loads((folder / "study.json").read_text())
    (job,) = told["jobs"]
    assert told["networks"] == {}
    assert job["outcome"]["equal_on_all_ranks"] is True
    assert set(job["steps"]) == {"bare", "stock", "tcp", "single"}
