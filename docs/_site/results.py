"""Tables and plots of benchmarks/results/*.json, as Markdown, with exactly the digits of the files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
Row = Mapping[str, Any]


def load(name: str) -> dict[str, Any]:
    """Read a file of measurements; its numbers are text, so that no digit is lost."""
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text, parse_float=str, parse_int=str)
    return found


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def interval(row: Row) -> str:
    """Return a row's value with its interval."""
    if "value" not in row:
        return f"{row['low']} to {row['high']}"
    return f"{row['value']} [{row['low']}, {row['high']}]" if "low" in row else str(row["value"])


def origin(found: Row, sitting: Row | None = None) -> Iterator[str]:
    """Yield date, machine and command of a file's figures."""
    both = {**found, **(sitting or {})}
    machine = both["machine"]
    versions = both["versions"]
    if not isinstance(versions, str):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = both["command"]
    for name, text in (
        ("Command", command if command == "not recorded" else f"`{command}`"),
        ("Date", both["date"]),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores, {both['system']}"),
        ("Versions", versions),
        ("Duration, load", f"{both['duration']}; {both['load']}"),
        ("Spread", both["spread"]),
    ):
        yield f"* {name}: {text}"
    yield ""


def sitting_of(name: str, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file and its run of this name."""
    found = load(name)
    wanted = " ".join(names)
    return found, next(each for each in found["sittings"] if each["name"] == wanted)


def judged(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table of figures with bars."""
    heads = ("gate", "verdict", "value [95 %]", "rounds", "bar", "situation")
    return table(
        heads,
        (
            (
                row["gate"],
                row.get("verdict", "not recorded"),
                interval(row),
                row["rounds"],
                row.get("bar", "–"),
                row.get("situation", row.get("code", "–")) + "; ".join(_paths(row)),
            )
            for row in rows
        ),
    )


def _paths(row: Row) -> Iterator[str]:
    if "paths" in row:
        paths = ", ".join(f"{each['path']} {each['value']} {each['unit']}" for each in row["paths"])
        yield f" ({paths})"


def gates(*names: str) -> Iterator[str]:
    """Yield one run of the gates: origin and table."""
    found, sitting = sitting_of("gates", names)
    yield from origin(found, sitting)
    if "counts" in sitting:
        yield "Counts: " + ", ".join(f"{number} {name}" for name, number in sitting["counts"].items()) + ".\n"
    if sitting["rows"]:
        yield from judged(sitting["rows"])


def nccl(*names: str) -> Iterator[str]:
    """Yield one run of the gates N1 to N6: origin and table."""
    found, sitting = sitting_of("nccl", names)
    yield from origin(found, sitting)
    yield from judged(sitting["rows"])


def gates_plot(*names: str) -> Iterator[str]:
    """Yield a plot of one run: value, interval and bar of each figure, on a logarithmic scale."""
    _, sitting = sitting_of("gates", names)
    yield from forest([row for row in sitting["rows"] if row["gate"] not in ("T8", "T10")])


def forest(rows: Sequence[Row]) -> Iterator[str]:
    """Yield an SVG with a line for each row: a dot, its interval, and a stroke at its bar."""
    left, width, pitch = 470, 840, 17
    height = pitch * len(rows) + 40
    low = math.log10(min(float(row["low"]) for row in rows))
    high = math.log10(max(float(row["high"]) for row in rows))

    def x(value: str | float) -> float:
        return left + (width - left - 12) * (math.log10(float(value)) - low) / (high - low)

    parts = [f'<line x1="{x(1):.1f}" y1="8" x2="{x(1):.1f}" y2="{height - 24}" stroke="currentColor" opacity="0.4"/>']
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50) if 10**low <= tick <= 10**high]
    parts += [_text(x(tick), height - 8, f"{tick:g}", "middle") for tick in ticks]
    for number, row in enumerate(rows):
        y = 18 + pitch * number
        label = f"{row['gate']} {row['situation']}"
        parts += [
            _text(left - 8, y + 4, label if len(label) < 78 else label[:76] + "…", "end"),
            f'<line x1="{x(row["low"]):.1f}" y1="{y}" x2="{x(row["high"]):.1f}" y2="{y}" stroke="currentColor"/>',
            f'<line x1="{x(row["bar"]):.1f}" y1="{y - 6}" x2="{x(row["bar"]):.1f}" y2="{y + 6}" stroke="#c62828"'
            ' stroke-width="2"/>',
            f'<circle cx="{x(row["value"]):.1f}" cy="{y}" r="3.5" fill="currentColor"/>',
        ]
    yield from svg(width, height, parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="11" fill="currentColor">{escape(text)}</text>'


def svg(width: int, height: int, parts: Iterable[str]) -> Iterator[str]:
    """Yield a picture as raw HTML."""
    yield "```{raw} html"
    yield f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" font-family="sans-serif">{"".join(parts)}</svg>'
    yield "```\n"


def peers() -> Iterator[str]:
    """Yield the comparison of all-reduces with other programs: origin and table, one column per size."""
    found = load("peers")
    sizes = list(dict.fromkeys(row["size_mb"] for row in found["rows"]))
    cells: dict[str, list[str]] = {}
    for row in found["rows"]:
        cell = f"{row['value']} ({row['low']} to {row['high']}); {row['cpu_s_per_gb']}"
        cells.setdefault(row["path"], []).append(cell)
    yield from origin(found)
    yield "Each cell: busbw in Gbit/s, median of 4 rounds (p10 to p90); CPU time in s for 10^9 bytes.\n"
    yield from table(("path", *(f"{size} MB" for size in sizes)), ((path, *row) for path, row in cells.items()))


def peers_plot(size: str) -> Iterator[str]:
    """Yield a bar for each path at one size, with the 10th and 90th percentile."""
    rows = [row for row in load("peers")["rows"] if row["size_mb"] == size]
    left, width, pitch = 110, 840, 19
    most = max(float(row["high"]) for row in rows)

    def x(value: str | float) -> float:
        return left + (width - left - 12) * float(value) / most

    parts = []
    for number, row in enumerate(rows):
        y = 10 + pitch * number
        colour = "#1565c0" if row["path"] in ("tcp", "ofi", "tcp-heap", "ofi-heap") else "#9e9e9e"
        parts += [
            _text(left - 6, y + 9, row["path"], "end"),
            f'<rect x="{left}" y="{y}" width="{x(row["value"]) - left:.1f}" height="11" fill="{colour}"/>',
            f'<line x1="{x(row["low"]):.1f}" y1="{y + 5.5}" x2="{x(row["high"]):.1f}" y2="{y + 5.5}"'
            ' stroke="currentColor"/>',
        ]
    bottom = 10 + pitch * len(rows)
    parts += [_text(x(tick), bottom + 12, f"{tick} Gbit/s", "middle") for tick in range(0, int(most), 25)]
    yield from svg(width, bottom + 20, parts)


def overhead() -> Iterator[str]:
    """Yield the overhead of the package: origin, figures with bars, medians."""
    found = load("overhead")
    yield from origin(found)
    yield from judged(found["rows"])
    heads = ("what", "median", "rounds", "spread")
    rows = found["medians"]
    yield from table(
        heads, ((row["what"], f"{row['value']} {row['unit']}", row["rounds"], row["spread"]) for row in rows)
    )


def copy_back() -> Iterator[str]:
    """Yield the cost of copying a sum back, by size."""
    heads = ("bytes", "backward, ns", "whole step, ns", "rounds", "spread")
    names = ("bytes", "backward_ns", "step_ns", "rounds", "spread")
    return table(heads, ([row[name] for name in names] for row in load("overhead")["copy_back"]["rows"]))


def hook_versions() -> Iterator[str]:
    """Yield the cost of a hook by version of the code."""
    rows = load("overhead")["hooks_by_version"]["rows"]
    return table(
        ("code", "empty hook over ours [95 %]", "rounds"), ((r["code"], interval(r), r["rounds"]) for r in rows)
    )


def plain(name: str, names: Sequence[str], heads: Sequence[str]) -> Iterator[str]:
    """Yield a file's origin, and columns of its rows."""
    found = load(name)
    yield from origin(found)
    yield from table(heads, ([row[name] for name in names] for row in found["rows"]))


def suite() -> Iterator[str]:
    """Yield the outcomes of Horovod's own tests."""
    names = ("file", "ranks", "started_by", "netbottleneck", "horovod")
    return plain("horovod-suite", names, ("file", "ranks", "started by", "netbottleneck", "Horovod 0.28.1"))


SCALE = {
    "ranks": "ranks",
    "lanes": "lanes",
    "transport": "transport",
    "setup_s": "set-up, s",
    "connections": "connections",
    "memory_open_mb": "memory opened, MB",
    "memory_used_mb": "memory used, MB",
    "latency_4kib_us": "4 KiB, µs",
    "busbw_16mb_gbit_s": "16 MB, busbw, Gbit/s",
}


def scale() -> Iterator[str]:
    """Yield the cost of more ranks, measured, then predicted."""
    found = load("scale")
    yield from origin(found)
    yield from table(list(SCALE.values()), ([row[name] for name in SCALE] for row in found["rows"]))
    predicted = found["predicted"]
    yield f"Predicted, not measured: {predicted['what']}.\n"
    yield from table(
        ("size", "ring", "recursive doubling", "halving and doubling"), (list(r.values()) for r in predicted["rows"])
    )


def automatic() -> Iterator[str]:
    """Yield what the automatic choice kept on simulated networks."""
    names = ("network", "width", "stock_ms", "best", "kept", "by_step", "kept_over_best", "cost_steps", "judged")
    heads = ("network", "width", "stock, ms", "best", "kept", "from step", "kept over best", "cost, steps", "judged")
    return plain("auto", names, heads)


def onset() -> Iterator[str]:
    """Yield the times from the onset of a cause to the warning that names it."""
    names = ("cause", "what", "layers", "seconds", "line")
    return plain("onset", names, ("cause", "what begins", "layers", "s", "first warning"))


def long_run() -> Iterator[str]:
    """Yield what an observed training holds during a long run."""
    heads = ("step", "private memory, KiB", "with touched pages of files, KiB", "record on the disk, bytes")
    return plain("long_run", ("step", "private_kib", "with_files_kib", "record_bytes"), heads)


def prediction() -> Iterator[str]:
    """Yield forecast steps with their measurements."""
    found = load("prediction")
    yield from origin(found)
    heads = ("model", "ranks", "network", "arm", "measured, ms", "predicted, ms", "error, %", "exposed, %", "streams")
    yield from table(
        heads,
        (
            (
                *(row[name] for name in ("model", "ranks", "network", "arm")),
                f"{row['measured_ms']} [{row['low_ms']}, {row['high_ms']}]",
                f"{row['predicted_ms']} [{row['predicted_low_ms']}, {row['predicted_high_ms']}]",
                *(row[name] for name in ("error_percent", "exposed_percent", "streams")),
            )
            for row in found["rows"]
        ),
    )


def claim() -> Iterator[str]:
    """Yield steps and scaling factors of the claim's study."""
    found = load("claim")
    yield from origin(found)
    yield from table(
        ("model", "network", "arm", "step, ms [95 %]", "scaling factor [95 %]"),
        (
            (
                *(row[name] for name in ("model", "network", "arm")),
                f"{row['step_ms']} [{row['low_ms']}, {row['high_ms']}]" if "step_ms" in row else "–",
                f"{row['scaling']} [{row['scaling_low']}, {row['scaling_high']}]",
            )
            for row in found["rows"]
        ),
    )


def experiment(*topics: str) -> Iterator[str]:
    """Yield a table for each experiment on these topics."""
    known = {each["topic"]: each for each in load("experiments")["experiments"]}
    for topic in topics:
        each = known[topic]
        yield f"Setting: {each['setting']}. Runs: {each['runs']}. Spread: {each['spread']}.\n"
        yield from table(
            ("condition", "measured"), ((r["condition"], f"{interval(r)} {r['unit']}") for r in each["rows"])
        )


def matrix(name: str = "scenarios") -> Iterator[str]:
    """Yield a confusion matrix of causes: origin, counts, a row for each cause, the columns' codes."""
    found = load(name)
    yield from origin(found)
    rows = found["matrix"]
    runs, wrong = (sum(int(row[name]) for row in rows) for name in ("runs", "wrong"))
    yield f"Seeds {found['seeds']}. {runs} verdicts, {wrong} of them wrong.\n"
    codes = list(dict.fromkeys(code for row in rows for code in row["cause"].removesuffix(" removed").split(" or ")))
    codes += [code for code in dict.fromkeys(code for row in rows for code in row["verdicts"]) if code not in codes]
    heads = ("cause", "runs", "wrong", *(str(number) for number, _ in enumerate(codes, 1)))
    yield from table(
        heads,
        ((row["cause"], row["runs"], row["wrong"], *(row["verdicts"].get(code, "") for code in codes)) for row in rows),
    )
    yield "Columns: " + ", ".join(f"{number} `{code}`" for number, code in enumerate(codes, 1)) + ".\n"


def verdict_savings(name: str = "scenarios") -> Iterator[str]:
    """Yield how far the savings of verdicts are from the difference to the twins."""
    found = load(name)["savings"]
    yield (
        f"{found['runs']} savings: median error {found['median_error_percent']} %, nine of ten within "
        f"{found['nine_of_ten_percent']} %, largest {found['largest_error_percent']} %."
    )


KNOWN = {
    "kind": "length",
    "runs": "runs",
    "least_part_percent": "least, % of the step",
    "largest_part_percent": "largest, % of the step",
    "median_error_percent": "median error, %",
    "nine_of_ten_percent": "nine of ten within, %",
    "largest_error_percent": "largest error, %",
    "beyond": "runs beyond 5 %",
    "all_steps_median_percent": "median error against all steps, %",
    "all_steps_largest_percent": "largest error against all steps, %",
    "all_steps_beyond": "runs beyond 5 % against all steps",
}


def known_lengths(name: str = "scenarios") -> Iterator[str]:
    """Yield the errors of injected lengths; of a run of its own, also its origin."""
    found = load(name)
    rows = found["known"]
    if "matrix" not in found:
        yield from origin(found)
    yield from table(list(KNOWN.values()), ([row[name] for name in KNOWN] for row in rows))


MAKERS: Mapping[str, Callable[..., Iterator[str]]] = {
    "gates": gates,
    "gates_plot": gates_plot,
    "nccl": nccl,
    "peers": peers,
    "peers_plot": peers_plot,
    "overhead": overhead,
    "copy_back": copy_back,
    "hook_versions": hook_versions,
    "suite": suite,
    "scale": scale,
    "automatic": automatic,
    "onset": onset,
    "long_run": long_run,
    "prediction": prediction,
    "claim": claim,
    "experiment": experiment,
    "matrix": matrix,
    "verdict_savings": verdict_savings,
    "known_lengths": known_lengths,
}
