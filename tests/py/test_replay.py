"""Replay of a backward pass over real transports: its bytes and the times of its gradients, without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.lab import Lab
from netbottleneck.launch import connect
from netbottleneck.report import Run
from netbottleneck.study import replaying
from netbottleneck.study import task as tasks
from netbottleneck.study.evidence.facts import _interface_bytes, quiet_spans, sent, sent_bytes
from netbottleneck.study.ranks import JobError, run_in_lab
from netbottleneck.study.task import PLAY, Player, Task, read_schedule, write_schedule
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.counter_files import Counters
from netbottleneck.trace.ring_file import EVENTS, read_ring
from netbottleneck.trace.transports import Arm
from netbottleneck.whatif.cost import Cost
from netbottleneck.whatif.plan import Plan, ReplaySchedule, replay_schedule
from netbottleneck.whatif.simulate import simulate

DEADLINE_S = RANKS_LIMIT_S
MS = 1_000_000
SIZES = (400_000, 40, 800_000, 1_200_000)  # bytes, in the model's order


def recorded(sizes: tuple[int, ...] = SIZES, steps: int = 3, **changed: Any) -> tr.Trace:
    """Return a run of one rank: 10 ms forward, a gradient every 5 ms from the last to the first, 2 ms of optimizer."""
    count = len(sizes)
    ready = 10 * MS + 5 * MS * count
    rows = tuple(
        tr.Step(
            0,
            number,
            0,
            "single",
            at,
            at + ready + 2 * MS,
            forward=((at, at + 10 * MS),),
            grad_ready=tuple((count - 1 - k, at + 10 * MS + 5 * MS * (k + 1)) for k in range(count)),
            optimizer=((at + ready, at + ready + 2 * MS),),
        )
        for number in range(steps)
        for at in (1000 * MS * number,)
    )
    parameters = tuple(tr.Parameter(f"p{k}", size, "float32") for k, size in enumerate(sizes))
    made = tr.Trace("r", 1, (Arm("single"),), model="four", ranks=(tr.Rank(0),), parameters=parameters, steps=rows)
    return replace(made, **changed)


PLAN = Plan.explicit([[3, 2], [1, 0]])
SMALL = replay_schedule(recorded(), PLAN)


def test_a_schedule_is_the_median_step() -> None:
    assert SMALL.ready == tuple((3 - k, 15 * MS + 5 * MS * k) for k in range(4))
    assert (SMALL.forward_ns, SMALL.tail_ns, SMALL.bytes) == (10 * MS, 2 * MS, sum(SIZES))
    assert SMALL.parts() == [
        ([15 * MS, 20 * MS], [3, 2], [0]),
        ([25 * MS, 30 * MS], [1, 0], [1]),
    ]


def test_buckets_are_complete_with_their_last_gradient_whatever_their_order() -> None:
    crossed = replay_schedule(recorded(), Plan.explicit([[3, 0], [2], [1]]))
    assert [(tensors, complete) for _, tensors, complete in crossed.parts()] == [
        ([3, 2], [1]),
        ([1], [2]),
        ([0], [0]),
    ]


def test_bytes_and_times_can_be_scaled_to_whole_elements() -> None:
    small = replay_schedule(recorded(), Plan.ddp(), scale=1 / 8, stretch=0.5)
    assert [size for _, size in small.tensors] == [50_000, 4, 100_000, 150_000]
    assert small.ready[0] == (3, 15 * MS // 2)
    assert small.forward_ns == 5 * MS


def test_invalid_replays_are_refused() -> None:
    trace = recorded()
    silent = replace(trace, steps=tuple(replace(step, grad_ready=()) for step in trace.steps))
    partly = replace(trace, steps=tuple(replace(step, grad_ready=step.grad_ready[:2]) for step in trace.steps))
    for given, plan, scale, message in (
        (silent, PLAN, 1, "no step records"),
        (partly, PLAN, 1, "only 2 of"),
        (trace, Plan.horovod(), 1, "chooses buckets at run time"),
        (trace, Plan.paper2020(), 1, "chooses buckets at run time"),
        (trace, Plan.explicit([[9]]), 1, "tensor 9"),
        (trace, PLAN, 0, "must be positive"),
        (trace, PLAN, float("nan"), "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            replay_schedule(given, plan, scale=scale)


def test_a_forward_pass_after_the_gradients_is_not_that_of_the_backward_pass() -> None:
    run = recorded()
    later = [(one.optimizer[0][0], one.optimizer[0][0] + MS) for one in run.steps]
    steps = tuple(replace(one, forward=(*one.forward, span)) for one, span in zip(run.steps, later, strict=True))
    assert replay_schedule(replace(run, steps=steps), PLAN) == SMALL


def test_a_rank_alone_is_played_before_ranks_that_shared_a_network() -> None:
    alone = recorded()
    later = tuple(replace(step, rank=1, arm=Arm("tcp"), begin_ns=step.begin_ns - MS) for step in alone.steps)
    both = replace(alone, arms=(Arm("tcp"),), steps=later + alone.steps)
    assert replay_schedule(both, PLAN).ready == SMALL.ready


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_payload_by_algorithm(size: int) -> None:
    ring = sent_bytes("ring all-reduce", size, 1200)
    assert ring == 2 * 1200 * (size - 1) / size
    assert sent_bytes(None, size, 1200) == ring
    known = size & (size - 1) == 0
    assert sent_bytes("recursive doubling", size, 1200) == (1200 * (size.bit_length() - 1) if known else None)
    assert sent_bytes("halving-doubling", size, 1200) == (ring if known else None)
    assert sent_bytes("something new", size, 1200) == (0 if size == 1 else None)


def test_a_bucket_is_sent_once_its_last_gradient_is_stamped_and_waited_for_before_the_optimizer(tmp_path: Path) -> None:
    core = connect.core()
    path = tmp_path / "0.train.ring"
    recorder = core.Recorder(str(path), 100, 0)
    player = Player(SMALL, 0, 1)
    sent: list[int] = []

    class Sent:
        def __init__(self, index: int) -> None:
            sent.append(index)
            recorder.put(EVENTS["OP_SUBMIT"], index)

        def wait(self) -> None:
            recorder.put(EVENTS["OP_DONE"])

    player.target(Sent)
    player.step(recorder)
    recorder.close()
    names = {number: name for name, number in EVENTS.items()}
    rows = [(names[int(row["kind"])], int(row["key"])) for row in read_ring(path).events]
    assert rows == [
        *(("FORWARD_BEGIN", 0), ("FORWARD_END", 0)),
        *(("GRAD_READY", 3), ("GRAD_READY", 2), ("OP_SUBMIT", 0)),
        *(("GRAD_READY", 1), ("GRAD_READY", 0), ("OP_SUBMIT", 1)),
        *(("WAIT_BEGIN", 0), ("OP_DONE", 0), ("OP_DONE", 0), ("WAIT_END", 0)),
        *(("OPTIMIZER_BEGIN", 0), ("OPTIMIZER_END", 0)),
    ]
    assert sent == [0, 1]
    times = read_ring(path).events["time_ns"]
    assert times[-1] - times[0] >= SMALL.ready[-1][1] + SMALL.tail_ns


def test_a_step_of_the_null_arm_is_its_compute(tmp_path: Path) -> None:
    recorder = connect.core().Recorder(str(tmp_path / "0.train.ring"), 100, 0)
    player = Player(SMALL, 1, 2)
    player.target(None)
    player.step(recorder)
    assert {float(value) for arena in player.memory for value in np.frombuffer(arena, np.float32)} == {2.0}
    with pytest.raises(ValueError, match="means"):
        player.target(None, predivide=2.0)


def test_a_schedule_survives_its_file_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    write_schedule(path, SMALL)
    assert read_schedule(path) == SMALL
    whole = json.loads(path.read_text())
    for text in ("", "[]", "{}", json.dumps({**whole, "version": 2}), path.read_text()[:50]):
        path.write_text(text)
        with pytest.raises(ValueError, match=str(path)):
            read_schedule(path)


def task(
    folder: Path, played: ReplaySchedule, arms: tuple[str, ...] = ("tcp",), rounds: int = 2, alone: int = 0
) -> Task:
    """Return a task that plays a schedule."""
    write_schedule(folder / "schedule.json", played)
    return Task(
        PLAY,
        arms,
        str(folder / "run"),
        block_steps=3,
        rounds=rounds,
        alone=alone,
        schedule=str(folder / "schedule.json"),
    )


def without_torch(folder: Path) -> dict[str, str]:
    """Return an environment in which torch cannot be imported."""
    folder.mkdir(parents=True)
    (folder / "torch.py").write_text("raise ImportError('no torch here')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def in_lab(request: Task, on_progress: Callable[..., None] = lambda *_: None, env: dict[str, str] | None = None) -> Run:
    """Run a task on two ranks on the loopback; all ranks hold the same sums in the end."""
    with Lab(2, "none", ways=("loopback",)) as lab:
        meet = {"NETBOTTLENECK_RENDEZVOUS": str(Path(request.folder).parent / "meeting")}
        (outcome,) = run_in_lab(lab, [request], on_progress, env={**meet, **(env or {})}, limit_s=DEADLINE_S)
    assert outcome.equal
    return Run(outcome.folder)


def test_a_replay_is_an_ordinary_run_and_needs_no_torch(tmp_path: Path) -> None:
    run = in_lab(task(tmp_path, SMALL, ("tcp", "null"), alone=3), env=without_torch(tmp_path / "stub"))
    trace = run.trace
    both = {(r, t) for r in (0, 1) for t in ("tcp", "null")}
    assert {(step.rank, step.arm) for step in trace.steps} == {*both, (0, "single")}
    still = {step.index for step in trace.steps if step.arm in ("single", "null")}
    assert {c.arm for c in trace.collectives if c.bucket is not None} == {"tcp"}
    assert len(still) > 3
    assert [parameter.bytes for parameter in trace.parameters] == list(SIZES)
    assert [bucket.parameters for bucket in trace.buckets] == [(3, 2), (1, 0)]
    moved = [c for c in trace.collectives if c.arm == "tcp" and c.bucket is not None]
    assert sum(c.tensor_bytes for c in moved) == 2 * 6 * sum(SIZES)
    assert all(c.finished for c in moved)
    assert Plan.of(trace, "tcp").buckets == PLAN.buckets
    again = replay_schedule(trace, Plan.of(trace))
    assert [index for index, _ in again.ready] == [index for index, _ in SMALL.ready]
    played = simulate(trace, Plan.of(trace, "tcp"), Cost.free(), transport="tcp")
    assert {c.tensor_bytes for c in played.collectives} == {c.tensor_bytes for c in moved}
    for one in sent(run):
        if one.transport == "tcp":
            assert (
                one.engine == one.model == 4 * sum(SIZES)
            )  # a rank of two sends S a step; two steps of each block count
    for step in trace.steps:
        assert len(step.grad_ready) == len(SIZES)
        assert all(at - step.begin_ns >= due for (_, at), (_, due) in zip(step.grad_ready, SMALL.ready, strict=True))


def test_stock_moves_the_same_buckets(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trace = in_lab(task(tmp_path, SMALL, ("stock", "tcp"))).trace
    by_arm = {
        arm: sorted(c.tensor_bytes for c in trace.collectives if c.arm == arm and c.step is not None)
        for arm in ("stock", "tcp")
    }
    assert by_arm["stock"] == by_arm["tcp"] != []


def test_a_rank_that_is_killed_ends_the_replay_and_is_named(tmp_path: Path) -> None:
    request = task(tmp_path, SMALL, rounds=500)

    def ranks(mark: bytes) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if str(tmp_path).encode() in (path / "cmdline").read_bytes() and (
                    mark in (path / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def kill(*_: Any) -> None:
        for pid in ranks(b"RANK=1"):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(JobError, match="rank 1 was killed by SIGKILL"):
        in_lab(request, kill)
    assert ranks(b"RANK=0") == ranks(b"RANK=1") == []


def test_the_command_replays_a_layer_log_and_prints_modelled_and_counted_bytes(tmp_path: Path) -> None:
    log = layer_log.of_trace(recorded((40_000, 2_000_000)), 0.03)
    layer_log.write(tmp_path / "two.bk.log", log)
    arguments = ["replay", str(tmp_path / "two.bk.log"), "--transport", "tcp", "--link", "none", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "netbottleneck", *arguments, "--block-steps", "4", "--directory", str(tmp_path / "out")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **without_torch(tmp_path / "stub")},
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"model \([a-z ,-]+\) 6\.12; engine 6\.12", done.stdout)
    text = " ".join(done.stdout.split())
    assert re.search(r"none, tcp: step [\d.]+ ms, [\d.]+ ms to [\d.]+ ms in 3 steps, [\d.]+ ms of it exposed", text)
    assert re.search(
        r"exposed \(mean of \d steps\), moved at \S+ Gbit/s in transfer \(\S+ Gbit/s to \S+ Gbit/s\)", text
    )
    assert re.search(r"Gbit/s over the step \(\d steps\) \(measured\)", text)
    record = json.loads((tmp_path / "out" / "replay.json").read_text())
    assert record["equal_on_all_ranks"] is True
    assert record["steps"]["tcp"]["steps"] == 3  # without the first of the block
    for one in record["sent"]:
        assert one["engine"] == one["model"] == 3 * 2_040_000


def test_the_sums_of_a_replay_that_moves_nothing_are_not_compared(tmp_path: Path) -> None:
    layer_log.write(tmp_path / "two.bk.log", layer_log.of_trace(recorded((40_000, 2_000_000)), 0.03))
    arguments = ["replay", str(tmp_path / "two.bk.log"), "--transport", "null", "--link", "none", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "netbottleneck", *arguments, "--block-steps", "4", "--directory", str(tmp_path / "out")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The sums of the ranks were not compared: no arm reduces them." in done.stdout
    assert json.loads((tmp_path / "out" / "replay.json").read_text())["equal_on_all_ranks"] is None


def test_counted_spans_begin_and_end_in_idle_gaps() -> None:
    trace = recorded(steps=4)
    steps = tuple(replace(step, arm=Arm("tcp"), block=step.index // 2) for step in trace.steps)

    def moved(step: int, start: int, done: int) -> tr.Collective:
        return tr.Collective(0, Arm("tcp"), 1, step, start, 8, step=step, start_ns=start, done_ns=done)

    rows = [moved(0, 100, 200), moved(1, 1000, 1100), moved(1, 1100, 1300), moved(2, 2000, 2200), moved(3, 3000, 3100)]
    both = replace(trace, arms=(Arm("tcp"),), steps=steps, collectives=tuple(rows))
    assert quiet_spans(both, 0, [rows[1], rows[2]], rows).tolist() == [[600, 1650]]
    assert quiet_spans(both, 0, [rows[1], rows[2], rows[4]], rows).tolist() == [[600, 1650], [2600, 3150]]


@pytest.mark.parametrize(("period_ns", "known"), [(10, True), (20, False)])
def test_bytes_of_an_interface_in_spans_that_are_short_for_its_readings_are_not_known(
    period_ns: int, known: bool
) -> None:
    times = np.arange(0, 1000, period_ns)
    columns = ("eth0:rx_bytes", "eth0:rx_packets", "eth0:tx_bytes", "eth0:tx_packets")
    rows = np.column_stack([1000 * times, 0 * times, 1000 * times, 0 * times])
    net = Counters("host", "id", 0, 100, 100, columns, times, rows)
    sent = _interface_bytes(net, np.array([[100, 250], [400, 500 + 5]]))
    assert sent == (pytest.approx(1000 * 255) if known else None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/file",), "no/such/file"),
        (("TRACE", "--link", "fast"), "fast"),
        (("TRACE", "--transport", "carrier"), "carrier"),
        (("TRACE", "--scale", "0"), "must be positive"),
        (("TRACE", "--scale", "1/0"), "must be a number or a fraction"),
        (("TRACE", "--transport", "stock,bare"), "'stock,bare': must be a list of names from stock, tcp, ofi, null"),
        (("TRACE", "--ranks", "0"), "above 0"),
        (("TRACE", "--ranks", "201"), "--ranks: '201': must be at most 200"),
        (("TRACE", "--directory", "TRACE/out"), "is not a folder: name another folder"),
        (("TRACE", "--plan", "recorded"), "does not record the buckets"),
        (("TRACE", "--compute-ms", "1", "2"), "--stretch"),
        (("resnet50",), "--compute-ms"),
        (("DAMAGED",), "line"),
        (("TRACE", "--directory", "."), "already exists"),
    ],
)
def test_bad_input_is_reported_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "r.jsonl.gz"
    tr.write(recorded(), path)
    damaged = tmp_path / "d.bk.log"
    damaged.write_text("a log\n1\n2\n5.0,400\n")
    meant = {"TRACE": str(path), "DAMAGED": str(damaged), ".": str(tmp_path)}
    given = [meant.get(word, word).replace("TRACE/", f"{path}/") for word in arguments]
    out = [] if "--directory" in given else ["--directory", str(tmp_path / "out")]
    try:
        code = replaying.main([*given, *out])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bk.log", "r.jsonl.gz"]


def test_blocks_of_one_step_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        replaying.main(["resnet50", "--compute-ms", "5", "5", "--block-steps", "1"])
    assert ended.value.code == 2
    assert "must be at least 2: a block's first step is not counted" in capsys.readouterr().err


class Turns:
    """A session whose only arm moves nothing, as far as playing needs it."""

    def __init__(self) -> None:
        self.step, self.arm, self.recorder = 0, "null", None
        self.place = SimpleNamespace(rank=0)
        self.control = SimpleNamespace(exchange=lambda blob: [blob])
        self.arms = {"null": SimpleNamespace(target=lambda _: None, barrier=lambda: None)}

    def begin(self) -> None:
        """Begin a step."""

    def end(self) -> None:
        """End a step."""
        self.step += 1

    def by_itself(self, _number: int) -> Any:
        """Return the context of a step of rank 0 alone."""
        return nullcontext()


@pytest.mark.parametrize(("alive_s", "steps"), [(float("inf"), [0, 3, 6]), (0.0, [0, 0, 0, 1, 2, 3, 3, 4, 5, 6, 6])])
def test_a_job_reports_progress_between_blocks_and_inside_long_ones(
    monkeypatch: pytest.MonkeyPatch, alive_s: float, steps: list[int]
) -> None:
    monkeypatch.setattr(tasks, "ALIVE_S", alive_s)
    seen: list[int] = []
    request = Task(PLAY, (Arm("null"),), "f", block_steps=3, rounds=2, alone=2)
    reports = tasks.Reports(lambda step, _steps, _arm: seen.append(step), request.steps)
    session, player = Turns(), SimpleNamespace(step=lambda _: None)
    tasks._play_alone(session, player, request, reports)  # type: ignore[arg-type]
    tasks._play(session, player, request, reports)  # type: ignore[arg-type]
    assert seen == steps


def test_a_replay_on_the_loopback_records_no_cap_of_a_link_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Task] = []

    def run(_lab: Lab, requests: list[Task], *_: Any, **__: Any) -> None:
        started.extend(requests)
        raise JobError("not run")

    monkeypatch.setattr(replaying, "run_in_lab", run)
    monkeypatch.setattr(replaying, "Lab", partial(Lab, ways=("loopback",)))
    monkeypatch.setattr(Lab, "verify", lambda *_: {"ok": False})
    path = tmp_path / "r.jsonl.gz"
    tr.write(recorded(), path)
    assert replaying.main([str(path), "--link", "2gbit", "--directory", str(tmp_path / "out")]) == 1
    (request,) = started
    assert request.network == {"how": "loopback", "link_bps": None, "flow_bps": [], "verified": {"ok": False}}
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "loopback: all ranks share this machine's loopback interface",
        "2gbit: the measured rates are not the",
    ):
        assert text in out
        assert any(note.startswith(text) for note in request.notes)
