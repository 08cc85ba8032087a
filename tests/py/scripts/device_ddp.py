"""Trains a DDP model on the CPU or on the device of tests/cuda/torch_device.cpp; prints a digest of its weights.

Arguments: where (cpu, fakecuda), steps, and optionally ranks: on these, buckets are sent from a stream that is captured
into a graph, as in a backward pass inside torch.cuda.graph. With "count" instead, the number of recorded events is
printed for each bucket. With "accumulate", three backward passes without a reduction come before each one with it. With
"capturing", the current stream counts as captured.

The script's own process group copies tensors to the host and sums them by gloo, and its futures are complete at once,
as NCCL's are. As there, it uses a stream of its own, except for a call that is not asynchronous: the current one.
"""

import atexit
import ctypes
import gc
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from device_training import DRAINED, digest, loss_of, model_on, open_device
from torch.nn.parallel import DistributedDataParallel

import netbottleneck  # noqa: F401 - measures DDP models, by the environment
from netbottleneck.hooks.reducer_group import ReducerGroup

Future = torch.futures.Future


class Staged(dist.ProcessGroup):  # type: ignore[misc]
    """A process group for tensors of any device over a gloo group."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._streams: list[Any] = []

    def getBackendName(self) -> str:
        return "staged"

    def _on_host(self, call: Any, tensors: list[torch.Tensor], *options: Any) -> Any:
        """Call gloo with copies, and return a work whose future has the device's events."""
        if tensors[0].device.type == "cpu":
            return call(tensors, *options)
        if not self._streams:
            self._streams.append(DEVICE.new_stream())
        current = any(getattr(option, "asyncOp", True) is False for option in options)
        usual = DEVICE.use_stream(self._streams[0])
        if current:
            DEVICE.use_stream(usual)
        try:
            if not current:
                DEVICE.wait_stream(self._streams[0], usual)
            copies = [tensor.cpu() for tensor in tensors]
            call(copies, *options).wait()
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            future: Any = Future(devices=[tensors[0].device])
            future.set_result(tensors)
        finally:
            DEVICE.use_stream(usual)
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._on_host(self._gloo.allreduce, tensors, *([] if opts is None else [opts]))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._on_host(self._gloo.broadcast, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return self._gloo.allgather(outputs, inputs)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def made(store: Any, rank: int, size: int, timeout: Any) -> Staged:
    """Return a group for torch."""
    gloo = torch._C._distributed_c10d.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return Staged(gloo, rank, size)


def open_group(device: Any) -> None:
    """Make the script's own process group the default one. device: of open_device; None: tensors of the CPU."""
    global DEVICE  # noqa: PLW0603
    DEVICE = device
    dist.Backend.register_backend("staged", made, devices=["cpu", "fakecuda"])
    dist.init_process_group("staged")


def free_model() -> None:
    """Free the model and the buckets of its reducer, as the end of a script does."""
    KEPT.clear()
    gc.collect()


def capture_buckets() -> None:
    """Report the stream as captured while a bucket is submitted to our communicator."""
    capture = ctypes.CDLL(os.environ["NETBOTTLENECK_CUDA_LIBRARY"]).fake_capture_here
    plain = ReducerGroup._send

    def send(*arguments: Any) -> Any:
        capture(True)
        try:
            return plain(*arguments)
        finally:
            capture(False)

    ReducerGroup._send = send  # type: ignore[method-assign]


def count_events() -> None:
    """Print a line for each bucket: its index, if all gradients are stamped, events since the last bucket, its own."""
    records = ctypes.CDLL(os.environ["NETBOTTLENECK_CUDA_LIBRARY"]).fake_records_here
    plain, last = ReducerGroup._send, [0]

    def send(group: ReducerGroup, place: Any, *arguments: Any) -> Any:
        before = records()
        work = plain(group, place, *arguments)
        print("events", place.index, int(group.detailed), before - last[0], records() - before, flush=True)
        last[0] = records()
        return work

    ReducerGroup._send = send  # type: ignore[method-assign]


def main() -> None:
    """Train, and print the digest."""
    where, steps = sys.argv[1], int(sys.argv[2])
    atexit.register(free_model)  # runs after the end of the measured run, which registers later
    open_group(open_device() if where != "cpu" else None)
    if str(dist.get_rank()) in sys.argv[3:]:
        capture_buckets()
    if "count" in sys.argv[3:]:
        count_events()
    model = model_on(where)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2, init_sync=False)
    KEPT.append(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if "capturing" in sys.argv[3:]:
        torch.fakecuda.is_current_stream_capturing = lambda: True
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(3 if "accumulate" in sys.argv[3:] else 0):
            with ddp.no_sync():
                loss_of(ddp, where, step, dist.get_rank()).backward()
        loss_of(ddp, where, step, dist.get_rank()).backward()
        optimizer.step()
        work = dist.all_reduce(torch.ones(1000, device=where), async_op=True)
        work.wait()
        dist.broadcast(torch.ones(2000, device=where), 0)
    print(digest(model), flush=True)
    print(f"drained {len(DRAINED)}", flush=True)
    dist.destroy_process_group()


DEVICE: Any = None
KEPT: list[torch.nn.Module] = []

if __name__ == "__main__":
    main()
