"""The environment: precedence, refused values, log output, and settings that all ranks must share."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S, Ranks

from netbottleneck import config
from netbottleneck.config import describe, settings, without_effect
from netbottleneck.launch import connect, rendezvous, topology

PYTHON = Path(__file__).resolve().parents[2] / "python"


def test_nothing_set_means_defaults_and_nothing_enabled() -> None:
    chosen = settings(environ={})
    assert not chosen.enabled
    assert chosen.transports == ("stock",)
    assert chosen.streams == 0
    assert chosen.timeout_s == 30.0
    assert chosen.sources == {}


@pytest.mark.parametrize(
    ("environ", "enabled"),
    [
        ({"NETBOTTLENECK": "1"}, True),
        ({"NETBOTTLENECK": "0"}, False),
        ({"NETBOTTLENECK_TRANSPORT": "stock"}, True),
        ({"NETBOTTLENECK_TRANSPORT": "ofi"}, True),
        ({"NETBOTTLENECK_TRANSPORT": ""}, False),
        ({"NETBOTTLENECK_TRANSPORT": "ofi", "NETBOTTLENECK": "0"}, False),
        ({"NETBOTTLENECK_TRANSPORT": "ofi", "NETBOTTLENECK": ""}, True),
        ({"NETBOTTLENECK_STREAMS": "4"}, False),
    ],
)
def test_a_switch_or_any_transport_enables_and_0_has_precedence(environ: dict[str, str], enabled: bool) -> None:
    assert settings(environ=environ).enabled is enabled


def test_precedence_is_argument_our_variable_horovods_default() -> None:
    horovod = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "7"}
    ours = {"NETBOTTLENECK_TIMEOUT_S": "8", **horovod}
    assert settings(environ=horovod).timeout_s == 7
    assert settings(environ=horovod).sources["timeout_s"] == "HOROVOD_GLOO_TIMEOUT_SECONDS"
    assert settings(environ=ours).timeout_s == 8
    assert settings({"timeout_s": 9.0}, ours).timeout_s == 9
    assert settings({"timeout_s": None}, ours).timeout_s == 8
    assert settings({"timeout_s": 9.0}, ours).sources["timeout_s"] == "argument"


def test_an_invalid_horovod_value_is_ignored_if_ours_is_set() -> None:
    environ = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "soon", "NETBOTTLENECK_TIMEOUT_S": "8"}
    assert settings(environ=environ).timeout_s == 8


@pytest.mark.parametrize(
    ("environ", "stall_s"),
    [
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, 5.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"}, 0.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "0"}, 5.0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "true"}, 60.0),  # Horovod reads a number there
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "NETBOTTLENECK_STALL_S": "2.5"}, 2.5),
    ],
)
def test_horovods_stall_check_is_honoured(environ: dict[str, str], stall_s: float) -> None:
    assert settings(environ=environ).stall_s == stall_s


@pytest.mark.parametrize(
    ("environ", "limit_s"),
    [
        ({}, 0.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, 90.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90", "NETBOTTLENECK_STALL_END_S": "70"}, 70.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "59"}, 0.0),  # no rank would be warned before
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "59", "HOROVOD_STALL_CHECK_TIME_SECONDS": "59"}, 59.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90", "HOROVOD_STALL_CHECK_DISABLE": "1"}, 0.0),
    ],
)
def test_horovods_stall_shutdown_is_honoured(environ: dict[str, str], limit_s: float) -> None:
    assert settings(environ=environ).stall_limit_s == limit_s


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, (1 << 20, 25 << 20)),
        ({"HOROVOD_FUSION_THRESHOLD": "67108864"}, (64 << 20, 64 << 20)),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, (1, 1)),  # no fusion
        ({"HOROVOD_FUSION_THRESHOLD": "1000", "NETBOTTLENECK_BUCKET_BYTES": "2Mi"}, (2 << 20, 2 << 20)),
    ],
)
def test_horovods_fusion_threshold_limits_buckets(environ: dict[str, str], limits: tuple[int, int]) -> None:
    gradients = pytest.importorskip("netbottleneck.torch.gradients")
    assert gradients.bucket_limits(settings(environ=environ)) == limits


def test_ranks_must_agree_on_the_size_of_buckets() -> None:
    one, other = settings(environ={}), settings(environ={"HOROVOD_FUSION_THRESHOLD": "65536"})
    assert one.tag("1") != other.tag("1")


def test_variables_of_horovod_that_are_not_followed_are_named() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_AUTOTUNE": "0", "HOROVOD_CACHE_CAPACITY": ""}
    off, cycle = without_effect(environ)
    assert off.startswith("HOROVOD_AUTOTUNE=0 has no effect here: ")
    assert cycle.startswith("HOROVOD_CYCLE_TIME=3.5 has no effect here: ")


def test_every_variable_of_horovod_is_followed_or_named() -> None:
    unknown = {"HOROVOD_QUANTIZATION_BITS": "4", "HOROVOD_REDUCTION": "SRA", "HOROVOD_NEW": "0"}
    compression, others = without_effect({"HOROVOD_COMPRESSION": "maxmin", **unknown, "HOROVOD_EMPTY": ""})
    assert compression.startswith("HOROVOD_COMPRESSION=maxmin has no effect here: ")
    assert others == "set, but without effect here: HOROVOD_NEW, HOROVOD_QUANTIZATION_BITS, HOROVOD_REDUCTION"


def test_variables_of_horovod_that_are_followed_or_the_launchers_are_not_named() -> None:
    followed = {name: "1" for row in describe(environ={}) for name in row.instead}
    places = dict.fromkeys(topology.LAUNCHERS[0].variables(), "1")
    server = dict.fromkeys(rendezvous.EXPOSED["http"], "1")
    assert followed["HOROVOD_TIMELINE"] == places["HOROVOD_RANK"] == "1"
    how = ("HOSTNAME", "ELASTIC", "ELASTIC_TIMEOUT", "CONTROLLER", "CPU_OPERATIONS")  # of ranks that horovodrun starts
    assert without_effect({**followed, **places, **server, **{f"HOROVOD_{name}": "1" for name in how}}) == []


@pytest.mark.parametrize("text", ["0", "-1", "inf", "1e308", "nan", "ten"])
def test_the_rate_of_the_link_is_above_zero(text: str) -> None:
    assert settings(environ={"NETBOTTLENECK_LINK_GBPS": "12.5"}).link_gbps == 12.5
    with pytest.raises(ValueError, match=f"NETBOTTLENECK_LINK_GBPS={text}: .*Gbit/s, above 0"):
        settings(environ={"NETBOTTLENECK_LINK_GBPS": text})


@pytest.mark.parametrize("name", ["START_STEP", "END_STEP", "BLOCK_STEPS", "SAMPLE_EVERY", "TRACE_EVENTS"])
def test_a_number_that_the_core_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"NETBOTTLENECK_{name}=99999999999999: .*to 2147483647"):
        settings(environ={f"NETBOTTLENECK_{name}": "99999999999999"})


@pytest.mark.parametrize("text", ["4", " 4", "+4 ", "\t4\n"])
def test_blanks_around_a_number_are_ignored(text: str) -> None:
    chosen = settings(environ={"NETBOTTLENECK_STREAMS": text, "NETBOTTLENECK_TIMEOUT_S": text})
    assert (chosen.streams, chosen.timeout_s) == (4, 4.0)


@pytest.mark.parametrize("value", [0.1, 2.5, 30, 1234567.0, 2147483])
def test_an_argument_in_seconds_may_be_long(value: float) -> None:
    assert settings({"timeout_s": value}, {}).timeout_s == pytest.approx(value, rel=1e-5)


def test_horovods_interface_is_an_exact_name() -> None:
    assert settings(environ={"HOROVOD_GLOO_IFACE": "eth1"}).ifname == "=eth1"


def test_cpus_are_a_list_and_horovods_apply_if_ours_are_unset() -> None:
    assert settings(environ={}).affinity == ()
    assert settings(environ={"NETBOTTLENECK_AFFINITY": "3, 1"}).affinity == (3, 1)
    both = {"NETBOTTLENECK_AFFINITY": "5", "HOROVOD_THREAD_AFFINITY": "2,4"}
    assert settings(environ=both).affinity == (5,)
    del both["NETBOTTLENECK_AFFINITY"]
    assert settings(environ=both).affinity == (2, 4)
    assert settings(environ=both).sources["affinity"] == "HOROVOD_THREAD_AFFINITY"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("NETBOTTLENECK", "yes", "0 or 1"),
        ("NETBOTTLENECK_TRANSPORT", "quic", "stock, tcp, ofi, nccl+tcp, nccl+ofi, null"),
        ("NETBOTTLENECK_TRANSPORT", "stock,stock", "without repetition"),
        ("NETBOTTLENECK_TRANSPORT", "stock,", "stock, tcp, ofi, nccl+tcp, nccl+ofi, null"),
        ("NETBOTTLENECK_STREAMS", "0", "1 to 64"),
        ("NETBOTTLENECK_STREAMS", "65", "1 to 64"),
        ("NETBOTTLENECK_STREAMS", "many", "auto"),
        ("NETBOTTLENECK_STREAMS", "1_0", "1 to 64"),
        ("NETBOTTLENECK_STREAMS", "\u0664", "1 to 64"),
        ("NETBOTTLENECK_TRACE_EVENTS", "1_000_000", "a whole number, 1 to 2147483647"),
        ("NETBOTTLENECK_NCCL_EVENTS", "true", "1, 0, or a path"),
        ("NETBOTTLENECK_NCCL_EVENTS", "2", "1, 0, or a path"),
        ("NETBOTTLENECK_PORTS", "9000", "LOW-HIGH"),
        ("NETBOTTLENECK_PORTS", "9001-9000", "LOW-HIGH"),
        ("NETBOTTLENECK_PORTS", "1-70000", "65535"),
        ("NETBOTTLENECK_AFFINITY", "0-3", "numbers of CPUs"),
        ("NETBOTTLENECK_AFFINITY", "0,,1", "numbers of CPUs"),
        ("NETBOTTLENECK_AFFINITY", "-1", "numbers of CPUs"),
        ("NETBOTTLENECK_AFFINITY", "1024", "numbers of CPUs"),
        ("HOROVOD_THREAD_AFFINITY", "all", "numbers of CPUs"),
        ("NETBOTTLENECK_SEGMENT_BYTES", "1.5", "bytes"),
        ("NETBOTTLENECK_SEGMENT_BYTES", "-1", "bytes"),
        ("NETBOTTLENECK_SEGMENT_BYTES", "16383", "bytes, 0, or 16384 to 2097152"),
        ("NETBOTTLENECK_SEGMENT_BYTES", "64Mi", "bytes, 0, or 16384 to 2097152"),
        ("NETBOTTLENECK_CUDA_GATHER_BYTES", "2Gi", "bytes, at most 2147483647"),
        ("HOROVOD_FUSION_THRESHOLD", "64Mi", "a whole number of bytes without a unit"),
        ("NETBOTTLENECK_BUCKET_BYTES", "9" * 400, "bytes, at most 9223372036854775807"),
        ("NETBOTTLENECK_BUCKET_BYTES", "9223372036854775808", "bytes, at most 9223372036854775807"),
        ("NETBOTTLENECK_TIMEOUT_S", "0", "seconds"),
        ("NETBOTTLENECK_TIMEOUT_S", "nan", "seconds"),
        ("NETBOTTLENECK_TIMEOUT_S", "1_0", "seconds"),
        ("NETBOTTLENECK_TIMEOUT_S", "inf", "seconds"),
        ("NETBOTTLENECK_TIMEOUT_S", "2147484", "seconds, 0.1 to 2147483"),
        ("NETBOTTLENECK_STALL_S", "1e300", "seconds, 0 to 2147483"),
        ("NETBOTTLENECK_MASTER", "host", "HOST:PORT"),
        ("NETBOTTLENECK_MASTER", "host:0", "HOST:PORT"),
        ("NETBOTTLENECK_LOG_LEVEL", "loud", "warning"),
        ("NETBOTTLENECK_START_STEP", "-1", "whole number"),
        ("NETBOTTLENECK_SIZE", "0", "whole number"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "soon", "seconds"),
        ("HOROVOD_LOG_LEVEL", "loud", "warning"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        settings(environ={name: value})
    assert f"{name}={value}" in str(caught.value)
    assert allowed in str(caught.value)


def test_a_wrong_argument_is_refused_whatever_its_type() -> None:
    for wrong in (
        {"streams": 65},
        {"streams": "65"},
        {"streams": 0},
        {"transports": ("quic",)},
        {"transports": "quic"},
    ):
        with pytest.raises(ValueError, match="must be"):
            settings(wrong, {})
    with pytest.raises(TypeError, match="no such setting: stream"):
        settings({"stream": 4}, {})


@pytest.mark.parametrize("value", ["quic", "stock,stock", ("stock", "quic"), ""])
def test_a_wrong_transport_is_refused_by_the_name_of_the_argument(value: object) -> None:
    with pytest.raises(ValueError, match=r"^transport=.*: must be auto"):
        settings({"transports": value}, {})


def test_the_source_of_a_setting_is_the_argument_or_the_variable() -> None:
    environ = {"NETBOTTLENECK_TRANSPORT": "tcp", "HOROVOD_LOG_LEVEL": "INFO"}
    chosen = settings({"transports": "ofi", "streams": 4}, environ)
    assert [chosen.source_of(name) for name in ("transports", "streams")] == ["transport", "streams"]
    assert settings(environ=environ).source_of("transports") == "NETBOTTLENECK_TRANSPORT"
    assert settings(environ=environ).source_of("log_level") == "HOROVOD_LOG_LEVEL"
    assert settings(environ={}).source_of("transports") == "NETBOTTLENECK_TRANSPORT"  # where it may be set


def test_arguments_may_be_text_or_of_the_fields_type() -> None:
    assert settings({"streams": "auto"}, {"NETBOTTLENECK_STREAMS": "4"}).streams == 0
    assert settings({"streams": 2}, {"NETBOTTLENECK_STREAMS": "4"}).streams == 2
    assert settings({"transports": ["stock", "ofi"]}, {}).transports == ("stock", "ofi")
    assert settings({"ports": (9000, 9010)}, {}).ports == (9000, 9010)
    assert settings({"on": True}, {}).on
    assert settings({"secret": b"0123456789abcdef\xff"}, {}).secret == b"0123456789abcdef\xff"


def test_the_window_of_steps_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match=r"NETBOTTLENECK_END_STEP=5.*NETBOTTLENECK_START_STEP=5"):
        settings(environ={"NETBOTTLENECK_START_STEP": "5", "NETBOTTLENECK_END_STEP": "5"})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("65536", 65536),
        ("1K", 1000),
        ("1Ki", 1024),
        ("2M", 2 * 10**6),
        ("2MiB", 2 << 20),
        ("1.5Gi", 3 << 29),
        ("64 M", 64 * 10**6),
        ("10B", 10),
        ("9007199254740993", 2**53 + 1),
        ("0.001953125Ki", 2),
    ],
)
def test_sizes_are_decimal_or_binary_as_written(text: str, nbytes: int) -> None:
    assert settings(environ={"NETBOTTLENECK_BUCKET_BYTES": text}).bucket_bytes == nbytes


@pytest.mark.parametrize("nbytes", [0, *config.SEGMENT_BYTES])
def test_the_core_takes_each_size_of_a_segment_that_is_allowed(nbytes: int) -> None:
    chosen = settings(environ={"NETBOTTLENECK_SEGMENT_BYTES": str(nbytes), "NETBOTTLENECK_CUDA_GATHER_BYTES": "1Gi"})
    connect.connect(chosen, connect.Place(0, 1)).close()


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())


def test_an_unknown_name_is_logged_once_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        settings(environ={"NETBOTTLENECK_TRASPORT": "ofi", "NETBOTTLENECK_QQQQQQQQQQQQ": "1"})
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("NETBOTTLENECK_QQQQQQQQQQQQ is not a variable")
    assert second.startswith("NETBOTTLENECK_TRASPORT is not a variable")
    assert second.endswith("did you mean NETBOTTLENECK_TRANSPORT?")


def test_known_and_foreign_names_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    every = {row.name: row.value for row in config.describe(settings(environ={})) if row.value}
    settings(environ={**every, "HOROVOD_AUTOTUNE": "1", "NET": "1"})
    assert caplog.records == []


def test_neither_unknown_names_nor_the_secret_end_an_import(tmp_path: Path) -> None:
    """Kubernetes sets these names for a Service that is called netbottleneck."""
    environ = {"NETBOTTLENECK": "1", "NETBOTTLENECK_SERVICE_HOST": "10.0.0.1", "NETBOTTLENECK_PORT": "tcp://10.0.0.1:1"}
    environ |= {"PYTHONPATH": str(PYTHON), "PATH": "", "NETBOTTLENECK_SECRET_FILE": str(tmp_path / "none")}
    command = [sys.executable, "-W", "error", "-c", "import netbottleneck; print('trained')"]
    done = subprocess.run(command, check=False, env=environ, timeout=RANKS_LIMIT_S, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == [
        "NETBOTTLENECK_PORT",
        "NETBOTTLENECK_SERVICE_HOST",
    ]


def test_a_job_that_starts_reads_the_secret(tmp_path: Path) -> None:
    done = log_of({"NETBOTTLENECK_SECRET_FILE": str(tmp_path / "none")})
    assert done.returncode == 1
    assert f"ValueError: NETBOTTLENECK_SECRET_FILE={tmp_path}/none: No such file" in done.stderr


def test_a_secret_is_text_or_hex_and_is_never_shown() -> None:
    word = "correct horse battery"
    chosen = settings(environ={"NETBOTTLENECK_SECRET": word})
    assert chosen.secret == word.encode()
    assert settings(environ={"NETBOTTLENECK_SECRET": "0f" * 16}).secret == b"\x0f" * 16
    assert word not in repr(config.describe(chosen))
    assert word not in repr(chosen)
    with pytest.raises(ValueError, match="NETBOTTLENECK_SECRET") as caught:
        settings(environ={"NETBOTTLENECK_SECRET": "tooshort"})
    assert "tooshort" not in str(caught.value)


def secret_file(tmp_path: Path, content: bytes = b"correct horse battery\n", mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_from_a_file_and_its_own_variable_has_precedence(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    environ = {"NETBOTTLENECK_SECRET_FILE": str(path)}
    assert settings(environ=environ).secret is None
    chosen = settings(environ=environ).with_secret()
    assert chosen.secret == b"correct horse battery"
    assert chosen.sources["secret"] == "NETBOTTLENECK_SECRET_FILE"
    assert "horse" not in repr(chosen) + repr(config.describe(chosen))
    path.write_bytes(b" " + b"0f" * 16 + b"\r\n")
    assert settings(environ=environ).with_secret().secret == b"\x0f" * 16
    both = settings(environ={**environ, "NETBOTTLENECK_SECRET": "another secret of mine"}).with_secret()
    assert both.secret == b"another secret of mine"
    assert both.sources["secret"] == "NETBOTTLENECK_SECRET"


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o644])
def test_a_secret_file_that_others_have_access_to_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = secret_file(tmp_path, mode=mode)
    owned_by(monkeypatch, 1000)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=rf"NETBOTTLENECK_SECRET_FILE={path}: others .* \(mode {mode:04o}\).* 0600"):
        settings(environ={"NETBOTTLENECK_SECRET_FILE": str(path)}).with_secret()


@pytest.mark.parametrize(
    ("mode", "taken"), [(0o400, True), (0o440, True), (0o640, True), (0o660, False), (0o644, False)]
)
def test_a_secret_file_of_root_may_be_read_by_a_group(
    mode: int, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"NETBOTTLENECK_SECRET_FILE": str(secret_file(tmp_path, mode=mode))}
    owned_by(monkeypatch, 0)
    if taken:
        assert settings(environ=environ).with_secret().secret == b"correct horse battery"
    else:
        with pytest.raises(ValueError, match="others have access"):
            settings(environ=environ).with_secret()


def test_a_secret_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"NETBOTTLENECK_SECRET_FILE": str(secret_file(tmp_path))}
    owned_by(monkeypatch, 4321)
    with pytest.raises(ValueError, match="belongs to user 4321"):
        settings(environ=environ).with_secret()


def owned_by(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Make every open file appear to belong to a user, which would need root otherwise."""
    fstat = os.fstat
    monkeypatch.setattr("os.fstat", lambda fd: os.stat_result([*fstat(fd)[:4], user, *fstat(fd)[5:10]]))


