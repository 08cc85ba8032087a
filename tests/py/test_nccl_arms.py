"""Arms over NCCL in a DDP model's run, over a stand-in for NCCL that calls the real net plugin."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S, Ranks

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_timing
from nccl_programs import LIBRARY, compiled

from netbottleneck import config
from netbottleneck.report import Run
from netbottleneck.runtime import nccl
from netbottleneck.trace.transports import OVER_NCCL, STOCK, Arm

SCRIPT = Path(__file__).parent / "scripts" / "nccl_arms.py"
STEPS, BLOCK = 24, 3
GRADIENT_BYTES = 4 * (37 * 300 + 300 + 300 * 5 + 5)
FIRST_BYTES = 4  # of the all-reduce that opens an arm's communicator
NEW, OLD = "2.29.7", "2.22.3"


def environment(folder: Path, transports: str) -> dict[str, str]:
    names = {"TRANSPORT": transports, "DIR": str(folder), "BLOCK_STEPS": str(BLOCK), "IFNAME": "lo"}
    names |= {"STREAMS": "2", "START_STEP": "0"}
    of_nccl = {"NCCL_LL128_C2C": "0"}  # without it aarch64 is refused
    return {f"NETBOTTLENECK_{name}": value for name, value in names.items()} | of_nccl


def trained(ranks: Ranks, env: dict[str, str], version: str = NEW, how: str = "") -> tuple[list[str], str]:
    """Return the words that all ranks print, and rank 0's log."""
    arguments = [version, str(STEPS), *([how] if how else [])]
    results = ranks(2, SCRIPT, env, args=arguments)
    printed = {result.stdout.splitlines()[0] for result in results}  # a report may follow
    assert len(printed) == 1, printed
    return printed.pop().split(), results[0].stderr


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, warm: object) -> str:
    """Return the digest of the training that nothing measures."""
    words, _ = trained(Ranks(tmp_path_factory.mktemp("plain"), warm=warm), {})
    assert words[1:] == ["None", "None"]
    return words[0]


@pytest.mark.parametrize(
    ("transports", "version"),
    [("stock,nccl+tcp,nccl+ofi", NEW), ("stock,nccl+tcp", OLD), ("nccl+ofi", NEW)],
    ids=["both", "old", "alone"],
)
def test_nccl_takes_turns_over_its_own_network_and_ours(
    warm_ranks: Ranks, weights: str, tmp_path: Path, transports: str, version: str
) -> None:
    folder = tmp_path / "run"
    words, log = trained(warm_ranks, environment(folder, transports), version)
    assert words == [weights, "Socket", "netbottleneck"], log
    assert "WARNING" not in log.replace("pair(s) of blocks", "")
    run = Run(folder)
    arms = [Arm.parse(name) for name in transports.split(",")]
    steps = {arm: [s.index for s in run.trace.steps if s.arm == arm and s.rank == 0] for arm in arms}
    assert all(steps.values())
    assert sum(map(len, steps.values())) == STEPS
    for step in run.trace.steps:
        assert len(step.grad_ready) == 4
        assert step.waits
    for rank in run.trace.ranks:
        found = {entry.name: entry for entry in rank.transports}
        for arm in arms:
            sent = FIRST_BYTES + GRADIENT_BYTES * len(steps[arm]) if arm.over_nccl else None
            assert found[arm.transport].bytes_out == sent
            if arm.over_nccl:
                assert found[arm.transport].provider == f"NCCL {version} over NetBottleneck"
    if arms[0] == STOCK:  # as gpu-check shows such a run
        shown = [row["condition"].partition(",")[0] for row in gpu_timing.arms(tmp_path)]
        assert [name for name in shown if name.startswith("step over") and " over step" not in name] == [
            f"step over {arm}" for arm in arms
        ]
        assert [name for name in shown if name.startswith("sent")] == [f"sent by a rank over {arm}" for arm in arms[1:]]


def left_alone(log: str) -> str:
    """Return why the model was left alone; the log must say it once."""
    lines = [line for line in log.splitlines() if "is left alone: " in line]
    assert len(lines) == 1, log
    return lines[0].partition("is left alone: ")[2]


