"""Exporters: what each tool receives, read back from its file or from memory, is what summary.json holds."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import types
from collections import defaultdict
from pathlib import Path

import pytest

from netbottleneck import cli
from netbottleneck.report import Run, exporters
from netbottleneck.trace.model import Step, Trace
from netbottleneck.trace.transports import STOCK, Arm
from ringwriter import FakeRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(FakeRun(tmp_path_factory.mktemp("exported") / "a run", blocks=9, size=3, late_ms={2: 4}).write())


@pytest.fixture(scope="module")
def found(run):
    return exporters.numbers(run.summary, run.trace)


def value_of(found, name, **labels):
    (one,) = (n for n in found.numbers if n.family.name == name and dict(n.labels) == labels)
    return one.value


def test_the_numbers_are_those_of_the_summary(run, found):
    summary = run.summary
    assert value_of(found, "verdict_info", code=summary["verdict"]["code"]) == 1
    assert value_of(found, "ranks") == 3
    assert value_of(found, "step_seconds", arm="ofi", quantile="0.5") == summary["steps"]["ofi"]["median_s"]
    for part in ("compute", "exposed_communication", "skew"):
        assert value_of(found, "part_seconds", arm="stock", part=part) == summary["split"]["stock"][f"{part}_s"]
    rates = summary["bandwidth"]["stock"]
    assert value_of(found, "bandwidth_bits_per_second", arm="stock", over="step") == rates["average_bits_per_s"]
    assert value_of(found, "link_utilization_ratio", arm="stock", over="transfer") == rates["active_utilization"]
    assert (
        value_of(found, "probe_bits_per_second", streams="4", transport=summary["probe"]["transport"])
        == summary["probe"]["points"][1]["bits_per_s"]
    )
    for one in summary["verdict"]["evidence"]:
        own = [n for n in found.numbers if n.labels.get("cause") == one["cause"]]
        known = one["saving_s"] if one["applies"] and one["saving_s"] else {}
        assert {n.labels["end"]: n.value for n in own} == {end: at for end, at in known.items() if at is not None}
        for name in ("fired", "at_most"):
            assert {n.labels[name] for n in own} <= {str(one[name]).lower()}
    for pair in (one for one in summary["comparisons"] if one["gain"] and one["enough"]):
        for end, at in pair["gain"].items():
            assert value_of(found, "gain_ratio", arm=pair["other"], end=end) == at
    assert value_of(found, "late_seconds", rank="2") == summary["late"][0]["others_wait_s"]


def test_a_saving_says_whether_it_was_measured_and_keeps_its_path(found, tmp_path):
    run = Run(FakeRun(tmp_path, transports=("stock", "ofi"), blocks=9).write())
    savings = [n for n in exporters.numbers(run.summary, run.trace).numbers if n.family.name == "saving_seconds"]
    own = [n for n in savings if n.labels["cause"] == "transport"]
    assert {(n.labels["source"], n.labels["fired"]) for n in own} == {("measured", "true")}
    paths = {n.path for n in own}
    assert paths == {f"netbottleneck/saving_seconds/transport{end}" for end in ("/value", "/low", "/high")}
    assert "netbottleneck/probe_bits_per_second/4" in {n.path for n in found.numbers}


def test_the_source_of_a_saving_does_not_depend_on_the_words_of_its_rule(run, found):
    summary = copy.deepcopy(dict(run.summary))
    for one in summary["verdict"]["evidence"]:
        one["rests"] = "other words; predicted"
    reworded = exporters.numbers(summary, run.trace)
    sources = {n.path: n.labels["source"] for n in reworded.numbers if n.family.name == "saving_seconds"}
    assert sources == {n.path: n.labels["source"] for n in found.numbers if n.family.name == "saving_seconds"}
    assert set(sources.values()) == {"measured", "predicted"}


def test_every_step_is_exported_once_for_its_arm(run, found):
    by_arm = defaultdict(set)
    for step in run.trace.steps:
        by_arm[step.arm].add(step.index)
    assert {arm: [at for at, _ in own] for arm, own in found.steps.items()} == {
        arm: sorted(own) for arm, own in by_arm.items()
    }
    first = run.trace.steps[0]
    assert dict(found.steps[first.arm])[first.index] == pytest.approx(first.duration_ns / 1e9, rel=1e-3)


def test_unknown_numbers_are_left_out(tmp_path):
    bare = Run(FakeRun(tmp_path, transports=("bare",), blocks=2).write())
    names = {one.family.name for one in exporters.numbers(bare.summary, bare.trace).numbers}
    assert names == {"verdict_info", "ranks", "step_seconds"}


def test_names_are_unique_and_follow_the_style_of_prometheus(found):
    paths = [one.path for one in found.numbers]
    assert len(set(paths)) == len(paths)
    assert all(re.fullmatch(r"[a-z_]+", family.name) for family in exporters.FAMILIES)


def test_no_name_is_a_folder_of_another(found):
    names = {one.path for one in found.numbers} | {f"netbottleneck/step/{arm}" for arm in found.steps}
    assert not names & {str(folder) for name in names for folder in Path(name).parents}


LINE = re.compile(r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\} (?P<value>\S+)')


def test_a_text_file_for_prometheus_holds_every_number(run, found, tmp_path):
    path = tmp_path / "nb.prom"
    assert run.export("prometheus", str(path)) == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["nb.prom"]
    read, typed = {}, []
    for line in path.read_text().splitlines():
        if line.startswith("# TYPE "):
            typed.append(line.split()[2])
        elif not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert typed[-1] == match["name"]  # the samples of a family follow its head
            labels = dict(re.findall(r'([a-z_]+)="((?:[^"\\\n]|\\.)*)"', match["labels"]))
            assert labels.pop("run") == run.summary["id"]
            read[match["name"], *labels.values()] = float(match["value"])
    assert read == {(f"netbottleneck_{n.family.name}", *n.labels.values()): n.value for n in found.numbers}
    assert len(typed) == len(set(typed))


def test_labels_of_prometheus_are_escaped(found):
    odd = exporters.Numbers('a "b" \\ \n', "", "", 0.0, found.numbers[:1])
    assert 'run="a \\"b\\" \\\\ \\n"' in exporters.prometheus_text(odd)


def test_tensorboard_reads_every_number_from_the_event_file(run, found, tmp_path):
    from tensorboard.backend.event_processing import event_file_loader as loader

    assert run.export("tensorboard", str(tmp_path)) == str(tmp_path)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    read = defaultdict(list)
    for event in loader.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.tensor.float_val else value.simple_value
            read[value.tag].append((event.step, number))
    for one in found.numbers:
        assert read[one.path] == [(0, pytest.approx(one.value, rel=1e-6))]
    for arm, own in found.steps.items():
        assert read[f"netbottleneck/step/{arm}"] == [(at, pytest.approx(s, rel=1e-6)) for at, s in own]


def test_opentelemetry_holds_every_number_in_memory(run, found, monkeypatch):
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    run.export("opentelemetry")
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "netbottleneck"
    read = {}
    for metric in scope.metrics:
        for point in metric.data.data_points:
            labels = dict(point.attributes)
            assert labels.pop("run") == run.summary["id"]
            read[metric.name, *sorted(labels.items())] = point.value
    assert read == {(f"netbottleneck.{n.family.name}", *sorted(n.labels.items())): n.value for n in found.numbers}
    provider.shutdown()


@pytest.mark.parametrize(
    ("taken", "error"),
    [
        (True, ""),
        (False, "http://collector:4318 did not take the metrics"),
        (None, "ConnectionError: unreachable"),
    ],
)
def test_opentelemetry_sends_each_number_once_and_reports_a_refusal(found, monkeypatch, taken, error):
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

    sent, closed, limits, at_fork, kept = [], [], [], [], []

    class Collector(MetricExporter):
        def export(self, metrics_data, timeout_millis=10_000, **kwargs):
            (resource,) = metrics_data.resource_metrics
            (scope,) = resource.scope_metrics
            assert scope.scope.name == "netbottleneck"
            points = [(metric.name, point) for metric in scope.metrics for point in metric.data.data_points]
            sent.append({(name, *sorted(point.attributes.items())): point.value for name, point in points})
            if taken is None:
                raise ConnectionError("unreachable")
            return MetricExportResult.SUCCESS if taken else MetricExportResult.FAILURE

        def force_flush(self, timeout_millis=10_000):
            return True

        def shutdown(self, timeout_millis=30_000, **kwargs):
            closed.append(self)

    def exporter(endpoint=None, timeout=None):
        limits.append(timeout)
        return Collector()

    module = types.ModuleType("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    module.OTLPMetricExporter = exporter
    for part in ("", ".otlp", ".otlp.proto", ".otlp.proto.http"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter{part}", types.ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("os.register_at_fork", lambda **called: at_fork.append(called))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    for timeout in ("", "20"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", timeout)
        if taken:
            assert exporters.export(found, "opentelemetry") == "http://collector:4318"
        else:
            with pytest.raises(RuntimeError, match=error):
                exporters.export(found, "opentelemetry")
        kept.append(len(at_fork))
    assert sent == 2 * [{(f"netbottleneck.{n.family.name}", *labelled(found, n)): n.value for n in found.numbers}]
    assert limits == [exporters.OTLP_TIMEOUT_S, None]
    assert len(closed) == 2
    assert kept[0] == kept[1]  # a process keeps nothing of an export


@pytest.mark.parametrize("path", ["", "/", "/v1/metrics"])
def test_metrics_go_to_the_usual_path_of_an_endpoint_without_one(path):
    assert exporters._endpoint(f"http://collector:4318{path}") == "http://collector:4318/v1/metrics"
    assert exporters._endpoint("https://collector/own?key=1") == "https://collector/own?key=1"
    assert exporters._endpoint("") is None


def labelled(found, number):
    return sorted({"run": found.id, **number.labels}.items())


def test_an_error_of_a_tool_is_one_line(run, monkeypatch, capsys):
    class UsageError(Exception):
        """As wandb's: of none of Python's own kinds."""

    def init(**_):
        raise UsageError("no API key")

    module = types.ModuleType("wandb")
    module.__version__, module.run = "0.28.2", None
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert cli.main(["report", str(run.path), "--export", "wandb"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1] == "netbottleneck: exporting to wandb failed: UsageError: no API key"
    )


def test_a_study_is_not_exported(tmp_path, capsys):
    (tmp_path / "cells").mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path), "--export", "prometheus=s.prom"])
    assert ended.value.code == 2
    assert "takes a run" in capsys.readouterr().err


class Experiment:
    """MLflow's client in memory, with the names and signatures that MLflow 3 has. The module has no run of its own."""

    def __init__(self):
        self.runs, self.tags, self.batches, self.ended = [], {}, [], []
        self.experiments = {"Default": "0"}
        self.module = types.ModuleType("mlflow")
        self.module.MlflowClient = lambda: self
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.Metric = lambda key, value, timestamp, step: (key, value, timestamp, step)

    def get_experiment_by_name(self, name):
        known = self.experiments.get(name)
        return None if known is None else types.SimpleNamespace(experiment_id=known)

    def create_experiment(self, name, artifact_location=None, tags=None):
        assert name not in self.experiments
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
        self.runs.append((experiment_id, run_name))
        self.tags |= tags
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert run_id == "7"
        for key, *_ in metrics:
            if not re.fullmatch(r"[/\w.\- ]+", key):
                raise ValueError(f"Invalid metric name: '{key}'")
        self.batches.append(list(metrics))

    def set_terminated(self, run_id, status=None, end_time=None):
        assert run_id == "7"
        self.ended.append(status)


