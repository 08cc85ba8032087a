"""The lab: caps hold, hosts are separate, and no process or namespace outlives a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.lab import Lab, LabError, LinkSpec, _flows, parse_lab, parse_rate
from netbottleneck.lab.lab import SHIM, first_line

DEADLINE_S = RANKS_LIMIT_S
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def open_lab(*args: Any, **options: Any) -> Lab:
    """Return a lab of namespaces, not yet entered; skips if this machine does not allow one."""
    ways = options.pop("ways", ("root", "user"))
    try:
        with Lab(1, "none", ways=ways):
            pass
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")
    return Lab(*args, ways=ways, **options)


def python(code: str, *args: str) -> list[str]:
    """Return a command that runs Python code."""
    return [sys.executable, "-I", "-c", code, *args]


def output(process: subprocess.Popen[str]) -> str:
    """Return a process's output; fails if it did not succeed."""
    text, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return text


PACED = """
import socket, sys
server = socket.create_server((sys.argv[1], 0), backlog=10)
held = [socket.create_connection(server.getsockname()) for _ in range(int(sys.argv[2]))]
print(*(one.getsockopt(socket.SOL_SOCKET, 47) for one in held))
"""
CLASS = re.compile(r"class htb 1:(\w+) .*?ceil (\w+) .*\n Sent (\d+) bytes")
LINK, FLOWS = "1", 0x1000  # ids of classes: of all that an interface sends, and the first one of a flow


class Caps:
    """The caps of one interface as `tc` shows them, and the bytes that they have let through."""

    def __init__(self, text: str) -> None:
        classes = {name: (parse_rate(rate.lower()), int(sent)) for name, rate, sent in CLASS.findall(text)}
        self.link_bps, self.link_bytes = classes.pop(LINK)
        flows = [cap for name, cap in classes.items() if int(name, 16) >= FLOWS]
        self.flow_bps = {rate for rate, _ in flows}
        self.flow_bytes = sorted(sent for _, sent in flows if sent)

    def check(self, run: dict[str, Any], link_bps: int, flow_bps: int | None = None) -> None:
        """Check that all bytes of a measured run went through these caps, each flow's through one of its own."""
        assert run["configured_bps"] == link_bps
        payload = run["measured_bps"] * run["seconds"] / 8
        assert 0 < payload <= self.link_bytes
        assert self.link_bps == link_bps
        assert self.flow_bps == ({flow_bps} if flow_bps else set())
        if flow_bps:
            assert payload <= sum(self.flow_bytes[-run["flows"] :])


def caps(lab: Lab, link: int = 0) -> Caps:
    """Return the caps of a link of host 0, for what the host sends."""
    return Caps(output(lab.popen(0, ["tc", "-s", "class", "show", "dev", f"nb{link}"], **PIPES)))


