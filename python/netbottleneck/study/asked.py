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
    quick: bool


def ask(args: argparse.Namespace, words: Sequence[str], size: int = 1) -> Asked:
    """Return what a command line asks for, on so many ranks of a launcher; nothing is written.

    Raises ValueError for a file that asks for what cannot be, and for a folder that holds another study; OSError.
    """
    folder = Folder(Path(args.directory or f"study-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    changed = args.quick or any(getattr(args, name) is not None for name in CHANGES)
    if args.file and args.quick:
        raise ValueError(f"--quick is a study of its own: leave it out, or {args.file}")
    resumed = not args.file and not changed and folder.file.exists()
    shipped = Path(__file__).with_name("quick.toml" if args.quick else "default.toml")
    path = Path(args.file) if args.file else folder.file if resumed else shipped
    text = _read(path)
    raw = tables.load(text, str(path))
    if changed or any("file" in table for table in raw["model"]):
        tables.checked(raw, tables.Lines(text, str(path)))
        text = tables.dump(_changed(raw, args, path.absolute().parent))
    if size > 1 and path == shipped and args.ranks is None:
        text = tables.dump(_on_all(tables.load(text, str(path)), size))
    transports, notes = needs.transports(args.provider)

    def parsed(text: str) -> spec.StudySpec:
        hosts = size if size > 1 else 0
        return spec.parse(text, str(path), transports=transports, hosts=hosts, done=folder.done)

    found = parsed(text)
    if folder.file.exists() and not resumed and parsed(_read(folder.file)) != found:
        raise ValueError(
            f"{folder.path} holds another study: name another --directory, or go on with that by --directory alone"
        )
    noted = () if "transports" in tables.load(text, str(path)) else notes
    return Asked(text, found, folder, noted, ("netbottleneck", "study", *words), args.strict, args.quick)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text ({error.reason}, byte {error.start})") from None


def _changed(raw: dict[str, Any], args: argparse.Namespace, base: Path) -> dict[str, Any]:
    """Return tables with what the words say in the place of what they said; files by their whole path."""
    models = [dict(table) for table in raw["model"] if not args.jobs or table.get("job", tables.REPLAY) in args.jobs]
    for job in args.jobs or ():
        if job not in {table.get("job", tables.REPLAY) for table in models}:
            models.append({"job": job} | ({"name": "resnet50"} if job == tables.REPLAY else {}))
    for table in models:
        if "file" in table:
            table["file"] = str((base / table["file"]).absolute())
    over_all = {k: getattr(args, k) for k in ("ranks", "networks", "transports", "block_steps", "rounds", "provider")}
    over_all = {key: value for key, value in over_all.items() if value is not None}
    of_replays = {"name": args.model, "compute": args.compute, "compute_ms": args.compute_ms}
    of_replays = {key: value for key, value in of_replays.items() if value is not None}
    kept: list[dict[str, Any]] = []
    for table in models:
        made = {key: value for key, value in table.items() if key not in over_all}
        if made.get("job", tables.REPLAY) == tables.REPLAY and "file" not in made:
            made |= of_replays
        if made not in kept:
            kept.append(made)
    top = {key: value for key, value in raw.items() if key not in ("model", "fit")}
    if "fit" in raw and kept == raw["model"] and not over_all:
        top["fit"] = raw["fit"]
    return {**top, **over_all, "model": kept}


def _on_all(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return tables in which every cell is of so many ranks."""
    models: list[dict[str, Any]] = []
    for table in raw["model"]:
        made = {key: value for key, value in table.items() if key not in ("ranks", "networks")}
        if made not in models:
            models.append(made)
    top = {key: value for key, value in raw.items() if key not in ("model", "fit")}
    return {**top, "ranks": [size], "model": models}
