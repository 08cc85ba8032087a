"""Streams of operations on devices, without a device: what is entered, in which order, and what ends a future."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from netbottleneck.torch import handles  # noqa: E402
from netbottleneck.torch.backend.operations import Operation, Progress  # noqa: E402


def test_a_stream_is_entered_inside_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(name: str) -> Any:
        @contextlib.contextmanager
        def context(value: Any) -> Iterator[None]:
            seen.append(f"{name} {value.device if name == 'stream' else value}")
            yield
            seen.append(f"end of {name}")

        return context

    monkeypatch.setattr(torch.cuda, "device", noted("device"))
    monkeypatch.setattr(torch.cuda, "stream", noted("stream"))
    with handles._entered(SimpleNamespace(device="cuda:1")):
        seen.append("work")
    assert seen == ["device cuda:1", "stream cuda:1", "work", "end of stream", "end of device"]


class Lost(Operation):
    """An operation whose device fails."""

    def over(self, limit_s: float) -> bool:
        if not self.is_over:
            raise RuntimeError("the device is lost")
        return True


def test_a_failure_of_the_device_completes_the_futures() -> None:
    progress, done = Progress(), [threading.Event(), threading.Event()]
    lost, healthy = Lost(), Operation()
    healthy.run(iter(()))  # type: ignore[arg-type]
    progress.add(lost, done[0].set)
    progress.add(healthy, done[1].set)
    assert all(each.wait(30) for each in done)
    assert str(lost.failure) == "the device is lost"
    assert lost.is_over
    assert healthy.failure is None
    progress.close()


class Awaited(Operation):
    """An operation that is over once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def over(self, limit_s: float) -> bool:
        return self._event.wait(limit_s)


@pytest.mark.parametrize("together", [True, False])
def test_a_callback_may_wait_for_an_earlier_future(*, together: bool) -> None:
    """The other operation is over together with the callback's own one, or only once the callback runs."""
    progress, done = Progress(), [threading.Event() for _ in range(3)]
    begun, first = threading.Event(), threading.Event()

    def wait_for_others() -> None:
        begun.set()
        if done[1].wait(30) and done[2].wait(30):
            done[0].set()

    progress.add(Awaited(first), wait_for_others)
    for each in done[1:]:
        progress.add(Awaited(first if together else begun), each.set)
    first.set()
    assert all(each.wait(60) for each in done)
    progress.close()
