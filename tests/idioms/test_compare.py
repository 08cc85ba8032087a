"""The comparison of idioms: what is wrong is reported, by bits and beyond the bound, and what is equal is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness.compare import Log, apart, digest, sum_bound  # noqa: E402 - found by the path above
from harness.modes import MODES, UNTOUCHED  # noqa: E402
from harness.pairs import Outcome, run_mode  # noqa: E402
from harness.table import Table  # noqa: E402
from harness.watch import Watch  # noqa: E402

Change = Callable[[Any], None]


def run(reference: list[Log] | None, change: Change | None = None, *, rank: int = 0, ranks: int = 1) -> Watch:
    """Train two steps of one layer; `change` is called with the model between the backward pass and the look."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    watch = Watch(rank, reference, bounded=ranks > 1 and reference is not None, sums=ranks > 1 and reference is None)
    watch.sum_gradients(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.full((4, 3), float(step + 1))).square().mean()
        loss.backward()
        if change is not None:
            change(model)
        watch.look("backward", model)
        optimizer.step()
        watch.step(model=model, optimizer=optimizer, loss=loss)
    watch.end()
    return watch


def test_the_same_training_is_equal() -> None:
    assert run([run(None).log]).differences == []


def scale(model: Any) -> None:
    model.weight.grad.mul_(1 + 2**-20)


def test_a_scaled_gradient_differs() -> None:
    found = run([run(None).log], scale).differences
    assert any("look backward" in line and "weight" in line for line in found)


def test_one_bit_of_one_element_differs() -> None:
    def flip(model: Any) -> None:
        model.bias.grad.view(torch.int32)[1] ^= 1

    assert any("1 of 2 elements" in line for line in run([run(None).log], flip).differences)


def test_a_gradient_that_is_missing_differs() -> None:
    def drop(model: Any) -> None:
        model.bias.grad = None

    assert any("bias" in line for line in run([run(None).log], drop).differences)


def test_random_numbers_drawn_beside_the_training_differ() -> None:
    def draw(_model: Any) -> None:
        torch.rand(1)

    assert any("random torch" in line for line in run([run(None).log], draw).differences)


