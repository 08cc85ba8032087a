"""Cells of a study: the request of a command line, its requirements, and the study's folder with each cell's files."""

from __future__ import annotations

import argparse
import errno
import fcntl
import importlib.util
import json
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.report.compare import FACTS, RESULT, present
from netbottleneck.study import spec
from netbottleneck.study.spec import DIGITS, REPLAY, Cell, StudySpec
from netbottleneck.study.task import Outcome
from netbottleneck.trace.files import check_folder, write_text
from netbottleneck.trace.model import decode

# Folder of a study: the specification, and the files of each cell. A cell is complete when its facts are written.

STUDY = "study.toml"
FORECAST = "forecast.json"
LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # of a file system that has no locks


class BusyError(RuntimeError):
    """Another process runs a study in the folder."""


@dataclass(frozen=True)
class CellResult:
    """The results of a cell's ranks. seconds: total duration.

    stock_alone: the outcome of digits with stock alone; tuned: the folder of stock over four interfaces, "" if not run.
    """

    cell: Cell
    outcome: Outcome
    stock_alone: Outcome | None = None
    tuned: str = ""
    seconds: float = 0.0

    @property
    def same_as_stock(self) -> bool | None:
        """True if the weights are bit-identical to those of stock alone; None if that was not run."""
        return None if self.stock_alone is None else self.stock_alone.digests == self.outcome.digests


