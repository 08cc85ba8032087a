"""A double of Horovod's C library for torch, on files in a folder that HOROVOD_DOUBLE names.

As the real one: a function for each type of tensor, handles from 0 upwards, operations that go on while the caller does
something else and find each other by name, ValueError for a name that is in use, RuntimeError for what failed.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch

AVERAGE = 0
TYPES = ("Float", "Double", "Half", "Int", "Long")
LIMIT_S = 10.0


class Library:
    """Stands in for `horovod.torch.mpi_ops.mpi_lib`."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # the names of the functions that were called
        self._folder = Path(os.environ["HOROVOD_DOUBLE"])
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._under_way: dict[int, tuple[threading.Thread, list[BaseException]]] = {}
        self._names: set[str] = set()
        self._rounds: dict[str, int] = {}
        self._next = 0
        for kind in TYPES:
            setattr(self, f"horovod_torch_allreduce_async_torch_{kind}Tensor", self._allreduce)
            setattr(self, f"horovod_torch_grouped_allreduce_async_torch_{kind}Tensor", self._grouped)
            setattr(self, f"horovod_torch_broadcast_async_torch_{kind}Tensor", self._broadcast)

    def horovod_torch_poll(self, handle: int) -> int:
        return int(not self._under_way[handle][0].is_alive())

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        thread, failed = self._under_way.pop(handle)
        thread.join()
        if failed:
            raise RuntimeError(str(failed[0]))

    def horovod_torch_reset(self) -> None:
        self.calls.append("reset")
        self._under_way.clear()

    def horovod_torch_barrier(self, process_set: int) -> int:
        one = torch.ones(1)
        return self._start("barrier", one, one, lambda values: values[0], process_set)

    def horovod_torch_join(self, output: torch.Tensor, _device: int) -> int:
        return self._start("join", output, output, lambda values: values[-1], 0)

    def _allreduce(  # noqa: PLR0917 - the library's own
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        divisor: int,
        name: bytes,
        op: int,
        before: float,
        after: float,
        process_set: int,
    ) -> int:
        self.calls.append("allreduce")
        assert divisor == 1
        share = after / self._size if op == AVERAGE else after
        label = f"allreduce.{name.decode() if name else f'noname.{self._next}'}"
        return self._start(label, tensor, output, lambda values: _scaled(values, before, share), process_set)

    def _grouped(  # noqa: PLR0917 - the library's own
        self,
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        divisor: int,
        name: bytes,
        op: int,
        before: float,
        after: float,
        process_set: int,
    ) -> int:
        self.calls.append("grouped_allreduce")
        assert divisor == 1
        share = after / self._size if op == AVERAGE else after
        label = f"grouped_allreduce.{name.decode()}"

        def work(values: list[Any]) -> Any:
            return [_scaled([value[i] for value in values], before, share) for i in range(len(tensors))]

        return self._start(label, tensors, outputs, work, process_set)

    def _broadcast(self, tensor: torch.Tensor, output: torch.Tensor, root: int, name: bytes, process_set: int) -> int:
        self.calls.append("broadcast")
        return self._start(f"broadcast.{name.decode()}", tensor, output, lambda values: values[root], process_set)

    def _start(self, name: str, tensor: Any, output: Any, work: Any, process_set: int) -> int:
        name = f"{process_set}.{name}"
        if name in self._names:
            raise ValueError(f"Requested to reduce a tensor with the same name as another one: {name}")
        turn = self._rounds[name] = self._rounds.get(name, 0) + 1
        failed: list[BaseException] = []
        # In this double, another process set has only this rank.
        ranks = range(self._size) if process_set == 0 else [self._rank]

        def run() -> None:
            try:
                _put(output, work([self._meet(f"{name}.{turn}", rank, tensor) for rank in ranks]))
            except BaseException as error:
                failed.append(error)
            finally:
                self._names.discard(name)

        self._names.add(name)
        thread = threading.Thread(target=run, daemon=True)
        handle, self._next = self._next, self._next + 1
        self._under_way[handle] = (thread, failed)
        thread.start()
        return handle

    def _meet(self, name: str, rank: int, mine: Any) -> Any:
        own, theirs = self._folder / f"{name}.{self._rank}", self._folder / f"{name}.{rank}"
        if not own.exists():
            value = [each.detach() for each in mine] if isinstance(mine, list) else mine.detach()
            scratch = own.with_name(f"{own.name}.part")
            scratch.write_bytes(pickle.dumps(value))
            scratch.replace(own)
        until = time.monotonic() + LIMIT_S
        while not theirs.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"rank {rank} did not come to {name}")
            time.sleep(0.001)
        return pickle.loads(theirs.read_bytes())


def _scaled(values: list[torch.Tensor], before: float, after: float) -> torch.Tensor:
    total = values[0] * before
    for value in values[1:]:
        total = total + value * before
    return total * after


def _put(output: Any, value: Any) -> None:
    for target, result in zip(output, value, strict=True) if isinstance(output, list) else [(output, value)]:
        target.detach().copy_(result)
