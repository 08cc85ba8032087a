"""Training on a torch device over the fake CUDA driver: the weights are those of the CPU, bit for bit.

What a hook would measure on a device is left alone. The checks for a machine with a GPU run here too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, Ranks
from warm import WarmPair

pytest.importorskip("torch")

import torch

from netbottleneck import _core
from netbottleneck.config import Settings
from netbottleneck.errors import Error
from netbottleneck.hooks import ddp, horovod
from netbottleneck.trace.model import Step, Trace
from netbottleneck.trace.transports import STOCK

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_timing  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "device_training.py"
LIMIT_S = 2 * RANKS_LIMIT_S  # of a part: it starts ranks once or twice


def weights(ranks: Ranks, how: str, where: str, env: dict[str, str]) -> str:
    """Return what all ranks print."""
    printed = {result.stdout for result in ranks(2, SCRIPT, env, args=[how, where])}
    assert len(printed) == 1, printed
    return printed.pop()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, warm: WarmPair) -> dict[str, str]:
    """Return the weights of the same training on the CPU, by API. It has no streams."""
    ranks = Ranks(tmp_path_factory.mktemp("cpu"), warm=warm)
    return {how: weights(ranks, how, "cpu", {}) for how in ("hvd", "hvd-fp16", "hvd-strided", "ddp")}


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@pytest.mark.parametrize(
    "how", ["hvd", "hvd-fp16", "hvd-strided", "hvd-streams", "hvd-strided-streams", "ddp", "ddp-streams"]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_those_of_the_cpu(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: dict[str, str], how: str, seed: int
) -> None:
    env = {**device, "FAKE_CUDA_SEED": str(seed)}
    assert weights(warm_ranks, how, "fakecuda", env) == on_cpu[how.removesuffix("-streams")]


def test_compressed_gradients_of_a_measured_run(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: dict[str, str], tmp_path: Path
) -> None:
    env = {**device, "NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    assert weights(warm_ranks, "hvd-fp16", "fakecuda", env) == on_cpu["hvd-fp16"]


@pytest.mark.parametrize("how", ["calls", "nb-calls"])
@pytest.mark.parametrize("seed", SEEDS)
def test_calls(warm_ranks: Ranks, device: dict[str, str], how: str, seed: int) -> None:
    assert weights(warm_ranks, how, "fakecuda", {**device, "FAKE_CUDA_SEED": str(seed)}) == "right\n"


@pytest.mark.parametrize("backend", ["cpu:nb,cuda:nb", "cpu:nb,fakecuda:nb", "cpu:nb"])
def test_devices_for_which_the_backend_is_named(warm_ranks: Ranks, device: dict[str, str], backend: str) -> None:
    how = "nb-refusal" if backend == "cpu:nb" else "nb-few"
    assert weights(warm_ranks, how, "fakecuda", {**device, "CHECKED_BACKEND": backend}) == "right\n"


ON_GPU: Any = SimpleNamespace(device=torch.device("cuda:0"))


def use_stream(monkeypatch: pytest.MonkeyPatch, handle: int) -> None:
    """Make a stream of this handle the current one of each GPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=handle))


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (["cuda:0", "cuda:0"], ""),
        (["cuda:0", "cpu"], "parameter 1 is on cpu, 0 on cuda:0: only a model on one device can be measured"),
        (["xpu:0"], "parameter 0 is on xpu:0: gradients travel from host and CUDA memory only"),
    ],
)
def test_a_ddp_model_is_left_alone_by_its_devices(monkeypatch: pytest.MonkeyPatch, places: list[str], why: str) -> None:
    model: Any = SimpleNamespace(process_group=SimpleNamespace(size=lambda: 2))
    parameters = [(str(i), SimpleNamespace(device=torch.device(place))) for i, place in enumerate(places)]
    monkeypatch.setattr(ddp, "reducer_of", lambda _: SimpleNamespace(_update_process_group=None))
    monkeypatch.setattr(ddp, "reduced_parameters", lambda _: parameters)
    monkeypatch.setattr(ddp.dist, "get_world_size", lambda: 2)
    use_stream(monkeypatch, 0)
    assert ddp._refusal(model, Settings()) == why


