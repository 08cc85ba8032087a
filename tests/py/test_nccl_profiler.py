"""The profiler that NCCL loads: it exports its tables, waits come back as long as they were, events are passed on.

NCCL's calls are a sequence written by hand (tests/nccl/profiled.h), made directly and through NCCL's own adapters.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_calls import operations
from nccl_programs import LIBRARY, compiled

import netbottleneck
from netbottleneck.analysis import nccl
from netbottleneck.runtime import run_folder
from netbottleneck.trace import nccl_events
from netbottleneck.trace.model import Trace
from test_nccl_plugin import check_library, nccl_library

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(netbottleneck.__file__).with_name("libnccl-profiler-netbottleneck.so")
VERSIONS = (4, 5, 6, 7)
ADAPTED = (4, 5, 6)  # NCCL 2.30 knows no version 7
CLOSE = 0.05
LIMIT_S = 120

Profile = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return a function that runs tests/nccl/profile.c and returns what it prints, with its log as "log"."""
    program = compiled("profile.c", tmp_path_factory.mktemp("nccl") / "profile")

    def run(*options: str, **variables: str) -> dict[str, Any]:
        argv = [str(program), "--plugin", str(PLUGIN), *options]
        env = {**os.environ, **variables}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**result, "log": done.stderr}

    return run


def check(result: dict[str, Any], path: Path) -> None:
    """Check that the ring has the waits of the harness, and that the split of the operation is made of them."""
    (operation,) = operations(path)
    assert (operation.function, operation.dtype, operation.bytes) == ("AllReduce", "float32", 1_000_000)
    assert (operation.algorithm, operation.protocol, operation.sequence) == ("RING", "SIMPLE", 5)
    assert (operation.comm, operation.comm_rank, operation.comm_size) == (0xC0FFEE, 0, 2)
    sent, received = operation.network
    for step, waits in ((sent, result["sent"]), (received, result["received"])):
        lengths = [end - begin for begin, end in zip(step.times_ns, step.times_ns[1:], strict=False)]
        assert lengths == [pytest.approx(wait, rel=CLOSE) for wait in waits]
        assert (step.bytes, step.peer, step.channel, step.number) == (1_000_000, 1, 0, 0)
    (split,) = nccl.splits(Trace("a", 2, (), nccl=(operation,)))
    gpu, peer, wire = result["sent"]
    arrival, flush, drain = result["received"]
    assert split.gpu_wait_ns == pytest.approx(gpu + drain, rel=CLOSE)
    assert split.peer_wait_ns == pytest.approx(peer, rel=CLOSE)
    assert split.wire_ns == pytest.approx(wire + flush, rel=CLOSE)
    assert split.unknown_ns == pytest.approx(arrival, rel=CLOSE)  # its sender left no record
    assert split.kernel_ns == result["kernel"]
    parts = split.wire_ns + split.peer_wait_ns + split.unknown_ns + split.gpu_wait_ns + split.idle_ns
    assert parts == split.network_ns


def test_it_exports_its_tables_and_stays_loaded() -> None:
    check_library(PLUGIN, [f"ncclProfiler_v{version}" for version in VERSIONS])


def test_codes_are_those_of_the_plugin() -> None:
    source = (ROOT / "csrc" / "nccl" / "profiler.c").read_text(encoding="utf-8")

    def names(table: str) -> list[str]:
        body = re.search(rf"const {table}\[\] = {{(.*?)NULL}}", source, re.DOTALL)
        assert body is not None
        return re.findall(r'"(\w+)"', body[1])

    assert names("functions") == list(nccl_events.NCCL_FUNCTIONS)
    assert names("algorithms") == list(nccl_events.NCCL_ALGORITHMS)
    assert names("protocols") == list(nccl_events.NCCL_PROTOCOLS)
    types = [name.removeprefix("nccl").lower() for name in names("types")]
    assert types == [*nccl_events.NCCL_DTYPES[:-1], "unknown"]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_wait_comes_back_as_long_as_it_was(profile: Profile, tmp_path: Path, version: int) -> None:
    """Each wait is charged to the state that ends with it, in each table."""
    result = profile("--version", str(version), NETBOTTLENECK_NCCL_EVENTS=str(tmp_path / "%p.ring"))
    check(result, tmp_path / f"{result['pid']}.ring")
    (operation,) = operations(tmp_path / f"{result['pid']}.ring")
    assert operation.tag == (42 if version == 7 else 0)


