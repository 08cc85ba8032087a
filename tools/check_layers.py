"""Fails on an include or import that the table of rooms (the constants below) does not allow.

It also fails on a circle of rooms in that table, of C files in one room, or of imports between files of the package,
and if docs/layout.md differs from the table.
"""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import layout

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "netbottleneck"
PAGE = ROOT / "docs" / "layout.md"

# A folder of csrc may include itself and these.
C_ROOMS: dict[str, set[str]] = {
    "base": set(),
    "trace": {"base"},
    "bootstrap": {"base"},
    "cuda": {"base"},
    "transport": {"base", "trace", "bootstrap"},
    "coll": {"base", "trace", "transport"},
    "engine": {"base", "trace", "bootstrap", "transport", "coll", "cuda"},
    "sim": {"base", "trace"},
    "nccl": {"base", "trace", "bootstrap", "transport"},
    "py": {"base", "trace", "bootstrap", "transport", "coll", "engine", "cuda", "sim"},
    "lab": set(),
}

# A header from outside may be included only here: (header, files of csrc). In addition to the two users of sockets, the
# owners of a control connection: bootstrap opens it, engine/control.c keeps it; nccl has its own.
SOCKET_FILES = ["base/*", "transport/tcp*", "bootstrap/*", "engine/control*", "nccl/*", "lab/*"]
C_OUTSIDE: list[tuple[str, list[str]]] = [
    ("Python.h", ["py/*"]),
    ("rdma/*", ["transport/ofi*"]),
    ("cuda*.h", ["cuda/*"]),
    ("sys/socket.h", SOCKET_FILES),
    ("netinet/*", SOCKET_FILES),
    ("arpa/inet.h", SOCKET_FILES),
    ("netdb.h", SOCKET_FILES),
]

# Rooms of the package (modules or folders) that all others may use.
FOUNDATION = {"_version", "errors", "units"}

# A room may import itself, the foundation and these. "*": everything but cli.
PYTHON_ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "units": set(),
    "config": {"trace"},
    "trace": set(),
    "analysis": {"trace"},
    "whatif": {"_core", "trace", "analysis"},
    "report": {"trace", "analysis", "whatif"},
    "lab": set(),
    "launch": {"_core", "config", "trace"},
    "runtime": {"config", "trace", "analysis", "launch"},
    "torch": {"config", "trace", "whatif", "launch", "runtime"},
    "hooks": {"config", "trace", "whatif", "report", "launch", "runtime", "torch"},
    "callbacks": {"hooks"},
    "bench": {"config", "trace", "analysis", "lab", "launch", "runtime"},
    "study": {"*"},
    "__init__": {"*"},
    "cli": {"*"},
    "__main__": {"cli"},
}

# A package from outside may be imported only here: in a room, or in a folder or module of one. "lazily": inside a
# function only.
OUTSIDE: dict[str, set[str]] = {
    "torch": {"torch", "hooks", "bench/models", "study/jobs"},
    "horovod": {"hooks"},
    "matplotlib": {"report", "study/evidence"},
    "subprocess": {"lab", "bench", "study", "runtime/monitor", "runtime/progress", "runtime/timeline"},
    "multiprocessing": {"lab", "bench", "study"},
}
OUTSIDE_LAZILY: dict[str, set[str]] = {"torch": {"launch", "runtime"}, "multiprocessing": {"hooks"}}

# Analysis is a function of a trace: no clock, file, randomness, environment, process or socket in it.
PURE_ROOMS = {"analysis", "whatif"}
IMPURE = {
    "time",
    "datetime",
    "random",
    "os",
    "socket",
    "threading",
    "asyncio",
    "tempfile",
    "shutil",
    "pathlib",
    "psutil",
}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]')

# A comment, or a literal with its content.
C_BLANKED = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
# A name visible to other files: a function or variable that begins a line and is not static.
C_DEFINITION = re.compile(
    r"^(?!static\b|typedef\b|extern\b|return\b|else\b)[A-Za-z_](?:[\w \t*]*?)"
    r"(?:\b(?P<function>\w+)\((?:[^;{}]*)\)\s*\{|\b(?P<variable>\w+)(?:\[[^\]]*\])*\s*=)",
    re.MULTILINE,
)
# A name that is neither a tag nor a member.
C_NAME = re.compile(r"(?<![\w.])(?<!->)(?<!struct )(?<!enum )(?<!union )([A-Za-z_]\w*)")