@pytest.mark.parametrize(("connections", "left_alone"), [("1", True), ("8", False)])
def test_a_ddp_model_on_a_gpu_is_left_alone_where_all_streams_share_a_queue(
    monkeypatch: pytest.MonkeyPatch, connections: str, left_alone: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    use_stream(monkeypatch, 0)
    on_host: Any = SimpleNamespace(device=torch.device("cpu"))
    why = ddp._refusal_by_device([("weight", ON_GPU)])
    assert why.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue") == left_alone
    assert not ddp._refusal_by_device([("weight", on_host)])


@pytest.mark.parametrize(("handle", "left_alone"), [(0, False), (1, False), (2, True)])
def test_a_ddp_model_on_the_per_thread_default_stream_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, handle: int, left_alone: bool
) -> None:
    use_stream(monkeypatch, handle)
    assert ddp._refusal_by_device([("weight", ON_GPU)]).endswith("use a stream of torch.cuda") == left_alone


def test_a_gradient_of_an_installed_horovod_on_a_gpu_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert not horovod._can_travel("weight", ON_GPU, strict=False)
    assert "is left alone: parameter weight is on cuda:0" in caplog.text
    with pytest.raises(ValueError, match="weight is on cuda:0"):
        horovod._can_travel("weight", ON_GPU, strict=True)


CHECK = ROOT / "benchmarks" / "gpu_check.py"


def gpu_check(*options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the checks that a machine with a GPU makes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK_CUDA")}
    command = [sys.executable, str(CHECK), *options]
    return subprocess.run(
        command, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


ROWS = {
    **{"versions": 13, "collectives": 8, "nb": 5, "horovod": 4, "staging": 12, "gather": 3, "hooks": 3, "faults": 1},
    **{"timing": 11, "kernels": 3 * 13 + 3},
}


@pytest.mark.parametrize("part", [*ROWS, "nccl", "events"])
def test_each_part_of_gpu_check_writes_its_result(device: dict[str, str], tmp_path: Path, part: str) -> None:
    """Over the fake driver: all parts but one that needs a GPU."""
    results = tmp_path / "results.json"
    env = {**device, "OUT": str(tmp_path / "copy")}
    done = gpu_check("--only", part, "--device", "fakecuda", "--results", str(results), env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "copy" / "gpu-check.json").read_text(encoding="utf-8")) == found
    assert "no GPU took part" in found["title"]
    assert {"cpu", "cores", "kernel"} <= set(found["machine"])
    assert "torch" in found["versions"]
    assert set(found["parts"]) == {part}
    written = found["parts"][part]
    if part in ("nccl", "events"):
        assert (written["verdict"], written["why"]) == ("not run", "NCCL needs a GPU")
    else:
        assert (written["verdict"], len(written["rows"])) == ("ok", ROWS[part])
    if part == "kernels":
        assert {row["device"] for row in written["rows"] if "device" in row} == {"fakecuda:0"}


@pytest.mark.timeout(300)
def test_a_failed_part_of_gpu_check_keeps_the_results_of_the_others(device: dict[str, str], tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--device", "fakecuda", "--results", str(results)]
    assert gpu_check("--only", "versions,nccl", *options, env=device).returncode == 0
    done = gpu_check("--only", "hooks", *options, env={**device, "FAKE_CUDA_FAIL": "cuStreamWaitEvent"})
    assert done.returncode == 1, done.stdout + done.stderr
    parts = json.loads(results.read_text(encoding="utf-8"))["parts"]
    verdicts = {name: part["verdict"] for name, part in parts.items()}
    assert verdicts == {"versions": "ok", "nccl": "not run", "hooks": "failed"}
    assert "RuntimeError: ranks exited with" in parts["hooks"]["why"]
    assert "CUDA: cuStreamWaitEvent on device 0: CUDA_ERROR_OUT_OF_MEMORY" in "".join(parts["hooks"]["logs"])
    assert "CUDA: cuStreamWaitEvent on device 0: CUDA_ERROR_OUT_OF_MEMORY" in done.stdout


def test_gpu_check_without_a_gpu_says_what_is_absent(tmp_path: Path) -> None:
    missing = {"NETBOTTLENECK_CUDA_LIBRARY": str(tmp_path / "libcuda.so.1")}
    done = gpu_check("--only", "versions", "--results", str(tmp_path / "results.json"), env=missing)
    assert done.returncode == 77, done.stderr
    assert "nothing was checked" in done.stdout
    assert "libcuda.so.1 cannot be loaded (" in done.stdout
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("options", [("--only", "speed"), ("--device", "fakecuda")])
def test_gpu_check_refuses_unknown_parts_and_results_of_the_fake_driver(options: tuple[str, ...]) -> None:
    assert gpu_check(*options).returncode == 2


def launched(number: int, at: float, begin: float, end: float, name: str = "gemm") -> list[dict[str, Any]]:
    """Return a launch on the host and its kernel, as torch.profiler records them in us."""
    arguments = {"args": {"correlation": number}}
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, **arguments},
        {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, **arguments},
    ]


