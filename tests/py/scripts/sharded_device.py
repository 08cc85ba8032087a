"""Trains a model that FSDP2 shards, on the CPU or on the device of tests/cuda/torch_device.cpp.

Prints a digest of this rank's shards. Arguments: where (cpu, fakecuda), steps, and `offload` for parameters in host
memory. On the device, torch's streams and events are the driver's, and the collectives run on the streams that FSDP2
gives them.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_ddp
import torch
import torch.distributed as dist
from device_training import open_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import netbottleneck  # noqa: F401 - measures FSDP2 models, by the environment

GATES, WIRE_S = 8, 0.003
FAKE_H = Path(__file__).parents[2] / "cuda" / "fake.h"


class Stream(torch.Stream):
    """A stream with the methods in Python, as torch.cuda.Stream has them."""

    def __new__(cls, priority: int = 0, **where: Any) -> "Stream":
        """Make a stream, or the one that is named."""
        return super().__new__(cls, **(where or {"device": "fakecuda:0", "priority": priority}))

    def wait_event(self, event: Any) -> None:
        """Let further work wait for an event."""
        event.wait(self)

    def wait_stream(self, other: Any) -> None:
        """Let further work wait for what another stream holds."""
        self.wait_event(other.record_event())


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    found: Any = torch.accelerator.current_stream()
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


@contextlib.contextmanager
def stream(chosen: Any) -> Iterator[None]:
    """Make a stream the current one."""
    before = device_ddp.DEVICE.use_stream(chosen if isinstance(chosen, int) else chosen.stream_id)
    try:
        yield
    finally:
        device_ddp.DEVICE.use_stream(before)


class Sharding(device_ddp.Staged):
    """The script's own process group, with the collectives of FSDP2: on a device, the host waits for none of them.

    As with NCCL, the current stream goes on when the result is there. A thread moves the data, one call after another.
    """

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(gloo, rank, size)
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gates: list[Stream] = []  # streams that are held until a result is there
        self._turn = 0

    @property
    def group_name(self) -> str:
        """Return the name that torch.distributed gave it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def _run(self) -> None:
        stream_of_copies = Stream()
        device_ddp.DEVICE.use_stream(stream_of_copies.stream_id)
        while True:
            self._waiting.get()()

    def _base(self, name: str, output: torch.Tensor, given: torch.Tensor, *options: Any) -> Any:
        call = getattr(self._gloo, name)
        if output.device.type == "cpu":
            return call(output, given, *options)
        if not self._gates:
            self._gates = [Stream() for _ in range(GATES)]
            threading.Thread(target=self._run, daemon=True).start()
        usual, gate = current_stream(), self._gates[self._turn % GATES]
        self._turn += 1
        inputs, result = usual.record_event(), torch.Event("fakecuda")
        hold(gate.stream_id, True)
        result.record(gate)
        usual.wait_event(result)

        def move() -> None:
            current_stream().wait_event(inputs)
            made, copy = torch.empty(output.shape, dtype=output.dtype), given.cpu()
            call(made, copy, *options).wait()
            time.sleep(WIRE_S)
            output.copy_(made)
            torch.zeros(1, device="fakecuda").cpu()  # the copy is over
            hold(gate.stream_id, False)
            while not result.query():
                time.sleep(0.0001)

        self._waiting.put(move)
        future: Any = torch.futures.Future(devices=[output.device])
        future.set_result([output])
        return torch._C._distributed_c10d._create_work_from_future(future)

    def _allgather_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        return self._base("_allgather_base", output, given, *([] if opts is None else [opts]))

    def _reduce_scatter_base(self, output: Any, given: Any, opts: Any = None) -> Any:
        return self._base("_reduce_scatter_base", output, given, *([] if opts is None else [opts]))

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base


def hold(address: int, held: bool) -> None:
    """Let a stream of the fake driver execute nothing, or let it go on."""
    _, _, controls = FAKE_H.read_text(encoding="utf-8").partition("struct fake_controls {")
    place = re.findall(r"\(\*(\w+)\)\(", controls).index("hold")
    library = ctypes.CDLL(os.environ["NETBOTTLENECK_CUDA_LIBRARY"])
    library.fake_controls.restype = ctypes.POINTER(ctypes.c_void_p)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(library.fake_controls()[place])(address, held)


def main() -> None:
    """Train, and print the digest."""
    where, steps = sys.argv[1], int(sys.argv[2])
    device_ddp.Staged = Sharding  # type: ignore[misc]
    device_ddp.open_group(open_device() if where != "cpu" else None)
    if where != "cpu":
        module: Any = torch.fakecuda  # type: ignore[attr-defined]
        module.Stream, module.Event = Stream, functools.partial(torch.Event, "fakecuda")
        module.current_stream, module.stream = current_stream, stream
        module.is_initialized, module.set_device = (lambda: True), (lambda device: None)
    mesh = init_device_mesh(where, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Tanh(), torch.nn.Linear(128, 96)),
        torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Tanh()),
        torch.nn.Linear(64, 7),
    ).to(where)
    policy = CPUOffloadPolicy(pin_memory=False) if "offload" in sys.argv else OffloadPolicy()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(32, 96, generator=generator).to(where)).square().mean().backward()
        optimizer.step()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.to_local().detach().cpu().numpy().tobytes())
    print(f"digest {dist.get_rank()} {found.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
