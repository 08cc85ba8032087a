"""The checks for a machine with a GPU: how they end ranks and keep results; the trainings of ranks, on the CPU."""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import backend  # noqa: E402
import gpu_check as checks  # noqa: E402
import gpu_timing  # noqa: E402

import cbuild  # noqa: E402
import fresh_wheel  # noqa: E402
from netbottleneck.trace.model import Step, Trace  # noqa: E402
from netbottleneck.trace.transports import STOCK  # noqa: E402

LIMIT_S = 2 * RANKS_LIMIT_S
TRAINED = {
    **{"CHECKED_BACKEND": "gloo", "CHECKED_STEPS": "20", "CHECKED_SECONDS": "600", "CUDA_VISIBLE_DEVICES": ""},
    **{"NETBOTTLENECK_BLOCK_STEPS": "2", "NETBOTTLENECK_START_STEP": "2"},
}


@pytest.mark.parametrize(
    ("part", "env"),
    [
        ("arms", {"NETBOTTLENECK_TRANSPORT": "stock,tcp"}),
        ("timing", {"NETBOTTLENECK_TRANSPORT": "stock"}),
        ("sharded", {"NETBOTTLENECK": "1"}),
        ("events", {}),
    ],
)
@pytest.mark.timeout(300)
def test_parts_that_train_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, part: str, env: dict[str, str]) -> None:
    """All but NCCL, and the times of a device's clock, which their records lack here."""
    if part != "arms":
        monkeypatch.setattr(checks, "rows_of_record", lambda *_: [])
    rows = checks.run_ranks(part, "cpu", {**TRAINED, **env}, time.monotonic() + LIMIT_S)
    shown = [row["condition"] for row in rows if row["condition"].startswith("step ")]
    assert len(shown) == {"arms": 3, "timing": 1, "sharded": 0, "events": 0}[part]


FAILS = """
import os, signal, sys, time
from pathlib import Path

part, _, folder = sys.argv[1:]
while os.environ["RANK"] == "1" and not (Path(folder) / "nccl.0.log").exists():
    time.sleep(0.01)
(Path(folder) / f"nccl.{os.environ['RANK']}.log").write_text(f"NCCL of {os.environ['RANK']} says why")


def waits_for_the_other():
    signal.pause()


if part == "exits" and os.environ["RANK"] == "1":
    sys.exit("rank 1 says why")
if part == "faults" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if part == "faults":
    (Path(folder) / "rows.json").write_text("[]")
else:
    waits_for_the_other()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a script take the place of the ranks."""
    script = tmp_path / "rank.py"
    script.write_text(FAILS, encoding="utf-8")
    monkeypatch.setattr(checks, "RANK", script)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("part", ["exits", "hangs"])
