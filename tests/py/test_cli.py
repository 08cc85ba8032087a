"""The command line: commands, exit codes, and failure messages."""

from __future__ import annotations

import json
import os
import pickle
import py_compile
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import RANKS_LIMIT_S

from netbottleneck import __version__, cli
from netbottleneck.cli import COMMANDS, main

TRACE = Path(__file__).parent / "data" / "synthetic.jsonl.gz"


def command(
    *arguments: str,
    env: dict[str, str] | None = None,
    code: str | None = None,
    options: Sequence[str] = ("-m", "netbottleneck"),
) -> subprocess.CompletedProcess[str]:
    """Run the command line, or a program, in a new process without our variables; options: of Python."""
    values = {name: value for name, value in os.environ.items() if not name.startswith("NETBOTTLENECK")}
    head = ["-c", code] if code else options
    return subprocess.run(
        [sys.executable, *head, *arguments],
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        env={**values, **(env or {})},
        check=False,
    )


@pytest.mark.parametrize("arguments", [("version",), ("report", "RUN"), ("run", "train.py")])
def test_a_wrong_variable_ends_a_command_with_one_line(arguments: tuple[str, ...]) -> None:
    done = command(*arguments, env={"NETBOTTLENECK": "yes"})
    assert (done.returncode, done.stderr) == (1, "netbottleneck: NETBOTTLENECK=yes: must be 0 or 1\n")


@pytest.mark.parametrize(
    "options", [("-mnetbottleneck",), ("-Pm", "netbottleneck"), ("-W", "ignore", "-Bm", "netbottleneck")], ids=str
)
def test_a_wrong_variable_ends_a_command_with_one_line_however_m_is_written(options: Sequence[str]) -> None:
    done = command("version", env={"NETBOTTLENECK": "yes"}, options=options)
    assert (done.returncode, done.stderr) == (1, "netbottleneck: NETBOTTLENECK=yes: must be 0 or 1\n")


def test_a_wrong_variable_is_an_exception_in_a_script() -> None:
    done = command(env={"NETBOTTLENECK": "yes"}, code="try:\n import netbottleneck\nexcept ValueError: print('caught')")
    assert (done.returncode, done.stdout) == (0, "caught\n")


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr().err
    assert all(name in output for name in COMMANDS)
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in COMMANDS)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benhc"]) == 2
    assert "unknown command 'benhc'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "study"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([name, "--help"])
    except SystemExit as end:
        code = end.code
    assert code == 0
    assert "usage: netbottleneck" in capsys.readouterr().out


def test_a_former_name_of_a_command_still_runs_it_and_names_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == "netbottleneck profile is now netbottleneck calibrate\n"
    assert printed.out.startswith("usage: netbottleneck calibrate")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"netbottleneck {__version__}\n"


def test_study_receives_its_arguments_and_returns_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[list[str]] = []
    study = types.ModuleType("netbottleneck.study")
    study.main = lambda arguments: got.append(arguments) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "netbottleneck.study", study)
    monkeypatch.setattr("netbottleneck.study", study, raising=False)
    assert main(["study", "--quick", "x"]) == 3
    assert got == [["--quick", "x"]]


def test_env_shows_value_default_and_source() -> None:
    done = command("env", env={"NETBOTTLENECK_STREAMS": "4", "HOROVOD_GLOO_IFACE": "eth7"})
    assert "NETBOTTLENECK_STREAMS=4\n" in done.stdout
    assert "NETBOTTLENECK_IFNAME==eth7  (from HOROVOD_GLOO_IFACE)" in done.stdout
    rows = {row["name"]: row for row in json.loads(command("env", "--json").stdout)}
    assert rows["NETBOTTLENECK_TRANSPORT"]["value"] == rows["NETBOTTLENECK_TRANSPORT"]["default"] == "stock"


def test_a_failure_is_one_line_and_a_traceback_only_when_debugging() -> None:
    done = command("env", env={"NETBOTTLENECK_STREAMS": "many"})
    assert done.returncode == 1
    assert done.stderr == "netbottleneck: NETBOTTLENECK_STREAMS=many: must be auto, or a number from 1 to 64\n"
    done = command("env", env={"NETBOTTLENECK_STREAMS": "many", "NETBOTTLENECK_LOG_LEVEL": "debug"})
    assert "Traceback" in done.stderr