@pytest.mark.nccl
@pytest.mark.parametrize("version", ADAPTED)
def test_nccl_calls_each_table(profile: Profile, tmp_path: Path, version: int) -> None:
    """NCCL's own adapter calls the table: the layout that NCCL was compiled with."""
    through = ("--version", str(version), "--through", str(nccl_library()))
    result = profile(*through, NETBOTTLENECK_NCCL_EVENTS=str(tmp_path / "%h-%p.ring"))
    assert "not_run" not in result, result
    check(result, tmp_path / f"{os.uname().nodename}-{result['pid']}.ring")


def test_without_the_variable_nothing_is_reported(profile: Profile, tmp_path: Path) -> None:
    result = profile("--version", "6", NETBOTTLENECK_NCCL_EVENTS="0")
    assert result["mask"] == 0
    assert result["log"] == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("NCCL_EVENTS", "/nonexistent/a.ring", "open /nonexistent/a.ring: No such file"),
        ("NCCL_EVENTS", "1", "name a file, such as /tmp/nccl-%h-%p.ring"),
        ("NCCL_EVENTS", "true", "NETBOTTLENECK_NCCL_EVENTS='true' is not possible: expected 0, or a path"),
        ("TRACE_EVENTS", "many", "NETBOTTLENECK_TRACE_EVENTS='many' is not possible"),
        ("TRACE_EVENTS", "2147483648", "expected a whole number, 1 to 2147483647"),
        ("NCCL_PROFILER", "nonexistent", "NETBOTTLENECK_NCCL_PROFILER=nonexistent cannot be loaded"),
        ("NCCL_PROFILER", str(PLUGIN), "it is no other profiler of version 4 to 6"),
    ],
)
def test_a_wrong_setting_is_named(profile: Profile, tmp_path: Path, name: str, value: str, why: str) -> None:
    """NCCL goes on; its log says why."""
    variables = {"NETBOTTLENECK_NCCL_EVENTS": str(tmp_path / "a.ring"), f"NETBOTTLENECK_{name}": value}
    result = profile("--version", "6", **variables)
    assert result["log"].startswith("WARN PROFILER/NetBottleneck : ")
    assert why in result["log"]


@pytest.mark.parametrize(("called", "other"), [(4, 4), (5, 4), (5, 5), (6, 5), (6, 6), (7, 4), (7, 5), (7, 6), (7, 7)])
def test_events_are_passed_on(profile: Profile, tmp_path: Path, called: int, other: int) -> None:
    """Another profiler gets the events that it wants, with its own handles, in its own version, beside ours."""
    library = compiled("other_profiler.c", tmp_path / "libother.so", *LIBRARY, f"-DOTHER={other}")
    variables = {"NETBOTTLENECK_NCCL_PROFILER": str(library), "OTHER_LOG": str(tmp_path / "log")}
    result = profile("--version", str(called), NETBOTTLENECK_NCCL_EVENTS=str(tmp_path / "%p.ring"), **variables)
    check(result, tmp_path / f"{result['pid']}.ring")
    assert result["log"] == ""
    group = (1, 0) if other == 4 else (0, 1)
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == [
        "init c0ffee rank 0",
        "start 1 type 1 parent 0 group 0",
        f"start 2 type 2 parent {group[0]} group {group[1]}",
        "stop 2",
        "stop 1",
        "start 3 type 8 parent 2 group 0",
        "start 4 type 16 parent 3 group 0",
        *("state 4 8 bytes 0", "state 4 20 bytes 0", "state 4 20 bytes 0", "state 4 9 bytes 1000000"),
        *("stop 4", "stop 3", "start 5 type 8 parent 2 group 0", "start 6 type 16 parent 5 group 0"),
        *("state 6 10 bytes 0", "state 6 11 bytes 1000000", "state 6 12 bytes 1000000"),
        *("stop 6", "stop 5", "finalize"),
    ]