@pytest.mark.parametrize(
    ("transports", "version", "how", "env", "why"),
    [
        ("nccl+tcp,nccl+ofi", OLD, "", {}, "the first of NETBOTTLENECK_TRANSPORT: name one"),
        ("stock,nccl+tcp", NEW, "late", {}, "import netbottleneck before that"),
        ("stock,nccl+tcp", NEW, "gloo", {}, "nccl+tcp: its gradients travel over gloo, not NCCL: use tcp or ofi"),
        ("stock,nccl+tcp", NEW, "named", {}, "nccl+tcp: its group has net_name IB"),
        ("stock,nccl+tcp", NEW, "unset", {}, "nccl+tcp: NCCL took NetBottleneck for its own group, too"),
        ("stock,nccl+tcp", NEW, "", {"NCCL_NET": "Socket"}, "NCCL_NET=Socket is set; unset it"),
        ("stock,nccl+tcp", NEW, "", {"NETBOTTLENECK_SECRET_FILE": "SECRET"}, "SECRET_FILE is not read here"),
        ("nccl+tcp,nccl+ofi", NEW, "disagree", {}, "nccl+tcp: NCCL 2.29.7 took another network, not NetBottleneck"),
    ],
    ids=["two on an old NCCL", "late", "gloo", "named", "unset", "NCCL_NET", "setting", "disagree"],
)
def test_what_cannot_be_compared_is_left_alone(  # noqa: PLR0917
    warm_ranks: Ranks,
    weights: str,
    tmp_path: Path,
    transports: str,
    version: str,
    how: str,
    env: dict[str, str],
    why: str,
) -> None:
    before = env.get("NCCL_NET")
    if "NETBOTTLENECK_SECRET_FILE" in env:  # the plugin does not read it
        secret = tmp_path / env["NETBOTTLENECK_SECRET_FILE"]
        secret.write_text("a secret of sixteen", encoding="utf-8")
        secret.chmod(0o600)
        env = {"NETBOTTLENECK_SECRET_FILE": str(secret)}
    words, log = trained(warm_ranks, {**environment(tmp_path / "run", transports), **env}, version, how)
    assert words[0] == weights
    assert why in left_alone(log)
    if before is not None or how == "late":
        assert words[1:] == [str(before), "None"]  # nothing was changed


def sent_over_nccl(folder: Path) -> list[int | None]:
    """Return the bytes that the ranks of a run sent over nccl+tcp."""
    entries = [entry for rank in Run(folder).trace.ranks for entry in rank.transports]
    return [entry.bytes_out for entry in entries if entry.name == "nccl+tcp"]