def test_a_run_with_fewer_looks_differs() -> None:
    longer = run(None).log
    longer.events.append(longer.events[-1])
    assert any("4 records, untouched 5" in line for line in run([longer]).differences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_any_nan_equals_any_nan_and_no_number(dtype: Any) -> None:
    number, nan = torch.zeros(2, dtype=dtype), torch.full((2,), float("nan"), dtype=dtype)
    if dtype.is_complex:
        nan = torch.complex(nan.real, nan.real)
    assert digest(nan) == digest(-nan)
    assert digest(nan) != digest(number)


def test_nans_of_other_bits_are_equal() -> None:
    other = torch.tensor([0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert digest(other) == digest(torch.full((2,), float("nan")))


def test_zeros_of_other_sign_differ() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_values_of_another_type_or_shape_differ() -> None:
    ones = torch.ones(4)
    assert len({digest(each) for each in (ones, ones.double(), ones.reshape(2, 2), ones.to_sparse())}) == 4


def test_sparse_values_are_compared_as_coalesced() -> None:
    once = torch.sparse_coo_tensor([[1]], [3.0], (4,))
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (4,))
    assert digest(once) == digest(twice)


def by(factor: float) -> Change:
    def change(model: Any) -> None:
        model.weight.grad.mul_(factor)

    return change


def test_a_gradient_within_the_bound_is_taken_and_training_goes_on_from_the_untouched_one() -> None:
    logs = [run(None, rank=rank, ranks=2).log for rank in range(2)]
    assert run(logs, by(1 + 2**-23), ranks=2).differences == []


def test_a_gradient_beyond_the_bound_is_wrong() -> None:
    logs = [run(None, rank=rank, ranks=2).log for rank in range(2)]
    found = run(logs, by(1 + 2**-20), ranks=2).differences
    assert any("times the bound" in line for line in found)


def test_the_bound_is_twice_what_one_average_may_be_off() -> None:
    parts = [torch.tensor([1.0], dtype=torch.float64)] * 3
    assert sum_bound(parts, torch.float32).item() == 2 * 3 * 2.0**-24
    assert apart(torch.tensor([1.0]), torch.tensor([1 + 2.0**-20]), sum_bound(parts, torch.float32)) > 1
    assert apart(torch.tensor([float("nan")]), torch.tensor([1.0]), torch.tensor([9.0])) == float("inf")


def test_a_silent_mode_fails_and_one_that_says_why_is_left_alone() -> None:
    table = Table({"plain": ("ddp", "plain")}, may_be_left_alone={("plain", "tcp")})
    table.add(("plain", "small"), 2, "tcp", Outcome("equal", lack="no model was measured"))
    assert table.failed == 1
    table.add(("plain", "small"), 2, "tcp", Outcome("equal", notes=["WARNING: it is left alone: why"], lack="none"))
    assert table.failed == 0
    assert "left alone" in table.markdown()


def test_a_model_that_is_left_alone_fails_unless_its_idiom_and_mode_are_listed() -> None:
    table = Table({"plain": ("ddp", "plain")}, may_be_left_alone={("plain", "tcp"), ("gan", "observe")})
    table.add(("plain", "small"), 2, "observe", Outcome("equal", notes=["WARNING: it is left alone: why"]))
    assert table.failed == 1
    assert table.last_line() == "0 passed, 1 failed"


@pytest.fixture
def untouched(tmp_path: Path) -> Path:
    outcomes: list[Outcome] = []
    items = [("plain", "small")]
    run_mode(tmp_path, MODES[UNTOUCHED], 2, items, deadline_s=100, done=lambda _, outcome: outcomes.append(outcome))
    assert [outcome.verdict for outcome in outcomes] == ["equal"]
    return tmp_path


@pytest.mark.timeout(120)
def test_real_ranks_that_differ_are_reported_wrong(untouched: Path) -> None:
    path = untouched / "reference-2" / "plain-small-1.pt"
    log = torch.load(path, weights_only=False)
    event = log.events[0]
    key = next(iter(event.values))
    event.values[key] = log.keep(log.store[event.values[key]] * 2)
    torch.save(log, path)
    outcomes: list[Outcome] = []
    items = [("plain", "small")]
    run_mode(untouched, MODES["observe"], 2, items, deadline_s=100, done=lambda _, outcome: outcomes.append(outcome))
    assert outcomes[0].verdict == "WRONG"
    assert all(line.startswith("rank 1: look backward (record 0)") for line in outcomes[0].differences)


@pytest.mark.timeout(120)
def test_a_rank_that_dies_is_a_crash_and_the_next_idiom_runs(untouched: Path) -> None:
    gone = untouched / "reference-2" / "clip_value-small-0.pt"
    assert not gone.exists()  # so that reading it raises in every rank
    seen: list[tuple[str, str]] = []
    items = [("clip_value", "small"), ("plain", "small")]
    run_mode(untouched, MODES["observe"], 2, items, deadline_s=100, done=lambda i, o: seen.append((i[0], o.verdict)))
    assert seen == [("clip_value", "CRASH"), ("plain", "equal")]


HANGS = """
import threading

def train(context):
    threading.Event().wait(600 if context.rank else 0)
"""


@pytest.mark.timeout(120)
def test_a_rank_that_waits_for_ever_is_a_hang_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcomes: list[Outcome] = []
    items = [("hangs", "small")]
    run_mode(tmp_path, MODES[UNTOUCHED], 2, items, deadline_s=2, done=lambda _, outcome: outcomes.append(outcome))
    assert outcomes[0].verdict == "HANG"
    assert any(line.startswith("rank 1: at wait") and "train (hangs.py" in line for line in outcomes[0].differences)


def test_names_that_are_unknown_are_refused() -> None:
    for given, found in (("--only=nothing", "no such idiom"), ("--modes=nothing", "must be of")):
        ended = subprocess.run(
            [sys.executable, str(HERE / "run.py"), given], capture_output=True, text=True, check=False, timeout=100
        )
        assert ended.returncode == 1
        assert found in ended.stderr


def test_every_idiom_imports_nothing_of_the_package() -> None:
    found = [path for path in HERE.glob("*.py") if path.name not in ("run.py", "test_compare.py")]
    assert len(found) >= 60
    assert not [path.name for path in found if "import netbottleneck" in path.read_text(encoding="utf-8")]
