"""The benchmark: its request, its numbers, its output, and that it leaves no process."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RANKS_LIMIT_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from peers import hvd, mpi  # noqa: E402
from peers.iperf import mean_received, processors  # noqa: E402

import netbottleneck  # noqa: E402
from netbottleneck import bench, config  # noqa: E402
from netbottleneck.bench import pair  # noqa: E402
from netbottleneck.bench.paths import COMPARISONS, load_peers  # noqa: E402
from netbottleneck.bench.values import (  # noqa: E402
    DTYPES,
    PERIOD,
    REDUCTIONS,
    Data,
    Request,
    Results,
    Samples,
    cells,
    line,
    parse_lanes,
    parse_sizes,
)
from netbottleneck.bench.worker import Workers  # noqa: E402
from netbottleneck.errors import Error  # noqa: E402
from netbottleneck.lab import Lab, LabError  # noqa: E402
from netbottleneck.lab.lab import find_tool  # noqa: E402
from netbottleneck.launch import connect  # noqa: E402

PEERS = str(BENCHMARKS / "peers")
KEYS = {
    "transport",
    "streams",
    "op",
    "dtype",
    "ranks",
    "bytes",
    "time_s",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "rounds",
    "owed_bytes",
    "wire_bits_per_s",
    "cpu_s_per_gb",
    "wrong",
}
LIMIT_S = RANKS_LIMIT_S


def fold(op: str, inputs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Reduce in the order 0, 1, 2, … in the storage type."""
    call = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    result = inputs[0].copy()
    for other in inputs[1:]:
        result = call(result, other, dtype=result.dtype)
    return result


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_correct_result_of_any_type_and_reduction_has_no_wrong_element(dtype: str, op: str) -> None:
    ranks, count = 5, 2003
    every = [Data(dtype, op, rank, ranks, count) for rank in range(ranks)]
    kind = DTYPES[dtype]
    inputs = []
    for data in every:
        buffer = np.zeros(count, kind.store)
        data.fill(buffer)
        inputs.append(kind.decode(buffer))
    result = fold(op, inputs)
    stored = kind.encode(result) if dtype == "bfloat16" else result.astype(kind.store)
    assert every[0].wrong(stored) == 0


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_one_element_that_was_not_reduced_is_counted(dtype: str) -> None:
    data = Data(dtype, "sum", 0, 2, 1000)
    kind = DTYPES[dtype]
    buffers = [np.zeros(1000, kind.store) for _ in range(2)]
    data.fill(buffers[0])
    Data(dtype, "sum", 1, 2, 1000).fill(buffers[1])
    total = fold("sum", [kind.decode(buffer) for buffer in buffers])
    stored = kind.encode(total) if dtype == "bfloat16" else total.astype(kind.store)
    stored[777] = buffers[0][777]
    assert data.wrong(stored) == 1


def test_data_moved_by_a_round_number_of_elements_is_wrong() -> None:
    count = PERIOD + (1 << 18)
    data = Data("int32", "max", 0, 1, count)
    buffer = np.zeros(count, np.int32)
    data.fill(buffer)
    assert data.wrong(buffer) == 0
    buffer[: 1 << 16] = buffer[1 << 17 : (1 << 17) + (1 << 16)]
    assert data.wrong(buffer) > 1 << 15


@pytest.mark.parametrize(("dtype", "op"), [("int8", "sum"), ("float32", "max"), ("float32", "sum"), ("float64", "sum")])
def test_memory_for_the_inputs_does_not_grow_with_the_ranks(dtype: str, op: str) -> None:
    def peak(ranks: int) -> int:
        tracemalloc.start()
        Data(dtype, op, ranks - 1, ranks, 100_000)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few = peak(3)
    assert peak(32) < 1.5 * few


def test_not_a_number_is_wrong() -> None:
    data = Data("float32", "sum", 0, 1, 3)
    buffer = np.zeros(3, np.float32)
    data.fill(buffer)
    buffer[1] = np.nan
    assert data.wrong(buffer) == 1


def test_sizes_and_lanes_are_parsed() -> None:
    assert parse_sizes("1M,16Mi,0,7") == (10**6, 16 * 2**20, 0, 7)
    assert parse_lanes("auto,1,64") == (0, 1, 64)
    with pytest.raises(ValueError, match=r"'4X': must be a size"):
        parse_sizes("1M,4X")
    with pytest.raises(ValueError, match=r"'65': must be auto or a number"):
        parse_lanes("65")


def test_a_request_names_unknown_values() -> None:
    with pytest.raises(ValueError, match="transport nccl: must be one of stock, tcp, ofi"):
        Request(("nccl",))
    with pytest.raises(ValueError, match="dtype float8: must be one of"):
        Request(dtype="float8")
    request = Request(("tcp", "mpi-tcp"), (0, 2), (4, 8), "int8", "max", 3, True, peers=PEERS)
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_a_peer_without_its_table_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for name in ("mpi-tcp", "horovod", "oneccl", "iperf3-4"):
        with pytest.raises(ValueError, match=rf"transport {name}: .*from a checkout .*--peers benchmarks/peers"):
            Request(("tcp", name))
    for place in ("", str(tmp_path), str(tmp_path / "none.py")):
        with pytest.raises(ValueError, match=r"peers .*: not a Python file or package\. .*from a checkout"):
            load_peers(place)
    (tmp_path / "empty.py").touch()
    with pytest.raises(ValueError, match=r"empty\.py: it defines no table PEERS"):
        load_peers(str(tmp_path / "empty.py"))