class StudyFolder:
    """A study's folder. Its files are written atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / STUDY

    def check_place(self) -> None:
        """Raise ValueError unless the path is free, or a writable folder with a study or nothing in it."""
        check_folder("--directory", self.path)
        if not self.file.exists() and self.path.is_dir() and {one.name for one in self.path.iterdir()} - {LOCK}:
            raise ValueError(f"--directory {self.path}: has files, but no {STUDY}: pass a new or an empty folder")

    @contextmanager
    def held(self) -> Generator[None]:
        """Hold the folder, so that no other process runs the study in it. The kernel releases a dead holder's lock.

        Raises BusyError naming the process that holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "(unknown)"
                raise BusyError(
                    f"{self.path}: process {holder} runs the study in this folder: wait for its end, or pass another "
                    "--directory"
                ) from None
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def create(self, text: str) -> None:
        """Create the folder and write the specification, unless it exists."""
        if not self.file.exists():
            write_atomically(self.file, text)

    def cell_folder(self, key: str) -> Path:
        """Return a cell's folder."""
        return self.path / "cells" / key

    def done(self, key: str) -> bool:
        """Return whether a cell's facts exist."""
        return (self.cell_folder(key) / FACTS).exists()

    def check_complete(self, cells: Sequence[Cell]) -> None:
        """Raise ValueError if a complete cell ran with other values than those of its specification in `cells`."""
        for cell in cells:
            if not self.done(cell.key):
                continue
            try:
                recorded = self.read_result(cell.key).cell
            except (OSError, ValueError):
                continue  # the study reports this cell as failed
            if unlike := _differences(recorded, cell):
                raise ValueError(
                    f"{self.path}: cell {cell.key} is complete, with other values: {'; '.join(unlike)}: restore them, "
                    f"pass another --directory, or remove {self.cell_folder(cell.key)} to run the cell again"
                )

    def new_cell_folder(self, key: str) -> Path:
        """Return a cell's folder, new and empty; files of an earlier attempt are moved to aside/."""
        folder = self.cell_folder(key)
        if folder.exists():
            aside = self.path / "aside"
            aside.mkdir(exist_ok=True)
            numbers = (number for number in range(1, 1 << 20) if not (aside / f"{key}.{number}").exists())
            folder.rename(aside / f"{key}.{next(numbers)}")
        folder.mkdir(parents=True)
        return folder

    def write_result(self, done: CellResult) -> None:
        """Write the results of a cell."""
        document = {
            "cell": asdict(done.cell),
            "outcome": done.outcome.as_dict(),
            "again": done.stock_alone and done.stock_alone.as_dict(),
            "tuned": done.tuned,
            "seconds": done.seconds,
        }
        write_atomically(self.cell_folder(done.cell.key) / RESULT, json.dumps(document, indent=1) + "\n")

    def read_result(self, key: str) -> CellResult:
        """Return what `write_result` wrote. Raises OSError, and ValueError naming the file."""
        path = self.cell_folder(key) / RESULT
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            outcome = self._outcome(key, document["outcome"])
            stock_alone = document["again"] and self._outcome(key, document["again"])
            tuned = document["tuned"] and self._present(key, document["tuned"])
            return CellResult(decode(Cell, document["cell"]), outcome, stock_alone, tuned, document["seconds"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: {error!r}") from error

    def _outcome(self, key: str, document: dict[str, Any]) -> Outcome:
        return Outcome.from_dict({**document, "folder": self._present(key, document["folder"])})

    def _present(self, key: str, recorded: str) -> str:
        return str(present(self.cell_folder(key), recorded))


def _differences(recorded: Cell, cell: Cell) -> list[str]:
    """Return the values in which two cells of one key differ, as text; not `same`, which follows from other cells."""
    old, new = ({**values.pop("model"), **values} for values in map(asdict, (recorded, cell)))
    return [
        f"{name} was {_shown(old[name])}, now {_shown(value)}"
        for name, value in new.items()
        if name != "same" and old[name] != value
    ]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


# Requirements of a study on this machine: packages and transports.

PACKAGES = {"torch": "torch", "sklearn": "scikit-learn"}


def missing_packages(spec: StudySpec) -> str:
    """Return a message about packages that the cells need and that are not installed, else ""."""
    needed = set()
    for cell in spec.cells:
        if cell.job != REPLAY or not cell.model.file or "stock" in cell.arms:
            needed.add("torch")
        if cell.job == DIGITS or (cell.job != REPLAY and cell.model.name == "thin_resnet"):
            needed.add("sklearn")
    absent = [PACKAGES[module] for module in sorted(needed, reverse=True) if importlib.util.find_spec(module) is None]
    return f"{' and '.join(absent)} not installed: pip install 'netbottleneck[study]'" if absent else ""


def default_transports(provider: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the default arms and a note; tcp replaces ofi if libfabric is not available."""
    why = _no_ofi(provider)
    return (("stock", "tcp"), (f"tcp replaces ofi: {why}",)) if why else (("stock", "ofi"), ())


def _no_ofi(provider: str | None) -> str:
    core = connect.core()
    if not core.HAVE_OFI:
        return "this build has no ofi (install libfabric-dev)"
    try:
        core.libfabric(config.settings({"provider": provider}).library)
    except OSError as error:
        return str(error)
    return ""


# The study that a command line requests: a file, a folder with a study, or a study of this package.

FINE, FAILED, USAGE, INCONCLUSIVE = 0, 1, 2, 4
DEFAULT, QUICK = (Path(__file__).with_name(f"{name}.toml") for name in ("default", "quick"))
# Options that change the study. Without them and without a file, the study in the folder is resumed.
STUDY_OPTIONS = (
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
OWN_NETWORK = (
    "To measure your own network, start the study with a launcher on its hosts (torchrun, mpirun, srun). Or run "
    "`netbottleneck bench --listen` on one host, and the command that it prints on another, or add "
    "`import netbottleneck` to your training script."
)


@dataclass(frozen=True)
class StudyRequest:
    """A requested study: its text, its specification, and its folder. notes: added to every run."""

    text: str
    spec: spec.StudySpec
    folder: StudyFolder
    notes: tuple[str, ...]
    command: tuple[str, ...]
    strict: bool


_ALONE = connect.Place(0, 1)


def parse_request(args: argparse.Namespace, arguments: Sequence[str], place: connect.Place = _ALONE) -> StudyRequest:
    """Return the study that a command line requests, for the ranks of a launcher; writes nothing.

    Raises OSError, and ValueError for an invalid file, for options without an effect, or for a folder with other files,
    with another study or with complete cells of other values. Rank 0 alone looks at the folder, which other hosts need
    not have.
    """
    folder = StudyFolder(Path(args.directory or f"study-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    if place.rank == 0:
        folder.check_place()
    path = _path(args, folder)
    text = _text(path, args, place.size)
    named = "transports" in spec.load(text, str(path))
    transports, notes = ((), ()) if named else default_transports(args.provider)

    def parsed(text: str) -> spec.StudySpec:
        hosts = place.size if place.size > 1 else 0
        done = folder.done if place.rank == 0 else _elsewhere
        return spec.parse(text, str(path), transports=transports, hosts=hosts, done=done)

    if text != _read(path):
        text, lost = _without_lost_fit(text, str(path), parsed)
        notes = (*notes, *lost)
    found = parsed(text)
    if place.rank == 0 and folder.file.exists() and path != folder.file and parsed(_read(folder.file)) != found:
        raise ValueError(
            f"{folder.path} holds another study: pass another --directory, or only --directory to resume it"
        )
    if place.rank == 0:
        folder.check_complete(found.cells)
    stored = _stored_text(text, path, transports)
    return StudyRequest(stored, found, folder, notes, ("netbottleneck", "study", *arguments), args.strict)


def _elsewhere(_key: str) -> bool:
    """Return True: whether a cell is complete is for rank 0 to judge."""
    return True


def _without_lost_fit(text: str, path: str, parsed: Callable[[str], spec.StudySpec]) -> tuple[str, tuple[str, ...]]:
    """Return a changed study's text without a `fit` whose cell the options removed, and a note on it."""
    raw = spec.load(text, path)
    if "fit" not in raw:
        return text, ()
    without = spec.dump({key: value for key, value in raw.items() if key != "fit"})
    found = parsed(without)
    if raw["fit"] in {cell.key for cell in found.cells}:
        return text, ()
    instead = f"forecasts are fitted to {found.fit_key}" if found.fit_key else "there are no forecasts"
    return without, (f"these options and ranks leave no cell {raw['fit']} (fit in {Path(path).name}): {instead}",)


def _path(args: argparse.Namespace, folder: StudyFolder) -> Path:
    """Return the file to use: the named one, the folder's own, or one of this package."""
    if args.file and args.quick:
        raise ValueError(f"--quick and {args.file} cannot be combined: leave out one of them")
    if args.file:
        return Path(args.file)
    if not names_study(args) and folder.file.exists():
        return folder.file
    return QUICK if args.quick else DEFAULT


def names_study(args: argparse.Namespace) -> bool:
    """Return whether a command line names a study; else it resumes the folder's, or runs the default."""
    return bool(args.file or args.quick or _given_options(args))


def _given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that change the study, by key."""
    return {name: getattr(args, name) for name in STUDY_OPTIONS if getattr(args, name) is not None}


def _text(path: Path, args: argparse.Namespace, size: int) -> str:
    """Return the study's text with the options applied; without options, the text of the file."""
    text = _read(path)
    raw = spec.load(text, str(path))
    if size > 1 and args.networks is not None and "interface" not in raw:
        raise ValueError(
            f"--networks {','.join(args.networks)}: the ranks of a launcher use the network between them as it is: "
            'leave out --networks, or pass a file that names the interface to cap, such as interface = "eth0"'
        )
    if _given_options(args):
        spec.parse(text, str(path))  # first, so that an error names a line of the file
        text = spec.dump(_with_options(raw, _given_options(args)))
    if size > 1 and path in (DEFAULT, QUICK) and args.ranks is None:
        text = spec.dump(_with_ranks(spec.load(text, str(path)), size))
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason}, byte {error.start})") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: name the file of a study") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a file: to resume its study, pass it as --directory") from None