def paced(lab: Lab, connections: int) -> list[int]:
    """Return the rates in bits per second at which the kernel paces connections of rank 0; 0: it does not."""
    text = output(lab.popen(0, python(PACED, lab.address(0), str(connections)), **PIPES))
    return [max(0, 8 * int(rate)) for rate in text.split()]


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for a condition, with a deadline."""
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "link", "flows"),
    [
        ("2gbit", 2 * 10**9, ()),
        ("2gbit/500mbit", 2 * 10**9, (5 * 10**8,)),
        ("1.5Gbit/400mbit, 64kbit", 15 * 10**8, (4 * 10**8, 64000)),
        ("none", None, ()),
        ("none/8mbit", None, (8 * 10**6,)),
        ("100mbit/none", 10**8, ()),
    ],
)
def test_a_lab_is_read_from_text_and_written_back(text: str, link: int | None, flows: tuple[int, ...]) -> None:
    spec = parse_lab(text)
    assert spec == LinkSpec(link, flows)
    assert parse_lab(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "2gb", "fast", "2gbit/", "2gbit/1mbit,", "2gbit/none,1mbit", "-1gbit", "0mbit"),
        *("1gbit+none", "none+1gbit", "1gbit+"),
    ],
)
def test_an_invalid_lab_is_quoted_in_the_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_lab(text)
    assert repr(text) in str(caught.value)


def test_a_lab_has_no_more_flow_rates_than_the_preloaded_library_takes() -> None:
    source = (Path(__file__).parents[2] / "csrc" / "lab" / "flowcap.c").read_text(encoding="utf-8")
    most = int(re.findall(r"MAX_RATES = (\d+)", source)[0])
    rates = [f"{number}mbit" for number in range(1, most + 2)]
    assert len(parse_lab("none/" + ",".join(rates[:most])).flow_bps) == most
    with pytest.raises(ValueError, match=f"{most + 1} flow rates: at most {most}"):
        parse_lab("none/" + ",".join(rates))


@pytest.mark.parametrize(
    ("flows", "expected"), [(1, 4e8), (2, 5e8), (3, 8e8), (4, 1e9)], ids=lambda value: f"{value:g}"
)
def test_the_expected_rate_is_the_sum_of_flow_caps_up_to_the_link(flows: int, expected: float) -> None:
    assert parse_lab("1gbit/400mbit,100mbit,300mbit").expected_bps(flows) == expected


@pytest.mark.parametrize(
    "arguments", [(0, "none"), (2, "none", 0), (2, "wrong")], ids=["no hosts", "no ranks", "no rate"]
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"not 0 with 1|not 2 with 0|'wrong' is not a rate"):
        Lab(*arguments)


def test_a_lab_with_several_links_is_read_and_written_back() -> None:
    spec = parse_lab("1gbit+250mbit/100mbit")
    assert spec == LinkSpec(10**9, (10**8,), (250 * 10**6,))
    assert str(spec) == "1gbit+250mbit/100mbit"
    assert [str(link) for link in spec.links] == ["1gbit/100mbit", "250mbit/100mbit"]


@pytest.mark.parametrize("flow", ["htb", "pacing"])
def test_one_flow_gets_its_cap_and_four_get_the_link(flow: str) -> None:
    with open_lab(2, "200mbit/50mbit", flow=flow) as lab:
        found = lab.verify()
        caps(lab).check(found["many_flows"], 200_000_000, 50_000_000 if flow == "htb" else None)
        assert paced(lab, 2) == ([50_000_000] * 2 if flow == "pacing" else [0, 0])
    assert found["how"].startswith("namespaces")
    assert found["flow_cap"] == flow
    assert found["one_flow"]["configured_bps"] == 50e6
    assert found["many_flows"]["flows"] == 4
    assert found["one_flow"]["burst_bytes"] == (128 << 10 if flow == "htb" else None)
    assert found["many_flows"]["link_burst_bytes"] == 128 << 10


@pytest.mark.parametrize(
    ("hosts", "before", "after", "flow_bps"),
    [(2, "200mbit/50mbit", "80mbit/20mbit", 20_000_000), (3, "200mbit", "80mbit", None)],
)
def test_caps_change_while_the_lab_is_open(hosts: int, before: str, after: str, flow_bps: int | None) -> None:
    with open_lab(hosts, before) as lab:
        lab.set_caps(after)
        found = lab.verify()
        caps(lab).check(found["many_flows"], 80_000_000, flow_bps)
    assert found["lab"] == after


@pytest.mark.parametrize(("slow", "mbit"), [(0, 80), (1, 200), (2, 80)])
def test_the_link_of_one_host_gets_a_rate_of_its_own(slow: int, mbit: int) -> None:
    with open_lab(3, "200mbit") as lab:
        lab.set_caps("80mbit", slow)
        found = lab.verify()
        with pytest.raises(IndexError, match="host 3 of 3"):
            lab.set_caps("80mbit", 3)
    assert found["lab"] == "200mbit"
    assert found["many_flows"]["measured_bps"] == pytest.approx(mbit * 1e6, rel=0.15)


@pytest.mark.parametrize("other", ["none", "200mbit", "200mbit/50mbit,60mbit", "200mbit+100mbit/50mbit"])
def test_only_rates_change(other: str) -> None:
    with open_lab(2, "200mbit/50mbit") as lab, pytest.raises(ValueError, match=re.escape(other)):
        lab.set_caps(other)
    with Lab(2, "100mbit/40mbit", ways=["loopback"]) as lab, pytest.raises(LabError, match="namespaces"):
        lab.set_caps("50mbit/40mbit")


def test_a_host_loses_a_part_of_what_it_receives() -> None:
    def told(host: int, command: str) -> str:
        return output(lab.popen(host, command.split(), **PIPES))

    def dropped() -> int:
        """Return the packets that host 1 has dropped before its own TCP saw them."""
        found = re.search(r"qdisc ingress .*\n.*\(dropped (\d+),", told(1, "tc -s qdisc show dev nb0"))
        return int(found[1]) if found else 0

    def resent() -> int:
        lines = told(0, "cat /proc/net/snmp").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(dict(zip(names, values, strict=True))["RetransSegs"])

    with open_lab(2, "200mbit") as lab:
        lab.verify()
        assert dropped() == 0  # not resent(): on a busy machine TCP sends again what is only late
        lab.drop(1, 0.02)
        lab.verify()
        assert dropped() > 0
        assert resent() > 0
        for part in (0, 1, -0.5):
            with pytest.raises(ValueError, match="between 0 and 1"):
                lab.drop(0, part)


@pytest.mark.parametrize("reads", [0, 2])
def test_bytes_are_counted_until_the_last_read(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    """Reads every 0.25 s of a window of 1 s; then the process waits for a processor until long after its end."""
    now, left = 5.0, reads

    def ready(*_: object) -> list[tuple[Any, int]]:
        nonlocal now, left
        now, left = now + (0.25 if left else 7.0), left - 1
        return [(SimpleNamespace(recv_into=lambda _: 1000), 0)] if left >= 0 else []

    monkeypatch.setattr(_flows, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(_flows, "ready", ready)
    counted = [0]
    assert _flows.count(cast(Any, None), now + 1.0, counted) == (5.5 if reads else 12.0)
    assert counted == [reads * 1000]


def test_each_flow_of_a_list_gets_its_own_cap() -> None:
    with open_lab(2, "400mbit/80mbit,80mbit,20mbit") as lab:
        assert paced(lab, 4) == [80_000_000, 80_000_000, 20_000_000, 80_000_000]
        assert lab.verify()["many_flows"]["configured_bps"] == 180e6


def test_a_link_caps_both_ways_through_a_switch() -> None:
    with open_lab(3, "100mbit") as lab:
        found = lab.verify()["many_flows"]
        caps(lab).check(found, 100_000_000)
        assert lab._namespaces is not None
        assert lab._switch is not None
        command = ["tc", "-s", "class", "show", "dev", "port2-0"]
        to_the_last = Caps(output(lab._namespaces.popen(lab._switch, command, dict(os.environ), **PIPES)))
        to_the_last.check(found, 100_000_000)


def test_the_same_without_root() -> None:
    with open_lab(2, "200mbit/50mbit", ways=["user"]) as lab:
        assert lab.how == "namespaces (user)"
        found = lab.verify()
        caps(lab).check(found["many_flows"], 200_000_000, 50_000_000)


def test_on_loopback_flows_are_capped_and_the_lab_explains_its_limits() -> None:
    with Lab(2, "100mbit/40mbit", ways=["loopback"]) as lab:
        assert lab.how == "loopback"
        assert "no link is capped" in lab.why
        assert len(lab.verify()["many_flows"]["measured_flow_bps"]) == 3
        assert paced(lab, 3) == [40_000_000] * 3
        assert lab.variables(0)["NETBOTTLENECK_HOST_ID"] != lab.variables(1)["NETBOTTLENECK_HOST_ID"]


def test_without_namespaces_the_lab_falls_back_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with Lab(2, "100mbit/40mbit") as lab:
        assert lab.how == "loopback"
        assert "ip is not installed" in lab.why
        assert lab.flow_cap == "pacing"
    with pytest.raises(LabError, match="ip is not installed"), Lab(2, "none", ways=["root", "user"]):
        pass


def test_a_lab_of_one_host_has_no_link_to_cap() -> None:
    with open_lab(1, "8mbit/4mbit", ranks_per_host=2) as lab:
        found = lab.verify(seconds=0.1)
    assert found["one_flow"]["configured_bps"] is None
    assert found["many_flows"]["link_burst_bytes"] is None
    assert found["one_flow"]["measured_bps"] > 0


def test_ranks_may_start_as_soon_as_the_lab_is_open() -> None:
    code = (
        "import numpy, netbottleneck as nb; nb.init(); print(nb.allreduce(numpy.ones(2), op=nb.runtime.ops.Sum)); "
        "nb.shutdown()"
    )
    for _ in range(3):
        with open_lab(2, "none") as lab:
            ranks = [lab.popen(rank, [sys.executable, "-c", code], **PIPES) for rank in (0, 1)]
            assert [output(rank).strip() for rank in ranks] == ["[2. 2.]"] * 2


@pytest.mark.parametrize("hosts", [2, 3])
def test_each_of_several_links_has_its_own_cap(hosts: int) -> None:
    with open_lab(hosts, "200mbit+50mbit") as lab:
        assert lab.interface == "nb0,nb1"
        assert lab.variables(1, {})["GLOO_SOCKET_IFNAME"] == "nb0,nb1"
        assert lab.variables(1, {})["NETBOTTLENECK_IFNAME"] == "=nb0,nb1"
        found = lab.verify()
        caps(lab).check(found["many_flows"], 200_000_000)
        caps(lab, 1).check(found["more_links"][0], 50_000_000)
    assert len(found["more_links"]) == 1


REACH = """
import socket, sys
server = socket.create_server((sys.argv[1], 40000))
print("listening", flush=True)
for _ in range(2):
    sys.stdin.readline()
    server.settimeout(100)
    print(server.accept()[1][0], flush=True)
