"""Runs every idiom untouched and in every mode, compares them after each step, and prints a table.

An idiom is a file beside this one: a docstring whose first line names it, and `train(context)`. It reads as a user's
script: torch, and context.model(), context.inputs(step) for a network and data. It calls
`context.watch.look(name, model)` where the script looks at gradients, after a backward pass and before they are used,
and `context.watch.step(model=, optimizer=, loss=)` after each update. It imports nothing of the package; the harness
does. KIND = "horovod" uses `import horovod.torch as hvd`, KIND = "loop" has `context.own_loop`,
KIND = "sharded" has parameters that FSDP2 shards. `context.skip(why)`
ends one that this torch cannot run. QUIET = True says that DDP sends nothing in it, STEPLESS = True that no optimizer's
step is ever seen, so that the first transport of a list stays.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import signal
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from harness.modes import MODES, UNTOUCHED  # noqa: E402 - found by the path above
from harness.pairs import Outcome, run_mode  # noqa: E402
from harness.table import UNEQUAL, Table  # noqa: E402

NOT_IDIOMS = {"run", "test_compare", "conftest"}
WIDTHS = ("small", "large")
AT_THREE = ("observe", "stock", "tcp", "ofi", "profile", "import")
QUICK = ("observe", "tcp", "profile", "import")


def idioms() -> dict[str, tuple[str, str]]:
    """Return (kind, title) of each idiom, those of Horovod last."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        if path.stem in NOT_IDIOMS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = [
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "KIND"
            and isinstance(node.value, ast.Constant)
        ]
        title = (ast.get_docstring(tree) or path.stem).splitlines()[0].rstrip(".")
        found[path.stem] = (str(kinds[0]) if kinds else "ddp", title)
    return dict(sorted(found.items(), key=lambda item: (item[1][0] == "horovod", item[0])))


def listed(file: str) -> dict[str, str]:
    """Return the idioms that a list of tests/idioms names, and what it says of each."""
    lines = (HERE / file).read_text(encoding="utf-8").splitlines()
    rows = (line.partition("|") for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): text.strip() for name, _, text in rows}


def left_alone() -> set[tuple[str, str]]:
    """Return the (idiom, mode) pairs that may be left alone. Raises ValueError for one that does not exist."""
    pairs = {(name, mode) for name, modes in listed("left_alone.txt").items() for mode in modes.split(", ")}
    if unknown := sorted(pair for pair in pairs if pair[0] not in idioms() or pair[1] not in MODES):
        raise ValueError(f"left_alone.txt: no such idiom or mode: {unknown}")
    return pairs


def chosen(name: str, mode: str, size: int, width: str) -> bool:
    """Return whether --quick runs this.

    It runs the main modes with 2 ranks and small gradients; of the rest an eighth of the idioms in each mode, by hash
    of name and mode, each with one width, and some of those of a main mode with 3 ranks.
    """
    if mode in QUICK and (size, width) == (2, "small"):
        return True
    number = int.from_bytes(hashlib.sha256(f"{name} {mode}".encode()).digest()[:8])
    sizes = (2, 3) if mode in QUICK else (2,)
    variants = [(n, w) for n in sizes for w in WIDTHS if not (mode in QUICK and (n, w) == (2, "small"))]
    return number % 8 == 0 and variants[number // 8 % len(variants)] == (size, width)


def plan(arguments: argparse.Namespace) -> dict[tuple[int, str], list[tuple[str, str]]]:
    """Return the idioms and widths to run by (ranks, mode), the untouched run first."""
    known = idioms()
    if unknown := sorted(set(arguments.only) - set(known)):
        sys.exit(f"--only {','.join(unknown)}: no such idiom; see the files of {HERE.name}/")
    if unknown := sorted(set(arguments.modes) - set(MODES)):
        sys.exit(f"--modes {','.join(unknown)}: must be of {', '.join(MODES)}")
    names = [name for name in known if not arguments.only or name in arguments.only]
    made: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for size in arguments.ranks:
        for mode in MODES.values():
            wanted = mode.name in (arguments.modes or (MODES if size == 2 else AT_THREE))
            if mode.name == UNTOUCHED or not wanted:
                continue
            made[size, mode.name] = [
                (name, width)
                for name in names
                for width in arguments.widths
                if known[name][0] in mode.kinds and (not arguments.quick or chosen(name, mode.name, size, width))
            ]
        needed = {item for (ranks, _), items in made.items() if ranks == size for item in items}
        if needed:
            made[size, UNTOUCHED] = [(name, width) for name in names for width in WIDTHS if (name, width) in needed]
    order = sorted(made, key=lambda key: (key[0], key[1] != UNTOUCHED))
    return {key: made[key] for key in order if made[key]}


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    listed = {"type": lambda text: [part for part in text.split(",") if part], "metavar": "NAME,…"}
    parser.add_argument("--only", default=[], help="these idioms", **listed)
    parser.add_argument("--modes", default=[], help=f"these modes, of {', '.join(MODES)}", **listed)
    parser.add_argument("--ranks", type=int, action="append", choices=(2, 3), help="default: 2 and 3")
    parser.add_argument("--width", dest="widths", action="append", choices=WIDTHS, help="default: both")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}, and an eighth of the rest")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table, as Markdown")
    parser.add_argument("--deadline", type=float, default=40.0, metavar="S", help="of one idiom in one mode")
    parser.add_argument("--verbose", action="store_true", help="print each row's lines and traces")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what ranks printed and recorded there")
    chosen_ = parser.parse_args()
    chosen_.ranks = chosen_.ranks or [2, 3]
    chosen_.widths = chosen_.widths or list(WIDTHS)
    return chosen_


def main() -> int:
    """Run the plan. Returns 1 where a row failed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # ranks end with this process
    arguments = options()
    table = Table(idioms(), verbose=arguments.verbose, unequal=listed("unequal.txt"), may_be_left_alone=left_alone())
    with tempfile.TemporaryDirectory(prefix="idioms-") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        broken: set[tuple[int, str, str]] = set()
        for (size, mode), items in plan(arguments).items():
            left = [item for item in items if (size, *item) not in broken]

            def row(item: tuple[str, str], outcome: Outcome, size: int = size, mode: str = mode) -> None:
                if mode == UNTOUCHED and (outcome.failed or outcome.skipped):
                    broken.add((size, *item))
                table.add(item, size, mode, outcome)

            run_mode(folder, MODES[mode], size, left, deadline_s=arguments.deadline, done=row)
    print(table.text())
    if arguments.write:
        arguments.write.write_text(table.markdown(), encoding="utf-8")
    for name in table.listed_and_equal:
        print(f"{name}: listed in unequal.txt, and equal: take it off the list")
    unlike = sum(verdict == UNEQUAL for verdict, _ in table.outcomes.values())
    if unlike:
        print(f"{unlike} outcomes of idioms listed in unequal.txt differ, and count neither as passed nor as failed")
    print(table.last_line())
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
