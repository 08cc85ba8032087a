"""Exporters: the numbers of summary.json, and the length of each step, to the tools that a team already watches.

A library is imported when its exporter runs, never before. Every number is taken from the summary. The tables of a run,
its rows rather than its numbers, go to Parquet and pandas.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from netbottleneck.report.summary import COLLECTIVE_COLUMNS, collective_cells
from netbottleneck.trace.files import write_text
from netbottleneck.trace.model import Interval, Step, Trace

Summary = Mapping[str, Any]
Labelled = tuple[dict[str, str], float | None]
PREFIX = "netbottleneck"
DESCRIBING = (
    "source",
    "fired",
    "at_most",
    "transport",
)  # labels that say what a number is; no two numbers differ in them alone
MLFLOW_BATCH = 1000  # most metrics of one request
MLFLOW_REFUSES = re.compile(r"[^\w./ -]")  # characters that the name of a metric must not contain


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one kind. name: in the style of Prometheus, with its unit; values: (labels, value) of a summary."""

    name: str
    unit: str
    help: str
    values: Callable[[Summary], Iterator[Labelled]]


@dataclass(frozen=True, slots=True)
class Number:
    """One exported number, with its labels."""

    family: Family
    labels: Mapping[str, str]
    value: float

    @property
    def path(self) -> str:
        """Name for tools without labels: netbottleneck/step_seconds/stock/0.5.

        It has no label that describes the number. No path is a folder of another: MLflow stores paths as files.
        """
        own = [text for label, text in self.labels.items() if label not in DESCRIBING]
        return "/".join([PREFIX, self.family.name, *own])


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a run. columns: type (int, float, str or bool) by name; a unit is part of the name. None: unknown."""

    columns: Mapping[str, type]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> list[Any]:
        """Return the cells of a column. Raises ValueError for an unknown name."""
        place = list(self.columns).index(name)
        return [row[place] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is exported of a run. steps: by arm, (index, seconds) of each recorded step, the median over its ranks.

    started_s: wall clock at the begin of the run. tables: computes the run's tables by name.
    """

    id: str
    verdict: str
    model: str
    started_s: float
    numbers: tuple[Number, ...]
    steps: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    tables: Callable[[], Mapping[str, Table]] = dict


def _verdict(summary: Summary) -> Iterator[Labelled]:
    yield {"code": summary["verdict"]["code"]}, 1.0


def _cause_change(summary: Summary) -> Iterator[Labelled]:
    """The last change of the cause, of a run in progress alone: a report judges all steps at once."""
    change = summary.get("cause_change")
    if change:
        yield {"code": change["code"], "before": change["before"]}, float(change["step"])


def _size(summary: Summary) -> Iterator[Labelled]:
    yield {}, float(summary["size"])


def _steps(summary: Summary) -> Iterator[Labelled]:
    for arm, found in summary["steps"].items():
        for quantile, name in (("0.1", "p10_s"), ("0.5", "median_s"), ("0.9", "p90_s")):
            yield {"arm": arm, "quantile": quantile}, found[name]


def _parts(summary: Summary) -> Iterator[Labelled]:
    for arm, split in summary["split"].items():
        for name, value in split.items():
            if name.endswith("_s"):
                yield {"arm": arm, "part": name.removesuffix("_s")}, value


def _bandwidth(summary: Summary) -> Iterator[Labelled]:
    for arm, found in summary["bandwidth"].items():
        yield {"arm": arm, "over": "transfer"}, found["active_bits_per_s"]
        yield {"arm": arm, "over": "step"}, found["average_bits_per_s"]


def _utilization(summary: Summary) -> Iterator[Labelled]:
    for arm, found in summary["bandwidth"].items():
        yield {"arm": arm, "over": "transfer"}, found["active_utilization"]
        yield {"arm": arm, "over": "step"}, found["average_utilization"]


def _probe(summary: Summary) -> Iterator[Labelled]:
    probe = summary["probe"] or {}
    for point in probe.get("points", ()):
        yield {"streams": str(point["streams"]), "transport": str(probe["transport"])}, point["bits_per_s"]


def _ends(labels: dict[str, str], interval: Mapping[str, float | None]) -> Iterator[Labelled]:
    """The value and the ends of an interval."""
    for end in ("value", "low", "high"):
        yield labels | {"end": end}, interval[end]


