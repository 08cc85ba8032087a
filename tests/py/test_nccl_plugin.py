"""The library that NCCL loads: what it exports, and that it moves bytes through each table, NCCL's own adapters too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ports
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import nccl_gates
from nccl_gates import PLUGIN

from netbottleneck.trace.transports import SELECTABLE

VERSIONS = (6, 8, 10, 11, 12)
ADAPTED = (6, 8, 10, 11)  # NCCL 2.30 uses version 12 as it is
LIMIT_S = 120
SMALL = ("--bytes", "300000", "--count", "8", "--rounds", "20")

Measure = Callable[..., dict[str, Any]]


def nccl_library() -> Path:
    """Return NCCL's library; skips the test where there is none."""
    return nccl_gates.library() or pytest.skip("not run: NCCL is not installed (requirements/nccl.txt)")


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Return a function that runs tests/nccl/measure.c and returns what it prints."""
    program = nccl_gates.compiled(tmp_path_factory.mktemp("nccl"))

    def run(*options: str, **variables: str) -> dict[str, Any]:
        env = {**os.environ, "NETBOTTLENECK_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **variables}
        done = subprocess.run(
            [str(program), *options], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines, done.stderr
        record: dict[str, Any] = json.loads(lines[-1])
        return record

    return run


def output_of(*argv: str) -> str:
    """Return what a tool prints."""
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def check_library(library: Path, names: Iterable[str]) -> None:
    """Check that a plugin exports these names alone, stays loaded, and needs the system's libraries only.

    NCCL is loaded beside torch, so any other name could clash. It closes the library with its last communicator, and a
    fork's handler must not be gone then.
    """
    lines = output_of("nm", "-D", "--defined-only", str(library)).splitlines()
    assert sorted(line.split()[-1] for line in lines) == sorted(names)
    dynamic = output_of("readelf", "-d", str(library))
    assert "NODELETE" in dynamic
    assert f"[{library.name}]" in dynamic
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\.so", dynamic))
    assert needed <= {"libc", "libm", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_it_exports_its_tables_and_stays_loaded() -> None:
    check_library(PLUGIN, [f"ncclNetPlugin_v{version}" for version in VERSIONS])


@pytest.mark.parametrize("version", VERSIONS)
def test_each_table_moves_bytes(measure: Measure, version: int) -> None:
    """Two processes, 32 messages in flight on each of 3 channels."""
    depth = ("--depth", "32", "--channels", "3")
    result = measure("--plugin", str(PLUGIN), "--version", str(version), *SMALL, *depth)
    assert result["gbit_per_s"] > 0
    assert result["channels"] == 3


@pytest.mark.nccl
@pytest.mark.parametrize("version", ADAPTED)
def test_nccl_takes_each_table(measure: Measure, version: int) -> None:
    """NCCL's own adapter calls the table: the layout that NCCL was compiled with."""
    through = ("--through", str(nccl_library()))
    result = measure("--plugin", str(PLUGIN), "--version", str(version), *SMALL, *through)
    assert result.get("gbit_per_s", 0) > 0, result


@pytest.mark.nccl
def test_the_socket_network_is_driven_the_same_way(measure: Measure) -> None:
    """The harness plays NCCL's proxy for NCCL's own network, which defines what is right."""
    result = measure("--stock", str(nccl_library()), *SMALL)
    assert result.get("gbit_per_s", 0) > 0, result


def test_a_library_without_the_symbols_is_not_run(measure: Measure) -> None:
    """A stripped or another NCCL is no failure, and no measurement."""
    result = measure("--stock", str(PLUGIN), *SMALL)
    assert "ncclNetSocket" in result["not_run"]
    assert "not_run" in measure("--stock", "/nonexistent/libnccl.so.2", *SMALL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STREAMS", "65"),
        ("STREAMS", "four"),
        ("STREAMS", "1_0"),
        ("TIMEOUT_S", "soon"),
        ("TIMEOUT_S", "2147484"),
        ("SEGMENT_BYTES", "1"),
        ("SEGMENT_BYTES", "0zzz"),
        ("TRANSPORT", "offi"),
        ("TRANSPORT", "nccl+OFI"),
        ("TRANSPORT", "nccl+ofi,tpc"),
        ("TRANSPORT", "auto,tcp"),
        ("TRANSPORT", "tcp,"),
        ("PORTS", "9-8"),
        ("SECRET", "short"),
        ("SECRET_FILE", "/tmp/secret"),
        ("IFNAME", "=nothing0"),
        ("IFNAME", "lo,nothing0"),
    ],
)
def test_a_wrong_setting_is_named(measure: Measure, name: str, value: str) -> None:
    """NCCL goes on with another network then; its log says why."""
    with pytest.raises(AssertionError, match=f"WARN NET/NetBottleneck : .*{value if name == 'IFNAME' else name}"):
        measure("--plugin", str(PLUGIN), *SMALL, **{f"NETBOTTLENECK_{name}": value})


def test_settings_are_read(measure: Measure) -> None:
    """Lanes, segments and ports of the job's own variables."""
    with ports.block() as given:
        result = measure(
            "--plugin",
            str(PLUGIN),
            *SMALL,
            NETBOTTLENECK_STREAMS=" 2 ",
            NETBOTTLENECK_TIMEOUT_S="2147483 ",
            NETBOTTLENECK_SEGMENT_BYTES="64Ki",
            NETBOTTLENECK_PORTS=f"{given[0]}-{given[-1]}",
            NETBOTTLENECK_SECRET="a secret of sixteen",
            NETBOTTLENECK_TRANSPORT="stock,tcp",
        )
    assert result["gbit_per_s"] > 0


@pytest.mark.parametrize("value", ["auto", " auto ", ",".join(SELECTABLE)])
def test_all_transports_may_be_named(measure: Measure, value: str) -> None:
    """The names are those that netbottleneck.config knows."""
    variables = {"NETBOTTLENECK_TRANSPORT": value, "NETBOTTLENECK_SEGMENT_BYTES": "0"}
    assert measure("--plugin", str(PLUGIN), *SMALL, **variables)["gbit_per_s"] > 0


def test_interfaces_for_nccl_may_be_alternatives(measure: Measure) -> None:
    """A list that all hosts share may name interfaces that only some of them have."""
    names = {"NETBOTTLENECK_IFNAME": "", "NCCL_SOCKET_IFNAME": "nothing0,lo"}
    assert measure("--plugin", str(PLUGIN), *SMALL, **names)["gbit_per_s"] > 0
