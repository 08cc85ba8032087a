"""A run in progress: its last steps from rings that grow, `netbottleneck top`, and the progress of rank 0."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import pty
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import RANKS_LIMIT_S, Ranks
from rich.console import Console

from netbottleneck import cli, report
from netbottleneck.analysis.thresholds import STEPS_MIN
from netbottleneck.analysis.usage import Cores, HostUse, Use
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import Change, Following, Part, Run, exporters, progress
from netbottleneck.runtime.progress import LOG_EVERY, Progress
from netbottleneck.trace import counter_files, model, ring_file, ring_reader
from netbottleneck.trace.machine import machine_id
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun, RingWriter

TAKEN = struct.Struct("<Q")
TAKEN_AT = ring_file.HEADER.fields["taken"][1]
STEPS = 36  # of a FakeRun with 6 blocks


class Growing:
    """A recorded run whose rings show only a part of their events, as if the rest were not written yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole = {path: path.read_bytes() for path in (folder / "ranks").glob("*.ring")}

    def show(self, share: float) -> None:
        for path, raw in self._whole.items():
            body = raw[ring_file.RING_HEADER_BYTES :]
            count = round(share * len(body) // 64)
            head = bytearray(raw[: ring_file.RING_HEADER_BYTES])
            TAKEN.pack_into(head, TAKEN_AT, count)
            path.write_bytes(bytes(head) + body[: 64 * count])


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return FakeRun(tmp_path / "run", late_ms={1: 4}).write()


def frame_of(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert cli.main(["top", str(folder), "--once", *options]) == 0
    return capsys.readouterr().out


def about_steps(run: Run) -> set[tuple[int, int]]:
    return {(step.rank, step.index) for step in run.trace.steps}


# The last steps of rings that grow.


def test_a_window_of_all_steps_is_the_whole_run_however_often_it_was_read(fake: Path) -> None:
    grows, following = Growing(fake), Following(fake, 0)
    seen = []
    for share in (0.2, 0.5, 0.5, 1.0):
        grows.show(share)
        seen.append(len(following.look().trace.steps))
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert following.look().trace == Run(fake).trace
    assert following.grown is False


def test_each_look_reads_only_what_was_written_since(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, int, int]] = []
    real = ring_file.read_slots

    def read(path: Path, begin: int = 0, end: int | None = None) -> object:
        slots = real(path, begin, end)
        reads.append((Path(path).name, begin, len(slots.events)))
        return slots

    monkeypatch.setattr(ring_file, "read_slots", read)
    grows, following = Growing(fake), Following(fake)
    grows.show(0.5)
    following.look()
    first = {name: begin + count for name, begin, count in reads}
    reads.clear()
    grows.show(1.0)
    following.look()
    assert {name: begin for name, begin, _ in reads} == first
    reads.clear()
    following.look()
    assert sum(count for *_, count in reads) == 0


def test_a_window_holds_the_same_last_steps_of_every_rank_with_all_their_operations(fake: Path) -> None:
    whole, part = Run(fake).trace, Following(fake, 7).look().trace
    last = range(STEPS - 6, STEPS + 1)
    assert {(step.rank, step.index) for step in part.steps} == {(rank, index) for rank in (0, 1) for index in last}
    assert part.steps == tuple(step for step in whole.steps if step.index in last)
    kept = [c for c in whole.collectives if c.step in last]
    assert kept
    assert [(c.rank, c.step, c.name, c.submit_ns, c.done_ns) for c in part.collectives] == [
        (c.rank, c.step, c.name, c.submit_ns, c.done_ns) for c in kept
    ]
    assert [rank.transports for rank in part.ranks] == [rank.transports for rank in whole.ranks]


def test_a_window_gives_the_numbers_of_its_steps(fake: Path) -> None:
    run = Following(fake, 12).look()
    late = run.findings.late_ns
    assert late[1] == pytest.approx(4e6, rel=0.01)  # rank 1 begins its forward 4 ms later
    assert late.get(0, 0.0) == 0
    assert run.findings.waiting_ns == pytest.approx({0: 4e6, 1: 0.0}, rel=0.01)


def test_a_rank_that_is_behind_ends_the_window_of_all(fake: Path) -> None:
    path = fake / "ranks" / "1.train.ring"
    slots = ring_file.read_slots(path).events
    behind = int(np.flatnonzero(slots["step"] > STEPS - 3)[0])
    raw = bytearray(path.read_bytes())
    TAKEN.pack_into(raw, TAKEN_AT, behind)
    path.write_bytes(bytes(raw))
    found = about_steps(Following(fake, 5).look())
    assert {index for rank, index in found if rank == 1} == set(range(STEPS - 7, STEPS - 2))
    assert {index for rank, index in found if rank == 0} == set(range(STEPS - 7, STEPS + 1))


def test_a_window_has_fewer_steps_where_they_hold_too_many_events(fake: Path) -> None:
    steps = [
        s for r in (0, 1) for s in ring_file.read_slots(fake / "ranks" / f"{r}.train.ring").events["step"].tolist()
    ]
    part = Part(fake, 500, most_events=len(steps) // 3)
    part.look()
    found = ring_reader.load(fake, part.ring)
    assert 2 <= len({step.index for step in found.steps}) < STEPS / 2
    assert max(step.index for step in found.steps) == STEPS


def test_the_events_of_nccl_count_for_the_step_of_their_time(fake: Path) -> None:
    train = ring_file.read_slots(fake / "ranks" / "0.train.ring").events
    begins = train[train["kind"] == ring_file.EVENTS["STEP_BEGIN"]]
    ring = RingWriter(fake / "ranks" / "0.nccl.ring")
    for time_ns in begins["time_ns"].tolist():
        for number in range(100):
            ring.put(time_ns + number, "NCCL_STEP")
    ring.close()
    part = Part(fake, 500, most_events=1000)
    part.look()
    steps = {step.index for step in ring_reader.load(fake, part.ring).steps}
    assert (len(steps) <= 10, max(steps)) == (True, STEPS)
    assert sum(len(part.ring(path).events) for path in (fake / "ranks").glob("*.ring")) <= 1000


def test_what_is_kept_of_a_window_does_not_grow_with_the_run(tmp_path: Path) -> None:
    folder = FakeRun(tmp_path, transports=("stock",)).write()
    rings = sorted((folder / "ranks").glob("*.ring"))
    grows, part, kept = Growing(folder), Part(folder, 6), []
    for share in (0.4, 0.6, 0.8, 1.0):
        grows.show(share)
        part.look()
        kept.append(sum(len(part.ring(path).events) for path in rings))
    whole = sum(len(ring_file.read_ring(path).events) for path in rings)
    assert max(kept) <= whole * 8 / STEPS  # six steps, the open one, and samples of modules in some


def test_of_a_long_ring_only_the_end_is_read(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FIRST_EVENTS", 8)
    monkeypatch.setattr(report, "LAST_EVENTS", 100)
    indices: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, index in about_steps(Following(fake).look()):
        indices[rank].add(index)
    assert indices[0] == indices[1] == set(range(min(indices[0]), STEPS + 1))
    assert len(indices[0]) < STEPS / 2
    whole = {(c.rank, c.step, c.key) for c in Run(fake).trace.collectives if c.step in indices[0]}
    assert {(c.rank, c.step, c.key) for c in Following(fake).look().trace.collectives if c.step} >= whole


def test_of_a_long_ring_a_window_of_all_steps_has_the_middle_too(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FIRST_EVENTS", 8)
    monkeypatch.setattr(report, "LAST_EVENTS", 100)
    assert Following(fake, 0).look().trace == Run(fake).trace


def test_a_slot_that_is_filled_late_is_read_then(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "0.train.ring"
    ring = RingWriter(path, capacity=8)
    for step in (0, 1):
        ring.put(10 + step, "STEP_BEGIN", step)
        ring.put(20 + step, "STEP_END", step)
    late = ring.events[1]
    ring.events[1] = bytes(64)
    ring.close(orderly=False)
    part = Part(tmp_path)
    assert part.look()
    assert len(part.ring(path).events) == 3
    assert part.ring(path).dropped == 1
    ring.events[1] = late
    ring.close(orderly=False)
    assert part.look()
    assert len(part.ring(path).events) == 4
    assert part.ring(path).dropped == 0
    assert not part.look()


# What is shown.


def test_a_frame_fits_80_columns_and_has_no_colour_in_a_pipe(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = frame_of(fake, capsys)
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    run = Run(fake)
    printed = " ".join(shown.split())
    assert "Run fake: ended, 2 ranks, 2 hosts, fake net" in printed
    assert f"Step {STEPS}" in printed
    assert f"steps 1 to {STEPS}" in printed
    assert f"Verdict: {run.verdict.code}:" in printed
    assert "0 host0 4.00 ms 0.00 ms" in printed
    assert "the link is 2.00 Gbit/s" in printed
    for arm in run.trace.arms:
        assert arm in printed


@pytest.mark.parametrize("no_colour", [True, False])
def test_a_frame_honours_no_color_on_a_terminal(fake: Path, monkeypatch: pytest.MonkeyPatch, no_colour: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    run, out = Run(fake), io.StringIO()
    Console(file=out, force_terminal=True, width=80).print(
        progress.frame(run.findings, run.verdict, (), ["in progress", "a line"], 0)
    )
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", out.getvalue())) is not no_colour


def test_interfaces_are_shown_beside_their_rated_speed(tmp_path: Path) -> None:
    rated = {"stock": {"interface": "eth1", "link_bps": 25 * 10**9}}
    run = Run(FakeRun(tmp_path, run={"network": None}, about=rated).write())
    base = run.findings.base
    assert base == "stock"
    cores = Cores({"idle": 0.25, "iowait": 0.0}, "cpu0", 0.9, 0.0)
    uses = (
        Use("eth1", "tx", 5e9, 20e9, 1.0, 1.0),
        Use("eth1", "rx", 4e9, None, 1.0, 1.0),
        Use("lo", "tx", 1e9, 2e9, 1.0, 1.0),
    )
    other = HostUse(1, "host1", Arm("ofi"), 1.0, 1.0, 50.0, uses[:1])
    out = io.StringIO()
    Console(file=out, width=80).print(
        progress.frame(
            run.findings, run.verdict, (HostUse(0, "host0", base, 1.0, 1.0, 50.0, uses, cores), other), ["on"], 0
        )
    )
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["host0", "eth1", "20.00", "~4.00", "25.0", "Gbit/s", "75", "%", "90", "%", "-"] in rows
    assert ["host0", "lo", "2.00", "-", "not", "known"] in rows
    assert not any(row[:1] == ["host1"] for row in rows)


def test_unknown_waits_between_ranks_are_a_dash(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (fake / "ranks").glob("1.*"):
        path.unlink()
    assert any(line.split()[:4] == ["0", "host0", "-", "-"] for line in frame_of(fake, capsys).splitlines())


def test_the_parts_of_a_step_add_up_and_exposed_is_transfer_and_waiting(fake: Path) -> None:
    for parts in Run(fake).findings.parts.values():
        found = progress.step_parts(parts)
        assert sum(found.values()) == pytest.approx(parts.step_ns)
        assert found["transfer"] + found["waiting"] == pytest.approx(parts.exposed_ns + parts.wait_ns)
        assert min(found.values()) >= 0


@pytest.mark.parametrize(("finished", "state"), [(False, "no verdict yet"), (True, "no verdict")])
def test_too_few_steps_say_how_many_more_are_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: bool, state: str
) -> None:
    meta = {"finished": finished, "hostname": "elsewhere"}
    folder = FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=4, meta=meta).write()
    run = Run(folder)
    assert run.verdict.code == "INCONCLUSIVE"
    assert run.verdict.more == STEPS_MIN - 3  # the first step of a block does not count
    line = frame_of(folder, capsys, "--line")
    assert line.startswith(f"step 4: {state}, {STEPS_MIN - 3} more steps (about ")
    assert line.count("\n") == 1


def test_a_verdict_that_needs_more_steps_than_the_window_names_the_window(fake: Path) -> None:
    findings = Run(fake).findings
    have = sum(time.steps + time.blocks for time in findings.times.values())
    undecided = Verdict("INCONCLUSIVE", "", "", more=100)
    assert f"in a window of {have + 100} steps" in progress.missing_text(findings, undecided, have)
    for window in (0, have + 100):
        assert "window" not in progress.missing_text(findings, undecided, window)
    assert progress.missing_text(findings, Verdict("NOT_NETWORK", "", ""), 1) == ""
    assert progress.missing_text(findings, Verdict("INCONCLUSIVE", "", "Measure it."), 1) == "Measure it."


def test_a_missing_folder_and_one_without_a_run_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", str(tmp_path / "none"), "--once"]) == cli.USAGE
    assert "none: no such folder" in capsys.readouterr().err
    assert cli.main(["top", str(tmp_path), "--once"]) == cli.USAGE
    error = capsys.readouterr().err
    assert "no run.json" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--once", "--line"])
def test_a_run_of_another_version_is_bad_input(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(tmp_path, blocks=1, run={"version": 2}).write()
    assert cli.main(["top", str(tmp_path), option]) == cli.USAGE
    assert "a run record of version 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("about", "told", "line"),
    [
        ({"finished": False, "hostname": "elsewhere"}, "no step is recorded yet", "no step could be split yet"),
        ({"finished": True}, "no step was recorded", "no step could be split;"),
        ({"finished": False, "hostname": platform.node(), "pid": 1 << 30}, "no step was recorded", "could be split;"),
    ],
)
def test_a_run_without_a_record_or_a_step_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], about: dict[str, object], told: str, line: str
) -> None:
    made = FakeRun(tmp_path, blocks=1, meta=about)
    made.write()
    Growing(tmp_path).show(0.0)
    assert told in frame_of(tmp_path, capsys)
    assert line in frame_of(tmp_path, capsys, "--line")
    for path in (tmp_path / "ranks").iterdir():
        path.unlink()
    assert cli.main(["top", str(tmp_path), "--once"]) == cli.USAGE
    assert "no rank has left a record" in capsys.readouterr().err


def test_missing_and_failed_ranks_are_named(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (fake / "ranks").glob("1.*"):
        path.unlink()
    path = fake / "ranks" / "0.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False, "error": "out of memory"}))
    shown = " ".join(frame_of(fake, capsys).split())
    assert "! no record of rank 1 in this folder" in shown
    assert "! rank 0 failed: out of memory" in shown


def test_the_text_of_a_scripts_error_moves_no_cursor_and_adds_no_line(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "ValueError: bad \x1b[31mred\nsecond\r\x9b2J"
    path = fake / "ranks" / "0.meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": False, "error": error}))
    run = fake / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"model": "Net\x1b]0;title\x07"}))
    line, frame = frame_of(fake, capsys, "--line"), frame_of(fake, capsys)
    assert line.count("\n") == 1
    assert re.search(r"rank 0 failed: ValueError: bad .*second", line)
    assert re.search(r"rank 0 failed: ValueError: bad .*second", frame)
    for shown in (line, frame, Run(fake).html):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