@pytest.mark.parametrize("content", [b"tooshort", b"", b"\xff\xfe" * 16, b"x" * 200])
def test_a_file_without_a_valid_secret_is_refused_and_not_shown(content: bytes, tmp_path: Path) -> None:
    path = secret_file(tmp_path, content)
    with pytest.raises(ValueError, match=f"NETBOTTLENECK_SECRET_FILE={path}: it must hold text of 16 to 128") as caught:
        settings(environ={"NETBOTTLENECK_SECRET_FILE": str(path)}).with_secret()
    assert "tooshort" not in str(caught.value)


def test_a_path_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory"), (pipe, "not a regular")):
        with pytest.raises(ValueError, match=f"NETBOTTLENECK_SECRET_FILE={path}: {why}"):
            settings(environ={"NETBOTTLENECK_SECRET_FILE": str(path)}).with_secret()


def test_description_shows_value_default_and_source_of_every_variable() -> None:
    environ = {"NETBOTTLENECK_TRANSPORT": "stock,ofi", "HOROVOD_LOG_LEVEL": "INFO"}
    rows = {row.name: row for row in config.describe(settings({"streams": 4}, environ))}
    fields = [field for field in dataclasses.fields(config.Settings) if "variable" in field.metadata]
    assert len(rows) == len(fields)
    assert all(row.text and row.allowed for row in rows.values())
    assert (rows["NETBOTTLENECK_TRANSPORT"].value, rows["NETBOTTLENECK_TRANSPORT"].default) == ("stock,ofi", "stock")
    assert rows["NETBOTTLENECK_TRANSPORT"].source == "NETBOTTLENECK_TRANSPORT"
    assert (rows["NETBOTTLENECK_STREAMS"].value, rows["NETBOTTLENECK_STREAMS"].source) == ("4", "argument")
    assert (rows["NETBOTTLENECK_LOG_LEVEL"].value, rows["NETBOTTLENECK_LOG_LEVEL"].source) == (
        "info",
        "HOROVOD_LOG_LEVEL",
    )
    assert rows["NETBOTTLENECK_PORTS"].source == "default"


