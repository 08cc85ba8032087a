"""One rank of gpu_check.py: python gpu_rank.py PART DEVICE FOLDER. Rank 0 writes its rows to FOLDER/rows.json.

DEVICE: cuda, or fakecuda, the device of tests/cuda over the fake driver. Parts that train take cpu too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "py" / "scripts"))

import device_training
import gpu_calls
from gpu_timing import BACKWARD, FORWARD, MODULE, Rows, annotation, row

import netbottleneck
import netbottleneck.torch as hvd
from netbottleneck import _core, config
from netbottleneck.bench import models
from netbottleneck.cli import calibrate
from netbottleneck.errors import HorovodInternalError
from netbottleneck.hooks.measured_model import leaves
from netbottleneck.lab import parse_lab

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
ROUNDS, WARM = 7, 2
PRODUCTS, MATRIX = 20, 2048  # matrix products of a computation, and the matrices' width
LIBRARY = config.settings().cuda_library
DIFFERENT = "different elements"
SLEEP_CYCLES = 5_000_000  # of the GPU: 2.5 ms at 2 GHz, in which Python launches some hundred calls
MOST_OF_CAPS = 1.15  # of what capped flows may carry: a shaper has a burst
EVENTS_BYTES = 4 << 20  # of the tensors that the part `events` moves
TIMED = range(2, 7)  # steps whose time says how many there is time for
LEAST_BLOCKS, PROFILED_BLOCKS = 10, 4  # of steps in a measured training; the last ones of `timing` are profiled


class CudaStreams:
    """Streams of a GPU, by the functions of tests/cuda/torch_device.cpp."""

    new_stream = staticmethod(torch.cuda.Stream)

    @staticmethod
    def use_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
        """Make a stream the current one; return the one before."""
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(stream)
        return before

    @staticmethod
    def wait_stream(waits: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Let a stream wait for what another one holds."""
        waits.wait_stream(other)


class Device:
    """The device under test. counts: elements of its tensors; large: elements, sizes: bytes of what is timed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.real = name == "cuda"
        self.counts = (1, 7, 1025, 3_000_001) if self.real else (1, 7, 1025, 20_001)
        self.sizes = calibrate.SIZES if self.real else calibrate.SIZES[:9:4]
        self.large = (64 << 20) // 4 if self.real else 1 << 16
        self.streams: Any = CudaStreams()
        if self.real:
            torch.cuda.set_device(0)
        elif name == "fakecuda":
            self.streams = device_training.open_device()

    def wait(self) -> None:
        """Wait for all work on the device."""
        if self.real:
            torch.cuda.synchronize()
        else:
            torch.zeros(1, device=self.name).cpu()


def timed(device: Device, work: Callable[[], Any]) -> list[float]:
    """Return the seconds of each run, with the device's work."""
    found = []
    for _ in range(WARM + ROUNDS):
        device.wait()
        hvd.barrier()
        began = time.perf_counter()
        work()
        device.wait()
        found.append(time.perf_counter() - began)
    return found[WARM:]


def by_events(device: Device, work: Callable[[], Any], samples: int, calls: int = 1) -> tuple[list[float], int]:
    """Return the seconds of a call of each sample by the device's events, and how many samples are the host's times.

    The GPU sleeps until the host has launched all calls of a sample, so the times are not the rate at which Python
    launches. Where the sleep is too short, a sample counts as the host's. Over the fake driver, all are.
    """
    times, late = [], 0
    for sample in range(WARM + samples):
        device.wait()
        began = time.perf_counter()
        if device.real:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
        for _ in range(calls):
            work()
        if device.real:
            late += sample >= WARM and begin.query()
            end.record()
        device.wait()
        spent = begin.elapsed_time(end) / 1e3 if device.real else time.perf_counter() - began
        times.append(spent / calls)
    return times[WARM:], late if device.real else samples


def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's data, small whole numbers, in host memory."""
    return ((torch.arange(count) * 3 + rank * 5) % 13).to(dtype)