"""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], 40000), timeout=float(sys.argv[2]))"


def test_a_link_that_was_set_down_carries_nothing_until_it_is_set_up() -> None:
    with open_lab(2, "1gbit+1gbit") as lab:
        target = lab.address(0, 1)
        server = lab.popen(0, python(REACH, target), stdin=subprocess.PIPE, **PIPES)
        assert server.stdout is not None
        assert server.stdin is not None
        assert server.stdout.readline() == "listening\n"
        for up in (True, False, True):
            lab.set_link(1, up=up, link=1)
            if not up:
                call = lab.popen(1, python(CALL, target, "0.5"), **PIPES)
                assert call.wait(DEADLINE_S) != 0
                assert call.communicate()[1].splitlines()[-1].startswith(("TimeoutError", "OSError"))
                continue
            server.stdin.write("go\n")
            server.stdin.flush()
            output(lab.popen(1, python(CALL, target, "100"), **PIPES))
            assert server.stdout.readline() == f"{lab.address(1, 1)}\n"


def test_several_links_need_namespaces() -> None:
    with (
        pytest.raises(LabError, match="several interfaces need network namespaces"),
        Lab(2, "1gbit+1gbit", ways=["loopback"]),
    ):
        pass
    with Lab(2, "none", ways=["loopback"]) as lab, pytest.raises(LabError, match="in an open lab of namespaces only"):
        lab.set_link(0, up=False)


RATES = """
import json, socket, sys
pacing = lambda s: int.from_bytes(s.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder)
home, result = sys.argv[1], {}
for port in map(int, sys.argv[2:]):
    server = socket.create_server((home, port))
    out = socket.socket()
    out.setblocking(False)
    out.connect_ex(server.getsockname())
    server.settimeout(100)
    result[port] = [pacing(out), pacing(server.accept()[0])]