def _stored_text(text: str, path: Path, transports: Sequence[str]) -> str:
    """Return a study's text as its folder stores it, with absolute paths of the files to replay.

    transports: this machine's default if the text names none; a resumed study keeps its arms.
    """
    raw = spec.load(text, str(path))
    if any("file" in table for table in raw["model"]):
        base = path.absolute().parent
        models = [t | ({"file": str((base / t["file"]).absolute())} if "file" in t else {}) for t in raw["model"]]
        text = spec.dump({**raw, "model": models})
    return f"transports = {json.dumps(transports)}\n{text}" if transports else text


def _with_options(raw: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with the options applied. Raises ValueError for an option that no table takes."""
    over_all = {key: value for key, value in options.items() if key not in ("jobs", *_OF_SOME_MODELS)}
    tables = _models_of_jobs(raw["model"], options.get("jobs"))
    takers = {key: _takers(key, tables) for key in _OF_SOME_MODELS if key in options}
    models: list[dict[str, Any]] = []
    for number, table in enumerate(tables):
        made = {key: value for key, value in table.items() if key not in over_all}
        made |= {_OF_SOME_MODELS[key]: options[key] for key, taking in takers.items() if taking[number]}
        if made not in models:
            models.append(made)
    top = {key: value for key, value in raw.items() if key != "model"}
    return {**top, **over_all, "model": models}


_OF_SOME_MODELS = {"model": "name", "compute": "compute", "compute_ms": "compute_ms"}  # options, and keys of a model


def _takers(option: str, tables: Sequence[dict[str, Any]]) -> list[bool]:
    """Return which tables take an option: replays, by name except for `compute`; else inflation takes a model.

    Raises ValueError if there is none.
    """
    jobs = [table.get("job", spec.REPLAY) for table in tables]
    own = [job == spec.REPLAY and (option == "compute" or "file" not in t) for job, t in zip(jobs, tables, strict=True)]
    if option == "model" and not any(own):
        own = [job == spec.INFLATION for job in jobs]
    if not any(own):
        raise ValueError(
            f"--{option.replace('_', '-')}: no model of this study takes it (jobs: {', '.join(dict.fromkeys(jobs))}; a "
            f"replayed file has its own model and times): leave it out, or add --jobs {spec.REPLAY}"
        )
    return own


def _models_of_jobs(models: Sequence[dict[str, Any]], jobs: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the models of the named jobs, and a default model for each job without one; None: all."""
    if jobs is None:
        return list(models)
    own = [table for table in models if table.get("job", spec.REPLAY) in jobs]
    lacking = [job for job in jobs if job not in {table.get("job", spec.REPLAY) for table in own}]
    return [*own, *({"job": job} | ({"name": "resnet50"} if job == spec.REPLAY else {}) for job in lacking)]


def _with_ranks(raw: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the tables with `size` ranks in every cell."""
    models: list[dict[str, Any]] = []
    for table in raw["model"]:
        made = {key: value for key, value in table.items() if key not in ("ranks", "networks")}
        if made not in models:
            models.append(made)
    top = {key: value for key, value in raw.items() if key != "model"}
    return {**top, "ranks": [size], "model": models}