def _savings(summary: Summary) -> Iterator[Labelled]:
    for one in summary["verdict"]["evidence"]:
        if one["applies"] and one["saving_s"] is not None:
            labels = {"cause": one["cause"], "source": one["source"]}
            labels |= {name: str(one[name]).lower() for name in ("fired", "at_most")}
            yield from _ends(labels, one["saving_s"])


def _gains(summary: Summary) -> Iterator[Labelled]:
    for pair in summary["comparisons"]:
        if pair["gain"] is not None and pair["enough"]:
            yield from _ends({"arm": pair["other"]}, pair["gain"])


def _scaling(summary: Summary) -> Iterator[Labelled]:
    for arm, found in summary["scaling"].items():
        yield {"arm": arm}, found["factor"]


def _late(summary: Summary) -> Iterator[Labelled]:
    for one in summary["late"]:
        yield {"rank": str(one["rank"])}, one["others_wait_s"]


FAMILIES = (
    Family("verdict_info", "", "The verdict of the run; always 1.", _verdict),
    Family("cause_change_step", "", "Step since which the verdict of a run in progress has its code.", _cause_change),
    Family("ranks", "", "Number of ranks.", _size),
    Family("step_seconds", "s", "Length of a step, by quantile.", _steps),
    Family("part_seconds", "s", "Mean length of a part of the step; skew: waiting for the slowest rank.", _parts),
    Family("bandwidth_bits_per_second", "bit/s", "busbw, one way, in transfer or over the step.", _bandwidth),
    Family("link_utilization_ratio", "1", "Bandwidth over the rate of the link.", _utilization),
    Family("probe_bits_per_second", "bit/s", "Achievable bandwidth by number of network streams.", _probe),
    Family("saving_seconds", "s", "What a step would save without a cause; at most, where at_most is true.", _savings),
    Family("gain_ratio", "1", "Part of the base's step that an arm saves, from paired blocks.", _gains),
    Family("scaling_factor", "1", "T_1 / T_n for equal work per rank.", _scaling),
    Family("late_seconds", "s", "How long the mean other rank waits for a rank in a step.", _late),
)


def _by_step(trace: Trace) -> dict[str, tuple[tuple[int, float], ...]]:
    lengths: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for step in trace.steps:
        lengths[step.arm][step.index].append(step.duration_ns)
    return {
        arm: tuple((index, median(values) / 1e9) for index, values in sorted(own.items()))
        for arm, own in lengths.items()
    }


def numbers(summary: Summary, trace: Trace) -> Numbers:
    """The numbers of a run; unknown ones are left out."""
    found = tuple(
        Number(family, labels, float(value))
        for family in FAMILIES
        for labels, value in family.values(summary)
        if value is not None
    )
    about = summary["id"], summary["verdict"]["code"], summary["model"], summary["started_wall_ns"] / 1e9
    return Numbers(*about, found, _by_step(trace), lambda: tables(summary, trace))


# Tables: one row for each step, operation, layer, ready gradient and wait. Times are ns of rank 0's monotonic clock.

STEP_COLUMNS = {
    **{"rank": int, "step": int, "block": int, "arm": str, "sampled": bool},
    **dict.fromkeys(("begin_ns", "end_ns", "duration_ns", "forward_ns", "optimizer_ns"), int),
    **dict.fromkeys(("evaluation_ns", "checkpoints_ns", "cpu_ns"), int),
}
TEXTS = ("transport", "name", "key", "kind", "dtype", "phase", "algorithm", "state", "lane_bytes_sent")
LAYER_COLUMNS = {
    **{"layer": str, "parameters": int, "gradient_bytes": int, "buckets": str},
    **dict.fromkeys(("forward_s", "backward_s", "exposed_communication_s"), float),
}
READY_COLUMNS = {"rank": int, "step": int, "parameter": int, "name": str, "gradient_bytes": int, "ready_ns": int}
WAIT_COLUMNS = {"rank": int, "step": int, "key": str, "begin_ns": int, "end_ns": int}


def _sum_ns(spans: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in spans)


