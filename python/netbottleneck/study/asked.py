"""What a command line asks for: a study by a file, by a folder that holds one, or one of those that are shipped."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netbottleneck.study import needs, spec, tables
from netbottleneck.study.cells import Folder

FINE, FAILED, USAGE, INCONCLUSIVE = 0, 1, 2, 4
DEFAULT, QUICK = (Path(__file__).with_name(f"{name}.toml") for name in ("default", "quick"))
# Words that change what is asked; without any, and without a file, a folder's own study goes on.
CHANGES = (
    "ranks",
    "networks",
    "transports",
    "jobs",
    "model",
    "compute",
    "compute_ms",
    "block_steps",
    "rounds",
    "provider",
)
OWN = (
    "To look at a network of your own: start the study by a launcher on its hosts (torchrun, mpirun, srun); "
    "`netbottleneck bench --listen` on one host and `netbottleneck bench --connect HOST` on the other; or "
    "`import netbottleneck` in your own training script."
)


@dataclass(frozen=True)
class Asked:
    """A study that is to run: its text, what that says, and where it goes. notes: for every run."""

    text: str
    spec: spec.StudySpec
    folder: Folder
    notes: tuple[str, ...]
    words: tuple[str, ...]
    strict: bool


def ask(args: argparse.Namespace, words: Sequence[str], size: int = 1) -> Asked:
    """Return what a command line asks for, on so many ranks of a launcher; nothing is written.

    Raises ValueError for a file that asks for what cannot be, and for a folder that holds another study; OSError.
    """
    folder = Folder(Path(args.directory or f"study-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    path = _path(args, folder)
    text = _text(path, args, size)
    named = "transports" in tables.load(text, str(path))
    transports, notes = ((), ()) if named else needs.transports(args.provider)

    def parsed(text: str) -> spec.StudySpec:
        hosts = size if size > 1 else 0
        return spec.parse(text, str(path), transports=transports, hosts=hosts, done=folder.done)

    found = parsed(text)
    if folder.file.exists() and path != folder.file and parsed(_read(folder.file)) != found:
        raise ValueError(
            f"{folder.path} holds another study: name another --directory, or go on with that by --directory alone"
        )
    return Asked(_kept(text, path), found, folder, notes, ("netbottleneck", "study", *words), args.strict)


def _path(args: argparse.Namespace, folder: Folder) -> Path:
    """Return the file that is meant: one that is named, a folder's own, or one that is shipped."""
    if args.file and args.quick:
        raise ValueError(f"--quick is a study of its own: leave it out, or {args.file}")
    if args.file:
        return Path(args.file)
    if not args.quick and not _words(args) and folder.file.exists():
        return folder.file
    return QUICK if args.quick else DEFAULT


def _words(args: argparse.Namespace) -> dict[str, Any]:
    """Return the words that change what is asked, by key."""
    return {name: getattr(args, name) for name in CHANGES if getattr(args, name) is not None}


def _text(path: Path, args: argparse.Namespace, size: int) -> str:
    """Return the study's text with the words' changes in it; as it stands in the file where there are none."""
    text = _read(path)
    raw = tables.load(text, str(path))
    if _words(args):
        spec.parse(text, str(path))  # so that an error names a line of the file itself
        text = tables.dump(_changed(raw, _words(args)))
    if size > 1 and path in (DEFAULT, QUICK) and args.ranks is None:
        text = tables.dump(_on_all(tables.load(text, str(path)), size))
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text ({error.reason}, byte {error.start})") from None


def _kept(text: str, path: Path) -> str:
    """Return a study's text as its folder keeps it: what it plays is named by its whole path."""
    raw = tables.load(text, str(path))
    if not any("file" in table for table in raw["model"]):
        return text
    base = path.absolute().parent
    models = [t | ({"file": str((base / t["file"]).absolute())} if "file" in t else {}) for t in raw["model"]]
    return tables.dump({**raw, "model": models})


def _changed(raw: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """Return tables with what the words say in the place of what they said."""
    over_all = {key: value for key, value in words.items() if key not in ("jobs", "model", "compute", "compute_ms")}
    names = {"model": "name", "compute": "compute", "compute_ms": "compute_ms"}
    of_replays = {names[key]: value for key, value in words.items() if key in names}
    kept: list[dict[str, Any]] = []
    for table in _of_jobs(raw["model"], words.get("jobs")):
        made = {key: value for key, value in table.items() if key not in over_all}
        if "file" not in made and made.get("job", tables.REPLAY) == tables.REPLAY:
            made |= of_replays
        if made not in kept:
            kept.append(made)
    top = {key: value for key, value in raw.items() if key != "model" and (key != "fit" or not words)}
    return {**top, **over_all, "model": kept}


def _of_jobs(models: Sequence[dict[str, Any]], jobs: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the models of the jobs that are named, and one for each job that has none; None: all."""
    if jobs is None:
        return list(models)
    own = [table for table in models if table.get("job", tables.REPLAY) in jobs]
    lacking = [job for job in jobs if job not in {table.get("job", tables.REPLAY) for table in own}]
    return [*own, *({"job": job} | ({"name": "resnet50"} if job == tables.REPLAY else {}) for job in lacking)]


def _on_all(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return tables in which every cell is of so many ranks."""
    models: list[dict[str, Any]] = []
    for table in raw["model"]:
        made = {key: value for key, value in table.items() if key not in ("ranks", "networks")}
        if made not in models:
            models.append(made)
    top = {key: value for key, value in raw.items() if key not in ("model", "fit")}
    return {**top, "ranks": [size], "model": models}