def test_report_prints_the_report_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(TRACE), "--html", str(page)]) == 0
    assert capsys.readouterr().out.strip()
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert main(["report", str(TRACE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["code"]
    assert main(["report", str(TRACE), "--write", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "summary.json").exists()


@pytest.mark.parametrize("words", ["report", "top", f"compare {TRACE}"])
def test_a_missing_run_is_one_line_and_a_usage_error(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert main([*words.split(), "/nonexistent/run"]) == cli.USAGE
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert "/nonexistent/run" in output


@pytest.mark.parametrize("words", ["report", "top --once", f"compare {TRACE}", "what-if", "replay"])
def test_what_cannot_be_read_as_a_run_is_one_line_and_a_usage_error(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.jsonl.gz").write_bytes(TRACE.read_bytes()[:3000])
    for name, why in (("empty", "no run.json here"), ("cut.jsonl.gz", "ended before the end")):
        if not (words.startswith("top") and name != "empty"):
            assert main([*words.split(), str(tmp_path / name)]) == cli.USAGE
            output = capsys.readouterr()
            assert (output.out, output.err.count("\n")) == ("", 1)
            assert why in output.err


def test_report_and_env_work_without_the_c_module_and_import_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['netbottleneck._core'] = None\n"
        "sys.modules['torch'] = None\n"
        "from netbottleneck.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = command("report", str(TRACE), code=code)
    assert (done.returncode, done.stderr) == (0, "")
    assert command("env", code=code).returncode == 0
    done = command("bench", code=code)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "_core is not built" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["report", str(TRACE), "--html", "none/x.html"], "--html none/x.html"),
        (["report", str(TRACE), "--write", "file/x"], "--write file/x"),
        (["report", str(TRACE), "--export", "prometheus=none/x.prom"], "--export prometheus none/x.prom"),
        (["report", str(TRACE), "--export", "nagios=x"], "--export nagios"),
        (["compare", str(TRACE), str(TRACE), "--html", "none/x.html"], "--html none/x.html"),
        (["bench", "--json", "none/x.json"], "--json none/x.json"),
        (["report", str(TRACE), "--write", "."], "--write ."),
        (["compare", str(TRACE), str(TRACE), "--html", "run.json"], "--html run.json"),
        (["bench", "--json", "run.json"], "--json run.json"),
        (["top", ".", "--export", "prometheus=run.json"], "--export prometheus run.json"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    arguments: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("file", "run.json"):
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    assert (end.value.code, captured.out) == (2, "")
    assert f"{option}: " in captured.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "mine", "run.json": "mine"}


@pytest.mark.parametrize("words", ["version", "--help", "env --json", "report --help"])
def test_a_closed_stdout_is_no_traceback(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    head = [sys.executable, "-m", "netbottleneck", *words.split()]
    done = subprocess.run(head, stdout=write, stderr=subprocess.PIPE, text=True, timeout=RANKS_LIMIT_S, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *head]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=RANKS_LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", ["--help", "bench --help", "unknown\u2026"])
def test_streams_of_any_encoding_are_written(words: str) -> None:
    done = command(*words.split(), env={"PYTHONIOENCODING": "latin-1:strict"})
    assert done.returncode == (2 if words.startswith("unknown") else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "?" in (done.stdout or done.stderr)


def test_strict_returns_code_4_for_an_inconclusive_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from netbottleneck import report
    from netbottleneck.analysis.verdict import Verdict

    monkeypatch.setattr(report.Run, "verdict", Verdict("INCONCLUSIVE", "too few steps", "run longer"))
    assert main(["report", str(TRACE), "--strict"]) == cli.INCONCLUSIVE == 4
    assert main(["report", str(TRACE)]) == 0


def test_strict_takes_a_run_and_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cells").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), "--strict"])
    assert ended.value.code == cli.USAGE
    assert "--strict: takes a run" in capsys.readouterr().err


SCRIPT = """
import os, sys
print(__name__, sys.argv, os.environ["NETBOTTLENECK"], "netbottleneck" in sys.modules, "torch" in sys.modules)
"""


def test_run_behaves_as_the_script_with_measurement(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "import beside\n")
    (tmp_path / "beside.py").write_text("print('beside', __name__)\n")
    done = command("run", str(script), "--lr", "0.1")
    assert done.stdout.splitlines() == [f"__main__ ['{script}', '--lr', '0.1'] 1 True False", "beside beside"]
    assert done.returncode == 0
    done = command("run", str(script), env={"NETBOTTLENECK": "0"})
    assert " 0 True" in done.stdout
    done = command("run", str(script), env={"NETBOTTLENECK": ""})
    assert " 1 True" in done.stdout


def test_run_m_runs_a_module(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "netbottleneck", "run", "-m", "trainer", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        check=True,
    )
    assert done.stdout.startswith("__main__ ['")
    assert "trainer.py', 'a'] 1 True" in done.stdout


AT_THE_END = """
import atexit, pickle, sys, threading

class Own:
    pass

def saved(where):
    assert type(pickle.loads(pickle.dumps(Own()))) is Own is sys.modules["__main__"].Own
    print("saved", where, flush=True)

atexit.register(saved, "at exit")
threading.Timer(0.3, saved, ["in a thread"]).start()
"""


@pytest.mark.parametrize("module", [False, True])
def test_the_scripts_classes_are_those_of_main_to_the_end(tmp_path: Path, module: bool) -> None:
    (tmp_path / "trainer.py").write_text(AT_THE_END)
    arguments = ["-m", "trainer"] if module else ["trainer.py"]
    done = subprocess.run(
        [sys.executable, "-m", "netbottleneck", "run", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RANKS_LIMIT_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["saved in a thread", "saved at exit"]
    assert done.stderr == ""


def test_run_hooks_into_ddp_before_the_script_imports_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom netbottleneck.hooks.imports import DDP\nprint([type(f).__name__ for f in sys.meta_path])\n"
    )
    assert "_Later" in command("run", str(script)).stdout
    assert "_Later" not in command("run", str(script), env={"NETBOTTLENECK": "0"}).stdout


CHILDREN = """
import multiprocessing, pickle, sys

def hooks():
    return [type(finder).__name__ for finder in sys.meta_path].count("_Later")

def work(queue, deeper):
    queue.put((hooks(), "torch" in sys.modules))
    if deeper:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(queue, deeper - 1))
        child.start()
        child.join()

if __name__ == "__main__":
    queue = multiprocessing.get_context(sys.argv[1]).SimpleQueue()
    work(queue, 2)
    print([queue.get() for _ in range(3)])
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("module", [False, True])
def test_run_hooks_into_children_of_multiprocessing(tmp_path: Path, method: str, module: bool) -> None:
    (tmp_path / "train.py").write_text(CHILDREN)
    arguments = ["-m", "train"] if module else ["train.py"]
    for enabled, hooks in (("1", 3), ("0", 0)):
        done = subprocess.run(
            [sys.executable, "-m", "netbottleneck", "run", *arguments, method],
            cwd=tmp_path,
            env={**os.environ, "NETBOTTLENECK": enabled},
            capture_output=True,
            text=True,
            timeout=RANKS_LIMIT_S,
            check=False,
        )
        assert done.stdout == f"{[(hooks, False)] * 3}\n", done.stderr


def test_a_child_that_does_not_find_this_package_runs_without_it() -> None:
    from netbottleneck.hooks.imports import ForChildren

    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])))"
    arguments = [sys.executable, "-I", "-S", "-c", code, pickle.dumps(ForChildren()).hex()]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "None\n"


def test_the_exit_of_a_script_is_preserved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)\n")
    assert command("run", str(script)).returncode == 7
    script.write_text("def train():\n    raise ValueError('loss is nan')\ntrain()\n")
    done = command("run", str(script))
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: loss is nan\n")
    assert "in train" in done.stderr
    assert "runpy" not in done.stderr
    assert "cli/__init__.py" not in done.stderr


SCRIPTS = {
    "annotations": "class A:\n    n: int = 1\nprint(A.__annotations__)\n",
    "file": "import os\nos.chdir('/')\nprint(__file__, os.path.abspath(__file__))\n",
    "interrupt": "import atexit\natexit.register(print, 'at exit')\n"
    "def deep():\n    raise KeyboardInterrupt('by hand')\ndeep()\n",
    "exit": "raise SystemExit('a text')\n",
    "no code": "raise SystemExit\n",
    "base": "class End(BaseException): pass\nraise End('so')\n",
    "excepthook": "import sys\ndef hook(*_):\n    raise OSError('in the hook')\nsys.excepthook = hook\n1 / 0\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_under_python(tmp_path: Path, name: str) -> None:
    """The same output and the same traceback, also by a relative path; the command's frames do not show."""
    Path(tmp_path, "script.py").write_text(SCRIPTS[name], encoding="utf-8")

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments, "script.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False)

    plain, ours = ended(), ended("-m", "netbottleneck", "run")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert (plain.returncode == -signal.SIGINT) == (name == "interrupt")


def test_a_compiled_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__file__, sys.argv)\n", encoding="utf-8")
    compiled = py_compile.compile(str(script), str(tmp_path / "script.pyc"))
    assert compiled is not None
    plain = subprocess.run([sys.executable, compiled, "a"], capture_output=True, text=True, timeout=60, check=True)
    assert command("run", compiled, "a").stdout == plain.stdout


def test_run_without_a_script_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-x"]) == 2
    assert main(["run", "/nonexistent/train.py"]) == 2
    assert "no such script: /nonexistent/train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4X"], "'4X': must be a size"),
        (["--streams", "0"], "'0': must be auto or a number from 1 to 64"),
        (["--transports", "udp"], "transport udp: must be one of stock, tcp, ofi"),
        (
            ["--transports", "tcp,mpi-tcp"],
            "from a checkout of the netbottleneck repository: add --peers benchmarks/peers",
        ),
        (["--peers"], "peers (no path): not a Python file or package. MPI, oneCCL, Horovod and iperf3 are measured"),
        (["--lab", "fast"], "'fast' is not a rate"),
        (["--ranks", "3", "--ranks-per-host", "2"], "--ranks must be a multiple"),
        (["--ranks-per-host", "2"], "--ranks-per-host 2: needs simulated hosts: add --lab"),
        (["--port", "1"], "--port needs --listen"),
        *(
            (["--listen", option, value], f"{option} cannot be used with --listen")
            for option, value in (
                ("--lab", "none"),
                ("--ranks", "2"),
                ("--ranks-per-host", "1"),
                ("--shm", "auto"),
                ("--dtype", "float32"),
                ("--op", "sum"),
                ("--iters", "0"),
                ("--json", "rows.json"),
            )
        ),
        (["--connect", "there", "--port", "1"], "--port cannot be used with --connect"),
        (["--connect", "there", "--ifname", "lo"], "--ifname cannot be used with --connect"),
        (["--listen", "--sizes", "1M,2M"], "--sizes 1M,2M: between two hosts, one size is measured"),
        (["--listen", "--connect", "there"], "not allowed with argument"),
    ],
)
def test_bench_reports_bad_arguments_before_it_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_between_two_hosts_needs_a_secret_and_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--connect", "localhost:1"], "NETBOTTLENECK_SECRET"),
        (["--connect", "localhost:x", "--secret", "0" * 32], "must be HOST, HOST:PORT or [IPV6]:PORT"),
        (["--connect", "localhost:1", "--secret", "short"], "must be text of 16 to 128 bytes"),
        (["--listen", "--transports", "stock"], "only tcp and ofi are measured"),
        (["--listen", "--sizes", "2"], "at least 4 bytes"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["bench", *arguments])
        assert end.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--lab", "none"), ("--ranks", "3"), ("--ranks-per-host", "1")])
def test_bench_places_no_ranks_of_a_launcher(
    option: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETBOTTLENECK_RANK", "0")
    monkeypatch.setenv("NETBOTTLENECK_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["bench", *option])
    assert end.value.code == 2
    assert f"{option[0]}" in capsys.readouterr().err.splitlines()[-1]


def test_bench_prints_nccl_tests_columns_and_writes_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    done = command("bench", "--transports", "tcp", "--sizes", "1K", "--iters", "2", "--json", str(rows))
    assert done.returncode == 0, done.stderr
    columns = next(line for line in done.stdout.splitlines() if "busbw" in line).split()
    for name in ("size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"):
        assert name in columns
    found = json.loads(rows.read_text())
    assert [(row["bytes"], row["time_s"]["n"], row["wrong"]) for row in found["rows"]] == [(1000, 2, 0)]
    assert found["machine"]["cores"] > 0


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("bench", "--listen", "--ifname", "=lo", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert done.stderr.count("\n") == 1