def test_every_default_is_a_valid_value() -> None:
    shown = {row.name: row.default for row in config.describe(settings(environ={})) if row.default}
    assert {row.name: row.value for row in config.describe(settings(environ=shown)) if row.default} == shown


def test_ranks_that_differ_have_different_tags() -> None:
    tag = settings(environ={}).tag("1.0")
    assert tag == settings(environ={"NETBOTTLENECK_LOG_LEVEL": "info", "NETBOTTLENECK_DIR": "x"}).tag("1.0")
    others = [
        settings(environ={"NETBOTTLENECK_TRANSPORT": "ofi"}).tag("1.0"),
        settings(environ={"NETBOTTLENECK_STREAMS": "4"}).tag("1.0"),
        settings(environ={"NETBOTTLENECK_PROVIDER": "net"}).tag("1.0"),
        settings(environ={"NETBOTTLENECK_SEGMENT_BYTES": "64Ki"}).tag("1.0"),
        settings(environ={"NETBOTTLENECK_BLOCK_STEPS": "4"}).tag("1.0"),
        settings(environ={}).tag("1.1"),
    ]
    assert len({tag, *others}) == 1 + len(others)
    assert "streams=4" in others[1]


LOGGING = """
import logging, sys
from netbottleneck.runtime import job
if sys.argv[1:] == ["own"]:
    logging.basicConfig(format="own: %(message)s", level=logging.DEBUG)
logger = logging.getLogger("netbottleneck")
job.start()
logger.debug("a detail"); logger.info("a fact"); logger.warning("a warning")
job.stop()
job.start()
logger.warning("a second job")
"""
ALONE = {"NETBOTTLENECK_RANK": "0", "NETBOTTLENECK_SIZE": "1"}


