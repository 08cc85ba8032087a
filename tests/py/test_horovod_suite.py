"""The command that runs Horovod's own tests against this package: its counts, and its exit code."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RANKS_LIMIT_S

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import horovod_suite  # noqa: E402
import horovod_suite_jobs  # noqa: E402
from horovod_suite_jobs import Job, Rendezvous  # noqa: E402

FILE = "test/parallel/test_some.py"
TESTS = """
import os, time
import horovod.torch as hvd
from horovod.runner.util.threads import lent
import pytest
import torch

hvd.init()


def test_sum():
    assert lent and hvd.rank() == int(os.environ["HOROVOD_RANK"])
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@pytest.mark.skipif(hvd.rank() == 0, reason="of rank 1")
def test_of_one_rank():
    pass


def test_skipped():
    pytest.skip("no GPU")


def test_wrong_on_one_rank():
    assert hvd.rank() == 0


def test_that_hangs():
    while hvd.rank() == 1:
        time.sleep(0.1)


def test_after_it():
    assert hvd.size() == 2
"""


@pytest.mark.parametrize("environment", ["horovodrun", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_file_is_run_by_real_ranks_and_counted(environment: str, tmp_path: Path) -> None:
    threads = tmp_path / "horovod" / "runner" / "util" / "threads.py"
    for path, text in ((threads, "lent = True\n"), (tmp_path / FILE, TESTS)):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    limits = {"limit": RANKS_LIMIT_S, "quiet": RANKS_LIMIT_S}
    options = argparse.Namespace(horovod=str(tmp_path), reference=None, tests=None, **limits)
    suite = horovod_suite.Suite(options, tmp_path / "made")
    suite.folder.mkdir()
    found = suite._part(FILE, 2, environment, False, ("test_that_hangs",))
    kinds = {test: outcome.kind for test, outcome in found.items()}
    assert kinds == {
        "test_sum": "passed",
        "test_of_one_rank": "passed",
        "test_skipped": "skipped",
        "test_wrong_on_one_rank": "failed",
        "test_after_it": "passed",
    }
    assert found["test_skipped"].why == "no GPU"


def test_tests_after_a_hanging_one_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = horovod_suite.Outcome
    parts = {
        (): {"a": outcome("passed"), "b": outcome("unfinished"), "c": outcome("unfinished", absent=1)},
        ("a", "b"): {"c": outcome("passed"), "d": outcome("unfinished", absent=1)},
    }
    monkeypatch.setattr(horovod_suite.Suite, "_part", lambda suite, *arguments: parts[arguments[-1]])
    suite = horovod_suite.Suite(argparse.Namespace(), Path())
    found = suite.file(FILE, 2, "torchrun", reference=False)
    assert {test: outcome.kind for test, outcome in found.items()} == {
        "a": "passed",
        "b": "unfinished",
        "c": "passed",
        "d": "unfinished",
    }


def test_ranks_without_progress_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each wait advances by 20 s. The output grows in ten of them."""
    news, waits = tmp_path / "news", 0
    news.mkdir()

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits <= 10:
            with (news / "0").open("a", encoding="utf-8") as out:
                out.write("x")

    clock = SimpleNamespace(monotonic=lambda: 20.0 * waits, sleep=sleep)
    monkeypatch.setattr(horovod_suite_jobs, "time", clock)
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    end = horovod_suite_jobs.by_horovodrun(Job(command, 1, {}, tmp_path, 1000, news, 30))
    assert end.code is None
    assert (news / "0").stat().st_size == 10
    assert waits == 12


def ended(*tests: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the lines that a rank writes."""
    lines: list[dict[str, Any]] = [{"began": True}]
    for test, outcome in tests:
        lines.append({"test": test, "outcome": "unfinished", "why": "did not end"})
        if outcome != "unfinished":
            lines.append({"test": test, "outcome": outcome, "why": "so"})
    return [*lines, {"ended": True, "horovod": "netbottleneck.torch"}]


def test_a_tests_outcome_is_that_of_its_worst_rank_and_unreached_is_failed() -> None:
    one = ended(("a", "passed"), ("b", "passed"), ("c", "skipped"), ("d", "passed"))
    other = ended(("a", "passed"), ("b", "failed"), ("c", "unfinished"))
    found = horovod_suite.merged([one, other], 2, False, "")
    assert {test: outcome.kind for test, outcome in found.items()} == {
        "a": "passed",
        "b": "failed",
        "c": "unfinished",
        "d": "unfinished",
    }
    assert "1 of 2 ranks did not reach it" in found["d"].why


def test_ranks_of_the_wrong_package_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="netbottleneck"):
        horovod_suite.merged([ended()], 1, True, "")
    with pytest.raises(RuntimeError, match="1 of 2 ranks began"):
        horovod_suite.merged([ended()], 2, False, "")


def test_tests_that_pass_only_with_horovod_are_listed_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).touch()
    here = {"same": "passed", "lost": "skipped", "gained": "passed", "both": "failed", "only there": "passed"}
    there = {"same": "passed", "lost": "passed", "gained": "skipped", "both": "failed", "only there": "failed"}

    def run(suite: Any, file: str, size: int, environment: str, reference: bool) -> Any:
        return {test: horovod_suite.Outcome(kind, "so") for test, kind in (there if reference else here).items()}

    monkeypatch.setattr(horovod_suite.Suite, "file", run)
    monkeypatch.setattr(horovod_suite, "FOR_TESTS", ())
    args = ["--horovod", str(tmp_path), "--reference", str(tmp_path), "--ranks", "2", "--environment", "torchrun"]
    args += ["--files", FILE]
    assert horovod_suite.main(args) == 1
    output = capsys.readouterr().out
    assert "| test_some.py | 2 | torchrun | netbottleneck | 3 | 1 | 1 |" in output
    lost = "* lost (test_some.py, 2 ranks, torchrun): here skipped: so; there passed: so\n"
    assert f"Passes with Horovod, not here: \n{lost}" in output
    assert "Skipped with Horovod, passes here: \n* gained (" in output
    assert "Fails with Horovod, passes here: \n* only there (" in output
    assert "Fails in both: \n* both (" in output
    here["lost"] = "passed"
    assert horovod_suite.main(args) == 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "horovod_suite.py"), "--horovod", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False)
    assert ended.returncode == 2
    assert f"no {horovod_suite.FILES[0]} in it: a checkout of Horovod's repository at v0.28.1 has it" in ended.stderr


def test_a_scope_of_horovodruns_is_removed_when_all_its_ranks_have_finished() -> None:
    server = Rendezvous(2)
    try:
        server.scopes = {"global": {"0": b"x"}, "mine": {"0": b"x", "1": b"y"}}
        server.left("global", "0")
        server.left("mine", "0")
        assert list(server.scopes["mine"]) == ["1"]
        assert "global" in server.scopes
        server.left("global", "1")
        assert "global" not in server.scopes
    finally:
        server.close()
