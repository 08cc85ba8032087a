"""Writes what README.md says of the stored trace and study: `tools/readme.py`; with --check says whether it is current.

The study's first figure is written, too. A block stands between `<!-- trace: NAME -->` and `<!-- end -->`; NAME is
one of BLOCKS.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from netbottleneck import Evidence
from netbottleneck.cli.what_if import questions
from netbottleneck.cli.what_if.source import Source
from netbottleneck.cli.what_if.words import parser
from netbottleneck.report import Run, answers
from netbottleneck.report.words import sentences

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TRACE = ROOT / "benchmarks" / "traces" / "resnet50-2gbit-500mbit.jsonl.gz"
STUDY = ROOT / "benchmarks" / "traces" / "quick-study.json"
FIGURE = ROOT / "docs" / "study-figure1.svg"
BLOCK = re.compile(r"(<!-- trace: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _sentence(run: Run) -> str:
    return f"> {' '.join(sentences(run.findings))}\n"


def _report(run: Run) -> str:
    """The report without the sentence, which stands above it."""
    return f"```\n{run.text[run.text.index(f'Run {run.trace.id}') :]}```\n"


def _answers(run: Run) -> str:
    """What `what-if --target-scaling 0.9` says in words."""
    asked = parser().parse_args([str(run.path), "--target-scaling", "0.9"])
    told = questions.ask(asked, Source(run.path, trace=run.trace))
    return "```\n" + "".join(f"{line}\n" for line in answers.sentences(told)) + "```\n"


def _chain(_run: Run) -> str:
    """What the stored study says, a sentence a step."""
    steps = enumerate(Evidence.read(STUDY).steps, 1)
    return "".join(f"{number}. **{step.title}** {step.verdict}\n" for number, step in steps)


BLOCKS: Mapping[str, Callable[[Run], str]] = {
    "sentence": _sentence,
    "report": _report,
    "answers": _answers,
    "chain": _chain,
}


def render(text: str, run: Run) -> str:
    """Return the text with every block made anew. Raises KeyError for a block of another name."""
    return BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]](run) + found[3], text)


def main() -> int:
    """Write, or check; 1 where --check finds a difference."""
    text = README.read_text(encoding="utf-8")
    new = render(text, Run(TRACE))
    if "--check" in sys.argv[1:]:
        print("README.md is current" if new == text else "README.md is not current: run tools/readme.py")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    Evidence.read(STUDY).draw(1).write(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
