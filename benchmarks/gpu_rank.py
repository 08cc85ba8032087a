"""One rank of gpu_check.py: python gpu_rank.py PART DEVICE FOLDER. Rank 0 writes its rows to FOLDER/rows.json.

DEVICE: cuda, or fakecuda, the device of tests/cuda over the fake driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "py" / "scripts"))

import device_training
from gpu_timing import BACKWARD, FORWARD, MODULE, Rows, annotation, row

import netbottleneck
import netbottleneck.torch as hvd
from netbottleneck import _core, config
from netbottleneck.bench import models
from netbottleneck.cli import calibrate
from netbottleneck.errors import HorovodInternalError
from netbottleneck.hooks.measured_model import leaves

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
ROUNDS, WARM = 7, 2
LIBRARY = config.settings().cuda_library
DIFFERENT = "different elements"


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
        else:
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


def staging(device: Device) -> Rows:
    """Time the all-reduce of GPU memory beside that of host memory, and plain pinned copies."""
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
    if device.real:
        pinned = torch.empty(device.large, pin_memory=True)
        for name, work in (
            ("to the host", lambda: pinned.copy_(there, non_blocking=True)),
            ("to the device", lambda: there.copy_(pinned, non_blocking=True)),
        ):
            rows.append(row(f"plain pinned copy of {what} {name}", timed(device, work), 1e3, "ms"))
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


def trained_by_hand(device: Device) -> str:
    """Train as device_training.train_ddp does, with gradients summed in host memory; return the digest of the weights.

    DDP divides before it sums, and so does this. Sums of two ranks do not depend on their order.
    """
    model = device_training.model_on(device.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(device_training.STEPS):
        optimizer.zero_grad()
        device_training.loss_of(model, device.name, step, RANK).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            shared = parameter.grad.cpu() / SIZE
            dist.all_reduce(shared)
            parameter.grad.copy_(shared)
        optimizer.step()
    return device_training.digest(model)


def backend_nb(device: Device) -> Rows:
    """Compare the backend nb on the device: its calls with those on the CPU, DDP over it with sums on the host."""
    dist.init_process_group(f"cpu:nb,{device.name}:nb")
    compared = device_training.compare_nb(device.name)
    device_training.check_waits(device.name, device.streams)
    wanted = trained_by_hand(device)
    for what, streams in (("one stream", None), ("streams of its own", device.streams)):
        model = device_training.train_ddp(device.name, device_training.on_streams(streams))
        assert device_training.digest(model) == wanted, f"other weights after DDP on {what}"
        compared[f"weights after DDP on {what}"] = sum(parameter.numel() for parameter in model.parameters())
    dist.destroy_process_group()
    return [
        {"condition": f"{DIFFERENT}, {kind}, of {count}", "value": 0, "unit": "elements"}
        for kind, count in compared.items()
    ]


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


def timing(device: Device, folder: str) -> Rows:
    """Train a small model with DDP, measured by the environment; record the last steps with torch.profiler too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.real:
        dist.init_process_group(os.environ["CHECKED_BACKEND"])
        torch.manual_seed(0)
        model = models.build("thin_bert", hidden=1024, heads=16, words=8192, positions=256).to(device.name)
        batch = torch.randint(8192, (32, 256), device=device.name)
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    else:
        import device_ddp

        device_ddp.open_group(device.streams)
        model = device_training.model_on(device.name)
        batch = torch.randn(16, 37).to(device.name)
    ddp = torch.nn.parallel.DistributedDataParallel(model, init_sync=False)  # equal by its seed
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ranges = Ranges(model)
    began = time.perf_counter()

    def train(first: int, end: int) -> None:
        for ranges.step in range(first, end):
            optimizer.zero_grad()
            outputs = ranges.around(FORWARD, ddp, batch)
            loss = (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean()
            ranges.around(BACKWARD, loss.backward)
            optimizer.step()

    plain, steps = (int(os.environ[name]) for name in ("CHECKED_PLAIN_STEPS", "CHECKED_STEPS"))
    train(0, plain)
    device.wait()
    took = time.perf_counter() - began
    with torch.profiler.profile(activities=activities) as profile:
        train(plain, steps)
        device.wait()
    profile.export_chrome_trace(f"{folder}/profile.{RANK}.json")
    dist.destroy_process_group()
    return [
        row(
            f"step of a DDP model of {sum(each.numel() for each in model.parameters())} parameters, mean of {plain}",
            [took / plain],
            1e3,
            "ms",
        )
    ]


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
        """Time a call of torch by the device's events; over the fake driver, by the host's clock."""
        times = []
        for _ in range(WARM + self.samples):
            self.device.wait()
            if self.device.real:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            began = time.perf_counter()
            for _ in range(self.calls):
                work()
            if self.device.real:
                end.record()
            self.device.wait()
            spent = begin.elapsed_time(end) / 1e3 if self.device.real else time.perf_counter() - began
            times.append(spent / self.calls)
        return self.row(f"torch's {what}", times[WARM:], moved)

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
        except OSError as error:
            changed.copy_(wanted)
            return {"condition": f"our {kernel}, {self.size} bytes", "value": f"not timed: {error}"}
        assert torch.equal(changed, wanted), f"a wrong result of {kernel} of {self.size} bytes"
        return self.row(f"our {kernel}", [each / 1e9 for each in ns], moved)


def kernels(device: Device) -> Rows:
    """Time our kernels beside torch's, and the 2020 study's copies and additions, by size. Rank 0 has the GPU alone."""
    rows: Rows = []
    for size in device.sizes if RANK == 0 else ():
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


def over_nccl(device: Device) -> Rows:
    """Check and time NCCL's all-reduce over the network of the environment; raise if NCCL took another."""
    data = torch.full((device.large,), float(RANK + 1), device=device.name)
    wanted = float(sum(range(1, SIZE + 1)))
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    times = []
    for _ in range(WARM + ROUNDS):
        data.fill_(RANK + 1)
        device.wait()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(data)
        device.wait()
        times.append(time.perf_counter() - began)
        assert bool((data == wanted).all()), "a wrong sum"
    dist.destroy_process_group()
    log = Path(os.environ["NCCL_DEBUG_FILE"]).read_text(encoding="utf-8", errors="replace")
    network = os.environ["NCCL_NET"]
    assert f"via NET/{network}" in log, f"NCCL did not take {network}: {log[-1500:]}"
    return [row(f"all-reduce of {device.large * 4 / 1e6:.3g} MB via NET/{network}", times[WARM:], 1e3, "ms")]


def arms(device: Device) -> Rows:
    """Train a small model with DDP over NCCL, by the arms of the environment; check that ranks end with one model."""
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = models.build("thin_bert", hidden=1024, heads=16, words=8192, positions=256).to(device.name)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(int(os.environ["CHECKED_STEPS"])):
        torch.manual_seed(SIZE * step + RANK)
        batch = torch.randint(8192, (32, 256), device=device.name)
        optimizer.zero_grad()
        outputs = ddp(batch)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean().backward()
        optimizer.step()
    device.wait()
    digests: list[Any] = [None] * SIZE
    dist.all_gather_object(digests, device_training.digest(model))
    assert len(set(digests)) == 1, "ranks have different weights"
    dist.destroy_process_group()
    return []


def sharded(device: Device) -> Rows:
    """Train a model that FSDP2 shards over NCCL, observed."""
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device.name)
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    measured = netbottleneck.attach(model, optimizer)
    assert measured is not None, "the model is left alone"
    for step in range(int(os.environ["CHECKED_STEPS"])):
        torch.manual_seed(SIZE * step + RANK)
        optimizer.zero_grad()
        model(torch.randn(512, 2048, device=device.name)).square().mean().backward()
        optimizer.step()
    device.wait()
    dist.destroy_process_group()
    return []


def main() -> None:
    """Run a part."""
    part, name, folder = sys.argv[1:]
    device = Device(name)
    if part in ("nccl", "sockets"):
        rows = over_nccl(device)
    elif part == "nb":
        rows = backend_nb(device)
    elif part == "kernels":
        rows = kernels(device)
    elif part == "timing":
        rows = timing(device, folder)
    elif part in ("arms", "sharded"):
        rows = {"arms": arms, "sharded": sharded}[part](device)
    else:
        hvd.init()
        parts = {
            "collectives": collectives,
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
