"""Files that are replaced as a whole: a reader never sees a part of one, and a failure leaves the earlier file."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path | str) -> Generator[BinaryIO]:
    """Open a file for bytes that replaces `path` at the end. If the body raises, `path` stays as it was.

    A symbolic link stays, and its target is replaced; an existing file keeps its mode. A device, a pipe or a standard
    stream of this process is written directly. Raises OSError, which names `path`, if its folder does not exist, cannot
    be written or is full.
    """
    status = None
    with suppress(FileNotFoundError):
        status = os.stat(path)
    if status is not None and (stream := _stream(status)) is not None:
        with open(os.dup(stream), "wb") as file:
            yield file
        return
    if status is not None and not stat.S_ISREG(status.st_mode):
        with open(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            if status is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            yield file
        scratch.replace(target)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(scratch)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _stream(status: os.stat_result) -> int | None:
    """Return the descriptor of standard output or error if it is the file with this status; its text is flushed."""
    for descriptor, text in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(descriptor)):
                if text is not None:
                    text.flush()
                return descriptor
    return None


def write_text(path: Path | str, text: str) -> None:
    """Write a text as UTF-8; what it cannot have, as from the name of a file, becomes "?". Raises as whole_file."""
    with whole_file(path) as file:
        file.write(text.encode(errors="replace"))


# Control characters, which a terminal would obey, to what is shown instead.
CONTROLS = {code: " " if chr(code).isspace() else "?" for code in (*range(0x20), *range(0x7F, 0xA0))}


def printable(text: Path | str) -> str:
    """Return a text, or the name of a file, in one line that any stream and terminal takes."""
    return str(text).encode(errors="replace").decode().translate(CONTROLS)


# The record of a run, which no other output may replace.
RUN = "run.json"
RECORDED = (RUN, "env.json")
RANKS = "ranks"


def check_file(option: str, path: Path | str, inputs: Iterable[Path | str] = ()) -> Path:
    """Return the path of a file that can be written, and that is neither an input nor part of the record of a run.

    Raises ValueError naming `option`, the path and the remedy.
    """
    target = Path(path)
    if target.is_dir() or not (target.exists() or Path(os.path.realpath(target)).parent.is_dir()):
        raise ValueError(f"{option} {path}: must be a file in an existing folder")
    special = target.exists() and not target.is_file()
    if not os.access(target if special else Path(os.path.realpath(target)).parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written by this user: name a file in a writable folder")
    if target.exists() and any(Path(used).exists() and target.samefile(used) for used in inputs):
        raise ValueError(f"{option} {path}: is an input of this command: name another file")
    whole = Path(os.path.realpath(target))
    run = whole.parent if whole.name in RECORDED else whole.parent.parent if whole.parent.name == RANKS else None
    if run is not None and (run / RUN).exists():
        raise ValueError(f"{option} {path}: is part of the record of the run in {run}: name another file")
    return target


def check_folder(option: str, path: Path | str) -> Path:
    """Return the path of a folder that can be written or created. Raises ValueError as check_file."""
    target = Path(path).absolute()
    existing = next(folder for folder in (target, *target.parents) if folder.exists() or folder.is_symlink())
    if not existing.is_dir():
        raise ValueError(f"{option} {path}: {existing} is not a folder: name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: {existing} cannot be written by this user: name another folder")
    return Path(path)


def check_no_other_run(option: str, path: Path | str, own: Path | str) -> None:
    """Raise ValueError, as check_file, if a folder has another run than `own`."""
    folder = Path(path)
    if (folder / RUN).exists() and not (Path(own).exists() and folder.samefile(own)):
        raise ValueError(f"{option} {path}: has the record of another run: name another folder")