def test_mlflow_receives_every_number_in_batches_that_it_accepts(run, found, monkeypatch):
    mlflow = Experiment()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    monkeypatch.setattr(exporters, "MLFLOW_BATCH", 40)
    assert run.export("mlflow", "networks") == "7"
    assert mlflow.runs == [(mlflow.experiments["networks"], run.summary["id"])]
    assert mlflow.ended == ["FINISHED"]
    assert mlflow.tags["netbottleneck.verdict"] == run.summary["verdict"]["code"]
    assert max(map(len, mlflow.batches)) <= 40
    rows = [row for batch in mlflow.batches for row in batch]
    at_ms = run.summary["started_wall_ns"] // 10**6
    expected = [(n.path, n.value, at_ms, 0) for n in found.numbers]
    expected += [(f"netbottleneck/step/{arm}", s, at_ms, at) for arm, own in found.steps.items() for at, s in own]
    assert rows == expected


@pytest.mark.parametrize(
    ("variables", "place", "experiment"),
    [
        ({}, "", "0"),
        ({"MLFLOW_EXPERIMENT_ID": "5", "MLFLOW_EXPERIMENT_NAME": "other"}, "", "5"),
        ({"MLFLOW_EXPERIMENT_NAME": "other"}, "", "1"),
        ({"MLFLOW_EXPERIMENT_ID": "5"}, "Default", "0"),
    ],
)
def test_a_run_of_mlflow_is_in_the_experiment_that_is_named(run, monkeypatch, variables, place, experiment):
    mlflow = Experiment()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run.export("mlflow", place)
    assert mlflow.runs == [(experiment, run.summary["id"])]