def log_of(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    whole = {"PYTHONPATH": str(PYTHON), "PATH": "", **ALONE, **environ}
    command = [sys.executable, "-c", LOGGING, *arguments]
    return subprocess.run(command, check=False, env=whole, timeout=RANKS_LIMIT_S, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["a warning", "a second job"]),
        ({"NETBOTTLENECK_LOG_LEVEL": "info"}, ["a fact", "a warning", "a second job"]),
        ({"NETBOTTLENECK_LOG_LEVEL": "debug"}, ["a detail", "a fact", "a warning", "a second job"]),
        ({"HOROVOD_LOG_LEVEL": "TRACE"}, ["a detail", "a fact", "a warning", "a second job"]),
        ({"NETBOTTLENECK_LOG_LEVEL": "error"}, []),
    ],
)
def test_the_log_level_is_the_lowest_logged_level(environ: dict[str, str], expected: list[str]) -> None:
    done = log_of(environ)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if " a " in line]
    assert [line.partition(": ")[2] for line in lines] == expected
    assert all(line.startswith(f"[rank 0/1 {platform.node()}] netbottleneck ") for line in lines)


def test_at_debug_level_the_settings_are_logged_without_the_secret() -> None:
    word = "correct horse battery"
    output = log_of({"NETBOTTLENECK_LOG_LEVEL": "debug", "NETBOTTLENECK_SECRET": word}).stderr
    assert "NETBOTTLENECK_SIZE=1 (NETBOTTLENECK_SIZE)" in output
    assert word not in output