OWN_PEER = """
from netbottleneck.bench.paths import Copy, Opener

class Own(Copy):
    provider = "a file of the user"

PEERS = {"own": Opener(lambda name, context: "", Own), "never": Opener(lambda name, context: "it is not here", Own)}
"""


def test_a_file_with_a_table_adds_its_paths(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN_PEER, encoding="utf-8")
    found = netbottleneck.bench(2, sizes="4096", transports="tcp,own,never", iterations=1, peers=str(file))
    assert found.notes == ["never left out: it is not here"]
    assert [row["transport"] for row in found.rows] == ["tcp", "own"]
    assert found.row("own")["provider"] == "a file of the user"
    assert not set(COMPARISONS) & set(load_peers(PEERS))


def test_several_all_reduces_per_round_need_an_idempotent_reduction() -> None:
    with pytest.raises(ValueError, match="more than one of min and max only"):
        Request(inner=2)
    found = bench.start(Request(("tcp", "tcp-heap"), (2,), (4096,), op="max", iterations=2, inner=3), 3)
    assert [row["transport"] for row in found.rows] == ["tcp", "tcp-heap"]
    assert found.wrong == 0


def test_a_row_is_the_arithmetic_of_its_samples() -> None:
    # Two ranks, three rounds; the slower rank makes each round's time: 2, 4 and 3 ms.
    times = np.array([[1, 4, 3], [2, 1, 1]]) * 1_000_000
    values = np.zeros((2, 3, 6), np.int64)
    values[:, :, 0] = times
    values[:, :, 1] = 1_000_000
    values[0, :, 2] = 900_000
    values[1, 0, 4] = 7
    values[0, :, 5] = 20_000_000
    row = Samples(values, 250_000, 4, wire=True).row()
    assert row["time_s"] == {"median": 0.003, "p10": pytest.approx(0.0022), "p90": pytest.approx(0.0038), "n": 3}
    assert row["algbw_bytes_per_s"] == pytest.approx(1e6 / 0.003)
    assert row["busbw_bytes_per_s"] == pytest.approx(row["algbw_bytes_per_s"])
    assert row["cpu_s_per_gb"] == pytest.approx(0.006 / 0.003)
    assert row["wire_bits_per_s"] == pytest.approx(8 * 2_700_000 / 0.009)
    assert row["wrong"] == 7
    assert row["rounds"] == {
        "time_s": [0.002, 0.004, 0.003],
        "busy_s": [0.02] * 3,
        "sent_bytes": [900_000] * 3,
    }


def test_cells_of_a_line_are_apart_however_wide() -> None:
    values = np.full((2, 1, 6), 10**12, np.int64)
    values[:, :, 3] = -1
    path = {"transport": "tcp", "streams": 1, "dtype": "float32", "redop": "sum"}
    row = Samples(values, 2, 4, wire=False).row() | path
    assert line(row).split() == list(cells(row))
    assert "-" in cells(row)


def test_a_row_of_several_all_reduces_per_round_is_for_one() -> None:
    values = np.zeros((2, 1, 6), np.int64)
    values[:, 0] = (8_000_000, 4_000_000, 400, 400, 0, 40_000_000)
    row = Samples(values, 25, 4, wire=True, inner=4).row()
    assert row["time_s"]["median"] == 0.002
    assert row["rounds"] == {"time_s": [0.002], "busy_s": [0.01], "sent_bytes": [200]}
    assert row["cpu_s_per_gb"] == pytest.approx(0.002 / 1e-7)
    assert row["wire_bits_per_s"] == pytest.approx(8 * 100 / 0.002)


def test_loopback_bytes_are_not_counted_once_per_rank() -> None:
    values = np.ones((3, 2, 6), np.int64)
    values[:, :, 2] = 1000
    assert Samples(values, 25, 4, wire=False).row()["rounds"]["sent_bytes"] == [1000, 1000]


def test_unreported_bytes_of_a_path_are_not_estimated() -> None:
    values = np.ones((2, 1, 6), np.int64)
    values[:, :, 3] = -1
    assert Samples(values, 1, 4, wire=False).row()["wire_bits_per_s"] is None


def test_rows_of_every_path_are_right_and_complete_on_loopback() -> None:
    lines: list[str] = []
    found = netbottleneck.bench(
        2, sizes="0,4,1000001", transports="stock,tcp", streams="1,2", iterations=2, say=lines.append
    )
    paths = {(row["transport"], row["streams"]) for row in found.rows}
    assert paths == {("stock", 1), ("stock x4", 4), ("tcp", 1), ("tcp", 2)}
    assert len(found.rows) == 12
    assert found.wrong == 0
    for row in found.rows:
        assert row.keys() >= KEYS
        assert row["time_s"].keys() == {"median", "p10", "p90", "n"}
        assert row["bytes"] in (0, 4, 1000000)
        assert (row["interface"], row["link_bits_per_s"]) == ("lo", None)
    assert "\n".join(lines) == found.table()
    assert set(found.head) >= {"machine", "versions", "lab", "ranks"}