def _parts_ns(step: Step, recorder: str) -> tuple[int | None, ...]:
    """Return the sums of a step's forward passes, optimizers, evaluations and checkpoints; None: not recorded.

    Each step has the first two. Evaluations are recorded where forward passes are; torch records no checkpoints and
    does not tell evaluations from forward passes.
    """
    known = (step.forward, step.optimizer, not recorder and (step.forward or step.evaluation), not recorder)
    parts = (step.forward, step.optimizer, step.evaluation, step.checkpoints)
    return tuple(_sum_ns(spans) if seen else None for seen, spans in zip(known, parts, strict=True))


def _step_rows(trace: Trace) -> Iterator[tuple[Any, ...]]:
    for one in trace.steps:
        about = one.rank, one.index, one.block, str(one.arm), one.sampled, one.begin_ns, one.end_ns, one.duration_ns
        yield *about, *_parts_ns(one, trace.recorder), one.cpu_ns


def _layer_rows(summary: Summary) -> Iterator[tuple[Any, ...]]:
    for one in summary["layers"]:
        times = (one[name] for name in ("forward_s", "backward_s", "exposed_communication_s"))
        yield one["name"], one["parameters"], one["bytes"], " ".join(map(str, one["buckets"])), *times


def _ready_rows(trace: Trace) -> Iterator[tuple[Any, ...]]:
    for step in trace.steps:
        for index, ready_ns in step.grad_ready:
            own = trace.parameters[index] if index < len(trace.parameters) else None
            yield step.rank, step.index, index, own and own.name, own and own.bytes, ready_ns


def tables(summary: Summary, trace: Trace) -> dict[str, Table]:
    """The tables of a run: steps, collectives, layers, ready (gradients) and waits (of the training thread)."""
    collective_columns = {name: str if name in TEXTS else int for name in COLLECTIVE_COLUMNS}
    waits = (
        (step.rank, step.index, f"{key:016x}" if key else None, begin_ns, end_ns)
        for step in trace.steps
        for key, begin_ns, end_ns in step.waits
    )
    return {
        "steps": Table(STEP_COLUMNS, tuple(_step_rows(trace))),
        "collectives": Table(collective_columns, tuple(tuple(collective_cells(one)) for one in trace.collectives)),
        "layers": Table(LAYER_COLUMNS, tuple(_layer_rows(summary))),
        "ready": Table(READY_COLUMNS, tuple(_ready_rows(trace))),
        "waits": Table(WAIT_COLUMNS, tuple(waits)),
    }


def frames(found: Mapping[str, Table]) -> dict[str, Any]:
    """The tables as pandas.DataFrame; an unknown cell is pandas.NA. Raises ImportError if pandas is missing."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ImportError(f"data frames need: pip install pandas ({error})") from error

    dtypes = {int: "Int64", float: "Float64", str: "string", bool: "boolean"}
    return {
        name: pd.DataFrame(
            {column: pd.array(table.column(column), dtype=dtypes[kind]) for column, kind in table.columns.items()}
        )
        for name, table in found.items()
    }


# Parquet: a file for each table, with the run's id in its metadata.


def _parquet(found: Numbers, place: str) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
    folder = Path(place or f"{found.id}.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in found.tables().items():
        schema = pa.schema([(column, types[kind]) for column, kind in table.columns.items()])
        cells = {column: table.column(column) for column in table.columns}
        whole = pa.table(cells, schema=schema.with_metadata({"netbottleneck.run": found.id}))
        pq.write_table(whole, folder / f"{name}.parquet")
    return str(folder)


# Prometheus: a text file, for the textfile collector of its node exporter.


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def prometheus_text(found: Numbers) -> str:
    """The numbers in Prometheus' text format, version 0.0.4."""
    lines = []
    for family in FAMILIES:
        own = [one for one in found.numbers if one.family is family]
        if own:
            lines.append(f"# HELP {PREFIX}_{family.name} {family.help}")
            lines.append(f"# TYPE {PREFIX}_{family.name} gauge")
        for one in own:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in {"run": found.id, **one.labels}.items())
            lines.append(f"{PREFIX}_{family.name}{{{labels}}} {one.value!r}")
    return "\n".join(lines) + "\n"


def _prometheus(found: Numbers, place: str) -> str:
    path = Path(place or f"{PREFIX}.prom")
    write_text(path, prometheus_text(found))  # a collector never reads a part of the file
    return str(path)