def test_a_rank_that_no_longer_records_takes_the_same_turns(warm_ranks: Ranks, weights: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words, _ = trained(warm_ranks, environment(folder, "stock,nccl+tcp"), how="unrecorded")
    assert words[0] == weights
    assert sent_over_nccl(folder) == [FIRST_BYTES + GRADIENT_BYTES * STEPS // 2] * 2


def test_a_second_run_of_a_process_counts_its_own_bytes(warm_ranks: Ranks, weights: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words, log = trained(warm_ranks, environment(folder, "nccl+tcp"), how="twice")
    assert words[0] == weights, log
    for of_run in (folder, folder / "2"):
        assert sent_over_nccl(of_run) == [FIRST_BYTES + GRADIENT_BYTES * STEPS // 2] * 2


def test_an_arm_that_failed_on_one_rank_opens_at_the_next_attempt(
    warm_ranks: Ranks, weights: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words, log = trained(warm_ranks, environment(folder, "nccl+tcp"), how="again")
    assert words[0] == weights, log
    assert left_alone(log) == "broken on purpose"
    assert sent_over_nccl(folder / "2") == [FIRST_BYTES + GRADIENT_BYTES * STEPS] * 2


@pytest.mark.parametrize("arrive", [True, False])
def test_an_arm_ends_after_its_device_and_the_other_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arrive: bool
) -> None:
    torch = pytest.importorskip("torch")
    done: list[str] = []

    def wait(limit_s: float) -> bool:
        done.append(f"ranks within {limit_s:g} s")
        return arrive

    def submit(name: str, *_: Any) -> Any:
        done.append(name)
        return SimpleNamespace(wait=wait)

    control: Any = SimpleNamespace(submit=submit)
    group = SimpleNamespace(shutdown=lambda: done.append("shutdown"))
    queries = iter([False, True])

    def query() -> bool:
        done.append("query")
        return next(queries, True)

    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=query))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    settle = partial(nccl._settle, torch.device("cuda", 1), control, "end")
    with caplog.at_level(logging.INFO, logger="netbottleneck"):
        nccl.OverNccl("nccl+tcp", group, lambda: 1, {}, settle).close()
    assert done == [*["query"] * 3, "end", f"ranks within {nccl.END_S:g} s", "shutdown"]
    assert ("not all ranks arrived" in caplog.text) == (not arrive)


# Whether NCCL's own network is sure to be sockets.


@pytest.mark.parametrize(
    ("devices", "environ", "conf", "why"),
    [
        ((), {}, "", ""),
        ((), {}, "NCCL_DEBUG=WARN\n# NCCL_NET=IB\n", ""),
        (("mlx5_0",), {}, "", "NCCL may use InfiniBand device mlx5_0: compare in two runs"),
        (("mlx5_0",), {"NCCL_IB_DISABLE": "1"}, "", ""),
        (("mlx5_0",), {"NCCL_IB_DISABLE": "0"}, "", "NCCL may use InfiniBand device mlx5_0"),
        ((), {}, "NCCL_DEBUG=WARN\nNCCL_NET = IB\n", "nccl.conf sets NCCL_NET, so NCCL's own network is not known"),
        ((), {}, "NCCL_IB_HCA=mlx5\n", "nccl.conf sets NCCL_IB_HCA"),
        ((), {"NCCL_ENV_PLUGIN": "site"}, "", "NCCL_ENV_PLUGIN is set"),
    ],
)
@pytest.mark.parametrize("of", ["user", "site"])
def test_a_network_is_named_only_where_nccl_has_no_choice(
    tmp_path: Path, devices: tuple[str, ...], environ: dict[str, str], conf: str, why: str, of: str
) -> None:
    for device in devices:
        (tmp_path / "infiniband" / device).mkdir(parents=True)
    file = tmp_path / "nccl.conf"
    file.write_text(conf, encoding="utf-8")
    nothing = tmp_path / "none"
    values = {**environ, "NCCL_CONF_FILE": str(file if of == "user" else nothing)}
    found = nccl.not_sockets(values, tmp_path / "infiniband", nothing if of == "user" else file)
    assert found if why else not found
    assert why in found


def test_a_user_without_a_home_has_no_file_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert not nccl.not_sockets({}, tmp_path / "none", tmp_path / "none")


# Reasons not to use NCCL.


@pytest.mark.parametrize(
    ("version", "environ", "why"),
    [
        (None, {}, "torch 2.13.0+cu130 has no NCCL: use tcp or ofi"),
        ((2, 16, 2), {}, "NCCL 2.16.2 is too old: 2.18 or later is needed"),
        (
            (2, 28, 9),
            {"NCCL_NET": "Socket"},
            "NCCL 2.28.9 took Socket, not NetBottleneck: NCCL_NET=Socket is set; unset it",
        ),
        (
            (2, 28, 9),
            {"NCCL_NET": "netbottleneck"},
            "NCCL 2.28.9 took NetBottleneck for stock, too: NCCL_NET=netbottleneck is set; unset it",
        ),
        (
            (2, 28, 9),
            {"NCCL_NET_PLUGIN": "ofi"},
            "NCCL_NET_PLUGIN=ofi is set, and NCCL uses one plugin in a process: compare in two runs",
        ),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "netbottleneck"}, ""),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "none"}, ""),
        ((2, 28, 9), {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "netbottleneck", nccl.MARK: "Socket"}, ""),
        ((2, 28, 9), {"NCCL_NET_PLUGIN": "/opt/libnccl-net-netbottleneck.so"}, ""),
        ((2, 28, 9), {}, ""),
    ],
)
@pytest.mark.parametrize("transport", OVER_NCCL)
def test_a_transport_over_nccl_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, transport: str, version: tuple[int, ...] | None, environ: dict[str, str], why: str
) -> None:
    monkeypatch.setattr(nccl, "_nccl_of_torch", lambda: ("2.13.0+cu130", version))
    monkeypatch.setattr(nccl, "_nccl_here", lambda built: built)
    monkeypatch.setattr(nccl, "_arranged", None)
    monkeypatch.setattr(nccl, "not_sockets", lambda _: "")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN", nccl.MARK, "NCCL_NET_PLUGIN_REF_COUNT"):
        monkeypatch.setenv(name, environ.get(name, ""))
    nccl.arrange([Arm("stock"), Arm(transport)])
    arranged = not environ.get("NCCL_NET") and environ.get("NCCL_NET_PLUGIN") != "ofi"
    assert os.environ["NCCL_NET"] == ("Socket" if arranged else environ.get("NCCL_NET", ""))
    assert nccl.refusal([transport], config.settings({}, {})) == (f"{transport}: {why}" if why else "")