def test_another_profiler_alone(profile: Profile, tmp_path: Path) -> None:
    """Events are passed on, too, where none are recorded; NCCL reports those that it wants, and no others."""
    library = compiled("other_profiler.c", tmp_path / "libother.so", *LIBRARY, "-DOTHER=6")
    result = profile("--version", "6", NETBOTTLENECK_NCCL_PROFILER=str(library), OTHER_LOG=str(tmp_path / "log"))
    assert result["mask"] == 1 | 2 | 16
    assert len((tmp_path / "log").read_text(encoding="utf-8").splitlines()) == 21


LATE = """
import ctypes, sys
other, plugin = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(sys.argv[2])
table = (ctypes.c_void_p * 6).in_dll(plugin, "ncclProfiler_v6")
word, number = ctypes.c_void_p, ctypes.c_int
init = ctypes.CFUNCTYPE(number, word, ctypes.c_uint64, word, ctypes.c_char_p, number, number, number, word)(table[1])
context, mask = ctypes.c_void_p(), number(0)
for _ in range(2):  # communicators
    assert init(ctypes.addressof(context), 1, ctypes.addressof(mask), b"a", 2, 2, 0, None) == 0
assert mask.value == 0
other.other_begin()
print(mask.value)
"""


def test_another_profiler_alone_may_begin_later(tmp_path: Path) -> None:
    """No event arrives before it does: what it requests has to reach NCCL without one."""
    library = compiled("other_profiler.c", tmp_path / "libother.so", *LIBRARY, "-DOTHER=6")
    variables = {"NETBOTTLENECK_NCCL_PROFILER": str(library), "OTHER_LATE": "1", "OTHER_LOG": str(tmp_path / "log")}
    argv = [sys.executable, "-c", LATE, str(library), str(PLUGIN)]
    found = subprocess.run(
        argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, env={**os.environ, **variables}
    )
    assert int(found.stdout) == 1 | 2 | 16


SCRIPT = """
import json, os, subprocess, sys
import netbottleneck
import torch
from torch.nn.parallel import DistributedDataParallel
result = json.loads(subprocess.check_output(sys.argv[1:])) if sys.argv[1:] else {}
hidden = os.environ["NETBOTTLENECK_NCCL_EVENTS"].replace("%p", str(os.getpid())).replace("%h", os.uname().nodename)
if result:
    child = os.environ["NETBOTTLENECK_NCCL_EVENTS"].replace("%p", str(result["pid"])).replace("%h", os.uname().nodename)
    os.rename(child, hidden)  # as if NCCL had run in this process
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
print(json.dumps({"plugin": os.environ["NCCL_PROFILER_PLUGIN"], "hidden": hidden,
                  "next": os.environ.get("NETBOTTLENECK_NCCL_PROFILER")}))
"""