def test_a_run_of_mlflow_or_wandb_ends_if_an_export_fails(run, monkeypatch):
    def refuse(*_, **__):
        raise OSError("full")

    mlflow, opened = Experiment(), []
    mlflow.log_batch = refuse
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    with pytest.raises(RuntimeError, match="full"):
        run.export("mlflow")
    assert mlflow.ended == ["FAILED"]
    module = types.ModuleType("wandb")
    module.__version__, module.run = "0.28.2", None
    module.init = lambda **about: opened.append(WandbRun(**about)) or opened[-1]
    monkeypatch.setattr(WandbRun, "log", refuse)
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(RuntimeError, match="full"):
        run.export("wandb")
    assert [own.finished for own in opened] == [1]


def test_mlflow_receives_arms_over_nccl(tmp_path, monkeypatch):
    mlflow = Experiment()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow.module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    one = Run(FakeRun(tmp_path / "run", transports=("stock", "nccl+tcp")).write())
    assert one.export("mlflow") == "7"
    names = {key for batch in mlflow.batches for key, *_ in batch}
    assert {"netbottleneck/step/nccl-tcp", "netbottleneck/step_seconds/nccl-tcp/0.5"} <= names
    assert "netbottleneck/step_seconds/nccl+tcp/0.5" in {
        one.path for one in exporters.numbers(one.summary, one.trace).numbers
    }