def test_a_failed_part_has_the_ends_of_all_logs(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(checks, "END_S", 3.0)  # which the other rank has after the first failure
    exits = part == "exits"
    with pytest.raises(RuntimeError if exits else TimeoutError, match=r"ranks exited with \[None, ") as caught:
        checks.run_ranks(part, "cuda", {}, time.monotonic() + (LIMIT_S if exits else 10.0))
    first, nccl, second, _ = caught.value.__notes__
    assert "in waits_for_the_other" in first  # by SIGABRT
    assert nccl == "--- nccl.0.log\nNCCL of 0 says why"
    assert ("rank 1 says why" if exits else "in waits_for_the_other") in second


@pytest.mark.usefixtures("stand_in")
def test_the_rank_that_a_part_kills_is_no_failure() -> None:
    assert checks.run_ranks("faults", "cuda", {}, time.monotonic() + LIMIT_S) == []
    assert checks.has_failed("hooks", 1, -signal.SIGKILL)


def test_any_exception_fails_its_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> list[dict[str, Any]]:
        error = ZeroDivisionError("division by zero")
        error.add_note("--- 0.log\nits end")
        raise error

    monkeypatch.setattr(checks, "run_ranks", breaks)
    result = checks.run_part("hooks", "fakecuda", 100.0)
    assert (result["verdict"], result["why"]) == ("failed", "ZeroDivisionError: division by zero")
    assert result["logs"] == ["--- 0.log\nits end"]


def test_a_part_uses_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to twice its own limit. The limits of later parts are reserved for them."""
    monkeypatch.setattr(checks, "run_ranks", lambda *_: [])
    own, later = (checks.FAKE_TIMES * checks.PARTS[name].limit_s for name in ("hooks", "faults"))
    limits = [
        checks.run_part("hooks", "fakecuda", left_s, ["faults"])["limit_s"]
        for left_s in (1000.0, own + later + 3.0, own + later - 3.0, 11.0)
    ]
    assert limits == [2 * own, own + 3, own, 11]
    result = checks.run_part("hooks", "fakecuda", 3.0)
    assert result["verdict"] == "failed"
    assert "not run: 3 s are left: --only hooks" in result["why"]


def test_results_of_another_gpu_are_replaced_and_rows_beyond_the_last_are_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    rows = [{"condition": f"row {number}", "value": number} for number in range(100)]
    result = {"verdict": "ok", "seconds": 1, "limit_s": 2, "rows": rows}

    def parts_with(driver: str, name: str) -> set[str]:
        text = checks.write(results, {"nvidia-smi": driver}, "cuda", name, result)
        assert text == results.read_text(encoding="utf-8")
        return set(json.loads(text)["parts"])

    assert parts_with("580.1", "kernels") == {"kernels"}
    assert parts_with("580.1", "hooks") == {"kernels", "hooks"}
    assert parts_with("580.2", "nb") == {"nb"}
    checks.show("kernels", result)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 + checks.PRINTED_ROWS
    assert printed[1] == f"  the last {checks.PRINTED_ROWS} of 100 rows:"
    assert printed[-1] == "  row 99: 99"


def test_what_the_driver_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise ValueError("CUDA: cuCtxPushCurrent on device 0: invalid")

    monkeypatch.setattr(checks._core, "cuda", refuses)
    assert checks.absent("fakecuda") == ["CUDA: cuCtxPushCurrent on device 0: invalid"]


@pytest.mark.parametrize("why", ["", "not in this build"])
def test_ofi_takes_turns_where_it_works(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(checks, "native_refusal", lambda *_: why)
    way = dict(checks.WAYS["in turns"])
    rows = checks.add_ofi(way)
    assert [row["value"] for row in rows] == ([why] if why else [])
    assert way["NETBOTTLENECK_TRANSPORT"] == "stock,nccl+tcp" + ("" if why else ",nccl+ofi")


def nccl_of_torch(monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...]) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)


def test_ranks_of_one_host_share_a_gpu_from_a_version_of_nccl_on(monkeypatch: pytest.MonkeyPatch) -> None:
    environs = []

    def keeps(_part: str, _device: str, way: dict[str, str], _until: float) -> list[dict[str, Any]]:
        environs.append([checks.environ_of("one_host", rank, way, Path()) for rank in range(checks.RANKS)])
        return [{"condition": "a sum", "value": 1}]

    monkeypatch.setattr(checks, "run_ranks", keeps)
    nccl_of_torch(monkeypatch, (2, 29, 7))
    result = checks.run_part("one_host", "cuda", 100.0)
    assert (result["verdict"], result["why"]) == ("not run", "NCCL 2.29.7 is too old: 2.30 or later is needed")
    assert checks.run_part("nccl", "cuda", 100.0)["verdict"] == "ok"
    environs.clear()
    nccl_of_torch(monkeypatch, (2, 30, 4))
    result = checks.run_part("one_host", "cuda", 100.0)
    assert (result["verdict"], [row["condition"] for row in result["rows"]]) == ("ok", ["one host: a sum"])
    (ranks,) = environs
    assert len({environ["NCCL_HOSTID"] for environ in ranks}) == 1
    assert {environ["NCCL_MULTI_RANK_GPU_ENABLE"] for environ in ranks} == {"1"}


def test_elsewhere_each_rank_is_a_host_of_its_own(tmp_path: Path) -> None:
    for part in ("nccl", "sockets", "arms", "sharded"):
        for title in checks.WAYS_OF[part]:
            ranks = [checks.environ_of(part, rank, checks.WAYS[title], tmp_path) for rank in range(checks.RANKS)]
            assert len({environ["NCCL_HOSTID"] for environ in ranks}) == checks.RANKS
            assert not any("NCCL_MULTI_RANK_GPU_ENABLE" in environ for environ in ranks)


SHOWS_VARIABLES = """
import json, os, sys
from pathlib import Path

names = [name for name in os.environ if name.startswith(("NBFLOWCAP_", "LD_PRELOAD", "MASTER_PORT"))]
names += [name for name in ("NCCL_HOSTID", "NETBOTTLENECK_HOST_ID", "NETBOTTLENECK_PORTS") if name in os.environ]
Path(os.environ["SHOWN"], os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in names}))
Path(sys.argv[3], "rows.json").write_text("[]")
"""


@pytest.mark.parametrize("title", checks.CAPPED)
def test_flows_are_capped_inside_the_ranks_of_two_hosts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, title: str
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SHOWS_VARIABLES, encoding="utf-8")
    monkeypatch.setattr(checks, "RANK", script)
    way = {**checks.CAPPED[title], "SHOWN": str(tmp_path)}
    assert checks.run_ranks("capped", "cuda", way, time.monotonic() + LIMIT_S) == []
    shown = [json.loads((tmp_path / str(rank)).read_text(encoding="utf-8")) for rank in range(checks.RANKS)]
    for name in ("NCCL_HOSTID", "NETBOTTLENECK_HOST_ID"):
        assert len({environ[name] for environ in shown}) == checks.RANKS
    for environ in shown:
        rates = [int(each) / 1e6 for each in environ["NBFLOWCAP_BPS"].split(",")]
        assert rates == ([500, 500, 500, 125] if "125" in title else [500])
        assert environ["NBFLOWCAP_FREE"] == environ["MASTER_PORT"]
        assert environ["LD_PRELOAD"].split()[0].endswith(".so")
        assert ("NBFLOWCAP_PORTS" in environ) == ("ours" in title)
    if "ours" in title:
        ranges = [[int(port) for port in environ["NETBOTTLENECK_PORTS"].split("-")] for environ in shown]
        whole = [int(port) for port in shown[0]["NBFLOWCAP_PORTS"].split("-")]
        assert whole[0] < ranges[0][0] < ranges[0][1] < ranges[1][0] < ranges[1][1] <= whole[1]
        assert [(low - whole[0] - 1) % 4 for low, _ in ranges] == [0, 0]  # a rank's first lane has the first cap


def test_measured_parts_refuse_to_leave_a_model_alone(tmp_path: Path) -> None:
    names = ("NETBOTTLENECK_STRICT", "NCCL_MNNVL_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS")
    for part in checks.PARTS:
        environ = checks.environ_of(part, 1, {}, tmp_path)
        strict = "1" if part in checks.MEASURED else os.environ.get(names[0])
        assert [environ.get(name) for name in names] == [strict, "0", str(checks.CONNECTIONS)]


def test_parts_that_need_most_care_are_first() -> None:
    order = list(checks.PARTS)
    assert max(map(order.index, ("nccl", "arms", "sharded"))) < min(map(order.index, ("hooks", "one_host", "faults")))


def test_each_part_has_its_time_if_all_others_use_theirs() -> None:
    assert sum(part.limit_s for part in checks.PARTS.values()) <= checks.TOTAL_S <= 480


def test_the_gather_size_is_the_last_for_which_a_kernel_is_surely_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks._core, "cuda", lambda *_: ("", 13000, [("GPU", "", "")]))
    times = {1024: (1.0, 2.0), 4096: (1.9, 2.0), 16384: (2.1, 2.0), 65536: (1.0, 2.0)}  # of the kernel, of copies
    rows = [
        {"condition": f"{way}: 200 tensors of {size} bytes", "low": time_us, "high": time_us}
        for size, pair in times.items()
        for way, time_us in zip(("kernel", "copies"), pair, strict=True)
    ]
    assert checks.gathered(rows, "")["value"] == 4096
    rows[0] = {"condition": rows[0]["condition"], "value": "not timed: no memory"}
    assert checks.gathered(rows, "")["value"] == 0
    assert checks.gathered(rows, "two ranks")["value"] == "not known: two ranks"


def profiled_steps(counted: int) -> tuple[Trace, dict[int, gpu_timing.Profile]]:
    """Return three sampled steps, and the profiler's times of the first of them."""
    steps = tuple(
        Step(0, index, 0, STOCK, 0, 10, sampled=True, forward=((0, 4),), grad_ready=((0, 9),), modules=((0, 0, 4),))
        for index in range(3)
    )
    trace = Trace("run", 1, (STOCK,), modules=("a",), steps=steps)
    return trace, {0: {index: {"module a": 4} if index < counted else {} for index in range(3)}}


