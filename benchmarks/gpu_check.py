"""Checks on a GPU: python benchmarks/gpu_check.py [--only PART,…]. `make gpu-check` finds a Python with CUDA's torch.

Each part runs two ranks on one GPU, has a time limit, and writes its result to benchmarks/results/gpu-check.json at
once. All parts together take at most 8 minutes, without a network. Exit codes: 0, 1 if a part failed, 2 usage, 77
without a GPU: nothing was checked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_timing

from netbottleneck import _core, config
from netbottleneck.bench import head

ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).with_name("gpu_rank.py")
RESULTS = Path(__file__).with_name("results") / "gpu-check.json"
RANKS = 2
FAILED, USAGE, ABSENT = 1, 2, 77
CUDA, FAKE = "cuda", "fakecuda"
# Limits over the fake driver, whose times say nothing about a GPU, are so many times as long.
FAKE_TIMES = 4


class Part(NamedTuple):
    """A part: its limit in seconds, whether it needs NCCL, and what it checks."""

    limit_s: float
    nccl: bool
    text: str


PARTS = {
    "versions": Part(20, False, "driver, devices, pinning, kernels, torch, NCCL, MPS"),
    "collectives": Part(50, False, "every collective and type against sums on the host, bit for bit"),
    "nb": Part(40, False, "calls of the backend nb against the CPU's, and DDP over it against sums on the host"),
    "staging": Part(40, False, "all-reduce of GPU memory beside host memory, and plain pinned copies"),
    "gather": Part(30, False, "all-reduce of many small gradients, copied by the copy engine or by a kernel"),
    "hooks": Part(40, False, "gradient hooks on the thread of backward beside an empty Python hook"),
    "faults": Part(30, False, "a rank killed in mid-copy is an error on the other"),
    "timing": Part(80, False, "a measured DDP model's times beside torch.profiler's, and what measuring costs"),
    "kernels": Part(30, False, "our kernels beside torch's copies and additions, by size"),
    "nccl": Part(40, True, "NCCL over our plugin: sums, and the network that NCCL took"),
    "sockets": Part(50, True, "NCCL over our plugin beside its Socket network, default and tuned"),
    "arms": Part(50, True, "NCCL's own network, nccl+tcp and nccl+ofi in turns in a measured DDP model"),
    "sharded": Part(40, True, "the streams of a measured FSDP2 model: its collectives, and the waits for them"),
}

TOTAL_S = 480  # of all parts: one whose limit is beyond it fails

# The variables of the ways that a part takes in turn.
OURS = {"NCCL_NET": "NetBottleneck"}
WAYS: Mapping[str, Mapping[str, str]] = {
    "ours": OURS,
    "copies": {"NETBOTTLENECK_CUDA_GATHER_BYTES": "0"},
    "kernel": {"NETBOTTLENECK_CUDA_GATHER_BYTES": "1Mi"},
    "socket": {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none"},
    "socket 4x4": {
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
    # Not told which network: netbottleneck arranges that.
    "in turns": {
        "NETBOTTLENECK_TRANSPORT": "stock,nccl+tcp,nccl+ofi",
        "NCCL_IB_DISABLE": "1",  # without which the arms are refused where there is InfiniBand
        "NETBOTTLENECK_BLOCK_STEPS": "5",
        "NETBOTTLENECK_START_STEP": "5",
        "CHECKED_STEPS": "95",
    },
    "observed": {
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NETBOTTLENECK": "1",
        "NETBOTTLENECK_START_STEP": "5",
        "CHECKED_STEPS": "60",
    },
}
WAYS_OF = {
    "gather": ("copies", "kernel"),
    "nccl": ("ours",),
    "sockets": ("ours", "socket", "socket 4x4"),
    "arms": ("in turns",),
    "sharded": ("observed",),
}
MEASURED = ("timing", "arms", "sharded")  # parts whose training is measured
# The part `timing` runs over the first of these process groups that works: NCCL may refuse two ranks on one GPU.
GROUPS = {CUDA: ("nccl", "gloo"), FAKE: ("staged",)}
# By device: steps in all, steps before the profiled ones, steps in a block, one of how many steps is sampled.
STEPS = {CUDA: (112, 84, 7, 3), FAKE: (36, 24, 3, 3)}


def absent(device: str) -> list[str]:
    """Return what is missing for the checks; empty: nothing is."""
    missing = []
    try:
        _core.cuda(config.settings().cuda_library)
    except OSError as error:
        missing.append(str(error.strerror or error))
    try:
        import torch
    except ImportError:
        return [*missing, "torch is not installed"]
    if device == CUDA and not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} finds no CUDA device")
    return missing


def without_nccl(device: str) -> str:
    """Return why parts over NCCL cannot run, or ""."""
    import torch

    if device != CUDA:
        return "NCCL needs a GPU"
    return "" if torch.distributed.is_nccl_available() else f"torch {torch.__version__} has no NCCL"


def gathered(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest size up to which a kernel surely copies tensors faster than the copy engine, as a row.

    rows: of both ways, by size, from an idle GPU. No size if the kernels do not load: both ways are copies then.
    """
    found = {"condition": "NETBOTTLENECK_CUDA_GATHER_BYTES that these times suggest", "unit": "bytes"}
    _, _, devices = _core.cuda(config.settings().cuda_library)
    if why := next((kernels for _, _, kernels in devices if kernels), ""):
        return {**found, "value": f"not known: {why}", "unit": ""}
    by_name = {str(row["condition"]): row for row in rows}
    sizes = [name.removeprefix("copies: ") for name in by_name if name.startswith("copies: ")]
    faster = itertools.takewhile(
        lambda size: by_name[f"kernel: {size}"]["high"] < by_name[f"copies: {size}"]["low"], sizes
    )
    return {**found, "value": max((int(size.split()[-2]) for size in faster), default=0)}