def test_log_handlers_of_the_program_log_each_message_once() -> None:
    lines = log_of({}, "own").stderr.splitlines()
    assert lines == ["own: a warning", "own: a second job"]


def test_the_log_file_is_named_for_host_process_and_rank(plain_ranks: Ranks, tmp_path: Path) -> None:
    script = "import os\n" + LOGGING + "print(os.getpid())\n"
    results = plain_ranks(2, script, {"NETBOTTLENECK_LOG_FILE": str(tmp_path / "log.%h.%p.%r")})
    for result in results:
        path = tmp_path / f"log.{platform.node()}.{result.stdout.strip()}.{result.rank}"
        head = f"[rank {result.rank}/2 {platform.node()}] netbottleneck WARNING: "
        assert path.read_text().splitlines() == [f"{head}a warning", f"{head}a second job"]
        assert "a warning" not in result.stderr


def test_a_log_file_that_cannot_be_opened_is_named_and_no_job_ends_for_it(tmp_path: Path) -> None:
    named = str(tmp_path / "nowhere" / "log.%r")
    done = log_of({"NETBOTTLENECK_LOG_FILE": named})
    assert done.returncode == 0, done.stderr
    refused = (
        f"NETBOTTLENECK_LOG_FILE={tmp_path}/nowhere/log.0: No such file or directory: this rank does not log to it"
    )
    lines = [line.partition("WARNING: ")[2] for line in done.stderr.splitlines()]
    assert lines == [refused, "a warning", "a second job"]
    own = log_of({"NETBOTTLENECK_LOG_FILE": named}, "own").stderr.splitlines()
    assert own == [f"own: {refused}", "own: a warning", "own: a second job"]


def test_these_modules_import_no_torch() -> None:
    code = (
        "import sys; import netbottleneck.config, netbottleneck.launch.connect; "
        "import netbottleneck.runtime.ops, netbottleneck.whatif.plan; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PYTHON), "PATH": ""}, timeout=RANKS_LIMIT_S
    )


@pytest.mark.parametrize("value", ["tcp:fp16", "tcp@priority", "tcp:", "stock,tcp,tcp"])
def test_an_arm_that_is_not_available_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match=f"NETBOTTLENECK_TRANSPORT={value}"):
        settings(environ={"NETBOTTLENECK_TRANSPORT": value})