print(json.dumps(result))
"""


def test_a_ports_own_rate_holds_at_both_ends_and_control_is_free() -> None:
    with open_lab(2, "none/8mbit,16mbit") as lab:
        env = {**os.environ, "NETBOTTLENECK_PORTS": "41000-41007"}
        ports = [41000, 41001, 41002, 41003, int(lab.variables(0)["MASTER_PORT"])]
        ranks = [lab.popen(rank, python(RATES, lab.address(rank), *map(str, ports)), env, **PIPES) for rank in (0, 1)]
        first, second = (list(json.loads(output(rank)).values()) for rank in ranks)
    free, slow, fast = [2**64 - 1] * 2, [10**6] * 2, [2 * 10**6] * 2
    assert first == [free, slow, fast, slow, free]
    assert second == [slow, fast, slow, fast, free]


def test_a_flow_has_its_rate_if_the_shims_path_has_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.setattr("netbottleneck.lab.lab.SHIM", Path(shutil.copy(SHIM, folder)))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Lab(1, "none/8mbit", ways=("loopback",)) as lab:
        found = json.loads(output(lab.popen(0, python(RATES, "127.0.0.1", "0"), **PIPES)))
    assert found == {"0": [10**6, 10**6]}


MEET = """
import json, socket, sys
home, others = sys.argv[1], sys.argv[2:]
server = socket.create_server((home, 40000))
print("listening", flush=True)
sys.stdin.readline()
calls = [socket.create_connection((other, 40000), timeout=100) for other in others]
server.settimeout(100)
print(json.dumps(sorted(server.accept()[1][0] for _ in others)))
"""


def test_three_hosts_reach_each_other() -> None:
    with open_lab(3, "none") as lab:
        homes = [lab.address(host) for host in range(3)]
        others = [[other for other in homes if other != home] for home in homes]
        ranks = [lab.popen(k, python(MEET, homes[k], *others[k]), stdin=subprocess.PIPE, **PIPES) for k in range(3)]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "listening\n"
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        assert [json.loads(output(rank)) for rank in ranks] == others


SELF = "import json, os; print(json.dumps([os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'NETBOTTLENECK_HOST_ID')]))"


def test_ranks_of_a_host_share_its_id_and_no_others() -> None:
    with open_lab(2, "none", ranks_per_host=2) as lab:
        ranks = [json.loads(output(lab.popen(rank, python(SELF), **PIPES))) for rank in range(4)]
        assert [lab.host(rank) for rank in range(4)] == [0, 0, 1, 1]
        with pytest.raises(IndexError, match="rank 4 of 4"):
            lab.popen(4, ["true"])
    assert [rank[:2] for rank in ranks] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    ids = [rank[2] for rank in ranks]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_a_line_is_read_by_a_process_with_many_open_files(many_open_files: None) -> None:
    with subprocess.Popen(["echo", "ready"], stdout=subprocess.PIPE) as process:
        assert first_line(process, 60) == b"ready\n"


def test_a_missing_command_is_reported() -> None:
    with open_lab(1, "none") as lab:
        process = lab.popen(0, ["no-such-command"], **PIPES)
        assert "no-such-command: No such file" in process.communicate(timeout=DEADLINE_S)[1]
        assert process.returncode == 127


# The run that is ended: a rank with a child that left its session, and if requested a forked copy of the lab's process,
# which outlives it and holds all its descriptors.
RUN = """
import json, os, sys, time
from netbottleneck.lab import Lab
with Lab(int(sys.argv[1]), "100mbit/50mbit", ways=[sys.argv[2]]) as lab:
    rank = lab.popen(0, ["sh", "-c", "setsid sleep 1000 & echo started; exec sleep 1000"], stdout=-1, text=True)
    assert rank.stdout.readline() == "started\\n"
    fork = os.fork() if sys.argv[3] == "forked" else -1
    if fork == 0:
        os.close(1)
        sys.stdin.read(1)
        os._exit(0)
    spaces = [os.stat(f"/proc/{place.holder.pid}/ns/net").st_ino for place in lab._namespaces.all]
    print(json.dumps([lab.variables(0)["NETBOTTLENECK_HOST_ID"][:-1], spaces]), flush=True)
    if sys.argv[3] == "raises":
        raise RuntimeError("on purpose")
    if sys.argv[3] != "returns":
        time.sleep(1000)