@pytest.mark.parametrize("window", [20, 0])
def test_a_run_longer_than_its_files_is_followed_to_its_end(tmp_path: Path, window: int) -> None:
    whole = FakeRun(tmp_path / "whole", blocks=24, transports=("stock",)).write()
    every = {path.name: ring_file.read_ring(path).events for path in (whole / "ranks").glob("*.ring")}
    last = int(every["0.train.ring"]["step"].max())
    room = {"train": len(every["0.train.ring"]) // 3}
    folder = FakeRun(tmp_path / "long", blocks=24, transports=("stock",), room=room).write()
    following, late = Following(folder, window), Following(folder, window)
    for name, events in every.items():  # a look while the files are not full
        _rewrite(folder / "ranks" / name, events[events["step"] <= 20])
    assert max(step.index for step in following.look().trace.steps) == 20
    FakeRun(tmp_path / "long", blocks=24, transports=("stock",), room=room).write()
    found, again = following.look().trace, late.look().trace
    expected = {(s.rank, s.index): s for s in Run(whole).trace.steps}
    assert all(expected[step.rank, step.index] == step for trace in (found, again) for step in trace.steps)
    indices = {step.index for step in found.steps}
    assert max(indices) == last
    if window:
        assert indices == {step.index for step in again.steps} == set(range(last - window + 1, last + 1))
    else:  # the first steps, and the last ones
        assert {1, 10} < indices < set(range(1, last + 1))
        assert any("are left out" in note for note in found.notes)
        (left_out,) = [note for note in again.notes if "are left out" in note]
        assert left_out in Run(folder).trace.notes  # it names the same number of events


def test_a_damaged_ring_is_named_and_the_other_ranks_are_shown(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake / "ranks" / "1.train.ring").write_bytes(b"what is this")
    shown = "".join(frame_of(fake, capsys).split())  # a long path is cut at the end of a line
    assert "1.train.ring:notaringfile" in shown
    assert f"Step{STEPS}" in shown


def test_a_damaged_number_of_an_arm_is_one_of_an_unknown_arm(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fake / "ranks" / "1.train.ring"
    events = np.memmap(path, ring_file.EVENT, "r+", ring_file.RING_HEADER_BYTES)
    begins = np.flatnonzero(events["kind"] == ring_file.EVENTS["STEP_BEGIN"])
    events["b"][begins[-2]] = 1 << 54
    events.flush()
    assert f"Step{STEPS}" in "".join(frame_of(fake, capsys).split())


@pytest.mark.parametrize(
    "bad",
    [
        ["--refresh", "0"],
        ["--refresh", "inf"],
        ["--refresh", "nan"],
        ["--refresh", "1e10"],
        ["--window", "-1"],
        ["--export", "mlflow"],
    ],
)
def test_bad_arguments_are_refused(fake: Path, bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["top", str(fake), *bad])
    assert ended.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_an_export_that_cannot_be_written_is_refused_before_the_first_frame(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = fake / "no folder" / "run.prom"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["top", str(fake), "--line", "--export", f"prometheus={place}"])
    printed = capsys.readouterr()
    assert f"--export prometheus {place}: must be a file in an existing folder" in printed.err
    assert not printed.out


def test_an_export_that_fails_at_first_ends_with_one_line(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporters, "write_text", full)
    assert cli.main(["top", str(fake), "--line", "--export", "prometheus=run.prom"]) == 1
    printed = capsys.readouterr()
    assert "No space left on device" in printed.err
    assert len(printed.err.splitlines()) == 1
    assert "waiting" not in printed.out


def test_an_export_that_fails_later_is_a_line_of_the_frame(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metas = {path: json.loads(path.read_text()) for path in (fake / "ranks").glob("*.meta.json")}
    for path, whole in metas.items():
        path.write_text(json.dumps(whole | {"finished": False}))
    place = fake / "metrics"
    place.mkdir()

    def gone(_: float) -> None:  # between the first frame and the second
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
        for path, whole in metas.items():
            path.write_text(json.dumps(whole))

    monkeypatch.setattr(cli.time, "sleep", gone)
    assert cli.main(["top", str(fake), "--line", "--export", f"prometheus={place / 'run.prom'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "failed" not in lines[0]
    assert "exporting to prometheus failed" in lines[-1]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("cells/a/run/run.json", "/cells/CELL/run or run/N"), ("r0.pt.trace.json", "use netbottleneck report")],
)
def test_a_folder_that_is_a_study_or_has_profiles_is_refused(
    tmp_path: Path, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pause(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", pause)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    assert cli.main(["top", str(tmp_path), "--line"]) == cli.USAGE
    error = capsys.readouterr().err
    assert remedy in error
    assert error.count("\n") == 1


def test_what_a_follower_waits_for_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", pause)
    assert cli.main(["top", str(tmp_path), "--line"]) == 0
    assert capsys.readouterr().out.count("no run.json here") == 1


def test_a_process_number_of_another_machine_or_pid_namespace_is_not_judged(tmp_path: Path) -> None:
    def state(name: str, **meta: str) -> list[str]:
        about = {"hostname": platform.node(), "finished": False, **meta}
        following = Following(FakeRun(tmp_path / name, blocks=4, meta=about).write())
        return following.about(following.look())

    own = os.readlink("/proc/self/ns/pid")
    assert state("unnamed", pid_namespace=own)[0] == "stopped"
    assert state("here", pid_namespace=own, machine_id=machine_id())[0] == "stopped"
    container = state("container", pid_namespace="pid:[1]", machine_id=machine_id())
    machine = state("machine of equal name", pid_namespace=own, machine_id="00" * 16)
    for elsewhere in (container, machine):
        assert elsewhere[0] == "in progress"
        assert not any("killed" in line for line in elsewhere)


HERE = {"hostname": platform.node(), "finished": False, "pid_namespace": os.readlink("/proc/self/ns/pid")}


def test_a_rank_that_ends_after_a_look_was_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FakeRun(tmp_path, blocks=4, meta=HERE).write()

    def ended(_: Path, rank: model.Rank) -> bool:
        path = folder / "ranks" / f"{rank.rank}.meta.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"finished": True}))
        return False

    monkeypatch.setattr(report, "_lives", ended)
    following = Following(folder)
    state, *lines = following.about(following.look())
    assert state == "in progress"
    assert not any("killed" in line for line in lines)
    assert following.about(following.look()) == ["ended"]


def test_the_last_steps_of_a_run_that_has_stopped_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grows = Growing(FakeRun(tmp_path, meta=HERE).write())
    grows.show(0.5)
    monkeypatch.setattr(report, "_lives", lambda *_: grows.show(1.0))  # written after the look
    shown = " ".join(frame_of(tmp_path, capsys).split())
    assert "stopped, 2 ranks" in shown
    assert f"Step {STEPS}" in shown


@pytest.mark.parametrize(
    ("wall_s", "mono_s", "lives"),
    [
        (0.0, 0.0, True),
        (3600.0, 0.0, True),  # the wall clock was set
        (0.0, -1e6, False),  # the process began after the ring was opened: its number is used again
        (-1e9, 0.0, False),  # the host has booted since
    ],
)
def test_a_process_is_a_ranks_if_it_began_before_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wall_s: float, mono_s: float, lives: bool
) -> None:
    wall_ns, mono_ns = time.time_ns() + int(1e9 * wall_s), time.monotonic_ns() + int(1e9 * mono_s)
    RingWriter(tmp_path / "ranks" / "0.train.ring", mono_ns=mono_ns, wall_ns=wall_ns).close()
    rank = model.Rank(0, pid=os.getpid())
    assert report._lives(tmp_path, rank) is lives
    (tmp_path / "ranks" / "0.train.ring").unlink()
    assert report._lives(tmp_path, rank)
    assert not report._lives(tmp_path, model.Rank(0, pid=1 << 40))
    assert not report._lives(tmp_path, model.Rank(0))

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(report.os, "kill", refuse)
    assert report._lives(tmp_path, model.Rank(0, pid=1 << 40))  # another user's, in a /proc that hides it


def test_silence_is_the_time_without_a_new_step(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(wall_ns=10**18 + 3600 * 10**9, s=1000.0)
    clock = SimpleNamespace(time_ns=lambda: now.wall_ns, monotonic=lambda: now.s)
    monkeypatch.setattr(report, "time", clock)
    for meta in fake.glob("ranks/*.meta.json"):
        meta.write_text(meta.read_text().replace('"finished": true', '"finished": false'))
    grows, following = Growing(fake), Following(fake)
    grows.show(0.7)
    assert "no new step: the last one ended 60 min" in following.about(following.look())[-1]
    grows.show(1)
    assert not any("no new step" in line for line in following.about(following.look()))
    now.wall_ns *= 2  # a step of the clock is no silence
    assert not any("no new step" in line for line in following.about(following.look()))
    now.s += 90
    assert "no new step: the last one ended 90 s ago" in following.about(following.look())[-1]
    for ring in fake.glob("ranks/0.*.ring"):
        ring.unlink()  # its clock is the reference of the others'
    without = Following(fake)
    assert not any("no new step" in line for line in without.about(without.look()))
    assert not any("after the start" in line for line in progress._head_lines(without.look().trace, ["in progress"]))


# The alarm.


def looked(code: str, last: int, *arms: tuple[str, int]) -> SimpleNamespace:
    """A look at steps up to `last`, in blocks of 10; arms: each with its last step; without: stock."""
    steps = [SimpleNamespace(index=at, block=at // 10, arm=Arm(arm)) for arm, at in arms or (("stock", last),)]
    return SimpleNamespace(trace=SimpleNamespace(steps=steps), verdict=Verdict(code, "", ""))


def changes(*looks: tuple[str, int]) -> list[Change | None]:
    following = Following("nowhere")
    return [following.judge(looked(*look)) for look in looks]


def test_a_cause_has_changed_when_two_looks_in_a_row_agree() -> None:
    link, late = "LINK_LIMITED", "STRAGGLER"
    found = changes((link, 10), (late, 20), (link, 30), (late, 40), (late, 50), (late, 60))
    assert found == [None, None, None, None, Change(link, late, 40), None]
    assert str(found[4]) == "the cause has changed: LINK_LIMITED -> STRAGGLER, since step 40 or shortly before"


def test_the_first_verdict_an_inconclusive_one_and_old_steps_change_no_cause() -> None:
    assert changes(("INCONCLUSIVE", 5), ("LINK_LIMITED", 10), ("LINK_LIMITED", 20)) == [None] * 3
    assert changes(("LINK_LIMITED", 10), ("INCONCLUSIVE", 20), ("INCONCLUSIVE", 30)) == [None] * 3
    assert changes(("LINK_LIMITED", 1), ("STRAGGLER", 2), ("INCONCLUSIVE", 3), ("STRAGGLER", 4)) == [None] * 4
    assert changes(("LINK_LIMITED", 10), ("STRAGGLER", 20), ("STRAGGLER", 20)) == [None] * 3


def test_the_first_cause_is_a_change_if_the_step_time_has_changed_since_the_start() -> None:
    following = Following("nowhere")
    following._part._begin, following._part.change = 10, 10 + report.FIRST_STEPS
    looks = [("INCONCLUSIVE", 50), ("STRAGGLER", 80), ("STRAGGLER", 90), ("STRAGGLER", 95)]
    found = [following.judge(looked(*look)) for look in looks]
    assert found == [None, None, Change("INCONCLUSIVE", "STRAGGLER", 80), None]
    again = Following("nowhere")
    again._part._begin, again._part.change = 10, 10 + report.FIRST_STEPS
    looks = [("NOT_NETWORK", 50), ("NOT_NETWORK", 60), ("LINK_LIMITED", 70), ("LINK_LIMITED", 80)]
    assert [again.judge(looked(*look)) for look in looks][:3] == [None] * 3
    assert again.changed == Change("NOT_NETWORK", "LINK_LIMITED", 70)


def test_the_first_cause_that_a_process_sees_is_no_change() -> None:
    following = Following("nowhere")
    following._part._begin, following._part.change = 10, 10 + report.FIRST_STEPS
    looks = [("STRAGGLER", 80), ("STRAGGLER", 90), ("LINK_LIMITED", 100), ("LINK_LIMITED", 110)]
    change = Change("STRAGGLER", "LINK_LIMITED", 100)
    assert [following.judge(looked(*look)) for look in looks] == [None, None, None, change]


def test_the_two_verdicts_that_nothing_is_to_do_are_one_cause() -> None:
    assert changes(("NOT_NETWORK", 1), ("DO_NOTHING", 2), ("DO_NOTHING", 3)) == [None] * 3
    link = "LINK_LIMITED"
    found = changes((link, 1), ("DO_NOTHING", 2), ("NOT_NETWORK", 3))
    assert found == [None, None, Change(link, "NOT_NETWORK", 2)]


def looks_after_a_comparison(code: str, changed: int = 0) -> list[Change | None]:
    """Arms alternate up to step 700. Then stock stays, and the last steps of tcp leave the window."""
    following, found = Following("nowhere"), []
    for last, first in ((690, code), (790, code), (890, "IMBALANCE"), (1290, "IMBALANCE"), (1390, "IMBALANCE")):
        arms = [("stock", last), ("tcp", min(last - 5, 695))]
        following._part.change = changed if last > changed else 0
        found.append(following.judge(looked(first, last, *arms[: 1 if last > 1200 else 2])))
    return found


def test_a_comparison_that_has_ended_changes_no_cause() -> None:
    assert looks_after_a_comparison("TRANSPORT_LIMITED") == [None] * 5
    change = Change("LINK_LIMITED", "IMBALANCE", 890)
    assert looks_after_a_comparison("LINK_LIMITED") == [None, None, None, change, None]


def test_the_step_time_that_changes_after_a_comparison_changes_the_cause() -> None:
    change = Change("TRANSPORT_LIMITED", "IMBALANCE", 890)
    assert looks_after_a_comparison("TRANSPORT_LIMITED", 850) == [None, None, None, change, None]
    assert looks_after_a_comparison("TRANSPORT_LIMITED", 600) == [None] * 5


def test_a_cause_that_changes_while_the_arms_alternate_is_a_change() -> None:
    following, found = Following("nowhere"), []
    for last, code in ((690, "TRANSPORT_LIMITED"), (790, "STRAGGLER"), (890, "STRAGGLER")):
        found.append(following.judge(looked(code, last, ("stock", last), ("tcp", last - 15))))
    assert found == [None, None, Change("TRANSPORT_LIMITED", "STRAGGLER", 790)]


def test_a_window_begins_where_the_step_time_has_changed(tmp_path: Path) -> None:
    before = FakeRun(tmp_path / "before", blocks=12).write()
    after = FakeRun(tmp_path / "after", blocks=12, late_ms={1: 40}).write()
    whole = {
        rank: np.concatenate([_moved(half, rank, place) for place, half in enumerate((before, after))])
        for rank in (0, 1)
    }
    following, begins, peeks = Following(before), [], []
    for count in (60, 72, 77, 90, 144):
        for rank, events in whole.items():
            _rewrite(before / "ranks" / f"{rank}.train.ring", events[events["step"] <= count])
        peeks.append(following.peek())
        begins.append(min(step.index for step in following.look().trace.steps))
    assert begins[:3] == [1, 1, 1]
    assert 67 <= begins[3] <= begins[4] <= 79  # within a block
    assert peeks == [False, False, False, True, False]
    assert following.grown
    # The network may be another one since then.
    assert Run(before).findings.achievable is not None
    assert following.look().findings.achievable is None


def test_a_change_is_placed_as_well_by_many_looks_as_by_one(tmp_path: Path) -> None:
    onset, steps, path = 330, 420, tmp_path / "ranks" / "0.train.ring"
    for seed in (9, 28, 35):  # the first look behind the change places it 2 to 12 steps too early
        draw, ring, time_ns = np.random.default_rng(seed), RingWriter(path), 0
        for step in range(steps):
            arm = step // 5 % 2
            ring.put(time_ns, "STEP_BEGIN", step, b=arm)
            time_ns += int((63e6 if step < onset else 74e6) * math.exp(0.1 * draw.standard_normal()) * (1 + 0.1 * arm))
            ring.put(time_ns, "STEP_END", step)
        ring.close()
        grows, often, once = Growing(tmp_path), Part(tmp_path), Part(tmp_path)
        once.look()
        for count in range(200, steps + 1, 12):
            grows.show(count / steps)
            often.look()
        assert often.change == once.change
        assert int(often.ring(path).events["step"].min()) == once.change


CONNECTION = ("time_ns", *counter_files.CONNECTION_COLUMNS, "sent_segments", "resent_segments")


def _connections(path: Path, times: list[int], again: list[int], opened_every: int = 1 << 30) -> None:
    """Write counters of two connections, each of which sends 600 segments between readings, the second some again.

    opened_every: after so many readings, two others take their place.
    """
    about = {"hostname": "h", "host_id": "i", "rank": 0, "hz": 100, "ticks_per_s": 100, "columns": CONNECTION}
    text = json.dumps(about).encode()
    numbers = range(len(counter_files.CONNECTION_COLUMNS))
    rows = [
        struct.pack(f"<{len(CONNECTION)}q", time_ns, *(port if name == 4 else 0 for name in numbers), 600 * place, lost)
        for place, time_ns in enumerate(times)
        for first in [place // opened_every * 2]
        for port, lost in ((first + 1, 0), (first + 2, sum(again[: place + 1])))
    ]
    path.write_bytes(
        struct.pack("<8sII", counter_files.MAGIC, counter_files.SAMPLES_VERSION, 16 + len(text)) + text + b"".join(rows)
    )


def test_the_counts_of_closed_connections_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "0.tcp.counters"
    again = [3] * 60
    losses, sizes = report._Losses(path), []
    for count in range(2, 61):
        _connections(path, list(range(1, count + 1)), again[:count], opened_every=2)
        losses.grow()
        sizes.append(len(losses._counts))
    assert max(sizes[20:]) == max(sizes[40:]) <= 2 * report.CLOSED_READINGS
    # Each reading of a connection that stays open counts what was sent again since the one before.
    assert [round(part * 1200) for _, part in losses._readings][2:6] == [0, 3, 0, 3]


@pytest.mark.parametrize(("lost", "begin"), [(0, 1), (3, 1), (60, 101)])
def test_a_window_begins_where_packets_begin_to_be_lost(tmp_path: Path, lost: int, begin: int) -> None:
    run = FakeRun(tmp_path / "run", blocks=24).write()
    whole = {path: ring_file.read_ring(path).events for path in (run / "ranks").glob("*.train.ring")}
    steps = whole[run / "ranks" / "0.train.ring"]
    steps = steps[steps["kind"] == ring_file.EVENTS["STEP_BEGIN"]]
    again = [lost if step > 100 else 0 for step in steps["step"].tolist()]
    following, begins, peeks = Following(run), [], []
    for count in (60, 100, 106, 130, 144):
        for path, events in whole.items():
            _rewrite(path, events[events["step"] <= count])
        read = int((steps["step"] <= count).sum())
        _connections(run / "ranks" / "0.tcp.counters", steps["time_ns"][:read].tolist(), again[:read])
        peeks.append(following.peek())
        begins.append(min(step.index for step in following.look().trace.steps))
    assert begins[:3] == [1, 1, 1]
    assert begins[3:] == pytest.approx([begin, begin], abs=2)
    assert peeks == [False, False, False, begin > 1, False]


def test_a_change_is_shown_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first half of the run short operations are limited by latency; then rank 1 begins late."""
    before = FakeRun(tmp_path / "before", transports=("stock",), blocks=12, transfer_ms={"stock": (1, 1)}).write()
    after = FakeRun(tmp_path / "after", transports=("stock",), blocks=12, late_ms={1: 300}).write()
    codes = [Run(before).verdict.code, Run(after).verdict.code]
    assert codes == ["LATENCY_LIMITED", "STRAGGLER"]
    whole = {
        rank: np.concatenate([_moved(half, rank, place) for place, half in enumerate((before, after))])
        for rank in (0, 1)
    }
    following, changes = Following(before, 20), []
    for count in (32, 52, 72, 92, 112, 132):
        for rank, events in whole.items():
            _rewrite(before / "ranks" / f"{rank}.train.ring", events[events["step"] <= count])
        changes.append(following.judge(following.look()))
    change = Change(codes[0], codes[1], 92)
    assert changes == [None, None, None, None, change, None]
    monkeypatch.setattr(report.Following, "judge", lambda self, run: setattr(self, "changed", change))
    assert str(change) in " ".join(frame_of(before, capsys, "--export", f"prometheus={tmp_path / 'run.prom'}").split())
    sample = f'netbottleneck_cause_change_step{{run="fake",code="{codes[1]}",before="{codes[0]}"}} {float(change.step)}'
    assert sample in (tmp_path / "run.prom").read_text().splitlines()


def _moved(folder: Path, rank: int, place: int) -> np.ndarray:
    """Events of a run of 72 steps, moved behind `place` others."""
    events = ring_file.read_slots(folder / "ranks" / f"{rank}.train.ring").events.copy()
    events["step"] += 72 * place
    events["time_ns"] += 60 * 10**9 * place
    for kind, name, by in (
        ("STEP_BEGIN", "a", 12),
        ("OP_SUBMIT", "a", 72),
        ("OP_START", "a", 72),
        ("OP_DONE", "a", 72),
    ):
        events[name][events["kind"] == ring_file.EVENTS[kind]] += by * place
    return events


def _rewrite(path: Path, events: np.ndarray) -> None:
    head = bytearray(path.read_bytes()[: ring_file.RING_HEADER_BYTES])
    TAKEN.pack_into(head, TAKEN_AT, len(events))
    path.write_bytes(bytes(head) + events.tobytes())


# Real runs.

TRAINING = """
import pathlib, sys, time
import torch
import torch.distributed as dist
import netbottleneck

until, most = pathlib.Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(most):
    optimizer.zero_grad()
    time.sleep(0.005)  # a forward pass, so that a run of seconds is one of hundreds of steps and not of thousands
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    if step == 40:
        print("on the way", flush=True)
    if step % 20 == 0:
        flag = torch.tensor(float(until.exists()))
        dist.broadcast(flag, 0)
        if flag:
            break
print("trained", flush=True)
"""


def started(ranks: Ranks, folder: Path, until: Path, **variables: str):
    values = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(folder), "NETBOTTLENECK_START_STEP": "0", **variables}
    job = ranks.start(2, TRAINING, [str(until), "1000000"], values)
    job.wait_for_line(0, "on the way")
    return job


def wait_for(true, limit_s: float = RANKS_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_all(terminal: int) -> str:
    """Return what is written to a terminal until its other end is closed."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO: it is closed
        while more := os.read(terminal, 1 << 12):
            shown += more
    os.close(terminal)
    return shown.decode()


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "netbottleneck", "top", str(folder), *options]


def test_top_follows_a_run_to_its_end_from_another_process(warm_ranks: Ranks, tmp_path: Path) -> None:
    folder, until = tmp_path / "run", tmp_path / "end"
    job = started(warm_ranks, folder, until)
    wait_for((folder / "run.json").exists)
    with subprocess.Popen(
        command(folder, "--line", "--refresh", "0.05"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as top:
        assert top.stdout is not None
        seen: list[int] = []
        for line in top.stdout:
            found = re.match(r"step (\d+): ", line)
            if found:
                seen.append(int(found[1]))
            if len(set(seen)) >= 3:
                until.touch()
        assert top.wait(RANKS_LIMIT_S) == 0
    job.wait()
    assert len(set(seen)) >= 3
    assert seen == sorted(seen)
    assert seen[-1] == max(step.index for step in Run(folder).trace.steps)


def test_on_a_terminal_the_frame_of_a_run_that_ended_stays(fake: Path) -> None:
    other, own = pty.openpty()
    with subprocess.Popen(command(fake), stdout=own, stderr=own, stdin=subprocess.DEVNULL) as top:
        os.close(own)
        shown = read_all(other)
        assert top.wait(RANKS_LIMIT_S) == 0
    before, leave, after = shown.rpartition("\x1b[?1049l")  # the alternate screen ends
    assert leave
    for screen in (before, after):
        assert "Verdict: " in screen


def test_a_killed_run_is_shown_as_killed(warm_ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    job = started(warm_ranks, folder, tmp_path / "never")
    files = [folder / "ranks" / f"{rank}.{what}" for rank in (0, 1) for what in ("meta.json", "train.ring")]
    wait_for(lambda: all(path.exists() for path in (folder / "run.json", *files)))
    for rank in (0, 1):
        job.kill(rank, signal.SIGKILL)
    job.wait(check=False)
    shown = " ".join(frame_of(folder, capsys).split())
    assert "stopped, 2 ranks" in shown
    for rank in (0, 1):
        assert f"! rank {rank} was killed: its process" in shown
    assert "part of the step" in shown


def test_rank_0_logs_its_progress_and_trains_on(warm_ranks: Ranks, tmp_path: Path) -> None:
    folder, until = tmp_path / "run", tmp_path / "end"
    variables = {"NETBOTTLENECK_PROGRESS_S": "0.1", "NETBOTTLENECK_LOG_LEVEL": "info"}
    job = started(warm_ranks, folder, until, **variables)
    errors = job.folder / "0.err"
    wait_for(lambda: re.search(r"INFO: step \d+: .*compute \d+ %", errors.read_text()))
    until.touch()
    results = job.wait()
    assert all("trained" in result.stdout for result in results)
    assert "\x1b" not in results[0].stderr
    assert "\r" not in results[0].stderr
    assert "INFO: step" not in results[1].stderr


# The progress of rank 0.


def followers(pid: int = os.getpid()) -> set[int]:
    """The processes that show the progress of a rank."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"--of={pid}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_the_line_of_a_terminal_is_replaced_within_its_width_and_cleared(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "")
    import fcntl
    import termios

    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(own, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = Progress(fake, 0.01)
        shown = b""
        while b"\r" not in shown.lstrip(b"\r"):
            shown += os.read(other, 1 << 12)
        progress.close()
        monkeypatch.undo()
    whole = shown.decode() + read_all(other)
    pieces = [piece for piece in whole.split("\r") if piece]
    assert pieces[0].startswith(f"step {STEPS}: ")
    assert max(map(len, pieces)) <= 79
    assert "\n" not in whole
    assert "\x1b" not in whole
    assert pieces[-1].strip() == ""
    assert len(pieces[-1]) == len(pieces[0])
    wait_for(lambda: not followers())


def test_a_change_of_the_cause_is_a_warning_in_the_log(fake: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(fake, 1000.0)
    with caplog.at_level("INFO", "netbottleneck"):
        for number in range(LOG_EVERY + 1):
            progress._say({"line": f"line {number}", "alarm": "it has changed" if number == 1 else ""}, number)
    progress.close()
    assert [(one.levelname, one.message) for one in caplog.records] == [
        ("INFO", "line 0"),
        ("WARNING", "it has changed"),
        ("INFO", f"line {LOG_EVERY}"),
    ]


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python", "/bin/echo"])
def test_a_process_that_fails_ends_only_the_display(
    fake: Path, python: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with caplog.at_level("INFO", "netbottleneck"):
        progress = Progress(fake, 0.01)
        progress._thread.join(RANKS_LIMIT_S)
        assert not progress._thread.is_alive()
        progress.close()
    (record,) = caplog.records
    assert "the progress of the run is" in record.message


def test_a_rank_that_may_start_no_thread_shows_nothing(
    fake: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    Progress(fake, 0.01).close()
    assert [one.message for one in caplog.records] == ["the progress of the run is not shown: can't start new thread"]


def test_the_process_prints_json_on_idle_cores_until_its_input_closes(fake: Path) -> None:
    with subprocess.Popen(
        command(fake, "--refresh", "0.01", f"--of={os.getpid()}"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        message = json.loads(process.stdout.readline())
        assert message["line"].startswith(f"step {STEPS}: ")
        assert message["alarm"] == ""
        assert message["processor_s"] > 0
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        process.stdin.close()
        assert process.wait(RANKS_LIMIT_S) == 0
        assert process.stdout.read() == b""  # nothing new was recorded


def test_the_process_ends_with_its_rank(fake: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom netbottleneck.runtime.progress import Progress\n"
        "Progress(Path(sys.argv[1]), 0.01)\nwhile True:\n    time.sleep(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(fake)]) as rank:
        wait_for(lambda: followers(rank.pid))
        rank.kill()
    wait_for(lambda: not followers(rank.pid))


def test_without_a_period_there_is_no_thread_and_no_process(plain_ranks: Ranks) -> None:
    """A session of one rank; with the default period the thread exists, and ends with the session."""
    code = """
import sys, threading
from netbottleneck import config
from netbottleneck.runtime import session
names = lambda: [thread.name for thread in threading.enumerate()]
for period, there in ((0, False), (10, True)):
    given = {"transports": "null", "directory": f"run{period}", "progress_s": period}
    opened = session.open_session(config.settings(given))
    assert ("netbottleneck-progress" in names()) is there, names()
    opened.close()
    assert "netbottleneck-progress" not in names()
"""
    plain_ranks(1, code)


def test_a_run_with_a_rank_that_ended_and_no_new_step_has_stopped(tmp_path: Path) -> None:
    """The other rank was killed on another host, where its process is not seen."""
    following = Following(FakeRun(tmp_path, blocks=4, killed=1).write())
    state, *lines = following.about(following.look())
    assert state == "stopped"
    assert any(line.startswith("no new step: ") for line in lines)
