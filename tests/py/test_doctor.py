"""What doctor finds, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck.cli import doctor, main
from netbottleneck.errors import Error
from netbottleneck.launch import connect


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_lab", lambda: {"allowed": False, "how": "not asked"})


@pytest.mark.usefixtures("no_lab")
def test_every_topic_is_there_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    topics = "version job security interfaces libfabric torch cuda machine sockets environment lab"
    assert list(found) == topics.split()
    lo = next(each for each in found["interfaces"]["all"] if each["name"] == "lo")
    assert "127.0.0.1" in lo["addresses"]
    assert lo["mtu_bytes"] > 0
    assert found["machine"]["usable_cores"]
    assert found["version"]["transports"][0] == "tcp"


@pytest.mark.usefixtures("no_lab")
def test_the_interface_in_use_is_named_with_its_reason() -> None:
    found = doctor.examine({"NETBOTTLENECK_IFNAME": "=lo"})
    assert found["interfaces"]["used"] == "lo"
    assert found["interfaces"]["why"] == "NETBOTTLENECK_IFNAME==lo"
    missing = doctor.examine({"NETBOTTLENECK_IFNAME": "=nothere"})
    assert "nothere" in missing["interfaces"]["error"]
    assert missing["interfaces"]["all"], "what there is, is shown all the same"


@pytest.mark.usefixtures("no_lab")
def test_a_faster_interface_that_is_not_used_is_named() -> None:
    every: list[dict[str, Any]] = [
        {"name": "lo", "up": True, "speed_bits_per_s": 10**9},
        {"name": "fast", "up": True, "speed_bits_per_s": 10**11},
        {"name": "down", "up": False, "speed_bits_per_s": 10**12},
    ]
    assert doctor._chosen({"NETBOTTLENECK_IFNAME": "=lo"}, every)["faster"] == ["fast"]


@pytest.mark.usefixtures("no_lab")
def test_secrets_are_redacted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETBOTTLENECK_SECRET", "open sesame, open sesame")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "another one")
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "4")
    main(["doctor"])
    main(["doctor", "--json"])
    main(["env"])
    said = capsys.readouterr().out
    assert "sesame" not in said
    assert "another one" not in said
    assert "NCCL_SOCKET_NTHREADS" in said


@pytest.mark.usefixtures("no_lab")
def test_the_launcher_and_its_ranks_are_found() -> None:
    found = doctor.examine({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert found["job"] == {"launcher": "torchrun", "rank": 1, "ranks": 4, "ranks_on_this_host": 2}
    half = doctor.examine({"RANK": "1"})
    assert "WORLD_SIZE is not" in half["job"]["error"]


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
STORE = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
SERVER = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "7000"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
EXPLICIT = {"NETBOTTLENECK_RANK": "1", "NETBOTTLENECK_SIZE": "4"}
READABLE = "drawn by rank 0, and readable by anyone who reaches "


@pytest.mark.usefixtures("no_lab")
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "none needed: one rank"),
        ({**TORCHRUN, **STORE}, READABLE + "MASTER_ADDR:MASTER_PORT=192.0.2.1:29500: set NETBOTTLENECK_SECRET_FILE"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", **SERVER}, READABLE + "HOROVOD_GLOO_RENDEZVOUS_ADDR:"),
        ({**MPIRUN, **STORE}, READABLE + "MASTER_ADDR:MASTER_PORT=192.0.2.1:29500 unless the launcher offers PMIx"),
        (MPIRUN, "drawn by rank 0, shared by the launcher or in a folder of this user alone"),
        ({**EXPLICIT, "NETBOTTLENECK_MASTER": "127.0.0.1:5000"}, "drawn by rank 0, left in a folder of this user"),
        ({**EXPLICIT, "NETBOTTLENECK_MASTER": "192.0.2.1:5000"}, "missing: set NETBOTTLENECK_MASTER"),
        (
            {**EXPLICIT, "NETBOTTLENECK_MASTER": "192.0.2.1:5000", "NETBOTTLENECK_INSECURE": "1"},
            "none: NETBOTTLENECK_INSECURE=1, anyone can join the job",
        ),
        ({**EXPLICIT, "NETBOTTLENECK_RENDEZVOUS": "/shared/job"}, "drawn by rank 0, left in /shared/job"),
        ({**TORCHRUN, **STORE, "NETBOTTLENECK_SECRET": "0123456789abcdef"}, "set by NETBOTTLENECK_SECRET"),
    ],
)
def test_where_the_secret_comes_from_and_who_can_read_it_is_said(environ: dict[str, str], said: str) -> None:
    found = doctor.examine(environ)["security"]
    assert found["secret"].startswith(said)
    assert "nothing on the wire is encrypted" in found["gradients"]


@pytest.mark.usefixtures("no_lab")
def test_a_missing_libfabric_is_said_and_nothing_else_fails() -> None:
    found = doctor.examine({"NETBOTTLENECK_LIBFABRIC": "/nonexistent"})
    assert found["libfabric"]["error"].startswith("ofi left out: ")
    assert "used" in found["interfaces"] or "error" in found["interfaces"]


@pytest.mark.usefixtures("no_lab")
def test_a_build_without_headers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        HAVE_OFI = False

    monkeypatch.setattr(connect, "core", Core)
    assert doctor._libfabric({}) == {"error": "ofi left out: install libfabric-dev"}


@pytest.mark.usefixtures("no_lab")
def test_without_the_c_module_the_rest_is_still_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Any:
        raise ImportError("netbottleneck._core is not built")

    monkeypatch.setattr(connect, "core", missing)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "not built" in said
    assert "127.0.0.1" in said


def test_a_topic_that_cannot_be_looked_at_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise Error(0, "no such thing")

    assert doctor._guarded(broken) == {"error": "no such thing"}


def test_the_lab_is_tried_in_truth() -> None:
    found = doctor._lab()
    assert found["allowed"] == ("namespaces" in found["how"])
    if not found["allowed"]:
        assert found["not"].keys() == {"root", "user"}


def test_a_libfabric_without_providers_is_no_error() -> None:
    code = "from netbottleneck.cli import doctor; import json; print(json.dumps(doctor._libfabric({})))"
    env = {**os.environ, "FI_PROVIDER": "nothing"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=True
    )
    found = json.loads(done.stdout)
    if connect.core().HAVE_OFI:
        assert (found["providers"], found["used"]) == ([], "")
    else:
        assert found == {"error": doctor.OFI_LEFT_OUT}