@pytest.mark.parametrize(
    ("machine", "environ", "refused"),
    [
        ("x86_64", {}, False),
        ("aarch64", {}, True),
        ("aarch64", {"NCCL_LL128_C2C": "0"}, False),
        ("aarch64", {"NCCL_LL128_C2C": "1"}, True),
        ("aarch64", {"NCCL_PROTO": "Simple,LL"}, False),
        ("aarch64", {"NCCL_PROTO": "^ll128"}, False),
        ("aarch64", {"NCCL_PROTO": "^LL"}, True),
        ("aarch64", {"NCCL_PROTO": "^LL", "NCCL_LL128_C2C": "0"}, False),
        ("aarch64", {"NCCL_PROTO": "LL128", "NCCL_LL128_C2C": "0"}, True),
        ("aarch64", {"NCCL_PROTO": "Simple;allreduce:LL128", "NCCL_LL128_C2C": "0"}, True),
    ],
)
def test_arms_are_refused_where_nccl_may_take_ll128_over_c2c(
    monkeypatch: pytest.MonkeyPatch, machine: str, environ: dict[str, str], refused: bool
) -> None:
    monkeypatch.setattr(nccl, "_nccl_of_torch", lambda: ("2.13.0+cu130", (2, 29, 7)))
    monkeypatch.setattr(nccl, "_nccl_here", lambda built: built)
    monkeypatch.setattr(nccl, "_arranged", nccl._Arranged(first="nccl+tcp"))
    monkeypatch.setattr("platform.machine", lambda: machine)
    for name in ("NCCL_LL128_C2C", "NCCL_PROTO"):
        monkeypatch.setenv(name, environ.get(name, ""))
    why = nccl.refusal(["nccl+tcp"], config.settings({}, {}))
    assert why.startswith("nccl+tcp: NCCL may take its protocol LL128 on aarch64") == refused
    assert why.endswith("set NCCL_LL128_C2C=0, or NCCL_PROTO=^LL128") == refused


@pytest.mark.parametrize("arms", [["stock"], ["stock", "nccl+tcp"]])
@pytest.mark.parametrize(
    ("environ", "recorded"),
    [
        ({}, {}),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": ""}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"NCCL_NET_PLUGIN": "none"}, {"NCCL_NET_PLUGIN": "none"}),
        ({"NCCL_NET": "IB", "NCCL_NET_PLUGIN": "ofi"}, {"NCCL_NET": "IB", "NCCL_NET_PLUGIN": "ofi"}),
        ({"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "netbottleneck", nccl.MARK: "Socket"}, {}),
    ],
)
def test_the_variables_of_the_script_are_without_ours(
    monkeypatch: pytest.MonkeyPatch, arms: list[str], environ: dict[str, str], recorded: dict[str, str]
) -> None:
    monkeypatch.setattr(nccl, "_arranged", None)
    monkeypatch.setattr(nccl, "not_sockets", lambda _: "")
    for name in (*nccl.VARIABLES, nccl.MARK, "NCCL_NET_PLUGIN_REF_COUNT"):
        monkeypatch.setenv(name, environ.get(name, ""))
    nccl.arrange(map(Arm, arms))
    assert nccl.stock_variables() == recorded


def test_arms_that_were_named_too_late_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_nccl_of_torch", lambda: ("2.13.0+cu130", (2, 29, 7)))
    monkeypatch.setattr(nccl, "_nccl_here", lambda built: built)
    monkeypatch.setattr(nccl, "_arranged", None)
    why = nccl.refusal(["nccl+tcp"], config.settings({}, {}))
    assert why == "nccl+tcp: it was not asked for when netbottleneck was imported: set it before that"


ASKED = """
import ctypes, sys
from netbottleneck.config import settings
from netbottleneck.runtime import nccl
from netbottleneck.trace.transports import Arm
libraries, built = sys.argv[1:-1], tuple(map(int, sys.argv[-1].split(".")))
nccl._nccl_of_torch = lambda: ("2.13.0", built)
nccl.not_sockets = lambda _: ""
nccl.arrange([Arm("nccl+tcp"), Arm("nccl+ofi")])
for library in libraries:
    ctypes.CDLL(library)
print(nccl.refusal(["nccl+tcp", "nccl+ofi"], settings({}, {})))
"""
ONE = "one of our networks in a process, the first of NETBOTTLENECK_TRANSPORT: name one"


@pytest.mark.parametrize(
    ("loaded", "built", "why"),
    [
        (None, "2.29.7", ""),
        (None, "2.22.3", f"NCCL 2.22.3 has {ONE}"),
        ("22203", "2.29.7", f"NCCL 2.22.3 has {ONE}"),
        ("2803", "2.29.7", "NCCL 2.8.3 is too old: 2.18 or later is needed"),
        ("22907", "2.22.3", f"torch 2.13.0 was built with NCCL 2.22.3, so it has {ONE}"),
        ("22907", "2.28.9", ""),
    ],
)
def test_the_version_is_that_of_the_loaded_library(tmp_path: Path, loaded: str | None, built: str, why: str) -> None:
    soname = f"-Wl,-soname,{nccl.LIBRARY}"
    make = (*LIBRARY, soname, f"-DVERSION={loaded}")
    libraries = [str(compiled("version.c", tmp_path / "any.so", *make))] if loaded is not None else []
    command = [sys.executable, "-c", ASKED, *libraries, built]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "NETBOTTLENECK_"))}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, f"nccl+tcp: {why}\n" if why else "\n"), done.stderr