def trained(tmp_path: Path, *argv: str, **variables: str) -> dict[str, Any]:
    """Run SCRIPT as a job of one rank that records into tmp_path / "run"."""
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env |= {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_NCCL_EVENTS": "1"}
    env |= {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_TRACE_EVENTS": " 4096 ", **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return result


def test_a_run_takes_its_events(tmp_path: Path) -> None:
    """NCCL finds our plugin before its first communicator, and the file becomes a ring of the run."""
    program = compiled("profile.c", tmp_path / "profile")
    result = trained(tmp_path, str(program), "--plugin", str(PLUGIN), "--version", "6")
    assert result["plugin"] == str(PLUGIN)
    assert result["next"] is None
    assert not Path(result["hidden"]).exists()
    (operation,) = netbottleneck.Run(tmp_path / "run").trace.nccl
    assert (operation.function, len(operation.network), operation.rank) == ("AllReduce", 2, 0)


def notes(run: Path) -> list[str]:
    found: list[str] = json.loads((run / "run.json").read_text(encoding="utf-8"))["notes"]
    return found


def test_a_run_folder_below_a_new_folder_has_its_events(tmp_path: Path) -> None:
    """NCCL opens its file before the run makes its folder."""
    program = compiled("profile.c", tmp_path / "profile")
    run = tmp_path / "new" / "run"
    trained(tmp_path, str(program), "--plugin", str(PLUGIN), "--version", "6", NETBOTTLENECK_DIR=str(run))
    assert len(netbottleneck.Run(run).trace.nccl) == 1
    assert not any("NCCL" in note for note in notes(run))


def test_a_run_without_its_events_says_so(tmp_path: Path) -> None:
    trained(tmp_path)
    (note,) = (note for note in notes(tmp_path / "run") if "NCCL" in note)
    assert note.startswith("NETBOTTLENECK_NCCL_EVENTS=1, but NCCL has recorded no events")


def test_a_second_run_of_a_process_names_the_file_of_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("NETBOTTLENECK_NCCL_EVENTS", str(tmp_path / f"{run_folder.NCCL_HIDDEN}%h-%p.ring"))
    hidden = run_folder._nccl_name()
    assert hidden is not None
    hidden.touch()  # as NCCL does, once in a process
    said = []
    for folder in (first, second):
        (folder / "ranks").mkdir(parents=True)
        run_folder.take_nccl_events(folder, 0)
        said.append(run_folder.no_nccl_events(folder, 0))
    assert said == ["", f"NCCL's events are in {first / 'ranks' / '0.nccl.ring'}, of the first run of this process"]


CHILD = """
import os, pathlib
import netbottleneck
named = os.environ["NETBOTTLENECK_NCCL_EVENTS"].replace("%p", str(os.getpid())).replace("%h", os.uname().nodename)
pathlib.Path(named).touch()  # as NCCL does
"""


def test_a_process_of_no_run_leaves_no_file(tmp_path: Path) -> None:
    """A process that a rank starts has the rank's variables."""
    hidden = str(tmp_path / ".netbottleneck-nccl-%h-%p.ring")
    env = {**os.environ, "NETBOTTLENECK": "1", "NETBOTTLENECK_NCCL_EVENTS": hidden}
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=LIMIT_S, env=env)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", ["", "none"])
def test_the_default_profiler_gets_the_events(tmp_path: Path, named: str) -> None:
    """It is the one that NCCL loads by itself, unless it is told to load none."""
    compiled("other_profiler.c", tmp_path / "libnccl-profiler.so", *LIBRARY, "-DOTHER=6")
    result = trained(tmp_path, LD_LIBRARY_PATH=str(tmp_path), NCCL_PROFILER_PLUGIN=named)
    assert result["plugin"] == str(PLUGIN)
    assert result["next"] == (None if named else "libnccl-profiler.so")


def test_a_profiler_that_the_user_has_gets_the_events(tmp_path: Path) -> None:
    result = trained(tmp_path, NCCL_PROFILER_PLUGIN="inspector")
    assert result["plugin"] == str(PLUGIN)
    assert result["next"] == "inspector"
    assert netbottleneck.Run(tmp_path / "run").trace.nccl == ()


def test_a_profiler_that_would_get_no_events_stays(tmp_path: Path) -> None:
    """NCCL also loads profilers of versions 1 to 3, to which ours passes nothing on."""
    library = compiled("other_profiler.c", tmp_path / "libother.so", *LIBRARY, "-DOTHER=3")
    result = trained(tmp_path, NCCL_PROFILER_PLUGIN=str(library))
    assert result == {"plugin": str(library), "hidden": "1", "next": None}
    (note,) = (note for note in notes(tmp_path / "run") if "NCCL" in note)
    assert note.startswith(f"NETBOTTLENECK_NCCL_EVENTS=1 has no effect: the profiler plugin {library} stays alone")


@pytest.mark.parametrize("named", ["libother.so", "other"])
def test_a_profiler_by_its_short_name_gets_the_events(tmp_path: Path, named: str) -> None:
    """NCCL finds it by either name."""
    name = named if named.endswith(".so") else f"libnccl-profiler-{named}.so"
    compiled("other_profiler.c", tmp_path / name, *LIBRARY, "-DOTHER=4")
    result = trained(tmp_path, LD_LIBRARY_PATH=str(tmp_path), NCCL_PROFILER_PLUGIN=named)
    assert (result["plugin"], result["next"]) == (str(PLUGIN), named)