# TensorBoard: an event file. The numbers of the run are at step 0; steps are at their index.


def _tensorboard(found: Numbers, place: str) -> str:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as Values
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = place or f"runs/{found.id}"
    writer = EventFileWriter(folder)
    points = [(one.path, 0, one.value) for one in found.numbers]
    points += [(f"{PREFIX}/step/{arm}", at, length) for arm, own in found.steps.items() for at, length in own]
    for name, at, value in points:
        row = Values(value=[Values.Value(tag=name, simple_value=value)])
        writer.add_event(Event(wall_time=found.started_s, step=at, summary=row))
    writer.close()
    return folder


# MLflow: a run of an experiment, beside an active run of the script. MLflow's own variables name the server.

MLFLOW_DEFAULT = "0"  # the id of MLflow's default experiment


def _mlflow(found: Numbers, place: str) -> str:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient()  # the script's own run and experiment stay as they are
    tags = {f"{PREFIX}.verdict": found.verdict, f"{PREFIX}.model": found.model}
    run_id = str(client.create_run(_experiment(client, place), run_name=found.id, tags=tags).info.run_id)
    status = "FAILED"
    try:
        at_ms = int(1000 * found.started_s)
        points = [(one.path, one.value, 0) for one in found.numbers]
        points += [(f"{PREFIX}/step/{arm}", length, at) for arm, own in found.steps.items() for at, length in own]
        rows = [Metric(MLFLOW_REFUSES.sub("-", name), value, at_ms, at) for name, value, at in points]
        for begin in range(0, len(rows), MLFLOW_BATCH):
            client.log_batch(run_id, metrics=rows[begin : begin + MLFLOW_BATCH])
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status)
    return run_id


def _experiment(client: Any, place: str) -> str:
    """Return the id of an experiment, created if there is none; without a name, of MLflow's default.

    mlflow.set_experiment sets the variable of the id.
    """
    number = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
    name = place or ("" if number else os.environ.get("MLFLOW_EXPERIMENT_NAME", ""))
    if not name:
        return number or MLFLOW_DEFAULT
    known = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if known is None else known.experiment_id)


# Weights & Biases: a run of a project, beside those of the script. WANDB_MODE=offline keeps it in a folder.

# From this version on, wandb.init can make a run beside an active one. An older one returns or finishes that run.
WANDB_BESIDE = (0, 19, 10)


def _wandb(found: Numbers, place: str) -> str:
    import wandb

    beside = tuple(map(int, re.findall(r"\d+", wandb.__version__)[:3])) >= WANDB_BESIDE
    if wandb.run is not None and not beside:
        needed = ".".join(map(str, WANDB_BESIDE))
        raise RuntimeError(f"a run of this process is active: finish it before, or install wandb {needed} or later")
    config = {"model": found.model, "verdict": found.verdict}
    more = {"reinit": "create_new"} if beside else {}
    by_index: dict[int, dict[str, float]] = defaultdict(dict)
    for arm, own in found.steps.items():
        for at, length in own:
            by_index[at][f"{PREFIX}/step/{arm}"] = length
    run, code = wandb.init(project=place or PREFIX, name=found.id, job_type=PREFIX, config=config, **more), 1
    try:
        for at, values in sorted(by_index.items()):
            run.log(values, step=at)
        run.summary.update({one.path: one.value for one in found.numbers} | {f"{PREFIX}/verdict": found.verdict})
        code = 0
    finally:
        run.finish(exit_code=code)
    return str(run.name)


# OpenTelemetry: gauges of the program's own meter provider, else once over OTLP to where its own variables say.

OTLP_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OTLP_PATH = "/v1/metrics"
OTLP_TIMEOUTS = ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
OTLP_TIMEOUT_S = 3  # unless a variable has another: a frame of a run in progress waits for it


def _opentelemetry(found: Numbers, place: str) -> str:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    provider: Any = metrics.get_meter_provider()
    if isinstance(provider, MeterProvider):
        _set_gauges(provider, found)
        provider.force_flush()
        return "the program's meter provider"
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    limit_s = None if any(map(os.environ.get, OTLP_TIMEOUTS)) else OTLP_TIMEOUT_S
    exporter = OTLPMetricExporter(endpoint=_endpoint(place), timeout=limit_s)
    try:
        sent = exporter.export(_points(found))
    finally:
        exporter.shutdown()
    named = (place, *map(os.environ.get, OTLP_VARIABLES), "http://localhost:4318")
    to = next(one for one in named if one)
    if sent is not MetricExportResult.SUCCESS:
        raise ConnectionError(f"{to} did not take the metrics")
    return to


