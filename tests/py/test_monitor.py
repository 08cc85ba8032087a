"""A host's interfaces: ratings from devices and none for virtual ones, MTUs, and which of them an arm uses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from netbottleneck.config import settings
from netbottleneck.launch import connect
from netbottleneck.report import Run
from netbottleneck.runtime import monitor, nccl
from netbottleneck.runtime.session import open_session


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A host with a device eth0, a VLAN above it, and a virtual veth0 with a high rating. Speeds in Mbit/s."""
    for name in ("eth0", "eth0.7", "veth0"):
        (tmp_path / name).mkdir()
    (tmp_path / "eth0" / "device").mkdir()
    (tmp_path / "eth0.7" / "lower_eth0").symlink_to(tmp_path / "eth0")
    speeds = {"eth0": 25_000, "eth0.7": 25_000, "veth0": 10_000}
    monkeypatch.setattr(monitor, "_INTERFACES", tmp_path)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(speed=speed, mtu=9000) for name, speed in speeds.items()}
    )
    return speeds


@pytest.mark.parametrize(("name", "bps"), [("eth0", 25 * 10**9), ("eth0.7", 25 * 10**9), ("veth0", None), ("no", None)])
def test_only_interfaces_on_a_device_have_a_rating(host: dict[str, int], name: str, bps: int | None) -> None:
    assert monitor.link_bps(name) == bps


@pytest.mark.parametrize("speed", [0, -1, 65535 << 16])
def test_a_device_that_does_not_know_its_speed_has_none(host: dict[str, int], speed: int) -> None:
    host["eth0"] = speed
    assert monitor.link_bps("eth0") is None


def test_loopback_has_none() -> None:
    assert monitor.wire(settings({"ifname": "=lo", "streams": 4}, {}), "tcp") == {
        "streams_asked": 4,
        "interface": "lo",
        "mtu_bytes": psutil.net_if_stats()["lo"].mtu,
        "link_bps": None,
    }


def test_an_interface_is_named_only_if_it_is_certain(host: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    there = [("eth0", "192.0.2.1")]
    monkeypatch.setattr(connect, "core", lambda: SimpleNamespace(interfaces=lambda _: there))
    only = monitor.wire(settings(environ={}), "ofi")
    assert only == {"streams_asked": 0, "interface": "eth0", "mtu_bytes": 9000, "link_bps": 25 * 10**9}
    declared = monitor.wire(settings({"link_gbps": "12.5"}, {}), "ofi")
    assert (declared["link_bps"], declared["declared"]) == (12_500_000_000, True)
    there.append(("veth0", "198.51.100.1"))
    several = monitor.wire(settings(environ={}), "ofi")
    assert (several["interface"], several["mtu_bytes"]) == (None, None)


def test_stock_uses_gloos_configured_interface(host: dict[str, int]) -> None:
    about = monitor.wire(settings(environ={}), "stock", {"GLOO_SOCKET_IFNAME": "eth0,eth0"})
    assert about == {"streams_asked": None, "interface": "eth0", "mtu_bytes": 9000, "link_bps": 25 * 10**9}


def test_an_interface_that_is_not_there_has_no_mtu(host: dict[str, int]) -> None:
    about = monitor.wire(settings(environ={}), "stock", {"GLOO_SOCKET_IFNAME": "gone"})
    assert (about["interface"], about["mtu_bytes"]) == ("gone", None)


@pytest.mark.parametrize(
    ("provider", "named", "interface"),
    [
        ("nccl", "=eth0", "eth0"),
        ("cuda:nccl", "=eth0", "eth0"),
        ("nccl", "eth0", "own"),  # a prefix
        ("nccl", "=eth0,eth1", "own"),
        ("nccl", "^eth0", "own"),
        ("nccl", "", "own"),
        ("gloo", "=eth0", "veth0"),
        ("cpu:gloo,cuda:nccl", "=eth0", "veth0"),
        ("horovod 0.28 over gloo", "=eth0", "veth0"),
    ],
)
def test_nccls_own_variable_names_the_interface_of_nccl_if_it_names_one(
    host: dict[str, int], monkeypatch: pytest.MonkeyPatch, provider: str, named: str, interface: str
) -> None:
    monkeypatch.setattr(monitor, "_of_own_address", lambda: "own")
    environ = {"GLOO_SOCKET_IFNAME": "veth0", "NCCL_SOCKET_IFNAME": named}
    assert monitor.wire(settings(environ={}), "stock", environ, provider=provider)["interface"] == interface


def test_a_run_records_mtus_and_the_variables_of_the_stock_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in nccl.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    asked = {"transports": "tcp", "ifname": "=lo", "directory": str(tmp_path / "run"), "start_step": 0}
    session = open_session(settings(asked, {}))
    session.begin()
    session.end()
    session.close()
    (rank,) = Run(session.folder).summary["ranks"]
    assert rank["stock_variables"] == {"NCCL_SOCKET_IFNAME": "=eth7"}
    assert [info["mtu_bytes"] for info in rank["transports"]] == [psutil.net_if_stats()["lo"].mtu]
    meta = session.folder / "ranks" / "0.meta.json"
    old = json.loads(meta.read_text(encoding="utf-8"))
    del old["stock_variables"], old["transports"]["tcp"]["mtu_bytes"]
    meta.write_text(json.dumps(old), encoding="utf-8")
    (rank,) = Run(session.folder).summary["ranks"]
    assert (rank["stock_variables"], rank["transports"][0]["mtu_bytes"]) == ({}, None)


def test_nothing_moves_over_no_interface() -> None:
    assert set(monitor.wire(settings(environ={}), "null").values()) == {None}


@pytest.mark.parametrize(
    ("group", "files", "found"),
    [
        (
            "0::/a/b",
            {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"},
            {"quota_cores": 1.5, "quota_group": "/a"},
        ),
        (
            "0::/a/b",
            {"a/b/cpu.max": "50000 100000", "cpu.max": "max 100000"},
            {"quota_cores": 0.5, "quota_group": "/a/b"},
        ),
        ("0::/", {"cpu.max": "200000 100000"}, {"quota_cores": 2.0, "quota_group": "/"}),
        ("0::/kubepods/pod1", {"cpu.max": "200000 100000"}, {"quota_cores": 2.0, "quota_group": "/kubepods/pod1"}),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            {"quota_cores": 3.0, "quota_group": "/a"},
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, {}),
        ("not a group", {}, {}),
    ],
)
def test_the_least_processor_quota_is_found(
    group: str, files: dict[str, str], found: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(group, encoding="utf-8")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n", encoding="ascii")
    assert monitor.quota(tmp_path / "cgroup", tmp_path / "fs", tmp_path / "absent") == found
    assert monitor.quota(tmp_path / "absent", tmp_path / "fs") == {}
    (tmp_path / "namespace").symlink_to("cgroup:[7]")
    named = {name: f"cgroup:[7]{value}" if name == "quota_group" else value for name, value in found.items()}
    assert monitor.quota(tmp_path / "cgroup", tmp_path / "fs", tmp_path / "namespace") == named