def test_steps_without_a_time_of_the_profiler_are_counted() -> None:
    rows = {row["condition"]: row["value"] for row in gpu_timing.compared(*profiled_steps(1), on_gpu=True)}
    assert rows == {
        "ours over the profiler's, module a of 0.004 us": 1.0,
        "ours over the profiler's, forward of all modules of 0.004 us": 1.0,
        "sampled steps for whose modules the profiler has no time": 2,
    }
    with pytest.raises(RuntimeError, match="no time of 3 sampled steps"):
        list(gpu_timing.compared(*profiled_steps(0), on_gpu=True))


PACKAGED = ["python/netbottleneck/config.py", "python/netbottleneck/page.html"]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """Provide sources and a wheel of them."""
    files = ["setup.py", "pyproject.toml", "tools/cbuild.py", "csrc/base/error.c", *PACKAGED]
    for at, name in enumerate(files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
        os.utime(tmp_path / name, (1000 + at, 1000 + at))
    return tmp_path


def wheel_of(tree: Path, version: str = cbuild.version(), machine: str = platform.machine()) -> Path:
    """Make a wheel that is newer than the sources."""
    made = tree / f"netbottleneck-{version}-cp311-abi3-linux_{machine}.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("netbottleneck/_core.abi3.so", b"")
        for name in PACKAGED:
            archive.writestr(name.removeprefix("python/"), (tree / name).read_bytes())
    os.utime(made, (2000, 2000))
    return made


@pytest.mark.parametrize("name", PACKAGED)
def test_a_stale_wheel_is_refused(tree: Path, name: str) -> None:
    wheel = wheel_of(tree)
    assert not fresh_wheel.refusal(wheel, tree)
    assert fresh_wheel.refusal(wheel_of(tree, version="0.0"), tree).startswith("is not of version")
    assert fresh_wheel.refusal(wheel_of(tree, machine="other"), tree).startswith("is not for")
    (tree / name).write_text("changed", encoding="utf-8")
    os.utime(tree / name, (1000, 1000))
    assert fresh_wheel.refusal(wheel, tree) == f"has another {name.removeprefix('python/')}"
    os.utime(tree / "csrc/base/error.c", (3000, 3000))
    assert fresh_wheel.refusal(wheel, tree) == "is older than csrc/base/error.c"


@pytest.mark.parametrize("later", [True, False])
def test_gathers_by_the_name_that_torch_has(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    calls = itertools.count()
    names = ["all_gather_into_tensor", *(["all_gather_single"] if later else [])]
    functions = {name: lambda *_, **__: next(calls) for name in names}
    monkeypatch.setattr(backend, "dist", SimpleNamespace(get_world_size=lambda: 2, **functions))
    backend.gather_step(None, 4)()
    assert next(calls) == 1
