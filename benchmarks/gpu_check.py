"""Checks on a GPU: python benchmarks/gpu_check.py [--only PART,…]. `make gpu-check` finds a Python with CUDA's torch.

Each part runs two ranks on one GPU, has a time limit, and writes its result at once: to --results, which is
benchmarks/results/gpu-check.json unless said otherwise, and to a file of that name in the folder that --copy or the
variable OUT names. All parts together take at most 8 minutes, without a network. Exit codes: 0, 1 if a part failed,
2 usage, 77 without a GPU: nothing was checked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_calls
import gpu_timing
import keep

from netbottleneck import _core, config
from netbottleneck.bench import head
from netbottleneck.lab import Lab
from netbottleneck.runtime.communicators import native_refusal

ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).with_name("gpu_rank.py")
RESULTS = Path(__file__).with_name("results") / "gpu-check.json"
RANKS = 2
FAILED, USAGE, ABSENT = 1, 2, 77
CUDA, FAKE = "cuda", "fakecuda"
# Limits over the fake driver, whose times say nothing about a GPU, are so many times as long.
FAKE_TIMES = 4


# Seconds: between two looks at the ranks, for the other ranks after one failed, from SIGABRT to SIGKILL, and after it.
POLL_S, END_S, ABORT_S, KILL_S = 0.05, 5.0, 2.0, 10.0
LOG_CHARACTERS = 3000  # of the end of a log, in the results
PRINTED_ROWS, PRINTED_CHARACTERS = 14, 500  # of a part; of a text
CONNECTIONS = 32  # hardware queues for streams: the most that CUDA has


# The oldest NCCL that the net plugin serves, that the profiler plugin serves, and with NCCL_MULTI_RANK_GPU_ENABLE.
NCCL, PROFILER, MULTI_RANK = (2, 18), (2, 27), (2, 30)


class Part(NamedTuple):
    """A part: its limit in seconds, the oldest NCCL that it needs, if any, and what it checks."""

    limit_s: float
    nccl: tuple[int, int] | None
    text: str


# What ends a rank, or may harm the device, is last. All limits together are TOTAL_S.
PARTS = {
    "versions": Part(10, None, "driver, devices, pinning, kernels, torch, NCCL, MPS"),
    "collectives": Part(30, None, "every collective and type against sums on the host, bit for bit"),
    "nb": Part(30, None, "calls of the backend nb against the CPU's, and DDP over it against sums on the host"),
    "horovod": Part(30, None, "Horovod's calls, on streams of their own too, and trainings against sums on the host"),
    "nccl": Part(20, NCCL, "NCCL over our plugin: sums, and the network that NCCL took"),
    "arms": Part(45, NCCL, "NCCL's own network, nccl+tcp and nccl+ofi in turns in a measured DDP model"),
    "sharded": Part(30, NCCL, "the streams of a measured FSDP2 model: its collectives, and the waits for them"),
    "events": Part(30, PROFILER, "NCCL's events of our plugin and of Socket, and NCCL's calls, for replay elsewhere"),
    "timing": Part(60, None, "a measured DDP model's times beside torch.profiler's, and what measuring costs"),
    "staging": Part(30, None, "all-reduce of GPU memory beside host memory, and what it costs the GPU's computation"),
    "gather": Part(25, None, "all-reduce of many small gradients, copied by the copy engine or by a kernel"),
    "kernels": Part(20, None, "our kernels beside torch's copies and additions, by size, on one rank alone"),
    "sockets": Part(30, NCCL, "NCCL over our plugin beside its Socket network, default and tuned"),
    "capped": Part(50, NCCL, "the same, where each TCP flow is capped: all alike, and one of four lower"),
    "hooks": Part(15, None, "gradient hooks on the thread of backward beside an empty Python hook"),
    "one_host": Part(10, MULTI_RANK, "NCCL over our plugin, its ranks on one host: NCCL_MULTI_RANK_GPU_ENABLE"),
    "faults": Part(15, None, "a rank killed in mid-copy is an error on the other"),
}

# All parts together. A part may use what the parts before it have left, up to MORE times its limit. It is not started
# with less than LEAST_S.
TOTAL_S, LEAST_S, MORE = 480, 10, 2
ALONE = ("versions", "kernels")  # parts in which two ranks do not share the GPU

# The variables of the ways that a part takes in turn.
FLOWS = "CHECKED_FLOWS"  # caps of TCP flows in a lab on the loopback interface
OURS = {"NCCL_NET": "NetBottleneck"}
LANES = {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_STREAMS": "4", "NETBOTTLENECK_PORTS": "41000-41127"}
# The lab caps a lane by its port. Each rank has its own part of the range, from a port of the first cap on: four lanes
# have consecutive ports, and so all four caps. The lab leaves the range's first port without a cap.
PORTS_OF = ("41001-41060", "41061-41127")
WAYS: Mapping[str, Mapping[str, str]] = {
    "ours": OURS,
    # NCCL has ranks of one host on one GPU only with the first variable, and then goes by the network only without the
    # other ways between them.
    "one host": {
        **OURS,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_HOSTID": "host",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    },
    "ours x4": {**OURS, **LANES},
    "four flows of 500 Mbit/s": {**LANES, FLOWS: "500mbit"},
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
        "NETBOTTLENECK_TRANSPORT": "stock,nccl+tcp",  # and nccl+ofi where libfabric works
        "NCCL_IB_DISABLE": "1",  # without which the arms are refused where there is InfiniBand
        "NETBOTTLENECK_BLOCK_STEPS": "5",
        "NETBOTTLENECK_START_STEP": "5",
        "CHECKED_STEPS": "95",
        "CHECKED_SECONDS": "30",
    },
    "observed": {
        "NCCL_NET": "Socket",
        "NCCL_NET_PLUGIN": "none",
        "NETBOTTLENECK": "1",
        "NETBOTTLENECK_BLOCK_STEPS": "6",
        "NETBOTTLENECK_START_STEP": "5",
        "CHECKED_STEPS": "60",
        "CHECKED_SECONDS": "20",
    },
}
# The caps of the part `capped`, and the ways to compare under them. Socket's flows get different caps in turn, so only
# many flows have a share of the low one that is the same in every run.
CAPS = (
    ("500 Mbit/s a flow", "500mbit", ("ours x4", "socket", "socket 4x4")),
    ("500, 500, 500, 125 Mbit/s", "500mbit,500mbit,500mbit,125mbit", ("ours x4", "socket 4x4")),
)
CAPPED = {f"{caps}, {title}": {**WAYS[title], FLOWS: flows} for caps, flows, titles in CAPS for title in titles}
WAYS_OF = {
    "staging": ("", "four flows of 500 Mbit/s"),
    "gather": ("copies", "kernel"),
    "nccl": ("ours",),
    "events": ("ours", "socket"),
    "capped": tuple(CAPPED),
    "one_host": ("one host",),
    "sockets": ("ours", "socket", "socket 4x4"),
    "arms": ("in turns",),
    "sharded": ("observed",),
}
MEASURED = ("timing", "arms", "sharded")  # parts whose training is measured
# The part `timing` runs over the first of these process groups that works: NCCL may refuse two ranks on one GPU.
GROUPS = {CUDA: ("nccl", "gloo"), FAKE: ("staged",)}
# By device: the most steps, the seconds for them, steps in a block, one of how many steps is sampled.
STEPS = {CUDA: (112, 25, 7, 3), FAKE: (36, 600, 3, 3)}


def absent(device: str) -> list[str]:
    """Return what is missing for the checks; empty: nothing is."""
    missing = []
    try:
        _, _, devices = _core.cuda(config.settings().cuda_library)
        missing += [why for name, why, _ in devices[:1] if not name]  # the checks use the first one alone
    except (OSError, ValueError) as error:
        missing.append(str(getattr(error, "strerror", None) or error))
    try:
        import torch
    except ImportError:
        return [*missing, "torch is not installed"]
    if device == CUDA and not torch.cuda.is_available():
        missing.append(f"torch {torch.__version__} finds no CUDA device")
    return missing


def without_nccl(device: str, oldest: tuple[int, int] = NCCL) -> str:
    """Return why parts over NCCL of this version or later cannot run, or ""."""
    import torch

    if device != CUDA:
        return "NCCL needs a GPU"
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    version, needed = (".".join(map(str, each)) for each in (torch.cuda.nccl.version(), oldest))
    return "" if torch.cuda.nccl.version() >= oldest else f"NCCL {version} is too old: {needed} or later is needed"


def sharing() -> str:
    """Return how the ranks share the GPU: under MPS at the same time, else in turns, by slices of time."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return "MPS" if (pipe / "control").exists() else "time-sliced"


