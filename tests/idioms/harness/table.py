"""The outcomes as a table: printed while they come, in the end, and as the page of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.modes import MODES, UNTOUCHED
from harness.pairs import Outcome

# What the package says of a model that it does not serve.
LEFT_ALONE = re.compile(
    r"left alone|leaves? .* alone|untouched|No transport takes turns|all further steps use", re.IGNORECASE
)
SHOWN = 3  # differences of an outcome, where --verbose does not ask for all
FAILURES = ("CRASH", "HANG", "WRONG", "SILENT", "LEFT ALONE")
UNEQUAL = "unequal"  # and listed so
RANKING = (*FAILURES, UNEQUAL, "left alone", "skipped", "equal")
PAGE = """# Training loops that were compared

`make idioms` generates this page from the outcomes of `tests/idioms/run.py`. Each row is a way to
write a training loop, run untouched and in each mode, with 2 and 3 ranks, with small and large
gradients. After each step it compares weights, gradients whenever they are read, optimizer state,
buffers, random states and losses bit for bit. One exception: with 3 ranks and one of our
transports, averaged gradients must be within 2·n·u·Σ|g|/n (u: the unit roundoff; each of the two
averages is within half of that of the exact one).

"""


def _together(lines: list[str]) -> list[str]:
    """Return lines that begin with `rank N: `, those that ranks share once."""
    ranks: dict[str, list[str]] = {}
    for line in lines:
        rank, _, text = line.partition(": ")
        ranks.setdefault(text, []).append(rank)
    return [f"{', '.join(who)}: {text}" for text, who in ranks.items()]


@dataclass
class Table:
    """Outcomes by idiom, mode, ranks and width."""

    known: dict[str, tuple[str, str]]
    verbose: bool = False
    unequal: dict[str, str] = field(default_factory=dict)
    may_be_left_alone: set[tuple[str, str]] = field(default_factory=set)
    outcomes: dict[tuple[str, str, int, str], tuple[str, Outcome]] = field(default_factory=dict)

    def add(self, item: tuple[str, str], size: int, mode: str, outcome: Outcome) -> None:
        """Take an outcome, and print its line."""
        name, width = item
        verdict = outcome.verdict
        left_alone = [line for line in outcome.notes if LEFT_ALONE.search(line)]
        if verdict == "equal" and left_alone:
            listed = (name, mode) in self.may_be_left_alone
            verdict = "left alone" if listed else "LEFT ALONE"
        elif verdict == "equal" and outcome.lack:
            verdict = "SILENT"
            outcome.differences.append(f"all ranks: {outcome.lack}, and no line says why")
        if verdict == "WRONG" and name in self.unequal:
            verdict = UNEQUAL
            outcome.notes.append(f"listed: {self.unequal[name]}")
        self.outcomes[name, mode, size, width] = verdict, outcome
        print(f"{verdict:10} {name} {mode} {size} {width} {outcome.seconds:.1f} s", flush=True)
        shown = [
            *_together(outcome.differences)[: None if self.verbose else SHOWN],
            outcome.skipped,
            *(outcome.notes if self.verbose or verdict in (*FAILURES, UNEQUAL) else left_alone[:1]),
        ]
        for line in filter(None, shown):
            print(f"           {line[:300]}")
        if self.verbose and verdict in FAILURES:
            print(outcome.detail)

    def _rows(self) -> dict[str, dict[str, str]]:
        """Return, by idiom and mode, the worst verdict, and what it holds for."""
        rows: dict[str, dict[str, str]] = {}
        for (name, mode, size, width), (verdict, _) in self.outcomes.items():
            row = rows.setdefault(name, {})
            before = row.get(mode, "equal")
            where = f" ({size} ranks, {width})" if verdict in FAILURES else ""
            row[mode] = min(before, verdict + where, key=lambda text: RANKING.index(re.sub(r" \(.*", "", text)))
        return rows

    def text(self) -> str:
        """Return the table as lines: idiom, then modes grouped by verdict."""
        lines = []
        for name, row in self._rows().items():
            groups: dict[str, list[str]] = {}
            for mode, verdict in row.items():
                if mode != UNTOUCHED or verdict != "equal":
                    groups.setdefault(verdict, []).append(mode)
            lines.append(f"{name:32} | " + "; ".join(f"{verdict}: {', '.join(who)}" for verdict, who in groups.items()))
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the page."""
        shown = [mode for mode in MODES if mode != UNTOUCHED and any(mode in row for row in self._rows().values())]
        head = ["| idiom | " + " | ".join(shown) + " |", "| --- |" + " --- |" * len(shown)]
        body, left_alone = [], []
        for name, row in self._rows().items():
            title = self.known.get(name, ("", name))[1]
            skipped = row.get(UNTOUCHED) == "skipped"
            cells = ["skipped" if skipped else row.get(mode, "–") for mode in shown]
            body.append(f"| {title} (`{name}`) | " + " | ".join(cells) + " |")
            lines = [
                line
                for (idiom, *_), (verdict, outcome) in self.outcomes.items()
                if idiom == name and verdict.lower() == "left alone"
                for line in outcome.notes
                if LEFT_ALONE.search(line)
            ]
            reasons = [o.skipped for (idiom, *_), (_, o) in self.outcomes.items() if idiom == name and o.skipped]
            left_alone += [f"* `{name}`: {line}" for line in dict.fromkeys([*lines, *reasons])]
        text = PAGE + "\n".join([*head, *body]) + "\n"
        if left_alone:
            text += (
                "\nWhat the user reads of a row that is left alone, or why it was skipped:\n\n"
                + "\n".join(left_alone)
                + "\n"
            )
        return text + f"\n{self.last_line()}\n"

    @property
    def failed(self) -> int:
        """Return how many outcomes must not be."""
        return sum(verdict in FAILURES for verdict, _ in self.outcomes.values()) + len(self.listed_and_equal)

    @property
    def listed_and_equal(self) -> list[str]:
        """Return the idioms that are listed as unequal, ran in a mode, and were equal in each."""
        found: dict[str, set[str]] = {}
        for (name, mode, *_), (verdict, _) in self.outcomes.items():
            if name in self.unequal and mode != UNTOUCHED:
                found.setdefault(name, set()).add(verdict)
        return [name for name, verdicts in found.items() if UNEQUAL not in verdicts]

    def last_line(self) -> str:
        """Return `N passed, N failed`, and what was skipped."""
        skipped = sum(verdict == "skipped" for verdict, _ in self.outcomes.values())
        compared = [mode for (_, mode, *_), _ in self.outcomes.items() if mode != UNTOUCHED]
        failed_here = sum(v in FAILURES for (_, m, *_), (v, _) in self.outcomes.items() if m != UNTOUCHED)
        unequal = sum(verdict == UNEQUAL for verdict, _ in self.outcomes.values())
        counts = f"{len(compared) - failed_here - unequal} passed, {self.failed} failed"
        return f"{counts}, {skipped} skipped" if skipped else counts
