"""Edited traces and records: any replaced value gives an answer, or one error line."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netbottleneck.cli import main
from netbottleneck.report import Run
from netbottleneck.trace import model as tr
from netbottleneck.trace.model import Step, decode, encode
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun

WHOLE = Path(__file__).parent / "data" / "synthetic.jsonl.gz"
ODD = (
    None,
    -1,
    0,
    1e30,
    10**30,
    -(10**18),
    1 << 63,
    1 << 62,
    0.5,
    "x",
    [],
    {},
    [[]],
    True,
    float("nan"),
    [None],
    [[1, 2]],
)
TURNS = 120


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to each value inside a value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*path, key))


def put(rows: list[Any], number: int, path: tuple[Any, ...], value: object) -> None:
    inside = rows[number]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value


def rows_of(path: Path) -> list[Any]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def write(path: Path, rows: list[Any]) -> str:
    with gzip.open(path, "wt", 1) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


@pytest.mark.parametrize(
    ("command", "words", "refused"),
    [("what-if", ["--workers", "4", "--link-gbps", "1"], 2), ("report", [], 2)],
)
def test_any_value_may_be_another(
    command: str, words: list[str], refused: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(4)
    rows = rows_of(WHOLE)
    ends = set()
    for _ in range(TURNS):
        damaged = json.loads(json.dumps(rows))
        number = draw.randrange(len(rows))
        path = draw.choice([path for path in places(rows[number]) if path])
        value = draw.choice(ODD)
        put(damaged, number, path, value)
        code = main([command, write(tmp_path / "a.jsonl.gz", damaged), *words])
        ends.add(code)
        output = capsys.readouterr().err
        assert output.count("\n") == (1 if code == refused else 0), (number + 1, path, value, output)
    assert ends == {0, refused}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("step", ("transport",), "3"),
        ("step", ("rank",), -7),
        ("step", ("modules", 0, 0), -7),
        ("step", ("grad_ready", 0, 0), -7),
        ("collective", ("bucket",), -7),
        ("collective", ("bucket",), 4000),
        ("bucket", ("parameters", 0), -7),
        ("rank", ("rank",), -7),
    ],
)
def test_a_report_leaves_out_what_it_cannot_relate(
    kind: str, path: tuple[Any, ...], value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(WHOLE)
    own = [at for at, row in enumerate(rows) if kind in row and row[kind].get(path[0]) not in ([], None)]
    put(rows, own[len(own) // 3], (kind, *path), value)
    assert main(["report", write(tmp_path / "a.jsonl.gz", rows)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("size",), None, "missing 1 required positional argument: 'size'"),
        (("size",), 1 << 62, "a run of 4611686018427387904 ranks: must be from 0 to"),
        (("size",), [], "'[]' where int must be"),
        (("version",), 99, "a run record of version 99; this netbottleneck reads version 1"),
        (("arms",), None, "missing 1 required positional argument: 'arms'"),
        (("arms",), True, "'bool' object is not iterable"),
        (("arms", 0), [], "'[]' where str must be"),
        (("network",), [1], "'list' object has no attribute 'items'"),
        (("network", "flow_bps"), 3, "'int' object is not iterable"),
        (("notes",), 3, "'int' object is not iterable"),
    ],
)
def test_a_run_file_of_another_shape_is_named(
    path: tuple[Any, ...], value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(FakeRun(tmp_path, blocks=2).write() / "run.json", path, value)
    assert main(["report", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert (output.count("\n"), f"{tmp_path}/run.json: " in output, message in output) == (1, True, True), output


def edited(file: Path, path: tuple[Any, ...], value: object) -> None:
    """Replace one value of a JSON file."""
    record = [json.loads(file.read_text())]
    put(record, 0, path, value)
    file.write_text(json.dumps(record[0]))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("transports",), []),
        (("transports", "ofi"), []),
        (("transports", "ofi", "probe", 0), 3),
        (("transports", "ofi", "clock_offset_ns"), "x"),
        (("parameters", 0, "name"), []),
        (("parameters", 0, "bytes"), 1 << 63),
        (("buckets",), -1),
        (("buckets",), [[]]),
        (("buckets", 0, "key"), None),
        (("hostname",), 3),
    ],
)
def test_a_description_of_another_shape_is_left_out_with_a_note(
    path: tuple[Any, ...], value: object, tmp_path: Path
) -> None:
    file = FakeRun(tmp_path, blocks=2).write() / "ranks" / "0.meta.json"
    whole = Run(tmp_path)
    edited(file, path, value)
    run = Run(tmp_path)
    assert [note for note in run.trace.notes if str(file) in note]
    assert run.trace.parameters == whole.trace.parameters  # rank 1 describes the same model
    assert len(run.trace.steps) == len(whole.trace.steps)
    assert run.text


@pytest.mark.parametrize("name", ["command", "model", "notes", "network", "started_wall_ns", "id"])
def test_a_run_file_may_have_a_null(name: str, tmp_path: Path) -> None:
    edited(FakeRun(tmp_path, blocks=2).write() / "run.json", (name,), None)
    assert Run(tmp_path).text


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("step", ("begin_ns",), None, "nothing where int must be"),
        ("step", ("optimizer", 0, 1), None, "nothing where int must be"),
        ("step", ("grad_ready", 0), None, "line"),
        ("step", ("grad_ready", 0, 0), 4000, "of rank 0 has a gradient 4000; there are 4"),
        ("step", ("modules",), [[-7, 5, 6]], "of rank 0 has a module -7; there are"),
        ("step", ("grad_ready", 0, 1), 1 << 62, "4611686018427387904 ns is out of range for a time of this run"),
        ("collective", ("submit_ns",), None, "nothing where int must be"),
        ("collective", ("submit_ns",), 10**30, "where a number of 64 bits must be"),
        ("collective", ("done_ns",), -(1 << 62), "ns is out of range for a time of this run"),
        ("rank", ("clock",), None, "nothing where Clock must be"),
    ],
)
def test_an_invalid_value_is_named(
    kind: str, path: tuple[Any, ...], value: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(WHOLE)
    number = next(at for at, row in enumerate(rows) if kind in row and row[kind].get("grad_ready", True))
    put(rows, number, (kind, *path), value)
    name = write(tmp_path / "a.jsonl.gz", rows)
    assert main(["what-if", name]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert name in captured.err
    assert message in captured.err


@pytest.mark.parametrize("name", ["empty.jsonl.gz", "empty.bk.log", "packed.jsonl.gz", "head.jsonl.gz"])
def test_an_empty_value_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(b"")
    if name.startswith("packed"):
        path.write_bytes(gzip.compress(b""))
    if name.startswith("head"):
        write(path, rows_of(WHOLE)[:1])
    assert main(["what-if", str(path), "--step-s", "1"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert str(path) in captured.err


def test_null_is_accepted_if_the_field_is_optional() -> None:
    step = Step(0, 1, 2, Arm("tcp"), 5, 6, plan=None, cpu_ns=None)
    assert decode(Step, json.loads(encode(step))) == step
    assert tr.read(WHOLE).size == 2


def test_a_damaged_trace_of_one_rank_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Run(FakeRun(tmp_path, size=3, blocks=6).write())
    whole.write_all()
    ranks = tmp_path / "ranks"
    for path in ranks.glob("*.ring"):
        path.unlink()
    (ranks / "copy.jsonl.gz").write_bytes(b"")
    damaged = ranks / "1.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    run = Run(tmp_path)
    assert {step.rank for step in run.trace.steps} == {0, 2}
    (note,) = (note for note in run.trace.notes if note.startswith("left out: "))
    assert str(damaged) in note
    assert "no record of rank 1." in run.text
    for rank in (0, 2):
        (ranks / f"{rank}.jsonl.gz").write_bytes(b"")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (error.count("\n"), str(damaged) in error) == (1, True)