def ranged(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


# The host runs ahead of the GPU: 20 us for the first module, 300 for the second, 900 for the backward pass.
PROFILED = [
    ranged("user_annotation", "7|forward", 0, 40),
    ranged("user_annotation", "7|module a", 1, 10),
    *launched(1, 2, 100, 110),
    *launched(2, 5, 112, 120),
    ranged("user_annotation", "7|module b", 11, 20),
    *launched(3, 12, 125, 425),
    ranged("user_annotation", "7|backward", 50, 95),
    ranged("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 51, 60),
    *launched(4, 52, 500, 900),
    ranged("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 61, 70),
    *launched(5, 62, 905, 1325),
    *launched(6, 69, 1330, 5000, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    *launched(7, 90, 6000, 6010),  # after the last node: the reducer's copies out of its buckets
]


def test_times_of_the_profiler_are_those_of_the_kernels_that_a_range_launched() -> None:
    assert gpu_timing.profiled(PROFILED, on_gpu=True) == {
        7: {"module a": 20_000, "module b": 300_000, "backward": 900_000}
    }
    assert gpu_timing.profiled(PROFILED, on_gpu=False) == {
        7: {"module a": 9_000, "module b": 9_000, "backward": 30_000}
    }


@pytest.mark.parametrize(("backward_ns", "broken"), [(900_000, []), (960_000, ["backward"])])
def test_a_time_that_differs_from_the_profilers_breaks_the_bar(backward_ns: int, broken: list[str]) -> None:
    end = 425_000 + backward_ns
    step = Step(
        0, 7, 0, STOCK, 0, end, sampled=True, forward=((0, 425_000),), grad_ready=((0, end),),
        modules=((0, 100_000, 125_000), (1, 125_000, 425_000)),
    )  # fmt: skip
    trace = Trace("run", 1, (STOCK,), modules=("a", "b"), steps=(step,))
    rows = list(gpu_timing.compared(trace, {0: gpu_timing.profiled(PROFILED, on_gpu=True)}, on_gpu=True))
    found = {row["condition"].split(", ")[1].split(" of ")[0]: row for row in rows}
    assert found["module a"]["value"] == 1.25  # too short for the bar
    assert [what for what, row in found.items() if "broken" in row] == [*broken]


def test_kernels_are_refused_by_their_name_and_counts() -> None:
    for kernel, *counts in [("nb_speed", 1), ("nb_pack", 0), ("nb_pack", 1, 0), ("nb_pack", 1, 1, 0)]:
        with pytest.raises(ValueError, match=f"{kernel} of {counts[0]} elements"):
            _core.kernel_times(kernel, 0, 0, 0, *counts)


def test_kernels_are_timed_on_the_device_of_their_memory(device: dict[str, str]) -> None:
    library = device["NETBOTTLENECK_CUDA_LIBRARY"]
    with pytest.raises(Error, match="there is no device 7"):
        _core.kernel_times("nb_add_f32", 7, 0, 0, 1, library=library)


def test_a_staging_is_timed_on_memory_of_a_device_only(device: dict[str, str], tmp_path: Path) -> None:
    library = device["NETBOTTLENECK_CUDA_LIBRARY"]
    for way, *counts in [("in", 1), ("out", 0), ("back", 1, 0), ("both", 1, 10**6)]:
        with pytest.raises(ValueError, match=f"{way} of {counts[0]} bytes"):
            _core.staging_times(way, 0, 0, *counts)
    with pytest.raises(Error, match="there is no device 7"):
        _core.staging_times("out", 7, 0, 1, library=library)
    with pytest.raises(ValueError, match="cuMemcpyDtoHAsync of 8 bytes on device 0"):
        _core.staging_times("out", 0, 8, 8, library=library)
    with pytest.raises(Error, match=r"libcuda\.so\.1 cannot be loaded"):
        _core.staging_times("out", 0, 0, 1, library=str(tmp_path / "libcuda.so.1"))


def test_kernels_without_a_driver_are_not_timed(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"libcuda\.so\.1 cannot be loaded"):
        _core.kernel_times("nb_add_f32", 0, 0, 0, 1, library=str(tmp_path / "libcuda.so.1"))
