"""report.html, a single file without scripts or links, and its short form for notebooks."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from netbottleneck.analysis.findings import Findings
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import pictures, text
from netbottleneck.report.pictures import Recorded
from netbottleneck.trace.transports import MEANING
from netbottleneck.units import gbit, ms, nbytes, percent

TOP_LAYERS = pictures.TOP_LAYERS


def environment() -> jinja2.Environment:
    """Templates and style of this package; text is escaped."""

    def load(name: str) -> str:
        return resources.files("netbottleneck.report").joinpath(name).read_text(encoding="utf-8")

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters.update(ms=ms, gbit=gbit, percent=percent, nbytes=nbytes)
    return found


def _context(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    layers = sorted(findings.layers, key=lambda layer: -layer.exposed_ns)
    return {
        "f": findings,
        "trace": findings.trace,
        "verdict": verdict,
        "tiles": pictures.tiles(findings),
        "evidence": [
            (one, text.fired_words(one), text.saving_words(one), text.margin_words(one)) for one in verdict.evidence
        ],
        "secondary": text.secondary(verdict),
        "sentence": " ".join(text.sentences(findings)),
        "warnings": text.warnings(findings),
        "split": pictures.split(findings),
        "layers": layers[:TOP_LAYERS],
        "layers_left": len(layers[TOP_LAYERS:]),
        "layers_left_ns": sum(layer.exposed_ns for layer in layers[TOP_LAYERS:]),
        "wire_lines": [*text.beyond_the_link(findings), *text.costs(findings), *text.algorithms(findings)],
        "nccl": [(mean, text.nccl_cells(mean)) for mean in findings.nccl[:TOP_LAYERS]],
        "nccl_columns": text.NCCL_COLUMNS,
        "nccl_title": text.NCCL_TITLE,
        "not_probed": "" if findings.achievable else text.why_not_probed(findings),
        "meanings": {name: MEANING[name] for name in findings.times if name in MEANING},
        "pairs": {pair.other: pair for pair in findings.comparisons},
    }


def page(findings: Findings, verdict: Verdict, recorded: Recorded | None = None) -> str:
    """The complete page. recorded: what it draws beside the findings."""
    context = _context(findings, verdict)
    context["causes"] = pictures.causes(findings, verdict)
    context["figures"] = pictures.figures(findings, recorded or Recorded())
    connected = (recorded or Recorded()).connected
    context["connections"] = text.connection_rows(connected)
    context["connection_columns"] = text.CONNECTION_COLUMNS
    context["connection_lines"] = text.connection_lines(connected)
    context["connections_title"] = text.CONNECTIONS_TITLE
    return environment().get_template("report.html.j2").render(context)


def fragment(findings: Findings, verdict: Verdict) -> str:
    """The sentence, the bars and the verdict."""
    return environment().get_template("fragment.html.j2").render(_context(findings, verdict))