"""


def traces(mark: str, spaces: list[int]) -> Iterator[int]:
    """Yield every process that is in one of the namespaces or was started with the lab's mark."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            inside = os.stat(f"/proc/{name}/ns/net").st_ino in spaces
            if inside or mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                yield int(name)
        except OSError:  # gone meanwhile
            continue


def links() -> list[str]:
    """Return the names of this namespace's interfaces and of the named namespaces."""
    named = Path("/run/netns")
    return sorted(os.listdir("/sys/class/net")) + sorted(os.listdir(named) if named.is_dir() else [])


@pytest.mark.parametrize("way", ["root", "user", "loopback"])
@pytest.mark.parametrize(
    ("end", "number"),
    [
        ("signal", signal.SIGKILL),
        ("forked", signal.SIGKILL),
        ("signal", signal.SIGTERM),
        ("signal", signal.SIGINT),
        ("raises", None),
        ("returns", None),
    ],
)
def test_nothing_is_left_however_the_run_ends(way: str, end: str, number: int | None) -> None:
    if way != "loopback":
        open_lab(1, "none", ways=[way])
    before = links()
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, "2" if end == "signal" else "3", way, end], stdin=subprocess.PIPE, **PIPES
    )
    try:
        assert run.stdout is not None
        line = run.stdout.readline()
        assert line, run.communicate(timeout=DEADLINE_S)[1]
        mark, spaces = json.loads(line)
        spaces = [] if way == "loopback" else spaces
        if number is not None:
            until = time.monotonic() + DEADLINE_S
            while len(list(traces(mark, spaces))) < 2:  # a rank has its mark once it has started its program
                assert time.monotonic() < until, "the ranks did not start"
                time.sleep(0.01)
            run.send_signal(number)
        run.wait(DEADLINE_S)
        wait_until(lambda: not list(traces(mark, spaces)), "every process of the lab is gone")
        assert links() == before
    finally:
        run.kill()
        run.communicate(timeout=DEADLINE_S)


