"""`netbottleneck calibrate`: profile files that other commands read, and no files for bad input."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import asleep
import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.cli import calibrate
from netbottleneck.launch import connect
from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.ring_file import EVENTS, read_ring

core = connect.core()


def run(*arguments: str) -> int:
    """Run the command; argparse's exits are codes, too."""
    try:
        return calibrate.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_a_model_is_measured_in_the_order_of_readiness_with_its_spread(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from netbottleneck.bench import models

    folder = tmp_path / "p"
    assert run("thin_resnet", "--passes", "3", "--batch", "2", "--no-tables", "--directory", str(folder)) == 0
    named = [name for name, _ in models.shapes("thin_resnet")]
    with (folder / "thin_resnet.layers.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert sorted(row["tensor"] for row in rows) == sorted(named)
    assert rows[0]["tensor"] == "fc.bias"  # the last layer's gradients come first
    times = [float(row["ready_s"]) for row in rows]
    assert times == sorted(times)
    assert times[0] > 0
    for row in rows:
        assert float(row["ready_p10_s"]) <= float(row["ready_s"]) <= float(row["ready_p90_s"])
        assert (row["passes"], row["how"]) == ("3", "measured")
    log = layer_log.read(folder / "thin_resnet.bk.log")
    assert [size for _, size in log.tensors] == [int(row["bytes"]) for row in rows]
    assert log.backward_s == pytest.approx(times[-1], abs=1e-6)
    trace = tr.read(folder / "thin_resnet.jsonl.gz")
    assert trace.origin == "measured"
    assert [len(step.grad_ready) for step in trace.steps] == [len(named)] * 3
    for step in trace.steps:
        assert step.forward[0][1] <= step.grad_ready[0][1] <= step.optimizer[0][0] <= step.end_ns
    record = json.loads((folder / "profile.json").read_text())["profile"]
    assert (record["how"], record["tensors"]) == ("measured", len(named))
    assert f"{torch.get_num_threads()} threads" in record["note"]


def test_a_model_with_several_outputs_is_measured_with_all_its_gradients(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "p"
    assert run("thin_bert", "--passes", "2", "--batch", "2", "--no-tables", "--directory", str(folder)) == 0
    trace = tr.read(folder / "thin_bert.jsonl.gz")
    assert [len(step.grad_ready) for step in trace.steps] == [len(trace.parameters)] * 2


def test_a_large_model_is_modelled_by_its_exact_tensors_and_labelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "p"
    assert run("resnet50", "--modelled", "100", "200", "--no-tables", "--directory", str(folder)) == 0
    assert "modelled" in capsys.readouterr().out
    log = layer_log.read(folder / "resnet50.bk.log")
    assert "modelled" in log.name
    assert (len(log.tensors), log.bytes) == (161, 4 * 25557032)
    assert log.backward_s == pytest.approx(0.2)
    assert log.batch_s == pytest.approx(0.3)
    trace = tr.read(folder / "resnet50.jsonl.gz")
    assert trace.origin == "simulated"
    assert "not measured" in trace.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_model",), "no_such_model"),
        (("resnet50", "--modelled", "-1", "5"), "--modelled: a forward pass of -1 ms and a backward pass of 5 ms"),
        (("resnet50", "--modelled", "0", "1e-7"), "at least 0 and 1e-06, together"),
        (("resnet50", "--modelled", "1", "0"), "are not valid"),
        (("resnet50", "--modelled", "1", "inf"), "are not valid"),
        (("resnet50", "--modelled", "nan", "1"), "are not valid"),
        (("resnet50", "--modelled", "1e300", "5"), "together at most 2.30584e+12 ms"),
        (("resnet50", "--modelled", "1.3e12", "1.3e12"), "together at most 2.30584e+12 ms"),
        (("--modelled", "1", "1"), "--modelled needs a model"),
        (("--batch", "8"), "--batch needs a model"),
        (("--passes", "10"), "--passes needs a model"),
        (("--device", "cpu"), "--device needs a model"),
        (("resnet50", "--modelled", "1", "1", "--batch", "8"), "--batch has no effect with --modelled"),
        (("resnet50", "--modelled", "1", "1", "--passes", "10"), "--passes has no effect with --modelled"),
        (("resnet50", "--modelled", "1", "1", "--device", "cpu"), "--device has no effect with --modelled"),
        (("resnet50", "--most-bytes", "40", "--no-tables"), "--most-bytes has no effect with --no-tables"),
        (("thin_resnet", "--passes", "1"), "from 2"),
        (("thin_resnet", "--batch", "x"), "from 1"),
        (("thin_resnet", "--device", "cuda:99"), "--device cuda:99"),
        (("thin_resnet", "--device", "tpu"), "--device tpu"),
        (("--no-tables",), "nothing to do"),
        (("--most-bytes", "39"), "from 40"),
    ],
)
def test_bad_input_gives_one_error_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "p"
    assert run(*arguments, "--directory", str(folder)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not folder.exists()


def test_a_folder_that_cannot_be_created_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert run("--directory", str(tmp_path / "file" / "p")) == 2
    assert f"{tmp_path / 'file'} is not a folder: name another folder" in capsys.readouterr().err


def test_an_interrupt_of_the_tables_keeps_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "tables", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("resnet18", "--modelled", "1", "2", "--directory", str(tmp_path / "p"))
    assert json.loads((tmp_path / "p" / "profile.json").read_text())["profile"]["model"] == "resnet18"


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert run("--directory", str(tmp_path)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_tables_of_this_host_are_readable_as_layer_log_tables(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    assert run("--most-bytes", "100000", "--directory", str(folder)) == 0
    record = json.loads((folder / "profile.json").read_text())
    for name in ("vector_add", "vector_add_cached", "memcpy", "memcpy_cached"):
        table = layer_log.read_table(folder / f"{name}.csv")
        assert table.bytes == tuple(size for size in calibrate.SIZES if size <= 100000)
        assert min(table.seconds) > 0
        for row in record["tables"][name]:
            assert row["p10_s"] <= row["seconds"] <= row["p90_s"]
    assert record["host"]["caches"]


def test_tables_that_do_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "most_bytes", lambda: 39)
    with pytest.raises(ValueError, match="smallest size is 40"):
        calibrate.tables()


def test_calls_use_the_pieces_in_turn() -> None:
    into, source = core.Arena(64), core.Arena(64)
    memoryview(source)[:] = bytes(range(64))
    ((calls, ns),) = core.copy_times(into, source, 16, 1, 0)
    assert calls == 1
    assert ns >= 0
    assert bytes(memoryview(into)) == bytes(range(32)) + bytes(32)  # a call to warm up, and one that counts


def test_additions_are_performed() -> None:
    import numpy as np

    into, source = core.Arena(8), core.Arena(8)
    np.frombuffer(source, np.float32)[:] = [1, 2]
    pairs = core.reduce_times(into, source, 8, core.FLOAT32, 3, 1000)
    assert len(pairs) == 3
    assert all(ns >= 1000 for _, ns in pairs)
    one, two = np.frombuffer(into, np.float32)
    assert one > sum(calls for calls, _ in pairs)
    assert two == 2 * one


@pytest.mark.parametrize(
    ("nbytes", "samples", "least_ns"), [(0, 1, 0), (-4, 1, 0), (6, 1, 0), (128, 1, 0), (8, 0, 0), (8, 1, -1)]
)
def test_what_cannot_be_measured_is_refused(nbytes: int, samples: int, least_ns: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        core.reduce_times(core.Arena(64), core.Arena(64), nbytes, core.FLOAT32, samples, least_ns)
    with pytest.raises(ValueError, match="must be"):
        core.copy_times(core.Arena(64), core.Arena(4), 8)


def stamped(path: Path) -> list[tuple[int, int]]:
    """Return (key, time) of each gradient in a ring."""
    rows = read_ring(path).events
    return [(int(row["key"]), int(row["time_ns"])) for row in rows if row["kind"] == EVENTS["GRAD_READY"]]


@pytest.mark.parametrize("spin", [False, True])
def test_timestamps_are_ordered_and_never_early(tmp_path: Path, spin: bool) -> None:
    path = tmp_path / "0.train.ring"
    recorder = core.Recorder(str(path), 100, 0)
    begin = core.now_ns()
    times = [begin - 5, *(begin + 3_000_000 * k for k in range(1, 5)), begin]  # the last is late already
    core.stamp_at(recorder, EVENTS["GRAD_READY"], times, [9, 1, 2, 3, 4, 8], spin=spin)
    recorder.close()
    found = stamped(path)
    assert [key for key, _ in found] == [9, 1, 2, 3, 4, 8]
    assert all(at >= due for (_, at), due in zip(found, times, strict=True))


def test_a_wait_for_a_timestamp_can_be_interrupted(tmp_path: Path) -> None:
    recorder = core.Recorder(str(tmp_path / "0.train.ring"), 10, 0)
    until = core.now_ns() + int(RANKS_LIMIT_S * 1e9)
    with asleep.signalled(signal.SIGINT, RANKS_LIMIT_S) as begin, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        begin()
        core.stamp_at(recorder, EVENTS["GRAD_READY"], [until], [0])
    assert core.now_ns() < until


def test_an_invalid_schedule_is_refused(tmp_path: Path) -> None:
    recorder = core.Recorder(str(tmp_path / "0.train.ring"), 10, 0)
    for kind, times, keys in ((5, [1], []), (0, [1], [1]), (999, [1], [1])):
        with pytest.raises(ValueError, match=r"must be|must have the same length"):
            core.stamp_at(recorder, kind, times, keys)
    with pytest.raises(TypeError):
        core.stamp_at(None, 5, [], [])
    recorder.close()
    with pytest.raises(ValueError, match="closed"):
        core.stamp_at(recorder, 5, [], [])


def test_a_cache_whose_size_the_kernel_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_text

    def without_size(path: Path, *args: str, **kwargs: str) -> str:
        if path.name == "size" and "cpu0" in path.parts:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", without_size)
    assert calibrate.host_facts()["caches"] == []
    assert calibrate.last_cache_bytes() == 32 << 20
