"""Generated text of pages: a line `<!-- made: NAME WORD… -->` becomes Markdown at build time, from code or data.

NAME is one of MAKERS. Pages with generated text are read again at each build.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import results

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"^<!-- made: (\w+) ?(.*?) -->$", re.MULTILINE)


def help_of(command: list[str]) -> str:
    """Return the --help text of a command."""
    from netbottleneck import cli

    output = io.StringIO()
    place = {"COLUMNS": "90", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, place), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return output.getvalue().strip()


def commands() -> Iterator[str]:
    """Yield a section for each command, with its help."""
    from netbottleneck import cli

    for name, (_, text) in cli.COMMANDS.items():
        yield f"## netbottleneck {name}\n\n{text[0].upper()}{text[1:]}.\n\n```text\n{help_of([name])}\n```\n"


def api(module: str, kinds: str) -> Iterator[str]:
    """Yield an autodoc directive for each public name of a module that has one of these kinds (separated by commas)."""
    found = importlib.import_module(module)
    for name in sorted(found.__all__):
        value = getattr(found, name)
        if kind(value) in kinds.split(","):
            directive = "autofunction" if kind(value) == "function" else "autoclass"
            if kind(value) == "error":
                directive = "autoexception"
            yield f"```{{eval-rst}}\n.. {directive}:: {module}.{name}\n```\n"


def kind(value: Any) -> str:
    """Return the kind of a public name: error, class, function or value."""
    if isinstance(value, type):
        return "error" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "value"


def limits() -> Iterator[str]:
    """Yield a table of the verdict's thresholds."""
    from netbottleneck.analysis import thresholds

    source = Path(str(thresholds.__file__)).read_text(encoding="utf-8")
    yield "| limit | value | meaning |\n| --- | --- | --- |"
    for text, name in re.findall(r"^# (.+)\n([A-Z_]+) = [\d._]+$", source, re.MULTILINE):
        yield f"| `{name}` | {getattr(thresholds, name):g} | {text.rstrip('.')} |"


SIMULATED = "The job of this example is simulated, with a known cause. The report is computed as for a recorded run."
RECORDED = "Measured: ranks in network namespaces of one machine with two cores. Their communication is real."


def scenario(name: str) -> Iterator[str]:
    """Yield the end of the report of a scenario of tests/scenarios, with its first seed."""
    sys.path.insert(0, str(ROOT / "tests" / "scenarios"))
    from scenario.judge import example

    yield f"{SIMULATED}\n\n```text\n{example(name)}```"


def recorded(name: str) -> Iterator[str]:
    """Yield the end of the report of a stored run of benchmarks/traces/verdicts."""
    from netbottleneck import Run

    text = Run(ROOT / "benchmarks" / "traces" / "verdicts" / f"{name}.jsonl.gz").text
    start = text.find("Rules: ")
    yield f"{RECORDED}\n\n```text\n{text[start if start >= 0 else text.index('Verdict: ') :].rstrip()}\n```"


MAKERS: Mapping[str, Callable[..., Iterator[str]]] = {
    "api": api,
    "commands": commands,
    "limits": limits,
    "recorded": recorded,
    "scenario": scenario,
    **results.MAKERS,
}


def fill(text: str) -> str:
    """Return a page with every mark replaced. Raises KeyError for an unknown name."""
    return MARK.sub(lambda found: "\n".join(MAKERS[found[1]](*found[2].split())), text)


def read(_app: Any, _page: str, text: list[str]) -> None:
    """Fill in a page before it is parsed."""
    text[0] = fill(text[0])


def again(app: Any, *_known: Any) -> set[str]:
    """Return the pages with generated text: code and data may have changed since the last build."""
    pages = app.env.found_docs
    return {page for page in pages if MARK.search(Path(app.env.doc2path(page)).read_text(encoding="utf-8"))}


def docstring(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Convert a docstring, plain text with `code`, to reStructuredText."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]+`)", line)
        parts = [f"`{part}`" if part.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", part) for part in parts]
        lines[number] = "".join(parts)


# Expansions of numpy's names for types, and the names.
NUMPY = (
    (re.compile(r"~?numpy[^|]*_Buffer \|.*?_NestedSequence\[complex \| bytes \| str\]"), "ArrayLike"),
    (re.compile(r"~?numpy\.ndarray\[.*?, ~?numpy\.dtype\[~?(typing\.)?Any\]\]"), "ndarray"),
)


def signature(*event: Any) -> tuple[Any, ...]:
    """Return a signature and its return type, with numpy's types by their names."""
    found = event[-2:]
    for pattern, name in NUMPY:
        found = tuple(pattern.sub(name, text) if text else text for text in found)
    return found


def setup(app: Any) -> dict[str, bool]:
    """Register this extension with Sphinx."""
    app.connect("source-read", read)
    app.connect("env-get-outdated", again)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True}