# A lab that is closed while a forked copy of its process lives. A child of the rank has left its session, so that only
# the holder's own end kills it.
CLOSED = """
import json, os, sys
from netbottleneck.lab import Lab
with Lab(2, "none", ways=[sys.argv[1]]) as lab:
    rank = lab.popen(0, ["sh", "-c", "setsid sleep 1000 & echo started; exec sleep 1000"], stdout=-1, text=True)
    assert rank.stdout.readline() == "started\\n"
    if os.fork() == 0:
        os.close(1)
        sys.stdin.read(1)
        os._exit(0)
    holders = [place.holder for place in lab._namespaces.all]
    spaces = [os.stat(f"/proc/{holder.pid}/ns/net").st_ino for holder in holders]
    mark = lab.variables(0)["NETBOTTLENECK_HOST_ID"][:-1]
print(json.dumps([mark, spaces, [holder.returncode for holder in holders]]), flush=True)
"""


@pytest.mark.parametrize("way", ["root", "user", "loopback"])
def test_a_closed_lab_leaves_nothing_while_a_fork_of_its_process_lives(way: str) -> None:
    if way != "loopback":
        open_lab(1, "none", ways=[way])
    run = subprocess.Popen([sys.executable, "-c", CLOSED, way], stdin=subprocess.PIPE, **PIPES)
    try:
        assert run.stdout is not None
        line = run.stdout.readline()
        assert line, run.communicate(timeout=DEADLINE_S)[1]
        mark, spaces, codes = json.loads(line)
        assert set(codes) == {0}, "a holder was killed"
        assert not list(traces(mark, [] if way == "loopback" else spaces))
    finally:
        run.communicate(timeout=DEADLINE_S)


def command_line(*args: str) -> subprocess.CompletedProcess[str]:
    """Run python -m netbottleneck.lab."""
    return subprocess.run(
        [sys.executable, "-m", "netbottleneck.lab", *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_command_line_ends_all_ranks_when_one_fails() -> None:
    code = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)"
    done = command_line("none", "2", "--", *python(code))
    assert done.returncode == 7
    assert "rank 1 exited with 7" in done.stderr
    assert "exit codes -9 7" in done.stderr


def test_an_interrupt_of_the_command_line_is_code_130_without_a_traceback() -> None:
    ready = "import sys, time; print('ready', flush=True); time.sleep(1000)"
    words = [sys.executable, "-m", "netbottleneck.lab", "none", "1", "--", *python(ready)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_the_command_line_ends_quietly_if_its_output_is_closed() -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "netbottleneck.lab", "none", "2"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)
    os.close(write)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("count", ["0", "-1", "x", "1000000"])
def test_the_command_line_refuses_a_wrong_number_of_ranks_by_its_option(count: str) -> None:
    done = command_line("none", "2", f"--ranks-per-host={count}", "--", "true")
    assert done.returncode == 2
    assert f"--ranks-per-host: '{count}': must be a whole number from 1 to" in done.stderr


def test_the_command_line_refuses_a_wrong_rate_by_name() -> None:
    done = command_line("2gb", "2", "--", "true")
    assert done.returncode == 2
    assert "'2gb'" in done.stderr