def versions(device: str) -> list[dict[str, Any]]:
    """Return what is installed, as rows."""
    import torch

    path, version, devices = _core.cuda(config.settings().cuda_library)
    found: dict[str, Any] = {"driver": path, "CUDA of the driver": f"{version // 1000}.{version % 1000 // 10}"}
    for number, (name, pinning, kernels) in enumerate(devices):
        found |= {
            f"device {number}": name,
            f"pinning {number}": pinning or "works",
            f"kernels {number}": kernels or "load",
        }
    found |= {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    if not without_nccl(device):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["MPS"] = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "not set")
    if device == CUDA and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
        found["nvidia-smi"] = subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=False
        ).stdout.strip()
    return [{"condition": name, "value": value} for name, value in found.items()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environ_of(rank: int, port: int, way: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return a rank's variables. Each rank is a host of its own to NCCL, so all its transfers go over its network."""
    plugin = Path(_core.__file__).with_name("libnccl-net-netbottleneck.so")
    values: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NETBOTTLENECK_IFNAME": "lo",
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_NET_PLUGIN": plugin,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"{folder}/nccl.{rank}.log",
    }
    return {**os.environ, **{name: str(value) for name, value in values.items()}, **way}


def run_ranks(part: str, device: str, way: Mapping[str, str], until: float) -> list[dict[str, Any]]:
    """Run a part's ranks; return the rows that rank 0 wrote. Raises RuntimeError, or TimeoutError at `until`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(RANKS):
            log = stack.enter_context((Path(folder) / f"{rank}.log").open("w", encoding="utf-8"))
            command = [sys.executable, str(RANK), part, device, folder]
            environ = environ_of(rank, port, way, folder)
            if part in MEASURED:
                environ["NETBOTTLENECK_DIR"] = f"{folder}/run"
            ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
        try:
            codes = [rank.wait(max(until - time.monotonic(), 0.1)) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise TimeoutError("over its limit") from None
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
        rows = Path(folder) / "rows.json"
        killed = part == "faults" and codes[1] == -signal.SIGKILL
        if codes[0] or (codes[1] and not killed) or not rows.exists():
            tails = [(Path(folder) / f"{rank}.log").read_text(errors="replace")[-1500:] for rank in range(RANKS)]
            raise RuntimeError(f"ranks exited with {codes}: " + "\n".join(tails))
        found: list[dict[str, Any]] = json.loads(rows.read_text(encoding="utf-8"))
        if part == "timing":
            return [*found, *gpu_timing.rows(Path(folder), device == CUDA)]
        of_record = {"arms": gpu_timing.arms, "sharded": gpu_timing.sharded}.get(part)
        return [*found, *(of_record(Path(folder)) if of_record is not None else [])]


def run_timing(device: str, until: float) -> list[dict[str, Any]]:
    """Run the part `timing` over the first process group that works; return its rows. Raises as run_ranks."""
    steps, plain, block_steps, every = STEPS[device]
    environ = {
        **{"CHECKED_STEPS": steps, "CHECKED_PLAIN_STEPS": plain, "NETBOTTLENECK_TRANSPORT": "stock"},
        **{"NETBOTTLENECK_BLOCK_STEPS": block_steps, "NETBOTTLENECK_SAMPLE_EVERY": every},
        "NETBOTTLENECK_START_STEP": block_steps,
    }
    *others, last = GROUPS[device]
    refused = []
    for group in (*others, last):
        way = {**WAYS["socket"], **{name: str(value) for name, value in environ.items()}, "CHECKED_BACKEND": group}
        now = time.monotonic()
        try:
            rows = run_ranks("timing", device, way, until if group == last else now + 0.6 * (until - now))
        except (RuntimeError, OSError) as error:
            if group == last:
                raise
            refused.append({"condition": f"{group} failed, so another group was used", "value": str(error)[-300:]})
            continue
        return [*refused, *({**row, "condition": f"{group}: {row['condition']}"} for row in rows)]
    return refused


def run_part(name: str, device: str, left_s: float) -> dict[str, Any]:
    """Return a part's result. left_s: for all parts."""
    began = time.monotonic()
    part = PARTS[name]
    limit_s = part.limit_s * (FAKE_TIMES if device == FAKE else 1)
    result: dict[str, Any] = {"checks": part.text, "limit_s": limit_s, "verdict": "ok", "rows": []}
    why = without_nccl(device) if part.nccl else ""
    try:
        if why:
            result |= {"verdict": "not run", "why": why}
        elif left_s < limit_s:
            raise TimeoutError(f"not run: {left_s:.0f} s are left, which may not suffice: --only {name}")
        elif name == "versions":
            result["rows"] = versions(device)
        elif name == "timing":
            result["rows"] = run_timing(device, began + limit_s)
        else:
            for way in WAYS_OF.get(name, ("",)):
                rows = run_ranks(name, device, WAYS.get(way, {}), began + limit_s)
                result["rows"] += [{**row, "condition": f"{way}: {row['condition']}".lstrip(": ")} for row in rows]
            if name == "gather":
                result["rows"].append(gathered(result["rows"]))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:  # TimeoutError is an OSError
        result |= {"verdict": "failed", "why": f"{error}"}
    broken = [row["broken"] for row in result["rows"] if "broken" in row]
    if broken:
        result |= {"verdict": "failed", "why": "; ".join(broken)}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def write(results: Path, device: str, name: str, result: Mapping[str, Any]) -> None:
    """Add a part's result to the file, at once. Results of another machine or other versions are replaced."""
    here = head(RANKS)
    found: dict[str, Any] = {
        "title": "Checks on a GPU" if device == CUDA else "Checks over the fake driver: no GPU took part",
        "machine": here["machine"],
        "system": f"{platform.system()} {platform.release()}",
        "versions": here["versions"],
        "command": "python benchmarks/gpu_check.py",
        "parts": {},
    }
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(results.read_text(encoding="utf-8"))
        if all(before.get(key) == found[key] for key in ("title", "machine", "versions")):
            found["parts"] = before["parts"]
    found["parts"][name] = {"date": time.strftime("%Y-%m-%d"), **result}
    text = json.dumps(found, indent=1) + "\n"
    beside = results.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(results)


def main() -> int:
    """Check, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"parts, comma-separated, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--device", choices=(CUDA, FAKE), default=CUDA, help="fakecuda: the device of tests/cuda")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if options.device == FAKE and options.results == RESULTS:
        parser.error("--device fakecuda needs --results: what the fake driver gives is no result of a GPU")
    if missing := absent(options.device):
        print("gpu-check: nothing was checked, because this machine has no GPU to check:")
        print("".join(f"  {why}\n" for why in missing), end="")
        return ABSENT
    verdicts = []
    until = time.monotonic() + TOTAL_S * (FAKE_TIMES if options.device == FAKE else 1)
    for name in names:
        result = run_part(name, options.device, until - time.monotonic())
        write(options.results, options.device, name, result)
        verdicts.append(result["verdict"])
        print(f"{name}: {result['verdict']}, {result['seconds']} s of {result['limit_s']} s", result.get("why", ""))
        for row in result["rows"]:
            print(f"  {row['condition']}: {row['value']} {row.get('unit', '')}".rstrip(), flush=True)
    return FAILED if "failed" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