def c_findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) for one C file or header."""
    name = path.relative_to(CSRC).as_posix()
    room = name.split("/")[0]
    if room not in C_ROOMS:
        yield 1, f"csrc/{room} has no row in C_ROOMS"
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match is None:
            continue
        header = match[2]
        for pattern, places in C_OUTSIDE if match[1] == "<" else []:
            if fnmatch.fnmatchcase(header, pattern) and not any(fnmatch.fnmatchcase(name, place) for place in places):
                yield number, f"<{header}> belongs in {', '.join('csrc/' + place for place in places)} only"
        if match[1] == '"':
            target = header.split("/")[0]
            if not (CSRC / header).is_file():
                yield number, f'"{header}" is not a path below csrc'
            elif target != room and target not in C_ROOMS[room]:
                allowed = ", ".join(sorted(C_ROOMS[room])) or "itself alone"
                yield number, f"{room} includes {target}; it may include {allowed}"


def c_code(text: str) -> str:
    """Return C code without comments and the contents of literals."""
    return C_BLANKED.sub(lambda match: " " if match[0].startswith("/") else match[0][0] * 2, text)


def c_names(code: str) -> set[str]:
    """Return the functions and variables that a C file exports."""
    found = {match["function"] or match["variable"] for match in C_DEFINITION.finditer(code)}
    return found - {"main"}


def c_uses(folder: Path) -> dict[str, set[str]]:
    """Return by stem which other C files of its room each C file uses."""
    code = {path.stem: c_code(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.c"))}
    home = {name: stem for stem, text in code.items() for name in c_names(text)}
    return {
        stem: {home[name] for name in set(C_NAME.findall(text)) & set(home)} - {stem} for stem, text in code.items()
    }


def c_circles(folder: Path) -> list[set[str]]:
    """Return the sets of C files of a room that use one another, directly or through others."""
    uses = c_uses(folder)
    below: dict[str, set[str]] = {}
    for stem in uses:
        seen: set[str] = set()
        ahead = list(uses[stem])
        while ahead:
            at = ahead.pop()
            if at not in seen:
                seen.add(at)
                ahead.extend(uses[at])
        below[stem] = seen
    found: list[set[str]] = []
    for stem in sorted(uses):
        if stem in below[stem] and not any(stem in circle for circle in found):
            found.append({other for other in below[stem] if stem in below[other]})
    return found


def c_circle_findings(csrc: Path) -> Iterator[tuple[Path, str]]:
    """Yield (room, finding) for each circle of C files."""
    for folder in sorted(path for path in csrc.iterdir() if path.is_dir()):
        for circle in c_circles(folder):
            yield folder, f"a circle of C files: {' '.join(sorted(circle))}"


def place_of(path: Path) -> str:
    """Return a file of the package as a path of modules, such as bench/models/networks; its first part is its room."""
    below = path.relative_to(PACKAGE).with_suffix("")
    return (below.parent if below.name == "__init__" and below.parts[:-1] else below).as_posix()


def known_modules() -> set[str]:
    """Return the existing modules and folders, to distinguish them from names that a package exports."""
    return {path.stem for path in PACKAGE.glob("*") if path.suffix in {".py", ".pyi"} or path.is_dir()}


def imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Yield the dotted names that an import statement names, relative ones resolved against package."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = [*base, *(node.module.split(".") if node.module else [])]
        yield from (".".join([*stem, alias.name]) for alias in node.names)


def imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, dotted name, inside a function) for each import that is made at run time."""

    def walk(node: ast.AST, lazily: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from walk(child, lazily)
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in imported(node, package):
                yield node.lineno, name, lazily
        inside = lazily or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(tree, False)


def own_finding(room: str, target: str) -> str | None:
    """Return the finding of an import of one room by another; None if it is allowed."""
    allowed = PYTHON_ROOMS[room]
    everything = "*" in allowed and (target != "cli" or room == "cli")
    if target == room or target in FOUNDATION or target in allowed or everything:
        return None
    return f"{room} imports {target}; it may import {', '.join(sorted(allowed | FOUNDATION))}"


def within(place: str, places: set[str]) -> bool:
    """True if a file is one of these modules, or in one of these folders."""
    return any(place == other or place.startswith(f"{other}/") for other in places)


def outside_finding(place: str, top: str, lazily: bool) -> str | None:
    """Return the finding of an import of an external package; None if it is allowed."""
    room = place.partition("/")[0]
    if room in PURE_ROOMS and top in IMPURE:
        return f"{room} is analysis, a function of a trace: it may not import {top}"
    if top not in OUTSIDE or within(place, OUTSIDE[top]):
        return None
    if within(place, OUTSIDE_LAZILY.get(top, set())):
        return None if lazily else f"{place} may import {top} inside a function only"
    return f"{top} belongs in {', '.join(sorted(OUTSIDE[top]))} only"


def python_findings(path: Path, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) for one Python file of the package."""
    place = place_of(path)
    room = place.partition("/")[0]
    if room not in PYTHON_ROOMS:
        yield 1, f"{room} has no row in PYTHON_ROOMS"
        return
    package = ["netbottleneck", *path.relative_to(PACKAGE).parts[:-1]]
    for line, name, lazily in imports(ast.parse(path.read_text(encoding="utf-8")), package):
        parts = name.split(".")
        if parts[0] == "netbottleneck":
            finding = own_finding(room, parts[1] if len(parts) > 1 and parts[1] in modules else "__init__")
        else:
            finding = outside_finding(place, parts[0], lazily)
        if finding is not None:
            yield line, finding


def circles() -> Iterator[str]:
    """Yield each circle of rooms that may use one another. No room uses those that may use everything."""
    for rooms in (C_ROOMS, {room: allowed - {"*"} for room, allowed in PYTHON_ROOMS.items()}):
        try:
            graphlib.TopologicalSorter(rooms).prepare()
        except graphlib.CycleError as error:
            yield f"a circle of rooms: {' -> '.join(reversed(error.args[1]))}"


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file of the package at root."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if path.name == "__init__.py" else parts)


def home_of(name: str, modules: Collection[str]) -> str | None:
    """Return the module of ours that a dotted name imports: itself, or the one that defines it."""
    stem = name.rpartition(".")[0]
    return name if name in modules else stem if stem in modules and name != f"{PACKAGE.name}._core" else None


def serves_lazily(name: str, path: Path) -> bool:
    """True if imports inside functions do not count: in the command line, and in packages that export names lazily."""
    return path.name == "__init__.py" or name.split(".")[1:2] == ["cli"]


def file_circles(root: Path) -> Iterator[str]:
    """Yield the first circle of imports between files of the package at root, those inside functions included."""
    paths = {module_name(path, root): path for path in sorted(root.glob("**/*.py"))}
    uses: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
        found = imports(ast.parse(path.read_text(encoding="utf-8")), package)
        targets = (home_of(used, paths) for _, used, lazily in found if not (lazily and serves_lazily(name, path)))
        uses[name] = {target for target in targets if target is not None} - {name}
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        yield f"a circle of imports: {' -> '.join(reversed(error.args[1]))}"


def as_text(value: object) -> str:
    """Return a value of a table as readable text."""
    return (", ".join(sorted(value)) or "–") if isinstance(value, set) else str(value)


def page_findings() -> Iterator[str]:
    """Yield the differences between docs/layout.md and the data here."""
    try:
        page = layout.read(PAGE)
    except ValueError as error:
        yield str(error)
        return
    tables: list[tuple[str, Mapping[str, object], Mapping[str, object]]] = [
        ("csrc", page.c_rooms, C_ROOMS),
        ("header", page.c_outside, {header: set(places) for header, places in C_OUTSIDE}),
        ("room", page.python_rooms, PYTHON_ROOMS),
        ("package", page.outside, OUTSIDE),
        ("package inside a function", page.outside_lazily, OUTSIDE_LAZILY),
        ("list", {"foundation": page.foundation}, {"foundation": FOUNDATION}),
        (
            "list",
            {"analysis": page.pure_rooms, "not in analysis": page.impure},
            {"analysis": PURE_ROOMS, "not in analysis": IMPURE},
        ),
    ]
    for what, table_on_page, data in tables:
        for name in sorted({*table_on_page, *data}):
            page_says, data_says = (
                as_text(table[name]) if name in table else "(no row)" for table in (table_on_page, data)
            )
            if page_says != data_says:
                yield f"{what} {name}: the page says {page_says}; the data of {Path(__file__).name}: {data_says}"


def main() -> int:
    """Print every finding as file:line. Returns 1 if there are findings."""
    found = [(path, *row) for path in sorted(CSRC.glob("**/*.[ch]")) for row in c_findings(path)]
    modules = known_modules()
    files = sorted(PACKAGE.glob("**/*.py"))
    found += [(path, *row) for path in files for row in sorted(set(python_findings(path, modules)))]
    found += [(PAGE, 1, text) for text in page_findings()]
    found += [(Path(__file__), 1, text) for text in [*circles(), *file_circles(PACKAGE)]]
    found += [(path, 1, text) for path, text in c_circle_findings(CSRC)]
    for path, line, text in found:
        print(f"{path.relative_to(ROOT)}:{line}: {text}")
    print(f"layers: {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