class WandbRun:
    """A run of wandb in memory, with the names and signatures that wandb has."""

    def __init__(self, project=None, name=None, job_type=None, config=None, reinit=None):
        self.project, self.name, self.config = project, name, config
        self.logged, self.summary, self.finished = [], {}, None

    def log(self, data, step=None):
        assert not self.logged or step > self.logged[-1][0]  # wandb drops a step that is not later
        self.logged.append((step, dict(data)))

    def finish(self, exit_code=None, quiet=None):
        self.finished = exit_code


def test_wandb_receives_every_number_and_ascending_steps(run, found, monkeypatch):
    opened = []
    module = types.ModuleType("wandb")
    module.__version__, module.run = "0.28.2", None
    module.init = lambda **about: opened.append(WandbRun(**about)) or opened[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run.export("wandb")
    (own,) = opened
    assert (own.project, own.name, own.finished) == ("netbottleneck", run.summary["id"], 0)
    assert own.summary == {n.path: n.value for n in found.numbers} | {
        "netbottleneck/verdict": run.summary["verdict"]["code"]
    }
    read = [(key, step, value) for step, data in own.logged for key, value in data.items()]
    expected = [(f"netbottleneck/step/{arm}", at, s) for arm, steps in found.steps.items() for at, s in steps]
    assert sorted(read) == sorted(expected)


@pytest.mark.parametrize(("version", "refused"), [("0.28.2", False), ("0.19.10", False), ("0.19.9", True)])
def test_an_active_run_of_wandb_is_not_touched(run, monkeypatch, version, refused):
    opened = [WandbRun(name="the script's")]
    module = types.ModuleType("wandb")
    module.__version__, module.run = version, opened[0]

    def init(reinit=None, **about):
        if reinit == "create_new" and not refused:
            opened.append(WandbRun(**about))
        return opened[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    if refused:
        with pytest.raises(RuntimeError, match="a run of this process is active"):
            run.export("wandb")
    else:
        assert run.export("wandb") == run.summary["id"]
    script = opened[0]
    assert (script.logged, script.summary, script.finished) == ([], {}, None)


def test_the_tables_hold_every_row_of_the_trace(run, found):
    tables, trace = found.tables(), run.trace
    steps = tables["steps"]
    assert steps.column("duration_ns") == [step.duration_ns for step in trace.steps]
    assert steps.column("forward_ns") == [sum(e - b for b, e in step.forward) or None for step in trace.steps]
    assert tables["collectives"].column("done_ns") == [one.done_ns for one in trace.collectives]
    assert [int(key, 16) for key in tables["collectives"].column("key")] == [one.key for one in trace.collectives]
    ready = [(s.rank, s.index, trace.parameters[i].name, at) for s in trace.steps for i, at in s.grad_ready]
    assert list(zip(*map(tables["ready"].column, ("rank", "step", "name", "ready_ns")), strict=True)) == ready != []
    waits = [(step.rank, begin, end) for step in trace.steps for _, begin, end in step.waits]
    assert list(zip(*map(tables["waits"].column, ("rank", "begin_ns", "end_ns")), strict=True)) == waits
    assert tables["layers"].column("backward_s") == [one["backward_s"] for one in run.summary["layers"]] != []
    for table in tables.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        for name, kind in table.columns.items():
            assert {type(cell) for cell in table.column(name)} <= {kind, type(None), *([Arm] if kind is str else [])}


@pytest.mark.parametrize(
    ("step", "recorder", "parts_ns"),
    [
        ({}, "", (None, None, None, 0)),  # of the arm bare
        ({"forward": ((1, 3),), "optimizer": ((4, 5),)}, "", (2, 1, 0, 0)),
        ({"forward": ((1, 3),), "evaluation": ((6, 7), (8, 9)), "checkpoints": ((9, 12),)}, "", (2, None, 2, 3)),
        ({"forward": ((1, 3),), "optimizer": ((4, 5),)}, "torch.profiler", (2, 1, None, None)),
    ],
)
def test_a_part_that_was_not_recorded_is_unknown(run, step, recorder, parts_ns):
    trace = Trace("", 1, (STOCK,), steps=(Step(0, 1, 0, STOCK, 0, 20, **step),), recorder=recorder)
    steps = exporters.tables(run.summary, trace)["steps"]
    found = (steps.column(f"{name}_ns") for name in ("forward", "optimizer", "evaluation", "checkpoints"))
    assert tuple(cell for (cell,) in found) == parts_ns


@pytest.mark.frameworks
def test_parquet_files_hold_every_table(run, found, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq

    folder = tmp_path / "a" / "b"
    assert run.export("parquet", str(folder)) == str(folder)
    assert sorted(path.stem for path in folder.iterdir()) == sorted(found.tables())
    for name, table in found.tables().items():
        read = pq.read_table(folder / f"{name}.parquet")
        assert read.schema.metadata[b"netbottleneck.run"].decode() == run.summary["id"]
        assert read.column_names == list(table.columns)
        kinds = {"int64": int, "double": float, "string": str, "bool": bool}
        assert [kinds[str(kind)] for kind in read.schema.types] == list(table.columns.values())
        assert [tuple(row.values()) for row in read.to_pylist()] == list(table.rows)


@pytest.mark.frameworks
def test_data_frames_hold_every_table(run, found):
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frames = run.frames()
    assert set(frames) == set(found.tables())
    for name, table in found.tables().items():
        rows = frames[name].astype(object).where(frames[name].notna(), None)
        assert [tuple(row) for row in rows.itertuples(index=False)] == list(table.rows)
    mean_ns = frames["steps"].groupby("arm")["duration_ns"].mean()
    for arm in run.trace.arms:
        own = [step.duration_ns for step in run.trace.steps if step.arm == arm]
        assert mean_ns[arm] == pytest.approx(sum(own) / len(own))
    assert isinstance(frames["waits"], pd.DataFrame)


def test_what_parquet_and_pandas_need_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        run.export("parquet", str(tmp_path / "p"))
    with pytest.raises(ImportError, match="pip install pandas"):
        run.frames()
    assert not (tmp_path / "p").exists()


def test_a_missing_library_and_an_unknown_exporter_are_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        run.export("wandb")
    with pytest.raises(ValueError, match="unknown exporter 'nagios': name one of prometheus"):
        run.export("nagios")


def test_the_command_exports_to_several_tools(run, tmp_path, capsys):
    first, second = tmp_path / "a.prom", tmp_path / "b.prom"
    arguments = ["report", str(run.path), "--export", f"prometheus={first}", "--export", f"prometheus={second}"]
    assert cli.main(arguments) == 0
    assert first.read_text() == second.read_text() != ""
    assert f"Exported to prometheus: {second}" in capsys.readouterr().err


def test_no_library_of_a_tool_is_imported_with_the_report():
    names = ("tensorboard", "mlflow", "wandb", "opentelemetry", "prometheus_client", "pyarrow", "pandas")
    code = f"import sys, netbottleneck.report; print([n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_exporter_is_documented():
    page = (Path(__file__).parents[2] / "docs/how-to/export.md").read_text()
    for name, exporter in exporters.EXPORTERS.items():
        assert f"`{name}`" in page
        assert exporter.place in page
    for family in exporters.FAMILIES:
        assert f"`{family.name}`" in page


@pytest.mark.parametrize("name", ["wandb", "opentelemetry"])
def test_a_missing_package_is_named_before_the_report(run, name, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    assert cli.main(["report", str(run.path), "--export", name]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"exporting to {name} needs: pip install {name}" in said.err
