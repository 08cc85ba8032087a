"""The command line of a study: what is asked, by a file, a folder that holds a study, or words; and where it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from netbottleneck import env, launch
from netbottleneck.lab import parse_lab
from netbottleneck.study import needs, spec, tables
from netbottleneck.study.cells import STUDY, Folder
from netbottleneck.values import TRANSPORTS

HOOKED = ("NETBOTTLENECK", "NETBOTTLENECK_TRANSPORT")
# Words that change what is asked; without any, and without a file, a folder's own study goes on.
CHANGES = ("ranks", "networks", "transports", "jobs", "model", "compute", "compute_ms", "block_steps", "rounds", "provider")
FINE, FAILED, USAGE, INCONCLUSIVE = 0, 1, 2, 4
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 failure, 2 usage, 4 inconclusive (with --strict)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _arguments().parse_args(words)
        place = launch.detect(env.settings())
        asked = ask(args, words, place.size)
        lacking = needs.missing(asked.spec)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"netbottleneck study: {error}\n")
        return USAGE
    except SystemExit as end:
        return int(end.code or 0)
    if lacking:
        sys.stderr.write(f"netbottleneck study: {lacking}\n")
        return FAILED
    if place.size > 1:
        _without_hooks(words)
        from netbottleneck.study import hosts

        return _until_signalled(lambda: hosts.run(asked))
    from netbottleneck.study import runner

    return _until_signalled(lambda: runner.run(asked))


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
    text, base = _read(path), path.absolute().parent
    if changed or any("file" in table for table in tables.load(text, str(path))["model"]):
        tables.checked(tables.load(text, str(path)), tables.Lines(text, str(path)))
        text = tables.dump(_changed(tables.load(text, str(path)), args, base))
    transports, notes = needs.transports(args.provider)

    def parsed(text: str, named: Path) -> spec.StudySpec:
        if size > 1 and named == shipped and args.ranks is None:
            text = tables.dump(_on_all(tables.load(text, str(named)), size))
        return spec.parse(text, str(named), transports=transports, real=size > 1)

    found = parsed(text, path)
    if folder.file.exists() and not resumed and parsed(_read(folder.file), path) != found:
        raise ValueError(
            f"{folder.path} holds another study: name another --directory, or go on with that by --directory alone"
        )
    if "transports" in text:
        notes = ()
    return Asked(text, found, folder, notes, ("netbottleneck", "study", *words), args.strict, args.quick)


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


def _without_hooks(words: Sequence[str]) -> None:
    """Begin again without the variables that put hooks into this process: they would measure the study's own models."""
    if any(os.environ.get(name) for name in HOOKED):
        kept = {name: value for name, value in os.environ.items() if name not in HOOKED}
        os.execve(sys.executable, [sys.executable, "-m", "netbottleneck.study", *words], kept)


def _until_signalled(run: Callable[[], int]) -> int:
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return run()
    except KeyboardInterrupt as signalled:
        return 128 + (signalled.args[0] if signalled.args else signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt(signum)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netbottleneck study", description=__doc__, epilog=OWN)
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help=f"what to study, see docs/study.md; default: two ranks, three networks")
    add("--directory", help=f"where all goes; one that holds a study ({STUDY}): it goes on where it was")
    add("--quick", action="store_true", help="all steps of the chain with few steps and small gradients: some minutes")
    add("--ranks", type=_each(_count), metavar="N[,N]", help="ranks, each on a simulated host of its own")
    add("--networks", type=_each(_network), metavar="LINK[/FLOW]", help="comma-separated: 2gbit/500mbit,none")
    add("--transports", type=_listed(TRANSPORTS), help="arms that take turns; default: stock,ofi")
    add("--jobs", type=_listed(tables.JOBS), help=f"some of {','.join(tables.JOBS)}")
    add("--model", help="the model whose gradients are replayed")
    add("--compute", choices=("sleep", "spin"), help="how the replayed model computes")
    add("--compute-ms", type=float, nargs=2, metavar=("FORWARD", "BACKWARD"))
    add("--block-steps", type=_count, help="steps of a block")
    add("--rounds", type=_count, help="how often each arm has its turn")
    add("--provider", help="libfabric provider; default: the best there is")
    add("--strict", action="store_true", help="exit code 4 where a verdict is INCONCLUSIVE")
    return parser


def _each(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [one(part.strip()) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number above 0")
    return int(text)


def _network(text: str) -> str:
    try:
        return str(parse_lab(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if len(set(names)) != len(names) or not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(allowed)}")
        return names

    return parse