GLOO_SOCKETS = """
import os
from pathlib import Path
from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.runtime import communicators
from netbottleneck.bench import paths

def sockets():
    return sum(os.readlink(fd).startswith("socket") for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())

settings = config.settings()
place = connect.detect(settings)
control = connect.connect(settings, place, transport="tcp", streams=1)
control.exchange(b"here")
counted = []
make = communicators.stock_group

def counting(*given):
    before = sockets()
    group = make(*given)
    counted.append(sockets() - before)
    return group

communicators.stock_group(settings, place, control.exchange)
communicators.stock_group = counting
memory = connect.core().Arena(4096)
made = paths.open_stock(paths.Context(settings, place, control, memory, "float32", "sum", "lo"))
print([path.name for path in made], counted[1] - counted[0], os.environ["GLOO_SOCKET_IFNAME"])
control.exchange(b"done")
"""


def test_the_tuned_stock_has_more_connections_and_the_environment_is_as_before(ranks: Any) -> None:
    for result in ranks(2, GLOO_SOCKETS, env={"GLOO_SOCKET_IFNAME": "lo", "NETBOTTLENECK_IFNAME": "lo"}):
        names, more, left = result.stdout.strip().rpartition("] ")[0], *result.stdout.strip().split()[-2:]
        assert names == "['stock', 'stock x4'"
        assert int(more) >= 3
        assert left == "lo"


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_type_is_right_on_three_ranks(dtype: str) -> None:
    found = netbottleneck.bench(3, sizes="1,999,300007", transports="tcp", streams="2", dtype=dtype, iterations=1)
    assert found.wrong == 0
    assert [row["count"] for row in found.rows] == [max(n // DTYPES[dtype].itemsize, 1) for n in (1, 999, 300007)]


def test_auto_keeps_the_curve_of_the_probe() -> None:
    found = netbottleneck.bench(2, sizes="8M", transports="tcp", streams="auto", iterations=1)
    assert [lanes for lanes, _ in found.probe["tcp"]][:2] == [1, 2]
    assert all(rate > 0 for _, rate in found.probe["tcp"])
    assert found.row("tcp")["streams_used"] >= 1


def test_results_are_displayed_and_survive_json(tmp_path: Path) -> None:
    row = {"transport": "tcp <&>", "streams": "auto", "streams_used": 4, "bytes": 4, "count": 1, "dtype": "float32"}
    row |= {
        "redop": "sum",
        "time_s": {"median": 1e-3, "p10": 5e-4, "p90": 2e-3, "n": 7},
        "algbw_bytes_per_s": 4e3,
        "busbw_bytes_per_s": 4e3,
    }
    results = Results(
        {"ranks": 2}, [{**row, "wire_bits_per_s": None, "cpu_s_per_gb": None, "wrong": 0}], ["ofi left out: no library"]
    )
    assert "tcp &lt;&amp;&gt;" in results._repr_html_()
    assert "ofi left out" in results._repr_html_()
    assert cells(results.rows[0])[1] == "auto (4)"
    assert cells(results.rows[0])[6:9] == ("1000.0", "500.0-2000.0", "7")
    results.write(tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == results.rows
    with pytest.raises(KeyError, match="no row of stock"):
        results.row("stock")


def test_the_module_is_callable_before_and_after_an_import() -> None:
    assert bench is netbottleneck.bench or callable(netbottleneck.bench)
    with pytest.raises(ValueError, match="transport nothing"):
        netbottleneck.bench(transports="nothing")


def test_a_missing_libfabric_is_left_out_with_a_note_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETBOTTLENECK_LIBFABRIC", "/nonexistent")
    with pytest.raises(Error, match=r"ofi was requested and cannot be used: .*nonexistent"):
        netbottleneck.bench(2, sizes="4", transports="ofi", iterations=1)
    found = netbottleneck.bench(2, sizes="4", iterations=1)
    assert "ofi" not in {row["transport"] for row in found.rows}
    assert "nonexistent" in found.notes[0]


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_a_killed_rank_ends_the_benchmark_with_its_name_and_leaves_no_process() -> None:
    before = children()
    request = Request(("tcp",), (2,), (4 * 10**6,), iterations=10**6, exact=True)
    started: list[int] = []

    with Workers(request, 2, None) as workers:
        started += [process.pid for process in workers._processes]

        def on_line(line: Any) -> None:
            if "progress" in line:
                workers._processes[1].kill()  # more lines may come before its end is seen

        with pytest.raises(Error, match="rank 1 was killed by SIGKILL"):
            workers.listen(on_line, LIMIT_S)
    assert children() <= before
    assert all(not Path(f"/proc/{pid}").exists() for pid in started)


def test_output_of_gloo_among_the_messages_is_passed_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["[Gloo] Rank 0 is connected to 1 peer ranks", json.dumps({"progress": [4, 0]}), "[1]"]
    command = [sys.executable, "-I", "-c", f"print(*{lines!r}, sep='\\n')"]

    def start(_: Workers, __: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(Workers, "_start", start)
    seen: list[Any] = []
    with Workers(Request(("tcp",)), 1, None) as workers:
        workers.listen(seen.append, LIMIT_S)
    assert seen == [{"progress": [4, 0]}]
    assert capsys.readouterr().err.splitlines() == [lines[0], lines[2]]


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, netbottleneck\n"
        "from netbottleneck.bench import Request, start\n"
        "from netbottleneck.bench import worker\n"
        "seen = worker.Workers.__enter__\n"
        "def enter(self):\n"
        "    seen(self); print(*[p.pid for p in self._processes], flush=True); return self\n"
        "worker.Workers.__enter__ = enter\n"
        "start(Request(('tcp',), (1,), (10**6,), iterations=10**6, exact=True), 2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_launchers_ranks_are_used(ranks: Any, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import sys\nfrom netbottleneck.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    args = ["bench", "--sizes", "1000", "--transports", "tcp", "--iters", "1", "--json", str(tmp_path / "rows.json")]
    results = ranks(3, script, args=args, env={"NETBOTTLENECK_IFNAME": "lo"})
    assert "busbw" in results[0].stdout
    assert results[1].stdout == ""
    assert [row["ranks"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == [3]


def test_interfaces_are_resolved_and_hosts_of_different_sizes_are_counted(ranks: Any, tmp_path: Path) -> None:
    names = [name for name, _ in connect.core().interfaces("^none")]
    senders = 3 if names == ["lo"] else 2
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "os.environ['NETBOTTLENECK_HOST_ID'] = 'first' if os.environ['RANK'] < '2' else 'second'\n"
        "from netbottleneck.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    args = ["bench", "--sizes", "1000", "--transports", "tcp", "--iters", "1", "--json", str(tmp_path / "rows.json")]
    ranks(3, script, args=args, env={"NETBOTTLENECK_IFNAME": "^none", "NETBOTTLENECK_SHM": "0"})
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["interface"].split(",") == names
    assert row["owed_bytes"] == 2 * (senders - 1) * row["bytes"]


RUNNING = """
import time
from netbottleneck import _core
until = time.monotonic() + 100
while True:
    try:
        _core.interfaces("nb0")
        break
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def lab() -> Generator[Lab, None, None]:
    try:
        with Lab(2, "400mbit/100mbit", ways=("root", "user")) as made:
            # The kernel may take a second to call a new interface running.
            waits = [made.popen(rank, [sys.executable, "-c", RUNNING], os.environ) for rank in range(2)]
            assert [wait.wait(LIMIT_S) for wait in waits] == [0, 0]
            yield made
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")


def run_pair(lab: Lab, *args: str) -> tuple[list[str], list[str]]:
    """Run both sides on two hosts; return their outputs. The second command is the one that the first side printed."""
    command = [sys.executable, "-m"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    first = lab.popen(0, [*command, "netbottleneck", "bench", "--listen", "--port", "0", *args], environ, **options)
    timer = threading.Timer(LIMIT_S, first.kill)
    timer.start()
    try:
        assert first.stdout is not None
        lines = []
        for line in first.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("netbottleneck bench --connect"):
                break
        second = lab.popen(1, [*command, *shlex.split(lines[-1])], environ, **options)
        theirs, _ = second.communicate(timeout=LIMIT_S)
        ours, _ = first.communicate(timeout=LIMIT_S)
    finally:
        timer.cancel()
    assert (first.returncode, second.returncode) == (0, 0), f"{lines}\n{ours}\n{theirs}"
    return [*lines, *ours.splitlines()], theirs.splitlines()


def test_two_hosts_see_the_curve_and_the_same_verdict(lab: Lab) -> None:
    ours, theirs = run_pair(lab, "--transports", "tcp", "--sizes", "4M")
    table = [line.split() for line in theirs if line.split()[:1] == ["tcp"]]
    assert [row[1] for row in table] == ["1", "2", "4", "8", "16"]
    assert [line.split() for line in ours if line.split()[:1] == ["tcp"]] == table
    head = next(line for line in theirs if line.split()[:1] == ["transport"])
    assert head.endswith("cpu (s/GB)")
    assert all(float(row[-1]) > 0 for row in table)  # of both sides together, and both say the same
    assert theirs[-1] == ours[-1]
    assert "one tcp stream moves" in theirs[-1]
    # A flow has a quarter of the link, so there is a gain; its size depends on the machine.
    assert "leaves a factor of" in theirs[-1]


@pytest.mark.parametrize("second_has_both", [False, True])
def test_hosts_of_which_one_has_ipv6_alone_are_measured(second_has_both: bool) -> None:
    try:
        with Lab(2, "none", ways=("root", "user")) as made:
            for rank in range(2):
                changes = [["-6", "addr", "add", f"fd00::{rank + 1}/64", "dev", made.interface, "nodad"]]
                changes += [["-4", "addr", "flush", "dev", made.interface]] if rank == 0 or not second_has_both else []
                for words in changes:
                    assert made.popen(rank, [find_tool("ip"), *words], os.environ).wait(LIMIT_S) == 0
            ours, theirs = run_pair(made, "--transports", "tcp", "--streams", "1,2", "--sizes", "1M")
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    assert "listening at [fd00::1]:" in ours[0]
    assert [line.split()[1] for line in theirs if line.split()[:1] == ["tcp"]] == ["1", "2"]


KNOWN = config.settings({"secret": "0" * 32}, {})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("127.0.0.1", f"127.0.0.1:{pair.PORT}"),
        ("127.0.0.1:5", "127.0.0.1:5"),
        ("[::1]:5", "[::1]:5"),
        ("[::1]", f"[::1]:{pair.PORT}"),
        ("fd00::1", f"[fd00::1]:{pair.PORT}"),
    ],
)
def test_the_other_host_may_be_given_in_every_form(given: str, expected: str) -> None:
    assert pair.target(KNOWN, given) == expected


@pytest.mark.parametrize(
    "given", ["", ":5", "host:", "host:0", "host:65536", "host:x", "[::1", "[]:5", "[::1]5", "[10.0.0.1]:5", "a::g"]
)
def test_what_names_no_host_is_refused_with_its_text(given: str) -> None:
    with pytest.raises(ValueError, match=f"^--connect {re.escape(given)}"):
        pair.target(KNOWN, given)


# A process that was started in the background may ignore the signal, and so would its children.
INTERRUPTIBLE = """
import signal
from netbottleneck.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main())
"""


def test_a_side_that_waits_for_the_other_ends_at_ctrl_c() -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "bench", "--listen", "--port", "0", "--ifname", "=lo"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as side:
        try:
            assert side.stdout is not None
            found = re.search(r"listening at ([\d.]+):(\d+);", side.stdout.readline())
            assert found is not None
            with socket.create_connection((found[1], int(found[2])), LIMIT_S) as stranger:
                stranger.sendall(b"?")
                assert stranger.recv(1) == b""  # only a side that waits drops a stranger
            side.send_signal(signal.SIGINT)
            _, errors = side.communicate(timeout=LIMIT_S)
        finally:
            side.kill()
    assert (side.returncode, errors) == (130, "netbottleneck: interrupted\n")


def test_a_wrong_secret_is_refused_and_the_right_one_accepted_afterwards(lab: Lab) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    args = ["bench", "--listen", "--port", "0", "--transports", "tcp", "--streams", "1", "--sizes", "1M"]
    first = lab.popen(0, [sys.executable, "-m", "netbottleneck", *args], environ, **options)
    assert first.stdout is not None
    first.stdout.readline()
    command = first.stdout.readline().split()
    secret = command.index("--secret") + 1
    liar = [*command[:secret], "0" * 32, *command[secret + 1 :]]
    refused = lab.popen(1, [sys.executable, "-m", *liar], environ, **options)
    output, _ = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 1
    assert "have different secrets" in output
    right = lab.popen(1, [sys.executable, "-m", *command], environ, **options)
    output, _ = right.communicate(timeout=LIMIT_S)
    assert right.returncode == 0, output
    first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0


MEDIUM = """
import numpy as np
import netbottleneck as nb
from netbottleneck.runtime import job

this = job.start()
for _ in range(40):
    nb.allreduce_(np.ones(50_000, np.float32), name="small")
medium, count = np.ones(1 << 17, np.float32), 0
while not this.comm.info()["probe"] and count < 400:
    nb.allreduce_(medium, name="medium")
    count += 1
print(count, flush=True)
job.stop()
"""


def test_smaller_transfers_start_the_probe_of_the_lanes_after_10_s() -> None:
    try:
        with Lab(2, "50mbit", ways=("root", "user")) as made:
            environ = {**os.environ, "NETBOTTLENECK_TRANSPORT": "tcp"}
            ranks = [
                made.popen(rank, [sys.executable, "-c", MEDIUM], environ, stdout=subprocess.PIPE) for rank in (0, 1)
            ]
            counts = [int(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    assert counts[0] == counts[1]
    # One takes 84 ms by the rate of the link. Small ones do not count.
    assert 60 <= counts[0] <= 240


def test_a_lab_is_verified_and_its_wire_is_counted() -> None:
    try:
        found = netbottleneck.bench(2, "800mbit/200mbit", "tcp", "4", "4M", iterations=2)
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    lab = found.head["lab"]
    if "namespaces" not in lab["how"]:
        pytest.skip(f"no network namespaces on this machine: {lab['why']}")
    assert lab["ok"]
    row = found.row("tcp", 4)
    # What the interface sent is the payload with headers, of two iterations: never less than the payload.
    assert row["wire_bits_per_s"] * row["time_s"]["p90"] >= 8 * row["bytes"] * 0.99
    assert row["wrong"] == 0


def peers(ranks: int, lab: str | None, names: tuple[str, ...], **more: Any) -> Results:
    """Run one round of some paths."""
    return bench.start(Request(names, (1,), (300_000,), iterations=2, exact=True, peers=PEERS, **more), ranks, lab)


def skip_without(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")


def skip_without_mpi() -> None:
    skip_without("mpicc", "mpirun")
    header = subprocess.run(
        ["mpicc", "-E", "-x", "c", "/dev/stdin"], input="#include <mpi.h>", text=True, capture_output=True, check=False
    )
    if header.returncode != 0:
        pytest.skip("MPI's header (Debian: libopenmpi-dev) is not installed")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_mpi_reduces_the_same_memory_and_every_element_is_right(dtype: str) -> None:
    skip_without_mpi()
    found = peers(3, None, ("mpi-shm", "mpi-tcp"), dtype=dtype)
    assert found.notes == []
    assert [row["transport"] for row in found.rows] == ["mpi-shm", "mpi-tcp"]
    assert all("MPI" in row["provider"] for row in found.rows)
    assert all(row["cpu_s_per_gb"] > 0 for row in found.rows)
    assert found.wrong == 0
    assert min(found.row("mpi-tcp")["rounds"]["sent_bytes"]) >= found.row("mpi-tcp")["owed_bytes"] == 4 * 300_000


@pytest.mark.peers
def test_another_environments_mpich_is_not_taken_for_open_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_mpi()
    for tool in ("mpichversion", "mpirun", "mpicc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho not this one\nexit 1\n", encoding="utf-8")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = peers(2, None, ("mpi-shm",))
    assert found.notes == []
    assert "Open MPI" in found.row("mpi-shm")["provider"]


@pytest.mark.parametrize("name", ["mpich-shm", "mpich-ofi"])
def test_the_wheels_mpich_reduces_the_same_memory(name: str) -> None:
    if not Path(sys.prefix, "bin", "mpivars").exists():
        pytest.skip("mpich is not installed")
    found = peers(2, None, ("tcp", name))
    assert found.notes == []
    assert found.row(name)["provider"].startswith("MPICH ")
    assert found.wrong == 0
    if name == "mpich-ofi":
        assert min(found.row(name)["rounds"]["sent_bytes"]) >= found.row(name)["owed_bytes"] == 2 * 300_000


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_oneccl_reduces_the_same_memory(dtype: str) -> None:
    skip_without("mpicxx", "mpirun")
    if mpi.oneccl_missing():
        pytest.skip("oneCCL (tools/peers.sh) is not installed")
    found = peers(2, None, ("tcp", "oneccl"), dtype=dtype)
    assert found.notes == []
    row = found.row("oneccl")
    assert row["provider"].startswith("oneCCL 20")
    assert found.wrong == 0
    assert min(row["rounds"]["sent_bytes"]) >= row["owed_bytes"] == 2 * 300_000


@pytest.mark.peers
def test_horovod_reduces_the_same_memory() -> None:
    skip_without_horovod("horovod")
    found = peers(3, None, ("tcp", "horovod"))
    assert found.notes == []
    assert found.row("horovod")["provider"].startswith("Horovod ")
    assert found.wrong == 0
    assert min(found.row("horovod")["rounds"]["sent_bytes"]) >= found.row("horovod")["owed_bytes"] == 4 * 300_000


def skip_without_horovod(name: str) -> None:
    if hvd.not_installed():
        pytest.skip(hvd.not_installed())
    if name == "horovod-mpi":
        skip_without("mpirun")
        if hvd.without_mpi():
            pytest.skip("horovod is not installed with MPI (tools/peers.sh)")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_horovod_over_mpi_reduces_the_same_memory(dtype: str) -> None:
    skip_without_horovod("horovod-mpi")
    found = peers(2, None, ("tcp", "horovod-mpi"), dtype=dtype)
    assert found.notes == []
    row = found.row("horovod-mpi")
    assert row["provider"].startswith("Horovod ")
    assert "Open MPI" in row["provider"]
    assert found.wrong == 0
    assert row["cpu_s_per_gb"] > 0
    assert min(row["rounds"]["sent_bytes"]) >= row["owed_bytes"] == 2 * 300_000


def test_a_horovod_that_was_built_without_mpi_is_named_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "horovod" / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    library.write_bytes(b"\0libgloo\0")
    assert "built without Open MPI" in hvd.without_mpi()
    library.write_bytes(b"\0libmpi.so.40\0")
    assert hvd.without_mpi() == ""


def mpi_peers_of(pids: list[int]) -> list[int]:
    """Return the processes of the MPI program beside these ranks."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(name in " ".join(command[:2]) for name in ("mpi_peer", "horovod_peer")) and any(
            word.startswith(f"{pid}:") for pid in pids for word in command
        ):
            found.append(int(name))
    return found


@pytest.mark.peers
@pytest.mark.parametrize("name", ["mpi-tcp", "horovod", "horovod-mpi"])
def test_mpi_and_horovod_end_with_the_benchmarks_ranks(name: str) -> None:
    skip_without_mpi() if name == "mpi-tcp" else skip_without_horovod(name)
    request = Request((name,), sizes=(10**6,), iterations=10**6, exact=True, peers=PEERS)
    with Workers(request, 2, None) as workers:
        pids = [process.pid for process in workers._processes]
        theirs: list[int] = []

        def on_line(line: Any) -> None:
            if "progress" in line:
                theirs.extend(mpi_peers_of(pids))
                workers._processes[1].kill()  # more lines may come before its end is seen

        with pytest.raises(Error, match="rank 1 was killed by SIGKILL"):
            workers.listen(on_line, LIMIT_S)
    assert len(theirs) >= 2
    deadline = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in theirs) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in theirs if alive(pid)] == []


@pytest.mark.peers
def test_mpi_reaches_the_hosts_of_a_lab() -> None:
    skip_without_mpi()
    try:
        found = peers(2, "none", ("tcp", "mpi-tcp", "mpi-shm"))
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    if "namespaces" not in found.head["lab"]["how"]:
        pytest.skip(f"no network namespaces on this machine: {found.head['lab']['why']}")
    assert found.notes == ["mpi-shm left out: shared memory joins the ranks of one host"]
    assert found.wrong == 0
    for row in found.rows:
        assert min(row["rounds"]["sent_bytes"]) >= row["owed_bytes"] == 2 * 300_000


def test_an_mpi_that_does_not_start_is_left_out_with_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("mpicc", "touch $5"), ("mpirun", "echo no such network; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = peers(2, None, ("tcp", "mpi-tcp"))
    assert found.notes == ["mpi-tcp left out: no such network"]
    assert [row["transport"] for row in found.rows] == ["tcp"]


def test_peers_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    named = ("tcp", "mpi-tcp", "iperf3-4", "horovod-mpi")
    found = peers(2, None, named if hvd.BUILT.is_dir() else (*named, "horovod"))
    reasons = dict(note.split(" left out: ") for note in found.notes)
    assert reasons["mpi-tcp"].startswith("mpicc and mpirun not installed")
    assert reasons["iperf3-4"] == "iperf3 is not installed"
    assert reasons.get("horovod") in (None, "horovod is not installed")
    assert reasons["horovod-mpi"].partition(" ")[0] in ("horovod", "the", "mpirun")
    assert [row["transport"] for row in found.rows] == ["tcp"]


def test_memorys_limits_reduce_nothing_and_count_nothing_wrong() -> None:
    found = peers(2, None, ("memcpy", "add", "pair", "tcp-heap"))
    assert [row["transport"] for row in found.rows] == ["memcpy", "add", "pair", "tcp-heap"]
    assert found.wrong == 0
    assert all(min(row["rounds"]["time_s"]) > 0 and row["cpu_s_per_gb"] > 0 for row in found.rows)


@pytest.mark.peers
def test_iperf3_measures_the_link_of_the_lab(lab: Lab) -> None:
    skip_without("iperf3")
    found = Results({})
    request = Request(("iperf3-4",), sizes=(10**6,), iterations=1, exact=True, peers=PEERS)
    with Workers(request, 2, lab) as workers:
        workers.listen(bench.listener(found, None), LIMIT_S)
    rate = 8 * found.row("iperf3-4")["busbw_bytes_per_s"]
    assert found.row("iperf3-4")["cpu_s_per_gb"] > 0
    assert 100e6 < rate < 400e6  # four flows carry more than one may, and less than the link with its headers


def test_iperf3s_processors_are_those_of_both_ends() -> None:
    used = {"host_total": 60.0, "host_user": 1.0, "remote_total": 15.0}
    assert processors(json.dumps({"end": {"cpu_utilization_percent": used}})) == 0.75


def test_what_iperf3_received_is_the_mean_of_both_ways() -> None:
    ways = {"sum_received": {"bits_per_second": 3e9}, "sum_received_bidir_reverse": {"bits_per_second": 1e9}}
    assert mean_received(json.dumps({"end": ways})) == 2e9
    with pytest.raises(Error, match="unable to connect"):
        mean_received(json.dumps({"error": "unable to connect to server"}))
    with pytest.raises(Error, match="bad option"):
        mean_received("iperf3: bad option\n")


def points(*rates: float, transport: str = "tcp") -> list[pair.Point]:
    took = ([8e6 / (rate * factor) for factor in (1.25, 1, 0.8)] for rate in rates)
    return [pair.Point.of(transport, 2**index, 10**6, own, 0.5) for index, own in enumerate(took)]


def test_a_line_of_two_hosts_has_the_number_of_runs_and_their_spread() -> None:
    (point,) = points(1e9)
    assert point.line.split() == ["tcp", "1", "1", "MB", "1.00", "Gbit/s", "0.80-1.25", "3", f"{0.5 / 0.003:.2f}"]
    assert len(point.line) == len(pair.HEADING)


def test_the_verdict_names_the_fewest_streams_that_are_nearly_the_best() -> None:
    sentence = pair.verdict(points(1e9, 2e9, 3.9e9, 4e9, 3.8e9))
    assert sentence.startswith("Measured: one tcp stream moves 1.00 Gbit/s (3 runs, 0.80 to 1.25); ")
    assert "; 4 tcp streams move 3.90 Gbit/s (3 runs, 3.12 to 4.88)" in sentence
    assert "a factor of 3.9" in sentence
    assert "NETBOTTLENECK_TRANSPORT=tcp with NETBOTTLENECK_STREAMS=auto" in sentence


def test_the_verdict_reports_that_more_streams_gain_nothing() -> None:
    sentence = pair.verdict(points(9.4e9, 9.3e9, 9.2e9))
    assert "one tcp stream moves 9.40 Gbit/s" in sentence
    assert "more streams bring no gain" in sentence
    assert sentence.endswith("Stock is as good: keep one plain connection.")
    assert "NETBOTTLENECK_TRANSPORT" not in sentence


def test_the_verdict_names_a_gain_that_is_too_small_to_advise() -> None:
    sentence = pair.verdict(points(8e9, 9.088e9))
    assert "with 2 tcp streams: more streams gain 13.6 % here, less than 15 %." in sentence
    assert "no gain" not in sentence
    assert "NETBOTTLENECK_TRANSPORT" not in sentence


def test_the_verdict_advises_no_transport_slower_than_one_plain_stream() -> None:
    # Several streams gain a factor of three for ofi, but one of tcp is faster than all of them.
    sentence = pair.verdict([*points(9.4e9, 9.3e9, 9.2e9), *points(2e9, 4e9, 6e9, transport="ofi")])
    assert re.search(r"one tcp stream moves 9.40 Gbit/s \(.*?\); one ofi stream moves 2.00 Gbit/s", sentence)
    assert "more streams and another transport bring no gain" in sentence
    assert "NETBOTTLENECK_TRANSPORT" not in sentence


@pytest.mark.parametrize("turned", [False, True])
def test_the_verdict_advises_the_fastest_of_all_transports(turned: bool) -> None:
    tcp, ofi = points(3e9, 5e9, 8e9), points(2e9, 4e9, 6e9, transport="ofi")
    sentence = pair.verdict([*ofi, *tcp] if turned else [*tcp, *ofi])
    assert "4 tcp streams move 8.00 Gbit/s" in sentence
    assert "a factor of 2.7" in sentence
    assert "NETBOTTLENECK_TRANSPORT=tcp with NETBOTTLENECK_STREAMS=auto" in sentence
    assert "=ofi" not in sentence


def test_the_verdict_advises_one_stream_of_another_transport_if_it_is_as_fast() -> None:
    sentence = pair.verdict([*points(3e9, 4e9, 5e9), *points(9e9, 9.1e9, 9.2e9, transport="ofi")])
    assert "a factor of 3.0" in sentence
    assert "NETBOTTLENECK_TRANSPORT=ofi with NETBOTTLENECK_STREAMS=1" in sentence


@pytest.mark.parametrize(
    ("runs", "why", "how"),
    [
        ([2e9], "a claim needs 3 runs of each", "a smaller --sizes"),
        ([2e9, 2e9], "a claim needs 3 runs of each", "a smaller --sizes"),
        ([1.2e9, 2e9, 2.1e9], "their runs overlap", "without other work"),
    ],
)
def test_the_verdict_claims_no_gain_that_may_be_luck(runs: list[float], why: str, how: str) -> None:
    plain = points(1e9)[0]  # runs of 0.8 to 1.25 Gbit/s
    sentence = pair.verdict([plain, pair.Point.of("tcp", 4, 10**6, [8e6 / bps for bps in runs], 0.5)])
    assert f": inconclusive, as {why}: 4 tcp streams may be 2.0 times as fast as one tcp stream. " in sentence
    assert how in sentence
    assert "NETBOTTLENECK_TRANSPORT" not in sentence
    sure = pair.Point.of("tcp", 8, 10**6, [8e6 / 1.95e9] * 3, 0.5)
    advised = pair.verdict([plain, pair.Point.of("tcp", 4, 10**6, [8e6 / bps for bps in runs], 0.5), sure])
    assert "; 8 tcp streams move 1.95 Gbit/s" in advised
    assert "NETBOTTLENECK_TRANSPORT=tcp" in advised


@pytest.mark.parametrize("bytes_per_s", [2e6, 1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize("left", [1, 10])
def test_a_point_has_enough_runs_for_a_claim_within_its_time(
    bytes_per_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = pair.Pair(KNOWN, 0, print, b"", ("tcp",))
    side._begun = 0.0
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    nbytes, count = side._choose(bytes_per_s, left)
    assert 3 <= count <= 5
    assert count * nbytes / bytes_per_s <= 1.3 * pair.BUDGET_S / left


def test_the_verdict_compares_with_several_streams_if_one_was_not_measured() -> None:
    sentence = pair.verdict(
        [pair.Point.of("ofi", streams, 10**6, [8e6 / bps] * 3, 0.5) for streams, bps in ((2, 2e9), (8, 6e9))]
    )
    assert sentence.startswith(
        "Measured: 2 ofi streams move 2.00 Gbit/s (3 runs, 2.00 to 2.00); 8 ofi streams move 6.00 Gbit/s (3 runs, 6.00 "
        "to 6.00): a job with 2 "
    )
    sentence = pair.verdict([pair.Point.of("ofi", streams, 10**6, [8e6 / 2e9], 0.5) for streams in (2, 8)])
    assert "stock" not in sentence
    assert sentence.endswith("Keep 2 ofi streams.")
