"""Files that are replaced as a whole: a reader never sees a part of one, and a failure leaves the earlier file."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path | str) -> Generator[BinaryIO]:
    """Open a file for bytes that replaces `path` at the end. If the body raises, `path` stays as it was.

    Raises OSError if the folder of `path` does not exist or cannot be written.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            yield file
        scratch.replace(target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write a text as UTF-8. Raises as whole_file."""
    with whole_file(path) as file:
        file.write(text.encode())
