"""Reports of a run: Run, and the files written to a run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from netbottleneck.analysis import usage
from netbottleneck.analysis import verdict as rules
from netbottleneck.analysis.findings import Findings, find
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import exporters, html, summary, text
from netbottleneck.report.html import Curve, Recorded
from netbottleneck.trace import kineto, model, ring_reader
from netbottleneck.trace import model as tr

__all__ = ["Run"]


PAGE = "report.html"


class Run:
    """A recorded run: a run folder, a single trace file (*.jsonl.gz), or the traces of torch.profiler in a folder.

    Raises FileNotFoundError if it does not exist, ValueError naming the file for an unknown version.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._folder = self.path if self.path.is_dir() else None
        profiled = kineto.files(self.path)
        if profiled:
            self.trace: tr.Trace = kineto.load(profiled)
        elif self._folder or not self.path.exists():
            self.trace = ring_reader.load(self.path)
        else:
            self.trace = tr.read(self.path)

    @cached_property
    def findings(self) -> Findings:
        """The findings of the run."""
        return find(self.trace)

    @cached_property
    def verdict(self) -> Verdict:
        """Code, reason, next step, and the evidence of every rule."""
        return rules.decide(self.findings, self._predicted, self.hosts)

    @property
    def _predicted(self) -> rules.Predicted:
        """Savings by the what-if engine, which needs the C module."""
        try:
            from netbottleneck.whatif import sweeps
        except ImportError:
            return rules.Predicted(refused="the what-if engine is not available: the C module is missing")
        return sweeps.savings(self.findings.trace, self.findings.base, self.findings.link_bps)

    @cached_property
    def hosts(self) -> tuple[usage.HostUse, ...]:
        """Use of each host's interfaces and cores, where recorded."""
        return usage.hosts(self.trace, model.of_run(self._folder)) if self._folder else ()

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json."""
        return summary.summary(self.findings, self.verdict, self.hosts)

    @property
    def text(self) -> str:
        """Content of report.txt."""
        return text.text(self.findings, self.verdict, self.hosts)

    @cached_property
    def html(self) -> str:
        """Content of report.html: one page with pictures, without links or scripts."""
        recorded = Recorded(self.hosts, model.of_run(self._folder) if self._folder else (), self._curve)
        return html.page(self.findings, self.verdict, recorded)

    @property
    def _curve(self) -> Curve:
        """Predicted steps by rate of the link, which need the C module."""
        try:
            from netbottleneck.report import what_if
        except ImportError:
            return Curve(missing="the what-if engine is not available: the C module is missing")
        return what_if.curve(self.findings)

    @property
    def _page(self) -> Path | None:
        page = self.path / PAGE
        return page if self._folder is not None and page.exists() else None

    def show(self, console: Console | None = None) -> None:
        """Print the report, and the path of its HTML page."""
        text.show(self.findings, self.verdict, console, self.hosts, self._page)

    def write_all(self, folder: Path | str | None = None) -> list[Path]:
        """Write every file of the report into `folder` (default: the run's own) and return their paths.

        If the run has rings, their readable form goes to ranks/ of the run's own folder.
        """
        if folder is None and self._folder is None:
            raise ValueError(f"{self.path} is a single trace file: pass the folder to write to")
        target = Path(folder) if folder is not None else self.path
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in {
            "summary.json": json.dumps(self.summary, indent=1) + "\n",
            "layers.csv": summary.layers_csv(self.findings),
            "collectives.csv": summary.collectives_csv(self.trace),
            "report.txt": self.text,
            PAGE: self.html,
        }.items():
            (target / name).write_text(content, encoding="utf-8")
            written.append(target / name)
        summary.write_chrome_trace(self.trace, target / "trace.json.gz")
        written.append(target / "trace.json.gz")
        (target / "ranks").mkdir(exist_ok=True)
        for rank in self.trace.ranks:
            path = target / "ranks" / f"{rank.rank}.jsonl.gz"
            tr.write(self.trace.of_rank(rank.rank), path)
            written.append(path)
        return written

    def export(self, name: str, place: str = "") -> str:
        """Send the numbers to an exporter, such as "tensorboard", and return where they went.

        Raises ValueError for an unknown exporter, ImportError naming the package that is missing.
        """
        return exporters.export(exporters.numbers(self.summary, self.trace), name, place)

    def _repr_html_(self) -> str:
        return html.fragment(self.findings, self.verdict)