def collectives(device: Device) -> Rows:
    """Compare each collective's result with what the host computes from all ranks' data."""
    rows: Rows = []
    for dtype in TYPES:
        wrong = compared = 0
        for count in device.counts:
            mine = given(RANK, count, dtype).to(device.name)
            data = [given(rank, count, dtype) for rank in range(SIZE)]
            parts = [given(rank, SIZE * count, dtype) for rank in range(SIZE)]
            whole = given(RANK, SIZE * count, dtype).to(device.name)
            share = slice(RANK * count, (RANK + 1) * count)
            pairs = [
                (hvd.allreduce(mine, op=hvd.Sum), torch.stack(data).sum(0).to(dtype)),
                (hvd.allreduce(mine, op=hvd.Max), torch.stack(data).amax(0)),
                (hvd.allreduce(mine, op=hvd.Min), torch.stack(data).amin(0)),
                (hvd.broadcast(mine, SIZE - 1), data[-1]),
                (hvd.allgather(mine), torch.cat(data)),
                (hvd.reducescatter(whole, op=hvd.Sum), torch.stack(parts).sum(0).to(dtype)[share]),
                (hvd.alltoall(whole), torch.cat([part[share] for part in parts])),
            ]
            for got, want in pairs:
                here = (got[0] if isinstance(got, tuple) else got).cpu()
                compared += want.numel()
                wrong += int((here != want).sum()) if here.shape == want.shape else want.numel()
        rows.append({"condition": f"{DIFFERENT}, {str(dtype)[6:]}, of {compared}", "value": wrong, "unit": "elements"})
    wrong_rows = [each["condition"] for each in rows if each["value"]]
    if wrong_rows:
        raise AssertionError(f"rank {RANK}: {rows}")
    return rows


WAYS = {"out": "to the host", "back": "to the device", "both": "both ways at once"}


def copies(device: Device, there: torch.Tensor, what: str) -> Rows:
    """Time plain copies between a tensor of the device and pinned memory, and those of our staging, on rank 0 alone."""
    rows: Rows = []
    hvd.barrier()
    if RANK == 0:
        plain = plain_copies(device, there) if device.real else {}
        size = there.numel() * there.element_size()
        for way, name in WAYS.items():
            device.wait()
            ns = _core.staging_times(way, there.device.index, there.data_ptr(), size, ROUNDS, LIBRARY)
            own = row(f"our staging of {what} {name}", [each / 1e9 for each in ns], 1e3, "ms")
            rows.append(own)
            if plain:
                rows.append(row(f"plain pinned copy of {what} {name}", plain[way], 1e3, "ms"))
                own["rate over that of plain copies"] = float(f"{rows[-1]['value'] / own['value']:.3g}")
    hvd.barrier()
    return rows


def plain_copies(device: Device, there: torch.Tensor) -> dict[str, list[float]]:
    """Return the seconds of plain copies, by way."""
    pinned = torch.empty(device.large, pin_memory=True)
    other, pinned_other = torch.ones_like(there), torch.ones(device.large, pin_memory=True)
    beside = device.streams.new_stream()

    def both_ways() -> None:
        pinned.copy_(there, non_blocking=True)
        before = device.streams.use_stream(beside)
        other.copy_(pinned_other, non_blocking=True)
        device.streams.use_stream(before)

    def seconds(work: Callable[[], Any]) -> float:
        device.wait()
        began = time.perf_counter()
        work()
        device.wait()
        return time.perf_counter() - began

    ways = {
        "out": lambda: pinned.copy_(there, non_blocking=True),
        "back": lambda: other.copy_(pinned_other, non_blocking=True),
        "both": both_ways,
    }
    return {way: [seconds(work) for _ in range(WARM + ROUNDS)][WARM:] for way, work in ways.items()}


