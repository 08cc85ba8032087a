"""layers.csv and collectives.csv: a row each, units in the header, an empty cell for what is not known."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from netbottleneck.analysis.findings import Findings
from netbottleneck.trace.model import Collective, Trace

LAYER_COLUMNS = (
    "layer",
    "parameters",
    "gradient_bytes",
    "buckets",
    "forward_ns",
    "backward_ns",
    "exposed_ns_attributed_by_bytes",
)
COLLECTIVE_COLUMNS = (
    "rank",
    "step",
    "transport",
    "name",
    "key",
    "round",
    "comm",
    "kind",
    "dtype",
    "priority",
    "part",
    "parts",
    "phase",
    "bucket",
    "device",
    "algorithm",
    "tensor_bytes",
    "wire_bytes",
    "submit_ns",
    "agreed_ns",
    "start_ns",
    "first_byte_ns",
    "done_ns",
    "error",
    "lane_bytes_sent",
)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return buffer.getvalue()


def layers_csv(findings: Findings) -> str:
    """Means a step under the base transport."""
    return _csv(
        LAYER_COLUMNS,
        (
            (
                layer.name,
                layer.parameters,
                layer.bytes,
                " ".join(map(str, layer.buckets)),
                None if layer.forward_ns is None else round(layer.forward_ns),
                round(layer.backward_ns),
                round(layer.exposed_ns),
            )
            for layer in findings.layers
        ),
    )


def collectives_csv(trace: Trace) -> str:
    """Every operation of every rank; lane_bytes_sent: lane:bytes pairs."""

    def row(operation: Collective) -> list[object]:
        known = {column: getattr(operation, column) for column in COLLECTIVE_COLUMNS[:-1]}
        known["key"] = f"{operation.key:016x}"
        lanes = " ".join(f"{lane}:{sent}" for lane, sent, _ in operation.lanes or ())
        return [*known.values(), lanes]

    return _csv(COLLECTIVE_COLUMNS, map(row, trace.collectives))
