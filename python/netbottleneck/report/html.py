"""report.html, a single file without scripts or links, and its short form for notebooks."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from netbottleneck.analysis.findings import Findings, Parts
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import text
from netbottleneck.trace.transports import MEANING
from netbottleneck.units import gbit, ms, nbytes, percent

BAR_WIDTH, BAR_HEIGHT, LABEL_WIDTH = 640, 22, 80
TOP_LAYERS = 20
KINDS = (
    ("compute", "compute"),
    ("hidden", "compute with hidden communication"),
    ("exposed", "exposed communication"),
    ("wait", "waiting for negotiation"),
    ("other", "other"),
)


def _environment() -> jinja2.Environment:
    def load(name: str) -> str:
        return resources.files("netbottleneck.report").joinpath(name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(ms=ms, gbit=gbit, percent=percent, nbytes=nbytes)
    return environment


def lengths(parts: Parts) -> dict[str, float]:
    """Return ns by kind, in the order of KINDS: they add up to the step."""
    return {
        "compute": parts.compute_ns - parts.hidden_ns,
        "hidden": parts.hidden_ns,
        "exposed": parts.exposed_ns,
        "wait": parts.wait_ns,
        "other": parts.other_ns,
    }


def _segments(parts: Parts, longest_ns: float) -> list[dict[str, Any]]:
    by_kind = lengths(parts)
    scale = BAR_WIDTH / longest_ns if longest_ns else 0.0
    found: list[dict[str, Any]] = []
    x = 0.0
    for kind, what in KINDS:
        width = by_kind[kind] * scale
        if width > 0:
            found.append(
                {"kind": kind, "x": round(x, 2), "width": round(width, 2), "what": f"{what}: {ms(by_kind[kind])}"}
            )
        x += width
    return found


def _context(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    longest_ns = max((parts.step_ns for parts in findings.parts.values()), default=0.0)
    bars = [
        {
            "name": name,
            "y": row * (BAR_HEIGHT + 8),
            "segments": _segments(parts, longest_ns),
            "step": ms(parts.step_ns),
        }
        for row, (name, parts) in enumerate(findings.parts.items())
    ]
    layers = sorted(findings.layers, key=lambda layer: -layer.exposed_ns)
    return {
        "f": findings,
        "trace": findings.trace,
        "verdict": verdict,
        "evidence": [
            (one, text.fired_words(one), text.saving_words(one), text.margin_words(one)) for one in verdict.evidence
        ],
        "secondary": text.secondary(verdict),
        "sentence": " ".join(text.sentences(findings)),
        "warnings": text.warnings(findings),
        "bars": bars,
        "kinds": KINDS,
        "bar_height": BAR_HEIGHT,
        "label_width": LABEL_WIDTH,
        "width": LABEL_WIDTH + BAR_WIDTH + 90,
        "height": len(bars) * (BAR_HEIGHT + 8),
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


def page(findings: Findings, verdict: Verdict) -> str:
    """The complete page."""
    return _environment().get_template("report.html.j2").render(_context(findings, verdict))


def fragment(findings: Findings, verdict: Verdict) -> str:
    """The sentence, the bars and the verdict."""
    return _environment().get_template("fragment.html.j2").render(_context(findings, verdict))
