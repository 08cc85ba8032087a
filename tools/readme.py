"""Updates the parts of pages that show the stored traces and study: `tools/readme.py`; --check: only compare.

A block of a page lies between `<!-- trace: NAME -->` and `<!-- end -->`; NAME is one of BLOCKS. The pictures of the
report and of the study, and the study's first figure, are written, too. README.md, the tutorial and the picture of the
report show REPLAY, the example report TRACE and STUDY, the pictures of the study STUDY.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from netbottleneck import Evidence
from netbottleneck.cli import what_if
from netbottleneck.cli.what_if import Source, parser
from netbottleneck.report import Run
from netbottleneck.report import what_if as report
from netbottleneck.study import replaying
from netbottleneck.study.evidence import page

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXAMPLE = ROOT / "docs" / "explanation" / "example.md"
TUTORIAL = ROOT / "docs" / "tutorial" / "ten-minutes.md"
PAGES = (README, EXAMPLE, TUTORIAL)
TRACE = ROOT / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
REPLAY = ROOT / "benchmarks" / "traces" / "replay.jsonl.gz"
STUDY = ROOT / "benchmarks" / "traces" / "quick-study.json"
FIGURE = ROOT / "docs" / "study-figure1.svg"
OPENING = ROOT / "docs" / "study.svg"
PICTURE = ROOT / "docs" / "report.svg"
STYLE = ROOT / "python" / "netbottleneck" / "report" / "style.css"
# Paragraphs of the report that the picture shows, by their first words; a table includes its title.
SHOWN = ("Run ", "   stock", "Parts of a step", "Achieved, ", "Step by transport", "Verdict: ")
WIDTH = 660  # of the pictures, whose text has 13 pixels
CONCLUSIONS = ("transports", "full use")  # the claims that the picture of the study shows
CARD = ("Of your ", "   stock", "Verdict: ")  # the same, of the blocks `card` and `verdict`
LINK = "2gbit/500mbit"  # of REPLAY
COLOURS = {"#": "#4caf50", "=": "#26a69a", "!": "#ef5350", ".": "#ffb300"}
BLOCK = re.compile(r"(<!-- trace: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _parts() -> list[str]:
    """The first sentences of the report of the replay, its bars and its verdict."""
    return [text for text in Run(REPLAY).text.rstrip().split("\n\n") if text.startswith(CARD)]


def _card(_run: Run) -> str:
    return "```text\n" + "\n\n".join(_parts()) + "\n```\n"


def _arms(_run: Run) -> str:
    """The lines of `netbottleneck replay` about each transport, without those about bytes."""
    run = Run(REPLAY)
    found = [line for line in replaying.lines(run, replaying.sent(run), LINK) if not line.startswith(" ")]
    return "```text\n...\n" + "\n...\n".join(found) + "\n...\n```\n"


def _verdict(_run: Run) -> str:
    """The same as the card, with marks where lines are left out."""
    return "```text\n" + "\n...\n".join(_parts()) + "\n```\n"


def _report(run: Run) -> str:
    """The report without its first sentence, which the page shows above it."""
    return f"```\n{run.text[run.text.index(f'Run {run.trace.id}') :]}```\n"


def _sentences(run: Run) -> list[str]:
    """The sentences of `what-if --target-scaling 0.9`."""
    args = parser().parse_args([str(run.path), "--target-scaling", "0.9"])
    return list(report.sentences(what_if.answer_all(args, Source(run.path, trace=run.trace))))


def _answers(run: Run) -> str:
    return "```\n" + "".join(f"{line}\n" for line in _sentences(run)) + "```\n"


def _predicted(_run: Run) -> str:
    """The first four of these sentences about the replay, and the rate that the scaling factor needs."""
    found = _sentences(Run(REPLAY))
    needed = next(line for line in found if " needs " in line)
    return "```text\n" + "\n".join([*found[:4], "...", needed, "..."]) + "\n```\n"


def _chain(_run: Run) -> str:
    """The chain of claims of the stored study, one sentence per claim."""
    claims = enumerate(Evidence.read(STUDY).claims, 1)
    return "".join(f"{number}. **{claim.title}**: {claim.verdict}\n" for number, claim in claims)


def conclusion(study: Evidence) -> str:
    """Return what the picture of the study shows, in the words of its claims."""
    verdicts = {claim.name: claim.verdict for claim in study.claims}
    return " ".join([f"{page.opening(study.cells).title}.", *(verdicts[name] for name in CONCLUSIONS)])


def _study(_run: Run) -> str:
    return f"![{conclusion(Evidence.read(STUDY))}]({OPENING.relative_to(ROOT).as_posix()})\n"


BLOCKS: Mapping[str, Callable[[Run], str]] = {
    "card": _card,
    "arms": _arms,
    "verdict": _verdict,
    "predicted": _predicted,
    "report": _report,
    "answers": _answers,
    "chain": _chain,
    "study": _study,
}


def render(text: str, run: Run) -> str:
    """Return the text with every block generated again. Raises KeyError for an unknown block."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](run) + found[3], text)