def gathered(rows: Sequence[Mapping[str, Any]], why: str) -> dict[str, Any]:
    """Return the largest size up to which a kernel surely copies tensors faster than the copy engine, as a row.

    rows: of both ways, by size, from an idle GPU. why: why these times suggest no size. No size either if the kernels
    do not load: both ways are copies then.
    """
    found = {"condition": "NETBOTTLENECK_CUDA_GATHER_BYTES that these times suggest", "unit": "bytes"}
    _, _, devices = _core.cuda(config.settings().cuda_library)
    if why := why or next((kernels for _, _, kernels in devices[:1] if kernels), ""):
        return {**found, "value": f"not known: {why}", "unit": ""}
    by_name = {str(row["condition"]): row for row in rows}
    sizes = [name.removeprefix("copies: ") for name in by_name if name.startswith("copies: ")]
    faster = itertools.takewhile(
        lambda size: by_name[f"kernel: {size}"].get("high", math.inf) < by_name[f"copies: {size}"]["low"], sizes
    )
    return {**found, "value": max((int(size.split()[-2]) for size in faster), default=0)}


def gpus(device: str) -> dict[str, Any]:
    """Return what identifies the GPUs and their driver."""
    _, version, devices = _core.cuda(config.settings().cuda_library)
    found = {
        "CUDA of the driver": f"{version // 1000}.{version % 1000 // 10}",
        "devices": [name or "cannot be used" for name, *_ in devices],
    }
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    if device == CUDA and shutil.which(query[0]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
            found["nvidia-smi"] = done.stdout.strip()
    return found


def versions(device: str) -> list[dict[str, Any]]:
    """Return what is installed, as rows."""
    import torch

    path, _, devices = _core.cuda(config.settings().cuda_library)
    found: dict[str, Any] = {"driver": path, **gpus(device)}
    for number, (_, pinning, kernels) in enumerate(devices):
        found |= {f"pinning {number}": pinning or "works", f"kernels {number}": kernels or "load"}
    found |= {"torch": torch.__version__, "CUDA of torch": torch.version.cuda}
    if not without_nccl(device):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {
        "netbottleneck": os.environ.get("CHECKED_BUILD", f"{Path(_core.__file__).parent}"),
        "libfabric": native_refusal("ofi", config.settings()) or "works",
        "two ranks on a GPU": sharing(),
        "CUDA_DEVICE_MAX_CONNECTIONS": CONNECTIONS,
    }
    return [{"condition": name, "value": value} for name, value in found.items()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environ_of(part: str, rank: int, way: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return a rank's variables but its port.

    Each rank is a host of its own to NCCL, so all its transfers use its network; the part one_host has another way.
    NCCL_MNNVL_ENABLE: else GPUs that NVLink joins across hosts may bypass it.
    """
    plugin = Path(_core.__file__).with_name("libnccl-net-netbottleneck.so")
    values: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": 1,
        "PYTHONFAULTHANDLER": 1,
        "CUDA_DEVICE_MAX_CONNECTIONS": CONNECTIONS,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NETBOTTLENECK_IFNAME": "lo",
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_MNNVL_ENABLE": 0,
        "NCCL_NET_PLUGIN": plugin,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": folder / f"nccl.{rank}.log",
    }
    if part == "events":
        values |= gpu_calls.variables(folder, rank)
    if part in MEASURED:
        values |= {"NETBOTTLENECK_DIR": folder / "run", "NETBOTTLENECK_STRICT": 1}
    return {**os.environ, **{name: str(value) for name, value in values.items()}, **way}


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, and what they started. At SIGABRT Python writes where each of its threads is."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGABRT)
    until = time.monotonic() + ABORT_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(until - time.monotonic(), POLL_S))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep it
            rank.wait(KILL_S)


def has_failed(part: str, rank: int, code: int | None) -> bool:
    """Return True for an exit code that is not the part's own doing."""
    return bool(code) and not (part == "faults" and (rank, code) == (1, -signal.SIGKILL))


def finish(part: str, ranks: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Wait for all ranks; for END_S once one failed. Raises RuntimeError if one failed, TimeoutError at `until`."""
    failed = False
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < until:
            if not failed and any(has_failed(part, rank, code) for rank, code in enumerate(codes)):
                failed, until = True, min(until, time.monotonic() + END_S)
            time.sleep(POLL_S)
    finally:
        end(ranks)
    if any(has_failed(part, rank, code) for rank, code in enumerate(codes)):
        raise RuntimeError(f"ranks exited with {codes} (None: it was ended)")
    if None in codes:
        raise TimeoutError(f"over its limit: ranks exited with {codes} (None: it was ended)")


def logs(folder: Path) -> list[str]:
    """Return the ends of the ranks' logs and of NCCL's, each below its name."""
    names = [f"{kind}{rank}.log" for rank in range(RANKS) for kind in ("", "nccl.")]
    files = [folder / name for name in names if (folder / name).exists()]
    return [f"--- {file.name}\n{file.read_text(errors='replace')[-LOG_CHARACTERS:]}" for file in files]


def run_ranks(part: str, device: str, way: Mapping[str, str], until: float) -> list[dict[str, Any]]:
    """Run a part's ranks; return the rows that rank 0 wrote, and those of a record. A failure has the logs as notes."""
    port = {"MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ranks = []
        lab = stack.enter_context(Lab(RANKS, f"none/{way[FLOWS]}", ways=("loopback",))) if FLOWS in way else None
        for rank in range(RANKS):
            log = stack.enter_context((folder / f"{rank}.log").open("wb"))
            command = [sys.executable, str(RANK), part, device, name]
            environ = environ_of(part, rank, way, folder) | port
            if lab is not None:
                environ = lab.variables(rank, environ)
            if lab is not None and "NETBOTTLENECK_PORTS" in way:
                environ["NETBOTTLENECK_PORTS"] = PORTS_OF[rank]
            ranks.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True))
        try:
            finish(part, ranks, until)
            found: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
            found += rows_of_record(part, device, folder)
        except Exception as error:
            for text in logs(folder):
                error.add_note(text)
            raise
        if any("broken" in row for row in found):
            found.append({"condition": "logs", "value": "\n".join(logs(folder))})
        return found


def rows_of_record(part: str, device: str, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of what a measured part recorded. Raises RuntimeError for a record that is not whole."""
    if part == "timing":
        return gpu_timing.rows(folder, device == CUDA)
    rows_of = {"arms": gpu_timing.arms, "sharded": gpu_timing.sharded, "events": gpu_calls.rows}
    return rows_of.get(part, lambda _: [])(folder)


def run_timing(device: str, until: float) -> list[dict[str, Any]]:
    """Run the part `timing` over the first process group that works; return its rows. Raises as run_ranks."""
    steps, seconds, block_steps, every = STEPS[device]
    environ = {
        **{"CHECKED_STEPS": steps, "CHECKED_SECONDS": seconds, "NETBOTTLENECK_TRANSPORT": "stock"},
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
        except Exception as error:
            if group == last:
                raise
            refused.append({"condition": f"{group} failed, so another group was used", **failure(error)})
            continue
        return [*refused, *({**row, "condition": f"{group}: {row['condition']}"} for row in rows)]
    return refused


def failure(error: Exception) -> dict[str, Any]:
    """Return what an exception says, and the logs that it has as notes."""
    return {"value": f"{type(error).__name__}: {error}", "logs": getattr(error, "__notes__", [])}


def run_ways(name: str, device: str, until: float, rows: list[dict[str, Any]]) -> None:
    """Run a part in each of its ways; add the rows of each at once. Raises as run_ranks."""
    if name == "events":
        gpu_calls.recorder()
    for title in WAYS_OF.get(name, ("",)):
        way = dict((CAPPED if name == "capped" else WAYS).get(title, {}))
        if name == "arms":
            rows += add_ofi(way)
        found = run_ranks(name, device, way, until)
        rows += [{**row, "condition": f"{title}: {row['condition']}".lstrip(": ")} for row in found]
    if name == "gather":
        why = "" if sharing() == "MPS" else "the ranks take turns on the GPU: see the part kernels"
        rows.append(gathered(rows, why))
    if name == "kernels":
        rows.append(gathered(rows, ""))


def add_ofi(way: MutableMapping[str, str]) -> list[dict[str, Any]]:
    """Add the arm nccl+ofi where it works, else return a row with the reason."""
    if why := native_refusal("ofi", config.settings()):
        return [{"condition": "nccl+ofi is left out", "value": why}]
    way["NETBOTTLENECK_TRANSPORT"] += ",nccl+ofi"
    return []


def limit_of(name: str, later: Sequence[str], device: str, left_s: float) -> float:
    """Return a part's limit in seconds. later: parts that run after it. left_s: for all of them."""
    times = FAKE_TIMES if device == FAKE else 1
    own = PARTS[name].limit_s * times
    spare = left_s - times * sum(PARTS[each].limit_s for each in later)
    return round(min(left_s, max(own, min(spare, MORE * own))))


def run_part(name: str, device: str, left_s: float, later: Sequence[str] = ()) -> dict[str, Any]:
    """Return a part's result. left_s, later: see limit_of."""
    began = time.monotonic()
    part = PARTS[name]
    limit_s = limit_of(name, later, device, left_s)
    result: dict[str, Any] = {"checks": part.text, "limit_s": limit_s, "verdict": "ok", "rows": []}
    try:
        if why := without_nccl(device, part.nccl) if part.nccl else "":
            result |= {"verdict": "not run", "why": why}
        elif left_s < LEAST_S:
            raise TimeoutError(f"not run: {left_s:.0f} s are left: --only {name}")
        elif name == "versions":
            result["rows"] = versions(device)
        elif name == "timing":
            result["rows"] = run_timing(device, began + limit_s)
        else:
            run_ways(name, device, began + limit_s, result["rows"])
    except Exception as error:
        found = failure(error)
        result |= {"verdict": "failed", "why": found["value"], "logs": found["logs"]}
    if device == CUDA and name not in ALONE:
        result["rows"] = [{**row, "GPU": sharing()} for row in result["rows"]]
    broken = [row["broken"] for row in result["rows"] if "broken" in row]
    if broken:
        result |= {"verdict": "failed", "why": "; ".join(broken)}
    return {**result, "seconds": round(time.monotonic() - began, 1)}


def write(results: Path, gpu: Mapping[str, Any], device: str, name: str, result: Mapping[str, Any]) -> str:
    """Add a part's result to the file, at once; return the text. Results of another machine or versions are replaced.

    gpu: what identifies the GPUs and their driver.
    """
    here = head(RANKS)
    found: dict[str, Any] = {
        "title": "Checks on a GPU" if device == CUDA else "Checks over the fake driver: no GPU took part",
        "machine": here["machine"],
        "gpu": dict(gpu),
        "system": keep.system(here["machine"]["kernel"]),
        "versions": here["versions"],
        "command": "python benchmarks/gpu_check.py",
        "parts": {},
    }
    with contextlib.suppress(OSError, ValueError):
        before = json.loads(results.read_text(encoding="utf-8"))
        if all(before.get(key) == found[key] for key in ("title", "machine", "gpu", "versions")):
            found["parts"] = before["parts"]
    found["parts"][name] = {"date": time.strftime("%Y-%m-%d"), **result}
    text = json.dumps(found, indent=1) + "\n"
    replace(results, text)
    return text


def replace(file: Path, text: str) -> None:
    """Write a file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def show(name: str, result: Mapping[str, Any]) -> None:
    """Print a part's result: of many rows the last ones, of long texts the end. The file has all."""
    print(f"{name}: {result['verdict']}, {result['seconds']} s of {result['limit_s']} s", result.get("why", ""))
    for log in result.get("logs", ()):
        title, _, text = log.partition("\n")
        print(f"{title}\n{text[-PRINTED_CHARACTERS:]}")
    rows = result["rows"]
    if len(rows) > PRINTED_ROWS:
        print(f"  the last {PRINTED_ROWS} of {len(rows)} rows:")
    for row in rows[-PRINTED_ROWS:]:
        value = str(row["value"])[-PRINTED_CHARACTERS:]
        print(f"  {row['condition']}: {value} {row.get('unit', '')}".rstrip())
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """Return the arguments, checked; `names` are the parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"parts, comma-separated, of {', '.join(PARTS)}; default: all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--copy", type=Path, default=os.environ.get("OUT") or None, help="a folder; default: $OUT")
    parser.add_argument("--device", choices=(CUDA, FAKE), default=CUDA, help="fakecuda: the device of tests/cuda")
    options = parser.parse_args()
    options.names = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in options.names if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    if options.device == FAKE and options.results == RESULTS:
        parser.error("--device fakecuda needs --results: what the fake driver gives is no result of a GPU")
    return options


def main() -> int:
    """Check, and return the exit code."""
    options = arguments()
    if missing := absent(options.device):
        print("gpu-check: nothing was checked, because this machine has no GPU that can be checked:")
        print("".join(f"  {why}\n" for why in missing), end="")
        return ABSENT
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # a rank that is ended writes its threads, and no core
    verdicts: dict[str, list[str]] = {}
    until = time.monotonic() + TOTAL_S * (FAKE_TIMES if options.device == FAKE else 1)
    gpu = gpus(options.device)
    for at, name in enumerate(options.names):
        result = run_part(name, options.device, until - time.monotonic(), options.names[at + 1 :])
        verdicts.setdefault(result["verdict"], []).append(name)
        show(name, result)
        text = write(options.results, gpu, options.device, name, result)
        if options.copy is not None:
            replace(options.copy / RESULTS.name, text)
    print("gpu-check:", "; ".join(f"{verdict}: {', '.join(parts)}" for verdict, parts in verdicts.items()))
    return FAILED if "failed" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
