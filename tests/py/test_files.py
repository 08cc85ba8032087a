"""Files that are replaced as a whole, and checks that a place can be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from netbottleneck.trace.files import check_file, check_folder, check_no_other_run, whole_file, write_text


def test_a_link_stays_and_its_target_is_replaced_with_its_mode(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "a" / "target", tmp_path / "link", tmp_path / "dangling"
    target.parent.mkdir()
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    dangling.symlink_to("a/new")
    write_text(link, "new")
    write_text(dangling, "made")
    assert link.is_symlink()
    assert dangling.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("new", 0o600)
    assert sorted(path.name for path in target.parent.iterdir()) == ["new", "target"]


def test_a_pipe_is_written_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(check_file("--json", pipe), "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_output_to_the_file_of_stdout_is_part_of_it(tmp_path: Path) -> None:
    code = (
        "import sys; from netbottleneck.trace.files import write_text\n"
        "print('before'); write_text(sys.argv[1], 'text\\n'); print('after')"
    )
    path = tmp_path / "out"
    with path.open("wb") as out:
        subprocess.run([sys.executable, "-c", code, str(path)], stdout=out, check=True)
    assert path.read_text() == "before\ntext\nafter\n"


def test_a_failure_leaves_the_earlier_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_refused_by_option_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "none" / "x", tmp_path / "file" / "x"):
        with pytest.raises(ValueError, match=f"^--json {path}: must be a file in an existing folder"):
            check_file("--json", path)
    for path in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ValueError, match=f"^--write {path}: {tmp_path / 'file'} is not a folder"):
            check_folder("--write", path)
    assert check_folder("--write", tmp_path / "a" / "b") == tmp_path / "a" / "b"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"--json .*cannot be written by this user"):
        check_file("--json", tmp_path / "x")
    with pytest.raises(ValueError, match=r"--write .*cannot be written by this user"):
        check_folder("--write", tmp_path / "x")


def test_the_record_of_a_run_and_an_input_are_not_replaced(tmp_path: Path) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    (run / "ranks").mkdir(parents=True)
    for name in ("run.json", "env.json", "report.html", "ranks/0.meta.json"):
        (run / name).touch()
    link.symlink_to(run / "run.json")
    for path in (run / "run.json", run / "env.json", run / "ranks" / "0.meta.json", run / "ranks" / "new", link):
        with pytest.raises(ValueError, match=f"^--json {path}: is part of the record of the run in {run}: name anoth"):
            check_file("--json", path)
    assert check_file("--html", run / "report.html") == run / "report.html"
    (run / "run.json").rename(tmp_path / "run.json")
    assert check_file("--json", run / "env.json") == run / "env.json"
    with pytest.raises(ValueError, match=f"^--json {run / 'env.json'}: is an input of this command: name another"):
        check_file("--json", run / "env.json", (tmp_path / "none", run / "env.json"))


def test_a_report_is_not_written_into_another_run(tmp_path: Path) -> None:
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    check_no_other_run("--write", run, "none")
    (run / "run.json").touch()
    check_no_other_run("--write", run, link)
    with pytest.raises(ValueError, match=f"^--write {run}: has the record of another run: name another folder"):
        check_no_other_run("--write", run, tmp_path)