def _endpoint(place: str) -> str | None:
    """Return where to post the metrics: OTLP's usual path follows a place without one. None: as the variables say."""
    parts = urlsplit(place)
    whole = parts._replace(path=OTLP_PATH) if parts.netloc and parts.path in ("", "/") else parts
    return whole.geturl() or None


def _points(found: Numbers) -> Any:
    """The numbers as gauges, without a meter provider: a process keeps a part of each provider until its end."""
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    gauges, now_ns = [], time.time_ns()
    for family in FAMILIES:
        own = [one for one in found.numbers if one.family is family]
        points = [sdk.NumberDataPoint({"run": found.id, **one.labels}, 0, now_ns, one.value) for one in own]
        if points:
            gauges.append(sdk.Metric(f"{PREFIX}.{family.name}", family.help, family.unit, sdk.Gauge(points)))
    scope = sdk.ScopeMetrics(InstrumentationScope(PREFIX), gauges, "")
    return sdk.MetricsData([sdk.ResourceMetrics(Resource.create({}), [scope], "")])


def _set_gauges(provider: Any, found: Numbers) -> None:
    meter = provider.get_meter(PREFIX)
    for family in FAMILIES:
        gauge = meter.create_gauge(f"{PREFIX}.{family.name}", unit=family.unit, description=family.help)
        for one in found.numbers:
            if one.family is family:
                gauge.set(one.value, {"run": found.id, **one.labels})


@dataclass(frozen=True, slots=True)
class Exporter:
    """A tool that numbers go to. package: to install; place: what a user may name; send: returns where they went.

    live: numbers may be sent again and again during a run, each time in place of those before.
    """

    title: str
    package: str
    place: str
    send: Callable[[Numbers, str], str]
    live: bool = False

    @property
    def modules(self) -> set[str]:
        """The top-level modules of the packages."""
        return {package.partition("-")[0] for package in self.package.split()}


EXPORTERS: Mapping[str, Exporter] = {
    "prometheus": Exporter("a text file for Prometheus' textfile collector", "", "FILE", _prometheus, live=True),
    "tensorboard": Exporter("an event file of TensorBoard", "tensorboard", "FOLDER", _tensorboard),
    "mlflow": Exporter("a run of MLflow", "mlflow", "EXPERIMENT", _mlflow),
    "wandb": Exporter("a run of Weights & Biases", "wandb", "PROJECT", _wandb),
    "parquet": Exporter("a Parquet file for each table of the run", "pyarrow", "FOLDER", _parquet),
    "opentelemetry": Exporter(
        "gauges of OpenTelemetry",
        "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        "ENDPOINT",
        _opentelemetry,
        live=True,
    ),
}


def check_packages(name: str) -> None:
    """Raise ImportError naming the package to install if a module of an exporter is missing; imports none."""
    exporter = EXPORTERS[name]
    for module in exporter.modules:
        if module not in sys.modules and find_spec(module) is None:
            raise ImportError(f"exporting to {name} needs: pip install {exporter.package} (No module named {module!r})")


def export(found: Numbers, name: str, place: str = "") -> str:
    """Send numbers to the exporter `name`, and return where they went. place: by default the tool's own.

    Raises ValueError for an unknown exporter, ImportError naming the package that is missing, RuntimeError where the
    tool refuses the numbers or cannot be reached.
    """
    if name not in EXPORTERS:
        raise ValueError(f"unknown exporter {name!r}: name one of {', '.join(EXPORTERS)}")
    exporter = EXPORTERS[name]
    try:
        return exporter.send(found, place)
    except ModuleNotFoundError as error:
        raise ImportError(f"exporting to {name} needs: pip install {exporter.package} ({error})") from error
    except Exception as error:  # each tool has errors of its own
        raise RuntimeError(f"exporting to {name} failed: {type(error).__name__}: {error}") from error