def computation(device: Device, matrix: torch.Tensor) -> float:
    """Return the seconds of PRODUCTS matrix products by the device's events; over the fake driver, the host's."""
    began = time.perf_counter()
    if device.real:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)  # until the host has launched all
        begin.record()
    for _ in range(PRODUCTS):
        matrix @ matrix
    if not device.real:
        device.wait()
        return time.perf_counter() - began
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def slowed(device: Device, tensors: dict[str, torch.Tensor | None]) -> Rows:
    """Time a computation of rank 0 alone, and while all-reduces are in flight. tensors: what they move, by name."""
    matrix = torch.zeros(MATRIX if device.real else 16, MATRIX if device.real else 16, device=device.name)
    times: dict[str, list[float]] = {name: [] for name in tensors}
    ended_before = dict.fromkeys(tensors, 0)
    for turn in range(WARM + ROUNDS):
        for name, tensor in tensors.items():
            device.wait()
            hvd.barrier()
            handle = None if tensor is None else hvd.allreduce_async_(tensor, op=hvd.Max)
            spent = computation(device, matrix) if RANK == 0 else 0.0
            if turn >= WARM:
                times[name].append(spent)
                ended_before[name] += handle is not None and hvd.poll(handle)
            if handle is not None:
                hvd.synchronize(handle)
    rows = [row(f"computation on the GPU, {name}", spent, 1e3, "ms") for name, spent in times.items()]
    return [
        {**each, **({"operation ended before": ended_before[name]} if tensors[name] is not None else {})}
        for name, each in zip(tensors, rows, strict=True)
    ]


def staging(device: Device) -> Rows:
    """Time the all-reduce of GPU memory beside that of host memory.

    Without caps, time copies, gloo, and a computation beside all-reduces too.
    """
    host = torch.ones(device.large)
    there = torch.ones(device.large, device=device.name)
    megabytes = device.large * 4 / 1e6
    what = f"{megabytes:.3g} MB"
    rows = [
        row(
            f"all-reduce of {what}, device memory", timed(device, lambda: hvd.allreduce_(there, op=hvd.Max)), 1e3, "ms"
        ),
        row(f"all-reduce of {what}, host memory", timed(device, lambda: hvd.allreduce_(host, op=hvd.Max)), 1e3, "ms"),
    ]
    rows.append(
        {
            "condition": f"all-reduce of {what}, time of device memory over that of host memory",
            "value": float(f"{rows[0]['value'] / rows[1]['value']:.4g}"),
            "unit": "ratio",
        }
    )
    if "CHECKED_FLOWS" in os.environ:
        return rows
    beside = {"alone": None, "beside an all-reduce of host memory": host, "beside one of device memory": there}
    rows += slowed(device, beside)
    rows += copies(device, there, what)
    if device.real:
        dist.init_process_group("gloo")
        try:
            work = timed(device, lambda: dist.all_reduce(there, op=dist.ReduceOp.MAX))
            rows.append(row(f"all-reduce of {what}, device memory, gloo", work, 1e3, "ms"))
        finally:
            dist.destroy_process_group()
    return rows


