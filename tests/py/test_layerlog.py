"""Layer logs and tables: they survive their files, and invalid ones are refused with file and line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netbottleneck.trace import layer_log
from netbottleneck.trace import model as tr
from netbottleneck.trace.layer_log import LayerLog, VecTable
from netbottleneck.trace.transports import SINGLE

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
HEAD = "a comment\n1\n2\n"

waits = st.floats(0, 1e3, allow_subnormal=False)
tensors = st.lists(st.tuples(waits, st.integers(0, 2**40)), min_size=1, max_size=8).map(tuple)


def file(folder: Path, text: str | bytes, name: str = "some.bk.log") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_log_is_microseconds_and_bytes_after_three_lines(tmp_path: Path) -> None:
    log = layer_log.read(file(tmp_path, HEAD + "552.5,4000\n0.0,8192000\n"))
    assert log == LayerLog("some", ((552.5 / 1e6, 4000), (0.0, 8192000)))
    assert (log.bytes, log.backward_s) == (8196000, 552.5 / 1e6)


def test_batches_follow_each_other(tmp_path: Path) -> None:
    log = layer_log.read(file(tmp_path, "c\r\n2\r\n2\r\n1,1\r\n2,2\r\n3,3\r\n4,4\r\n\r\n"))
    assert log.batches == (((1e-6, 1), (2e-6, 2)), ((3e-6, 3), (4e-6, 4)))


@settings(max_examples=60, deadline=None)
@given(tensors, st.none() | st.floats(1e-6, 1e6), st.text("abc, =;_ü", max_size=9).map(str.strip))
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: layer_log.Tensors, step_s: float | None, name: str
) -> None:
    path = tmp_path_factory.mktemp("log") / "model.bk.log"
    layer_log.write(path, LayerLog(name, rows, step_s, (rows,)))
    again = layer_log.read(path)
    assert (again.name, again.batch_s) == (name or "model", step_s)
    for batch in again.batches:
        assert [size for _, size in batch] == [size for _, size in rows]
        for (got, _), (was, _) in zip(batch, rows, strict=True):
            assert abs(got - was) <= math.ulp(was)
    layer_log.write(path, again)
    assert layer_log.read(path) == again


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    table = VecTable((0, 40, 671088640), (1.04448e-05, 9.7792e-06, 0.00243368))
    layer_log.write_table(tmp_path / "add.log", table)
    assert layer_log.read_table(tmp_path / "add.log") == table


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "the file ends where the comment should be"),
        ("a comment\n", 2, "the file ends where the number of batches should be"),
        ("c\none\n2\n", 2, "number of batches 'one': must be a whole number"),
        ("c\n0\n2\n", 2, "0 batches: must be 1 or more"),
        ("c\n1\n-2\n", 3, "-2 tensors: must be 1 or more"),
        ("c\n1\n2.5\n", 3, "number of tensors '2.5'"),
        (HEAD + "1,1\n", 5, "the file ends where tensor 2 of 2 of batch 1 of 1 should be"),
        (HEAD + "1,1\n2,21", 5, "the last line has no end"),
        (HEAD + "1,1\n2,2\n3,3\n", 6, "'3,3' after the last of 1 x 2 tensors"),
        (HEAD + "1,1\n2,2\n3,", 6, "the last line has no end"),
        (HEAD + "nan,1\n2,2\n", 4, "wait nan: must be a finite number, 0 or more"),
        (HEAD + "1,1\ninf,2\n", 5, "wait inf"),
        (HEAD + "1,1\n-0.5,2\n", 5, "wait -0.5"),
        (HEAD + "1,1\n2,-2\n", 5, "size -2: must be 0 or more"),
        (HEAD + "1,1\n1e30,2\n", 5, "wait 1e+30: must be at most 2.30584e+15"),
        (HEAD + "1,1\n10,99999999999999999999\n", 5, "size 99999999999999999999: must be at most 1125899906842624"),
        (HEAD + f"1,{1 << 50}\n1,1\n", 5, f"sum of the sizes {(1 << 50) + 1}: must be at most"),
        (HEAD + "2e15,1\n2e15,1\n", 5, "sum of the waits 4000000000.0: must be at most"),
        (layer_log.MARK + "; step_s=1e300; name=x\n1\n1\n1,1\n", 1, "step_s 1e+300: must be at most"),
        (HEAD + "1,1\n2,nan\n", 5, "size 'nan': must be a whole number"),
        (HEAD + "1,1\n2\n", 5, "'2': must be wait_us,bytes"),
        (HEAD + "1,1\n1,2,3\n", 5, "'1,2,3': must be wait_us,bytes"),
        (HEAD.encode() + b"1,1\n\xff\xfe,2\n", 5, "no text"),
        ("c\n1\n999999999999\n1,1\n", 5, "the file ends where tensor 2 of 999999999999"),
        (layer_log.MARK + "; step_s=-1; name=x\n1\n1\n1,1\n", 1, "step_s -1.0"),
    ],
)
def test_a_damaged_log_is_refused_with_file_and_line(tmp_path: Path, text: str | bytes, line: int, what: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ValueError, match="line") as refused:
        layer_log.read(path)
    assert str(refused.value).startswith(f"{path}, line {line}: {what}")


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "the file ends where bytes,seconds should be"),
        ("40,1e-5\n40,1e-5\n", 2, "size 40: sizes must be 0 or more and rise"),
        ("40,1e-5\n20,1e-5\n", 2, "size 20"),
        ("-1,1e-5\n", 1, "size -1"),
        (f"{1 << 63},1e-5\n", 1, f"size {1 << 63}: must be at most"),
        ("40,1e30\n", 1, "time 1e+30: must be at most"),
        ("40,nan\n", 1, "time nan: must be a finite number"),
        ("40,-1e-5\n", 1, "time -1e-05"),
        ("40;1e-5\n", 1, "'40;1e-5': must be bytes,seconds"),
        ("40,1e-5\n80,1.0", 2, "the last line has no end"),
        ("\n40,1e-5\n80,1.0\n", 1, "'': must be bytes,seconds"),
        ("40,1e-5\n\n80,x\n", 3, "time 'x': must be a number"),
    ],
)
def test_a_damaged_table_is_refused_with_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ValueError, match="line") as refused:
        layer_log.read_table(path)
    assert str(refused.value).startswith(f"{path}, line {line}: {what}")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerLog("m", ()),
        lambda: LayerLog("m", ((-1.0, 1),)),
        lambda: LayerLog("m", ((1.0, -1),)),
        lambda: LayerLog("m", ((1.0, 1),), 0.0),
        lambda: LayerLog("m", ((1.0, 1),), math.nan),
        lambda: LayerLog("m", ((1.0, 1),), None, ((),)),
        lambda: VecTable((), ()),
        lambda: VecTable((1,), (1.0, 2.0)),
        lambda: VecTable((2, 1), (1.0, 2.0)),
        lambda: VecTable((1,), (math.inf,)),
    ],
)
def test_invalid_values_are_refused_from_any_source(make: object) -> None:
    with pytest.raises(ValueError, match=r"must be|one or more|without a tensor"):
        make()  # type: ignore[operator]


def test_a_log_survives_conversion_to_a_trace_and_back() -> None:
    log = LayerLog("m", ((0.001, 40), (0.0, 80), (0.0025, 120)), 0.010)
    made = layer_log.to_trace(log)
    (step,) = made.steps
    assert (step.begin_ns, step.end_ns, step.forward) == (0, 10_000_000, ((0, 6_500_000),))
    assert step.grad_ready == ((2, 7_500_000), (1, 7_500_000), (0, 10_000_000))
    assert [one.bytes for one in made.parameters] == [120, 80, 40]
    again = layer_log.of_trace(made)
    assert (again.name, again.tensors) == (log.name, log.tensors)
    assert layer_log.to_trace(LayerLog("m", log.tensors)).steps[0].end_ns == 3_500_000
    with pytest.raises(ValueError, match=r"a step of 0\.003 s"):
        layer_log.to_trace(LayerLog("m", log.tensors, 0.003))


def test_a_trace_has_each_gradients_median_over_the_batches_of_one_shape() -> None:
    first, second, third, other = (
        ((0.001, 40), (0.002, 80)),
        ((0.003, 40), (0.004, 80)),
        ((0.002, 40), (0.100, 80)),
        ((0.009, 80), (0.009, 40)),
    )
    whole = layer_log.to_trace(LayerLog("m", first, 0.010, (second, other)))
    assert whole.steps[0].forward == ((0, 5_000_000),)
    assert whole.steps[0].grad_ready == ((1, 7_000_000), (0, 10_000_000))
    assert [note.partition(" of the")[0] for note in whole.notes] == [
        "each gradient's time is its median over 2 batches",
        "1 of 3 batches",
    ]
    assert layer_log.to_trace(LayerLog("m", first, None, (second, third))).steps[0].end_ns == 7_000_000
    assert layer_log.to_trace(LayerLog("m", first)).notes == ()


def test_the_backward_pass_of_a_run_has_every_gradient_once_in_order_of_readiness() -> None:
    run = tr.read(TRACE)
    log = layer_log.of_trace(run)
    assert len(log.tensors) == len(run.parameters) == 161
    assert log.bytes == sum(one.bytes for one in run.parameters)
    assert log.tensors[0][1] in (run.parameters[-1].bytes, run.parameters[-2].bytes)
    lengths = [step.grad_ready[-1][1] - step.forward[-1][1] for step in run.steps if step.grad_ready]
    assert min(lengths) <= log.backward_s * 1e9 <= max(lengths)


def test_the_backward_pass_begins_after_the_last_forward_pass_before_its_last_gradient() -> None:
    """A pass after it, as for the accuracy, has no backward pass; the first of two has one whose gradients add up."""
    step = tr.Step(
        0,
        0,
        0,
        SINGLE,
        0,
        90,
        forward=((0, 10), (20, 30), (60, 70)),
        grad_ready=((1, 42), (0, 55)),
        optimizer=((80, 85),),
    )
    parameters = tuple(tr.Parameter(f"p{at}", 4 << at, "float32") for at in range(2))
    log = layer_log.of_trace(tr.Trace("r", 1, (SINGLE,), parameters=parameters, steps=(step,)))
    assert log.tensors == ((12e-9, 8), (13e-9, 4))
    assert step.backward_begin_ns == 30
    for passes, begin_ns in (((), 0), (((60, 70),), 0), (((0, 10), (5, 20)), 20)):
        assert replace(step, forward=passes).backward_begin_ns == begin_ns


def test_a_run_without_gradient_times_is_refused() -> None:
    with pytest.raises(ValueError, match="no step records when its gradients were ready"):
        layer_log.of_trace(tr.Trace("x", 1, ()))
