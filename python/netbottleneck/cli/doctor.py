"""Inspection of this machine for `netbottleneck doctor`: launcher, interfaces, libfabric, torch, CUDA, lab.

It measures nothing, and starts nothing except a lab's namespaces for a moment."""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import psutil

from netbottleneck import config
from netbottleneck._version import __version__
from netbottleneck.lab import Lab, LabError
from netbottleneck.launch import connect
from netbottleneck.runtime import monitor

OFI_LEFT_OUT = "ofi left out: install libfabric-dev"
NO_DEVICE_CODE = (
    "this build has no device code, so small tensors are copied one by one: build netbottleneck where nvcc is"
)
_LAB = "1gbit/500mbit"
_SYSCTLS = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_congestion_control",
    "net.core.default_qdisc",
)
# Prefixes of foreign variables that affect the stock path or our lanes.
_OTHERS = (
    "GLOO_",
    "NCCL_",
    "FI_",
    "HOROVOD_",
    "OMP_NUM_THREADS",
    "MASTER_",
    "TORCH_NCCL_",
    "TP_",
    "CUDA_VISIBLE",
    config.CONNECTIONS,
)
_SECRETS = ("SECRET", "KEY", "TOKEN", "PASSWORD")


def examine(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the findings by topic. A failed topic has its error text; this function does not raise."""
    topics: dict[str, Callable[[], Any]] = {
        "version": lambda: {"netbottleneck": __version__, "python": platform.python_version(), **_core_module()},
        "job": lambda: _job(environ),
        "security": lambda: _security(environ),
        "interfaces": lambda: _interfaces(environ),
        "libfabric": lambda: _libfabric(environ),
        "torch": _torch,
        "cuda": lambda: _cuda(environ),
        "machine": _machine,
        "sockets": _sysctls,
        "environment": lambda: _environment(environ),
        "lab": _lab,
    }
    return {name: _or_error(inspect) for name, inspect in topics.items()}


def _or_error(inspect: Callable[[], Any]) -> Any:
    try:
        return inspect()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}


def _core_module() -> dict[str, Any]:
    try:
        core = connect.core()
    except ImportError as error:
        return {"core": "missing", "why": str(error)}
    return {"core": core.VERSION, "transports": core.transports(), "kernels": core.isa()}


def _job(environ: Mapping[str, str]) -> dict[str, Any]:
    detected = connect.detect(config.settings(environ=environ), environ)
    return {
        "launcher": detected.launcher,
        "rank": detected.rank,
        "ranks": detected.size,
        "ranks_on_this_host": detected.local_size,
    }


def _security(environ: Mapping[str, str]) -> dict[str, Any]:
    settings = config.settings(environ=environ)
    return {
        "secret": connect.secret_source(settings, connect.detect(settings, environ), environ),
        "joining": "each connection authenticates with the secret (HMAC-SHA256)",
        "gradients": "not encrypted on the wire (docs/explanation/security.md)",
    }


def _interfaces(environ: Mapping[str, str]) -> dict[str, Any]:
    found = []
    states = psutil.net_if_stats()
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        found.append(
            {
                "name": name,
                "addresses": [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)],
                "up": bool(state and state.isup),
                "speed_bits_per_s": state.speed * 10**6 if state and state.speed else None,
                "mtu_bytes": state.mtu if state else None,
            }
        )
    return {"all": found, **_or_error(lambda: _selected_interface(environ, found))}


def _selected_interface(environ: Mapping[str, str], found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the interface that would be used, the reason, and any faster interfaces."""
    settings = config.settings(environ=environ)
    name, address = connect.core().interfaces(settings.ifname)[0]
    source = settings.sources.get("ifname")
    why = (
        f"{source}={settings.ifname}"
        if source
        else "the first interface that is up, but not loopback, docker* or virbr*"
    )
    speed = {each["name"]: each["speed_bits_per_s"] or 0 for each in found if each["up"]}
    faster = [other for other in speed if speed[other] > speed.get(name, 0) > 0]
    return {"used": name, "address": address, "why": why, "faster": faster}


def _libfabric(environ: Mapping[str, str]) -> dict[str, Any]:
    core = connect.core()
    if not core.HAVE_OFI:
        return {"error": OFI_LEFT_OUT}
    settings = config.settings(environ=environ)
    try:
        path, version = core.libfabric(settings.library)
    except OSError as error:
        return {"error": f"ofi left out: {error.strerror or error}"}
    providers = core.providers(settings.library)
    used = [settings.provider] if settings.provider else [name for name, _ in providers[:1]]
    return {"path": path, "version": version, "providers": [list(each) for each in providers], "used": "".join(used)}


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    if util.find_spec("torch") is None:
        return {
            "error": "torch is not installed: the stock path and training need it (pip install netbottleneck[torch])"
        }
    return {"version": _version_of("torch"), "horovod": _version_of("horovod")}


def _cuda(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the driver, what works on each device, and NCCL. Opens each device's primary context for a moment."""
    packages = sorted(
        f"{each.metadata['Name']} {each.version}"
        for each in metadata.distributions()
        if (each.metadata["Name"] or "").startswith(("nvidia-nccl", "nvidia-cuda-runtime"))
    )
    nodes = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    nccl = {"nccl": ctypes.util.find_library("nccl"), "packages": packages, "device_files": nodes}
    queue = {"streams": f"{config.CONNECTIONS}=1: a DDP model on a GPU is left alone, as all streams share one queue"}
    kernels = {} if connect.core().HAVE_DEVICE_CODE else {"kernels": NO_DEVICE_CODE}
    shared = queue if config.shares_a_queue(environ) else {}
    return {**kernels, **_or_error(lambda: _driver(environ)), **nccl, **shared}


def _driver(environ: Mapping[str, str]) -> dict[str, Any]:
    path, version, devices = connect.core().cuda(config.settings(environ=environ).cuda_library)
    return {
        "driver": f"{path}, CUDA {version // 1000}.{version % 1000 // 10}",
        "devices": [name or "cannot be used" for name, _, _ in devices],
        "pinning": [why or "memory can be pinned" for _, why, _ in devices],
        "kernels": [why or "loaded" for _, _, why in devices],
    }


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "usable_cores": sorted(os.sched_getaffinity(0)),
        "cgroup_cores": monitor.quota().get("quota_cores"),
        "memory_bytes": psutil.virtual_memory().total,
        "memlock_bytes": _memlock(),
    }


def _memlock() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _sysctls() -> dict[str, str]:
    found = {}
    for name in _SYSCTLS:
        with contextlib.suppress(OSError):
            text = Path("/proc/sys", *name.split(".")).read_text(encoding="ascii")
            found[name] = " ".join(text.split())
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    ours = {
        row.name: row.value
        for row in config.describe(config.settings(environ=environ), environ)
        if row.source == row.name
    }
    others = {
        name: "(redacted)" if any(word in name for word in _SECRETS) else value
        for name, value in environ.items()
        if name.startswith(_OTHERS)
    }
    return dict(sorted((ours | others).items()))


def _lab() -> dict[str, Any]:
    """Try to open a lab, the best way first."""
    reasons: dict[str, str] = {}
    for way in ("root", "user"):
        try:
            with Lab(2, _LAB, ways=(way,)) as lab:
                return {"allowed": True, "how": lab.how, **({"not": reasons} if reasons else {})}
        except LabError as error:
            reasons[way] = str(error)
    return {"allowed": False, "how": "loopback: links cannot be capped", "not": reasons}


def text(topics: Mapping[str, Any]) -> str:
    """Return the findings as text."""
    lines = []
    for topic, value in topics.items():
        lines.append(topic)
        rows = _interface_rows(value) if topic == "interfaces" else value
        if not rows:
            lines.append("  (nothing)")
        for key, item in rows.items():
            content = item if isinstance(item, str) else _flat(item)
            lines.append(f"  {content}" if key == "error" else f"  {key:<28} {content}")
    return "\n".join(lines)


def _interface_rows(value: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for each in value.get("all", ()):
        speed = each["speed_bits_per_s"]
        rate = f"{speed / 1e9:g} Gbit/s" if speed else "speed unknown"
        state = "up" if each["up"] else "down"
        rows[each["name"]] = f"{state}, {rate}, MTU {each['mtu_bytes']}, {', '.join(each['addresses']) or 'no address'}"
    if "used" in value:
        rows["used"] = f"{value['used']} ({value['address']}): {value['why']}"
        if value["faster"]:
            rows["faster"] = f"{', '.join(value['faster'])}: set NETBOTTLENECK_IFNAME to use it"
    if "error" in value:
        rows["error"] = value["error"]
    return rows


def _flat(item: Any) -> str:
    if item is None:
        return "-"
    if isinstance(item, Mapping):
        return "; ".join(f"{key}: {_flat(value)}" for key, value in item.items())
    if isinstance(item, list | tuple):
        return (
            ", ".join(" ".join(map(str, each)) if isinstance(each, list | tuple) else str(each) for each in item) or "-"
        )
    return str(item)


def main(argv: Sequence[str]) -> int:
    """Print the findings; returns 1 if the C module is missing."""
    parser = argparse.ArgumentParser(
        prog="netbottleneck doctor", description="Print the settings and capabilities of this machine."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = examine()
    sys.stdout.write((json.dumps(found, indent=1) if args.json else text(found)) + "\n")
    return 1 if found["version"].get("core") == "missing" else 0