def gather(device: Device) -> Rows:
    """Compare sums of groups of tensors with those of the host; time groups, by the size of their tensors."""
    counts = (1, 3, 1025, 4099, 1, 2, 65, 20_001)
    for dtype in TYPES:
        data = [[given(rank + at, count, dtype) for at, count in enumerate(counts)] for rank in range(SIZE)]
        got = hvd.grouped_allreduce([each.to(device.name) for each in data[RANK]], op=hvd.Sum)
        for at, tensor in enumerate(got):
            wanted = torch.stack([each[at] for each in data]).sum(0).to(dtype)
            assert torch.equal(tensor.cpu(), wanted), f"a wrong sum of {counts[at]} {dtype} in a group"
    rows: Rows = []
    for size in GATHERED_SIZES if device.real else GATHERED_SIZES[:1]:
        group = [torch.zeros(size // 4, device=device.name) for _ in range(GATHERED)]
        work = timed(device, lambda group=group: hvd.grouped_allreduce_(group, op=hvd.Max))  # type: ignore[misc]
        rows.append(row(f"all-reduce of {GATHERED} tensors of {size} bytes", work, 1e3, "ms"))
    return rows


def hooks(device: Device) -> Rows:
    """Time the thread of backward with no hook, an empty Python hook, and ours, for each gradient."""
    count = 400 if device.real else 20
    rows: Rows = []
    for name in ("none", "empty", "ours"):
        weights = [torch.nn.Parameter(torch.ones(1, device=device.name)) for _ in range(count)]
        optimizer: Any = torch.optim.SGD(weights, lr=0.0)
        if name == "ours":
            named = [(str(number), weight) for number, weight in enumerate(weights)]
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        elif name == "empty":
            for weight in weights:
                weight.register_post_accumulate_grad_hook(lambda _: None)
        times = []
        for _ in range(WARM + ROUNDS):
            optimizer.zero_grad()
            loss = torch.stack([weight * 2.0 for weight in weights]).sum()
            device.wait()
            began = time.perf_counter()
            loss.backward()
            times.append(time.perf_counter() - began)
            optimizer.step()
            device.wait()
        rows.append(row(f"backward of {count} gradients, hooks: {name}", times[WARM:], 1e6, "us"))
    return rows


def faults(device: Device) -> Rows:
    """Kill rank 1 while its copies are under way; rank 0 must get an error."""
    data = torch.ones(16 * device.large, device=device.name)
    hvd.allreduce_(data, op=hvd.Sum, name="warm")
    device.wait()
    hvd.barrier()
    began = time.perf_counter()
    handle = hvd.allreduce_async_(data, op=hvd.Sum, name="killed")
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.synchronize(handle)
    except HorovodInternalError as error:
        took = time.perf_counter() - began
        if "rank 1" not in str(error):
            raise
        return [row("time until the error that names rank 1", [took])]
    raise AssertionError("the all-reduce with a dead rank succeeded")


def summed_by_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks of a tensor in host memory, by the process group."""
    dist.all_reduce(tensor)
    return tensor


def trained_by_hand(device: Device, summed: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """Train as device_training does, with gradients summed in host memory; return the digest of the weights.

    DDP divides before it sums, and so does this. Horovod divides the sum; halves are exact. Sums of two ranks do not
    depend on their order.
    """
    model = device_training.model_on(device.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(device_training.STEPS):
        optimizer.zero_grad()
        device_training.loss_of(model, device.name, step, RANK).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(summed(parameter.grad.cpu() / SIZE))
        optimizer.step()
    return device_training.digest(model)


def backend_nb(device: Device) -> Rows:
    """Compare the backend nb on the device: its calls with those on the CPU, DDP over it with sums on the host."""
    dist.init_process_group(f"cpu:nb,{device.name}:nb")
    compared = device_training.compare_nb(device.name)
    device_training.check_waits(device.name, device.streams)
    wanted = trained_by_hand(device, summed_by_torch)
    for what, streams in (("one stream", None), ("streams of its own", device.streams)):
        model = device_training.train_ddp(device.name, device_training.on_streams(streams))
        assert device_training.digest(model) == wanted, f"other weights after DDP on {what}"
        compared[f"weights after DDP on {what}"] = sum(parameter.numel() for parameter in model.parameters())
    dist.destroy_process_group()
    return [
        {"condition": f"{DIFFERENT}, {kind}, of {count}", "value": 0, "unit": "elements"}
        for kind, count in compared.items()
    ]


def horovod(device: Device) -> Rows:
    """Compare Horovod's calls on the device with those on the CPU, and trainings with sums on the host."""
    compared = device_training.compare_calls(device.name, exact=not device.real)
    device_training.check_handles(device.name, device.streams)
    if device.real:
        compared["sparse"] = compare_sparse(device.name)
    wanted = trained_by_hand(device, lambda tensor: hvd.allreduce(tensor, op=hvd.Sum))
    for what, streams in (("one stream", None), ("streams of its own", device.streams)):
        model = device_training.model_on(device.name)
        around = device_training.on_streams(streams)
        device_training.train_hvd(model, device.name, around, hvd.Compression.none)
        assert device_training.digest(model) == wanted, f"other weights after a training on {what}"
        compared[f"weights after a training on {what}"] = sum(parameter.numel() for parameter in model.parameters())
    return [
        {"condition": f"{DIFFERENT}, {kind}, of {count}", "value": 0, "unit": "elements"}
        for kind, count in compared.items()
    ]


def compare_sparse(where: str) -> int:
    """Compare the sum of sparse tensors on a device with that on the CPU; return the number of elements."""
    found = []
    for place in (where, "cpu"):
        at = torch.tensor([[RANK, 2, 5]], device=place)
        values = torch.arange(12.0, device=place).view(3, 4) + RANK
        tensor = torch.sparse_coo_tensor(at, values, (6, 4))
        total = hvd.sparse_allreduce_async(tensor, name=f"sparse on {place}", op=hvd.Sum)()
        assert total.device.type == place
        found.append(total.to_dense().cpu())
    assert torch.equal(*found), f"a wrong sum of sparse tensors: {found}"
    return found[0].numel()


class Ranges:
    """Ranges for torch.profiler: a pass of a step, and in the forward pass each module."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.step = 0
        self._open: list[Any] = []
        for name, module in leaves(model):
            module.register_forward_pre_hook(partial(self._begin, name))
            module.register_forward_hook(self._end)

    def _begin(self, name: str, *_: Any) -> None:
        self._open.append(torch.profiler.record_function(annotation(self.step, MODULE + name)))
        self._open[-1].__enter__()

    def _end(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def around(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns; it runs in a range."""
        with torch.profiler.record_function(annotation(self.step, what)):
            return call(*arguments)


def bert(device: Device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Return a model with two outputs, equal on all ranks, and what makes a batch for it."""
    torch.manual_seed(0)
    if device.real:
        hidden, heads, words, positions, rows = 1024, 16, 8192, 256, 32
    else:
        hidden, heads, words, positions, rows = 32, 2, 64, 16, 4
    model = models.build("thin_bert", hidden=hidden, heads=heads, words=words, positions=positions).to(device.name)
    return model, lambda: torch.randint(words, (rows, positions), device=device.name)


def loss_of(outputs: Any) -> torch.Tensor:
    """Return a loss that reaches all parameters: DDP refuses the step after one that leaves out some."""
    each = outputs if isinstance(outputs, tuple) else (outputs,)
    loss: torch.Tensor = sum(output.square().mean() for output in each)  # type: ignore[assignment]
    return loss


def trained(device: Device, train: Callable[[range], None]) -> int:
    """Train the first steps; return the number of all steps: whole blocks, as many as all ranks have time for.

    CHECKED_SECONDS is the time for them, CHECKED_STEPS the most.
    """
    train(range(TIMED.start))
    device.wait()
    began = time.perf_counter()
    train(TIMED)
    device.wait()
    slowest = torch.tensor([time.perf_counter() - began], device=device.name)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    fit = float(os.environ["CHECKED_SECONDS"]) * len(TIMED) / float(slowest)
    block = config.settings().block_steps
    return block * max(LEAST_BLOCKS, min(int(os.environ["CHECKED_STEPS"]), int(fit)) // block)


def timing(device: Device, folder: str) -> Rows:
    """Train a small model with DDP, measured by the environment; record the last steps with torch.profiler too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.real:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    if device.name == "fakecuda":
        import device_ddp

        device_ddp.open_group(device.streams)
        model = device_training.model_on(device.name)
        batch = torch.randn(16, 37).to(device.name)
    else:
        dist.init_process_group(os.environ["CHECKED_BACKEND"])
        model, make_batch = bert(device)
        batch = make_batch()
    ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)  # equal by its seed
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ranges = Ranges(model)

    def train(steps: range) -> None:
        for ranges.step in steps:
            optimizer.zero_grad()
            loss = loss_of(ranges.around(FORWARD, ddp, batch))
            ranges.around(BACKWARD, loss.backward)
            optimizer.step()

    steps = trained(device, train)
    plain = range(TIMED.stop, steps - PROFILED_BLOCKS * config.settings().block_steps)
    began = time.perf_counter()
    train(plain)
    device.wait()
    took = time.perf_counter() - began
    with torch.profiler.profile(activities=activities) as profile:
        train(range(plain.stop, steps))
        device.wait()
    profile.export_chrome_trace(f"{folder}/profile.{RANK}.json")
    dist.destroy_process_group()
    numbers = sum(each.numel() for each in model.parameters())
    condition = f"step of a DDP model of {numbers} parameters, mean of {len(plain)}"
    return [row(condition, [took / len(plain)], 1e3, "ms")]


GATHERED = 200  # tensors of a group, by size in bytes
GATHERED_SIZES = [1 << shift for shift in range(10, 19, 2)]
PIECES = 10  # that are packed into one buffer; the smallest size has one element for each
CALLS_BYTES, CALLS_MAX = 64 << 20, 100  # a sample has calls for so many bytes in all, up to so many


class Buffers:
    """Buffers of one size in bytes of float32, and what the kernels and torch do with them."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.samples, self.calls = ROUNDS, max(1, min(CALLS_MAX, CALLS_BYTES // size))
        count = size // 4
        self.source = (torch.arange(count, device=device.name) % 13).to(torch.float32)
        self.other = torch.zeros(count, device=device.name)
        piece = size // PIECES
        places = [(self.source.data_ptr() + at * piece, at * piece, piece) for at in range(PIECES)]
        self.pieces = torch.tensor(places, dtype=torch.int64).to(device.name)

    def row(self, what: str, seconds: list[float], moved: int) -> dict[str, Any]:
        """Return a row with the time of a call, its device, and its rate by the bytes that it reads and writes."""
        found = row(f"{what}, {self.size} bytes", seconds, 1e6, "us")
        rate = float(f"{moved / 1e3 / max(found['value'], 1e-3):.4g}")
        return {**found, "GB/s": rate, "device": str(self.source.device)}

    def by_torch(self, what: str, work: Callable[[], Any], moved: int) -> dict[str, Any]:
        """Time a call of torch by the device's events. late: number of samples that are the host's times, if any."""
        seconds, late = by_events(self.device, work, self.samples, self.calls)
        return {**self.row(f"torch's {what}", seconds, moved), **({"late": late} if late else {})}

    def by_kernel(
        self, kernel: str, to: torch.Tensor, source: torch.Tensor, wanted: torch.Tensor, moved: int
    ) -> dict[str, Any]:
        """Time a kernel of ours by the device's events; without a kernel in this build, the row says so.

        wanted: what the kernel must leave in `to`, which begins with zeros; nb_unpack leaves it in `self.source`.
        """
        changed = self.source if kernel == "unpack" else to
        changed.zero_()
        self.device.wait()
        count = PIECES if "pack" in kernel else source.numel()
        where = to.device.index, to.data_ptr(), source.data_ptr(), count
        try:
            ns = _core.kernel_times(f"nb_{kernel}", *where, self.samples, self.calls, LIBRARY)
        except (OSError, ValueError) as error:
            changed.copy_(wanted)
            return {"condition": f"our {kernel}, {self.size} bytes", "value": f"not timed: {error}"}
        assert torch.equal(changed, wanted), f"a wrong result of {kernel} of {self.size} bytes"
        return self.row(f"our {kernel}", [each / 1e9 for each in ns], moved)


def gathering(device: Device) -> Rows:
    """Time groups of tensors on their way to pinned memory, by the copy engine and by our kernel, by their size."""
    rows: Rows = []
    for size in GATHERED_SIZES if device.real else GATHERED_SIZES[:1]:
        what = f"{GATHERED} tensors of {size} bytes"
        group = [torch.full((size // 4,), float(at), device=device.name) for at in range(GATHERED)]
        # The fake driver gives pinned memory another address for kernels.
        place: Any = {"pin_memory": True} if device.real else {"device": device.name}
        to = torch.zeros(GATHERED * size // 4, **place)
        pairs = list(zip(to.split(size // 4), group, strict=True))

        def copy_all(pairs: Any = pairs) -> None:
            for part, tensor in pairs:
                part.copy_(tensor, non_blocking=True)

        seconds, late = by_events(device, copy_all, ROUNDS)
        rows.append({**row(f"copies: {what}", seconds, 1e6, "us"), **({"late": late} if late else {})})
        to.zero_()
        places = [(tensor.data_ptr(), at * size, size) for at, tensor in enumerate(group)]
        pieces = torch.tensor(places, dtype=torch.int64).to(device.name)
        device.wait()
        where = group[0].device.index, to.data_ptr(), pieces.data_ptr(), GATHERED
        try:
            ns = _core.kernel_times("nb_pack", *where, ROUNDS, 1, LIBRARY)
        except (OSError, ValueError) as error:
            rows.append({"condition": f"kernel: {what}", "value": f"not timed: {error}"})
            continue
        assert torch.equal(to.cpu(), torch.cat(group).cpu()), f"a wrong copy of {what} by a kernel"
        rows.append(row(f"kernel: {what}", [each / 1e9 for each in ns], 1e6, "us"))
    return rows


def kernels(device: Device) -> Rows:
    """Time our kernels beside torch's, and the 2020 study's copies and additions, by size. One rank has the GPU."""
    rows = gathering(device)
    for size in device.sizes:
        own = Buffers(device, size)
        data = own.source.clone()
        rows += [
            own.by_torch("copy (memcpy table)", partial(own.other.copy_, own.source), 2 * size),
            own.by_kernel("pack", own.other, own.pieces, data, 2 * size),
            own.by_kernel("unpack", own.other, own.pieces, data, 2 * size),
        ]
        for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
            half = own.source.to(dtype)
            moved = 3 * size // 2
            rows += [
                own.by_torch(f"cast f32 to {name}", partial(half.copy_, own.source), moved),
                own.by_kernel(f"cast_f32_to_{name}", half, own.source, half.clone(), moved),
                own.by_torch(f"cast {name} to f32", partial(own.other.copy_, half), moved),
                own.by_kernel(f"cast_{name}_to_f32", own.other, half, data, moved),
            ]
        summed = own.source * (1 + own.samples * own.calls)
        rows += [
            own.by_torch("addition (vector-add table)", partial(own.other.add_, own.source), 3 * size),
            own.by_kernel("add_f32", own.other, own.source, summed, 3 * size),
        ]
    return rows


def over_nccl(device: Device, part: str) -> Rows:
    """Check and time NCCL's all-reduce over the network of the environment; raise if NCCL took another.

    The part `nccl` times a tiny one too: without MPS, most of it is the time until the other rank has its slice.
    """
    flows = parse_lab(f"none/{os.environ['CHECKED_FLOWS']}").flow_bps if "CHECKED_FLOWS" in os.environ else ()
    count = device.large // 4 if flows else device.large  # in less time
    data = torch.full((count,), float(RANK + 1), device=device.name)
    wanted = float(sum(range(1, SIZE + 1)))
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    network = os.environ["NCCL_NET"]
    rows: Rows = []
    for tensor in (data, *([data[:1]] if part == "nccl" else [])):
        times = []
        for _ in range(WARM + ROUNDS):
            tensor.fill_(RANK + 1)
            device.wait()
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            device.wait()
            times.append(time.perf_counter() - began)
            assert bool((tensor == wanted).all()), "a wrong sum"
        size = f"{tensor.numel() * 4 / 1e6:.3g} MB" if tensor is data else "4 bytes, which is the time of a slice"
        rows.append(row(f"all-reduce of {size} via NET/{network}", times[WARM:], 1e3, "ms"))
        if flows:
            four_bps = sum(4 // len(flows) * each for each in flows)
            # A rank of two sends as many bytes as the tensor has.
            share = 32 * tensor.numel() / statistics.median(times[WARM:]) / four_bps
            rows[-1]["part of what four flows carry"] = float(f"{share:.3g}")
            if network != "Socket" and share > MOST_OF_CAPS:
                rows[-1]["broken"] = f"four flows carry {share:.3g} of what their caps allow: they are not capped"
    dist.destroy_process_group()
    log = Path(os.environ["NCCL_DEBUG_FILE"]).read_text(encoding="utf-8", errors="replace")
    assert f"via NET/{network}" in log, f"NCCL did not take {network}: {log[-1500:]}"
    return rows


def events(device: Device) -> Rows:
    """Call NCCL's collectives as gpu_calls.CALLED says, and two messages."""
    dist.init_process_group(os.environ.get("CHECKED_BACKEND", "nccl"))
    count = EVENTS_BYTES // 4 // SIZE * SIZE
    data = torch.zeros(count, device=device.name)
    for tensor in (*[data] * (gpu_calls.CALLED["AllReduce"] - 3), *[data[:1024]] * 3):
        dist.all_reduce(tensor)
    for _ in range(gpu_calls.CALLED["AllGather"]):
        device_training.gather_whole(data, data[: count // SIZE].clone())
    for _ in range(gpu_calls.CALLED["ReduceScatter"]):
        device_training.scatter_whole(torch.zeros(count // SIZE, device=device.name), data)
    for _ in range(gpu_calls.CALLED["Broadcast"]):
        dist.broadcast(data, 0)
    for _ in range(gpu_calls.MESSAGES):
        dist.send(data, 1) if RANK == 0 else dist.recv(data, 0)
    device.wait()
    dist.destroy_process_group()
    return []


def arms(device: Device) -> Rows:
    """Train a small model with DDP over NCCL, by the arms of the environment; check that ranks end with one model."""
    dist.init_process_group(os.environ.get("CHECKED_BACKEND", "nccl"))
    model, make_batch = bert(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(steps: range) -> None:
        for step in steps:
            torch.manual_seed(SIZE * step + RANK)
            optimizer.zero_grad()
            loss_of(ddp(make_batch())).backward()
            optimizer.step()

    train(range(TIMED.stop, trained(device, train)))
    device.wait()
    digests: list[Any] = [None] * SIZE
    dist.all_gather_object(digests, device_training.digest(model))
    assert len(set(digests)) == 1, "ranks have different weights"
    dist.destroy_process_group()
    return []


def sharded(device: Device) -> Rows:
    """Train a model that FSDP2 shards over NCCL, observed."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(os.environ.get("CHECKED_BACKEND", "nccl"))
    torch.manual_seed(0)
    width, rows = (2048, 512) if device.real else (32, 4)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device.name)
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    measured = netbottleneck.attach(model, optimizer)
    assert measured is not None, "the model is left alone"

    def train(steps: range) -> None:
        for step in steps:
            torch.manual_seed(SIZE * step + RANK)
            optimizer.zero_grad()
            model(torch.randn(rows, width, device=device.name)).square().mean().backward()
            optimizer.step()

    train(range(TIMED.stop, trained(device, train)))
    device.wait()
    dist.destroy_process_group()
    return []


def main() -> None:
    """Run a part."""
    part, name, folder = sys.argv[1:]
    if part == "kernels" and RANK > 0:
        return  # without a context on the GPU, which rank 0 has alone
    device = Device(name)
    if part in ("nccl", "sockets", "capped", "one_host"):
        rows = over_nccl(device, part)
    elif part == "nb":
        rows = backend_nb(device)
    elif part == "kernels":
        rows = kernels(device)
    elif part == "timing":
        rows = timing(device, folder)
    elif part in ("arms", "sharded", "events"):
        rows = {"arms": arms, "sharded": sharded, "events": events}[part](device)
    else:
        hvd.init()
        parts = {
            "collectives": collectives,
            "horovod": horovod,
            "staging": staging,
            "gather": gather,
            "hooks": hooks,
            "faults": faults,
        }
        rows = parts[part](device)
        if part != "faults":
            hvd.shutdown()
    if RANK == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