def shown(run: Run) -> Iterator[str]:
    """Yield the lines of the report that the picture shows."""
    table = False
    for paragraph in run.text[run.text.index(f"Run {run.trace.id}") :].rstrip().split("\n\n"):
        starts = paragraph.startswith(SHOWN)
        if starts or (table and paragraph.startswith((" ", "\n"))):
            yield from [*paragraph.splitlines(), ""]
        table = starts and not paragraph.startswith("Run ")


def picture(run: Run) -> str:
    """Return the picture: the lines of `shown` as in a terminal, with coloured bars."""
    lines = list(shown(run))[:-1]
    height = 18 * len(lines) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#1e1e1e"/>',
        '<g font-family="monospace" font-size="13" fill="#e0e0e0">',
    ]
    for number, line in enumerate(lines):
        parts.append(f'<text x="16" y="{18 * number + 26}">{_coloured(line)}</text>')
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _coloured(line: str) -> str:
    """Return a line as SVG text with no-break spaces, and bars in colour."""
    line = line.replace(" ", "\N{NO-BREAK SPACE}")
    runs = ["".join(run) for _, run in groupby(line)]
    if not any(len(run) > 3 and run[0] in COLOURS for run in runs):
        return escape(line)
    return "".join(
        f'<tspan fill="{COLOURS[run[0]]}">{escape(run)}</tspan>' if run[0] in COLOURS else escape(run) for run in runs
    )


def study_picture(study: Evidence) -> str:
    """Return the picture that opens the study's page, with its key and the page's style, on its own background."""
    shown = page.opening(study.cells)
    (picture,) = shown.pictures
    below = [_key(shown.key), *(escape(line) for line in shown.note.replace(". ", ".\n").splitlines())]
    height = picture.height + 20 * len(below) + 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img"'
        f' aria-label="{escape(conclusion(study))}">',
        f"<style>{escape(STYLE.read_text(encoding='utf-8'))}</style>",
        '<g class="nb nb-picture">',
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" style="fill:var(--paper)"/>',
        f'<text class="nb-head" x="16" y="24">{escape(shown.title)}</text>',
        f'<svg x="16" y="36" width="{WIDTH - 32}" height="{picture.height:g}" overflow="visible">{picture}</svg>',
    ]
    for number, line in enumerate(below):
        parts.append(f'<text x="16" y="{picture.height + 20 * number + 54:g}">{line}</text>')
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _key(key: Sequence[tuple[str, str]]) -> str:
    """Return a key as SVG text: a square in its colour, or of the class of its colour, before each label."""
    parts = []
    for kind, what in key:
        colour = f'style="fill:{kind}"' if kind.startswith("#") else f'class="nb-{kind}"'
        parts.append(f"<tspan {colour}>\N{BLACK SQUARE}</tspan> {escape(what)}")
    return ("\N{NO-BREAK SPACE}" * 3 + " ").join(parts)


def main() -> int:
    """Write or check. Returns 1 if --check finds a difference."""
    run = Run(TRACE)
    new = {page: render(page.read_text(encoding="utf-8"), run) for page in PAGES}
    new[PICTURE] = picture(Run(REPLAY))
    new[OPENING] = study_picture(Evidence.read(STUDY))
    if "--check" in sys.argv[1:]:
        old = [path for path, text in new.items() if path.read_text(encoding="utf-8") != text]
        for path in old:
            print(f"{path.relative_to(ROOT)} is not current: run tools/readme.py")
        return int(bool(old))
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")
    Evidence.read(STUDY).draw(1).write(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
