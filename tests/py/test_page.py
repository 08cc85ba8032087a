"""report.html: one file without requests, whose pictures show the numbers of the summary or say why they cannot."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from netbottleneck.analysis import usage
from netbottleneck.analysis.findings import find
from netbottleneck.analysis.intervals import split_steps
from netbottleneck.report import Run, plots, progress, text, what_if
from netbottleneck.report import html as page_of
from netbottleneck.report.drawing import Picture, Piece, Row, Scale, bars, short_name
from netbottleneck.report.whole_run import LEVELS_MOST, RANK_KINDS, whole_run
from netbottleneck.trace.counter_files import Counters, Samples
from netbottleneck.trace.run_steps import RunSteps
from netbottleneck.trace.transports import Arm
from netbottleneck.units import gbit, ms, percent
from netbottleneck.whatif import questions, sweeps
from ringwriter import MS, FakeRun

VOID = {"meta", "br", "link", "img", "hr"}
TITLES = (
    "Parts of a step",
    "What a step would save without each cause",
    "One step of stock",
    "Lengths of the steps",
    "Achieved and achievable by streams",
    "Waiting between ranks",
    "Layers under stock",
    "Interfaces and processors over time",
    "What if the link were faster or slower",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(FakeRun(tmp_path_factory.mktemp("page"), blocks=9, size=3, late_ms={2: 4}).write())


class Balance(html.parser.HTMLParser):
    """Fails on a tag that is closed out of order; collects what a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "srcset", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(page):
    """Check that a page is well-formed and fetches nothing, and return its sections by the begin of their title."""
    balance = Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    assert balance.fetched == []
    assert not re.search(r"<script|url\(|@import|https?:", page)
    for drawn in re.findall(r"<svg class.*?</svg>\s*(?=<svg class|<figcaption|</figure)", page, re.DOTALL):
        ElementTree.fromstring(drawn)
    sections = re.findall(r"<section>(.*?)</section>", page, re.DOTALL)
    heads = [re.search(r"<(?:h2|summary)>(.*?)<", section)[1] for section in sections]
    return dict(zip(heads, sections, strict=True))


def section(sections, title):
    (found,) = (content for head, content in sections.items() if head.startswith(title))
    return found


def parsed(picture):
    return ElementTree.fromstring(str(picture))


def share(text):
    assert text.endswith("%")
    return float(text[:-1]) / 100


def rects(picture, kind=None):
    """(x, width, y) of each bar."""
    return [
        (share(r.get("x")), share(r.get("width")), float(r.get("y")))
        for r in parsed(picture).iter("rect")
        if kind is None or r.get("class") == f"nb-{kind}"
    ]


def texts_of(picture):
    return [text.text for text in parsed(picture).iter("text")]


def test_the_page_shows_every_picture_in_one_file(run):
    sections = checked(run.html)
    for title in TITLES:
        content = section(sections, title)
        assert ("<svg" in content) != ('class="nb-missing"' in content), title
    assert "prefers-color-scheme: dark" in run.html
    assert "@media print" in run.html
    assert 'name="viewport"' in run.html


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"transports": ("stock",)}, "Achievable: not probed (transport stock only)"),
        ({"size": 1}, "One rank has no other to wait for."),
        ({"transports": ("bare",)}, "No step could be split"),
        ({"transports": ("null", "bare")}, "No operation was timed, so no rate is known."),
        ({"transports": ("stock",)}, "set NETBOTTLENECK_MONITOR_HZ=20"),
        ({"transports": ("stock",)}, "does not use this package's streams"),
        ({"size": 1}, "What if the link"),
        ({"killed": 1}, "rank 1 did not finish cleanly."),
    ],
)
def test_a_question_that_a_run_cannot_answer_says_so(tmp_path, settings, sentence):
    page = Run(FakeRun(tmp_path, blocks=3, **settings).write()).html
    sections = checked(page)
    assert sentence in html.unescape(page)
    for content in sections.values():
        assert ("<svg" in content) != ('class="nb-missing"' in content)


def test_a_run_without_a_rank_says_that_waiting_is_not_known(run):
    alone = find(run.trace.of_rank(0))
    shown = page_of.waiting(alone, [row[1] for row in split_steps(alone.trace)])
    assert shown.pictures == ()
    assert "not known" in shown.missing


def test_the_bars_are_the_parts_of_the_summary(run):
    split = run.summary["split"]
    longest = max(parts["step_s"] for parts in split.values())
    (picture,) = page_of.split(run.findings).pictures
    for kind, part in (
        ("hidden", lambda p: p["hidden_communication_s"]),
        ("compute", lambda p: p["compute_s"] - p["hidden_communication_s"]),
        ("exposed", lambda p: p["exposed_communication_s"]),
        ("wait", lambda p: p["wait_s"]),
        ("other", lambda p: p["other_s"]),
    ):
        expected = [part(parts) / longest for parts in split.values() if part(parts) > 0]
        assert [width for _, width, _ in rects(picture, kind)] == pytest.approx(expected, abs=2e-5), kind
    assert [text for text in texts_of(picture) if text.endswith(" ms")] == [
        ms(1e9 * parts["step_s"]) for parts in split.values()
    ]


def test_the_card_has_the_numbers_of_the_summary(run):
    card = run.html[run.html.index("<header>") : run.html.index("</header>")]
    parts, rate = run.summary["split"]["stock"], run.summary["bandwidth"]["stock"]
    assert run.summary["verdict"]["code"] in card
    assert f"<dd>{ms(1e9 * parts['step_s'])}</dd>" in card
    assert f"<dd>{percent((parts['exposed_communication_s'] + parts['wait_s']) / parts['step_s'])}</dd>" in card
    assert f"<dd>{gbit(rate['active_bits_per_s'])}</dd>" in card
    assert f"{percent(rate['active_utilization'])} of the link" in card


def test_savings_are_drawn_with_their_intervals_and_the_limit(run):
    (picture,) = page_of.causes(run.findings, run.verdict).pictures
    known = [one for one in run.verdict.evidence if one.applies and one.saving is not None]
    scale = max(known[0].limit_ns, *(one.saving.high for one in known))
    drawn = [one.saving.value / scale for one in known if one.saving.value > 0]
    assert [width for _, width, _ in rects(picture)] == pytest.approx(drawn, abs=2e-5)
    (limit,) = (line for line in parsed(picture).iter("line") if line.get("class") == "nb-line-limit")
    assert share(limit.get("x1")) == pytest.approx(known[0].limit_ns / scale, abs=2e-5)


def test_each_saving_has_the_limit_of_its_own_cause(run):
    known = [one for one in run.verdict.evidence if one.applies and one.saving is not None]
    higher = replace(known[0], limit_ns=1.5 * known[0].limit_ns)
    shown = page_of.causes(run.findings, replace(run.verdict, evidence=(higher, *known)))
    scale = max(higher.limit_ns, *(one.saving.high for one in known))
    lines = [line for line in parsed(shown.pictures[0]).iter("line") if line.get("class") == "nb-line-limit"]
    expected = [one.limit_ns / scale for one in (higher, known[0])]
    assert [share(line.get("x1")) for line in lines] == pytest.approx(expected, abs=2e-5)
    assert float(lines[0].get("y2")) < float(lines[1].get("y1"))
    assert f"counts, {ms(known[0].limit_ns)} to {ms(higher.limit_ns)}." in shown.note


def test_the_timeline_shows_one_step_of_every_rank_to_scale(run):
    splits = [row[1] for row in split_steps(run.trace)]
    shown = page_of.timeline(run.findings, run.findings.base, splits)
    (picture,) = shown.pictures
    index = int(re.search(r"Step (\d+)", shown.note)[1])
    own = [split for split in splits if split.index == index]
    steps = [step for step in run.trace.steps if step.index == index]
    span = max(s.end_ns for s in steps) - min(s.begin_ns for s in steps)
    assert len(own) == 3
    assert [text for text in texts_of(picture) if text.startswith("rank")] == [f"rank {r}, host{r}" for r in range(3)]
    assert sum(width for _, width, _ in rects(picture, "optimizer")) == pytest.approx(3 * 2 * MS / span, abs=1e-4)
    # Both operations begin together on the ranks that are not late: these ns are drawn twice, and counted once.
    late = sum(width for _, width, _ in rects(picture, "late"))
    assert late * span == pytest.approx(2 * 4 * MS, rel=0.01)
    hidden = sum(width for _, width, _ in rects(picture, "hidden"))
    assert hidden * span == pytest.approx(sum(split.hidden_ns for split in own), rel=1e-3)


def test_the_timeline_shows_lanes_where_they_were_recorded(run):
    splits = [row[1] for row in split_steps(run.trace)]
    arm = next(arm for arm in run.findings.parts if arm == "ofi")
    shown = page_of.timeline(run.findings, arm, splits)
    assert len(rects(shown.pictures[0], "lane")) == 3 * 2 * 2  # ranks, operations, lanes
    assert "its part of the bytes" in shown.note


def test_operations_that_overlap_are_in_rows_of_their_own(run):
    def operation(begin, end):
        some = run.trace.collectives[0]
        return type(some)(0, some.arm, 1, 1, begin, 8, start_ns=begin, done_ns=end)

    rows = page_of._rows_of([operation(0, 10), operation(5, 15), operation(10, 20)])
    assert [[one.start_ns for one in row] for row in rows] == [[0, 10], [5]]
    crowded = page_of._rows_of([operation(n, 1000) for n in range(3 * page_of.OPERATION_ROWS)])
    assert len(crowded) == page_of.OPERATION_ROWS
    assert sum(map(len, crowded)) == 3 * page_of.OPERATION_ROWS


def test_the_distribution_counts_every_step(run):
    (picture,) = page_of.distribution(run.findings).pictures
    counted = [int(re.match(r"\d+", title.text)[0]) for title in parsed(picture).iter("title")]
    assert sum(counted) == sum(time["steps"] for time in run.summary["steps"].values())
    for time in run.summary["steps"].values():
        assert f"median {ms(1e9 * time['median_s'])}, {time['steps']} steps" in texts_of(picture)


def longer(trace, totals_ms, count=2, first=1):
    """Findings of the trace as of a longer run: by rank, the sums of `count` steps in a row, without the middle ones.

    The longest step of a row takes as long as the row's steps together.
    """
    rows = {
        rank: tuple(
            RunSteps(first + count * n, count, int(total * MS), int(total * MS), 0) for n, total in enumerate(own)
        )
        for rank, own in enumerate(totals_ms)
    }
    ranks = tuple(replace(one, run_steps=rows.get(one.rank, ())) for one in trace.ranks)
    steps = tuple(step for step in trace.steps if not 20 <= step.index < 40)
    return find(replace(trace, ranks=ranks, steps=steps))


def levels(picture, kind):
    """(x, x, y) of each level of a curve, as parts of the picture."""
    (line,) = (line for line in parsed(picture).iter("polyline") if line.get("class") == f"nb-curve-{kind}")
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    ends = list(zip(points[::2], points[1::2], strict=True))
    assert all(begin[1] == end[1] for begin, end in ends)
    bottom = page_of.PLOT_HEIGHT + 14
    return [(a / 1000, b / 1000, (bottom - y) / page_of.PLOT_HEIGHT) for (a, y), (b, _) in ends]


def test_a_run_that_is_recorded_in_full_has_no_picture_of_the_whole_run(run):
    assert whole_run(run.findings) == ()
    assert "The whole run" not in run.html


def test_the_whole_run_is_drawn_by_rank_with_the_steps_recorded_in_detail(run):
    last = max(step.index for step in run.trace.steps)
    totals = [[20.0] * 15 + [40.0] * 12, [30.0] * 27, [10.0] * 27]
    findings = longer(run.trace, totals)
    (shown,) = whole_run(findings)
    assert section(checked(page_of.page(findings, run.verdict)), shown.title).count("<svg class") == 1
    (picture,) = shown.pictures
    assert parsed(picture).get("aria-label") == f"mean step of each rank over steps 1 to {last}"
    for kind, own in zip(RANK_KINDS, totals, strict=False):
        drawn = levels(picture, kind)
        assert [x for x, _, _ in drawn] == pytest.approx([n / 27 for n in range(27)], abs=1e-4)
        assert [y for _, _, y in drawn] == pytest.approx([total / 2 / 21 for total in own], abs=1e-3)
    (before, _, _), (after, _, _) = rects(picture, "detailed")
    assert (before, after) == pytest.approx((0.0, 39 / last), abs=1e-4)
    assert {"0", "10", "20 ms", "20", "step 40"} <= set(texts_of(picture))
    assert [what for _, what in shown.key] == [
        "rank 0: 14.4 ms on average, at most 40.0 ms",
        "rank 1: 15.0 ms on average, at most 30.0 ms",
        "rank 2: 5.00 ms on average, at most 10.0 ms",
        "steps recorded in detail",
    ]
    assert shown.note == "Each level is the mean of up to 2 steps in a row, of any arm."


def test_of_many_ranks_the_whole_run_shows_the_slowest_and_the_fastest(tmp_path):
    trace = Run(FakeRun(tmp_path, blocks=9, size=6, transports=("stock",)).write()).trace
    (shown,) = whole_run(longer(trace, [[20.0 + rank % 4] * 27 for rank in range(6)]))
    assert [what for kind, what in shown.key if kind in RANK_KINDS] == [
        "rank 3, the slowest: 11.5 ms on average, at most 23.0 ms",
        "rank 0, the fastest: 10.0 ms on average, at most 20.0 ms",
    ]
    assert "Not drawn: 4 ranks." in shown.note
    assert len(list(parsed(shown.pictures[0]).iter("polyline"))) == 2


def test_levels_that_the_whole_run_cuts_are_counted_and_the_highest_is_named(run):
    (shown,) = whole_run(longer(run.trace, [[900.0] + [20.0] * 99]))
    assert "1 of 100 levels are cut at the top; the highest is 450 ms." in shown.note
    drawn = [y for _, _, y in levels(shown.pictures[0], "rank0")]
    assert drawn == pytest.approx([1.0] + [1 / 1.5] * 99, abs=1e-3)


def test_a_curve_of_the_whole_run_keeps_the_mean_of_every_row_and_stays_small(run):
    totals = [float(n % 100) for n in range(1000)]
    (shown,) = whole_run(longer(run.trace, [totals] * 3))
    drawn = levels(shown.pictures[0], "rank0")
    assert len(drawn) == 250 <= LEVELS_MOST
    assert "the mean of up to 8 steps" in shown.note
    high = 1.05 * max(sum(totals[n : n + 4]) / 8 for n in range(0, 1000, 4))
    assert np.mean([y for _, _, y in drawn]) * high == pytest.approx(np.mean(totals) / 2, rel=1e-3)
    assert len(str(shown.pictures[0])) < 50_000


def test_rates_are_drawn_beside_the_probe_and_the_link(run):
    shown = page_of.bandwidth(run.findings)
    (picture,) = shown.pictures
    labels = [what for _, what in shown.key]
    rates = {arm: rate["active_bits_per_s"] for arm, rate in run.summary["bandwidth"].items()}
    assert labels == [
        "probe over ofi",
        *(f"{a} {gbit(bps)} in transfer" for a, bps in rates.items()),
        "the link, 2.00 Gbit/s",
    ]
    titles = [title.text for title in parsed(picture).iter("title")]
    points = run.summary["probe"]["points"]
    assert titles == [
        f"{p['streams']} stream{'s' if p['streams'] > 1 else ''}: {gbit(p['bits_per_s'])}" for p in points
    ]
    heights = [float(dot.get("cy")) for dot in parsed(picture).iter("circle")]
    rates = [p["bits_per_s"] for p in points]
    bottom = 24 + page_of.PLOT_HEIGHT
    assert (bottom - heights[0]) / (bottom - heights[1]) == pytest.approx(rates[0] / rates[1], rel=0.01)


def test_waiting_of_each_rank_is_that_of_the_findings(run):
    splits = [row[1] for row in split_steps(run.trace)]
    shown = page_of.waiting(run.findings, splits)
    late = run.findings.late_ns[2]
    assert late == pytest.approx(4 * MS, rel=0.1)
    assert f"waits 0.00 ms, others {ms(late)}" in texts_of(shown.pictures[0])
    (bar,) = rects(shown.pictures[0], "waited")
    assert bar[1] == pytest.approx(late / max(late, 4 * MS), abs=1e-3)


def test_layers_add_up_to_the_exposed_communication(run):
    (picture,) = page_of.layers(run.findings).pictures
    layers = run.summary["layers"]
    longest = max(max(one["exposed_communication_s"], one["backward_s"]) for one in layers)
    drawn = sum(width for _, width, _ in rects(picture, "exposed")) * longest
    assert drawn == pytest.approx(run.summary["split"]["stock"]["exposed_communication_s"], rel=0.01)


def counters(columns, rows, hz=100):
    begin = 100 * MS
    times = begin + np.arange(len(rows), dtype=np.int64) * (10**9 // hz)
    return Counters("host0", "h0", 0, hz, 100, columns, times, np.array(rows, np.int64))


def heights(picture, kind):
    (line,) = (line for line in picture.iter("polyline") if line.get("class") == f"nb-curve-{kind}")
    found = {float(point.split(",")[1]) for point in line.get("points").split()}
    assert max(found) - min(found) < 0.1  # a constant rate is a straight line
    return max(found)


def test_counters_of_a_host_are_drawn_as_rates(run):
    rate = 125_000_000  # bytes a second: 1 Gbit/s
    count = 400
    net = counters(
        ("eth0:rx_bytes", "eth0:rx_packets", "eth0:tx_bytes", "eth0:tx_packets"),
        [(n * rate // 200, n, n * rate // 100, n) for n in range(count)],
    )
    kinds = [f"cpu{core}:{kind}" for core in (0, 1) for kind in usage.CPU_KINDS]
    kinds += ["tcp:sent_segments", "tcp:retransmitted_segments"]
    busy = [[n if name in ("cpu0:user", "cpu1:idle") else 0 for name in kinds] for n in range(count)]
    samples = (Samples(0, net, counters(tuple(kinds), busy)),)
    recorded = page_of.Recorded(usage.hosts(run.trace, samples), samples)
    shown = page_of.host_use(run.findings, recorded)
    interface, cores = map(parsed, shown.pictures)

    scale = Scale(0.0, 1.1 * 2.0)  # the link is 2 Gbit/s
    tall = page_of.HOST_BOTTOM - page_of.HOST_TOP
    for kind, value in (("tx", 1.0), ("rx", 0.5)):
        expected = page_of.HOST_BOTTOM - tall * scale.at(value)
        assert heights(interface, kind) == pytest.approx(expected, abs=0.1)
    assert heights(cores, "busiest") == pytest.approx(page_of.HOST_TOP, abs=0.1)
    assert heights(cores, "mean") == pytest.approx((page_of.HOST_TOP + page_of.HOST_BOTTOM) / 2, abs=0.1)
    assert ("link", "the link") in shown.key


def test_a_host_is_drawn_as_the_base_used_it(run):
    used = usage.Use("eth0", "tx", 1e9, 1e9, 1.0, 1.0)
    alone = usage.HostUse(0, "host0", Arm("single"), 1.0, 1.0, 50.0, (replace(used, interface="lo"),))
    base = replace(alone, arm=run.findings.base, interfaces=(used,))
    net = counters(("lo:rx_bytes", "lo:tx_bytes", "eth0:rx_bytes", "eth0:tx_bytes"), [[n] * 4 for n in range(400)])
    samples = (Samples(0, net, None),)
    (picture,) = page_of.host_use(run.findings, page_of.Recorded((alone, base), samples)).pictures
    assert "host0: eth0" in str(picture)
    (picture,) = page_of.host_use(run.findings, page_of.Recorded((alone,), samples)).pictures
    assert "host0: lo" in str(picture)


def test_the_loopback_is_no_part_of_the_link(run, capsys):
    used = usage.Use("eth0", "tx", 1e9, 1e9, 1.0, 1.0)
    both = usage.HostUse(
        0, "host0", run.findings.base, 1.0, 1.0, 50.0, (replace(used, interface="lo", bytes=9.0), used)
    )
    alone = replace(both, interfaces=both.interfaces[:1])
    net = counters(("lo:rx_bytes", "lo:tx_bytes", "eth0:rx_bytes", "eth0:tx_bytes"), [[n] * 4 for n in range(400)])
    for host, name, share in ((both, "eth0", ["50%"]), (alone, "lo", [])):
        shown = page_of.host_use(run.findings, page_of.Recorded((host,), (Samples(0, net, None),)))
        assert f"host0: {name}" in str(shown.pictures[0])
        assert ("nb-curve-link" in str(shown.pictures[0])) == bool(share)
        assert (("link", "the link") in shown.key) == bool(share)
        text.show(run.findings, run.verdict, hosts=(host,))
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["0", name, "stock", "tx", "1.00", *share, "1.00", *share, "-", "-", "-"] in rows


def test_ranks_that_are_not_drawn_are_counted(tmp_path):
    run = Run(FakeRun(tmp_path, blocks=2, size=page_of.RANKS_MOST + 2, transports=("stock",)).write())
    shown = page_of.waiting(run.findings, [row[1] for row in split_steps(run.trace)])
    assert "Not drawn: 2 ranks." in shown.note


def test_several_links_of_a_host_are_drawn_and_printed_as_one_interface(tmp_path, capsys):
    network = {"how": "a lab", "link_bps": 2e9, "flow_bps": [], "verified": {"more_links": [{"measured_bps": 1e9}]}}
    run = Run(FakeRun(tmp_path, run={"network": network}).write())
    kinds = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")
    columns = tuple(f"{name}:{kind}" for name in ("nb0", "nb1") for kind in kinds)
    net = counters(columns, [[n * 625_000, n] * 4 for n in range(400)])  # 0.5 Gbit/s each
    samples = (Samples(0, net, None),)
    uses = usage.hosts(run.trace, samples)
    (picture,) = page_of.host_use(run.findings, page_of.Recorded(uses, samples)).pictures
    assert "host0: nb0,nb1" in str(picture)
    place = page_of.HOST_BOTTOM - (page_of.HOST_BOTTOM - page_of.HOST_TOP) * Scale(0.0, 2.2).at(1.0)
    assert heights(parsed(picture), "tx") == pytest.approx(place, abs=0.1)
    text.show(run.findings, run.verdict, hosts=uses)
    Console(width=100).print(progress.frame(run.findings, run.verdict, uses, ["on"], 0))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "nb0,nb1", "stock", "rx", "1.00", "50%", "1.00", "50%", "-", "-", "-"] in rows
    assert ["host0", "nb0,nb1", "1.00", "1.00", "2.00", "Gbit/s", "-", "-", "-"] in rows


def test_the_curve_holds_the_answers_and_marks_this_run(run):
    curve = what_if.curve(run.findings)
    assert curve.missing == ""
    job = questions.job(run.trace, run.findings.base)
    for bps, step_ns, low_ns, high_ns in curve.points[:: len(curve.points) // 3]:
        one = questions.answer(job, next(sweeps.links(job, [bps])))
        assert step_ns == pytest.approx(1e9 * one.step_s.value)
        assert low_ns <= step_ns <= high_ns
    steps = [point[1] for point in curve.points]
    assert steps == sorted(steps, reverse=True)
    assert curve.present[:2] == (job.cost.link.rate_bps, job.measured_ns.value)
    assert curve.free_ns <= steps[-1]
    shown = page_of.what_if(run.findings, curve)
    assert ("present", f"this run: {ms(curve.present[1])} at {gbit(curve.present[0])} (measured)") in shown.key
    (dot,) = parsed(shown.pictures[0]).iter("circle")
    x = Scale(curve.points[0][0], curve.points[-1][0], log=True)
    assert share(dot.get("cx")) == pytest.approx(x.at(curve.present[0]), abs=1e-4)


def test_a_plot_of_answers_has_their_steps_and_leaves_out_what_was_refused(run):
    job = questions.job(run.trace, run.findings.base)
    found = sweeps.answers(job, [sweeps.now(job), sweeps.free(job)])
    refused = replace(found[0], step_s=None, scaling=None, refused="too far from the fit")
    axes = plots.answers([*found, refused])
    assert axes.get_title(loc="left").endswith(" (predicted)")
    poor = plots.answers([found[0], replace(found[1], label=questions.POORLY_PREDICTED)])
    assert poor.get_title(loc="left").endswith(" (predicted from a poor fit)")
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1e3 * one.step_s.value for one in found])
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.setting.title for one in found]
    assert [text.get_text() for text in axes.texts] == [ms(1e9 * one.step_s.value) for one in found]


def test_the_best_of_several_numbers_of_streams_is_drawn_as_achieved():
    rates = {"tcp": (1e8, 2e8, 1.5e8), "stock": (0.5e8,)}
    rows = [{"transport": name, "bytes": 4, "busbw_bytes_per_s": rate} for name, own in rates.items() for rate in own]
    axes = plots.bench_curve(SimpleNamespace(rows=rows, probe={}))
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([1.6, 0.4])


@pytest.mark.filterwarnings("error:No artists with labels")
def test_a_plot_without_numbers_has_the_reason_of_the_page_instead(tmp_path):
    bare = Run(FakeRun(tmp_path, transports=("bare",), blocks=1, block_steps=1).write())
    why = text.no_split(bare.findings)
    expected = {
        plots.split: why,
        plots.layers: why,
        plots.transports: page_of.distribution(bare.findings).missing,
        plots.bandwidth: page_of.bandwidth(bare.findings).missing,
    }
    assert min(map(len, expected.values())) > 0
    empty = {draw: draw(bare) for draw in expected}
    assert {draw: [one.get_text() for one in axes.texts] for draw, axes in empty.items()} == {
        draw: [reason] for draw, reason in expected.items()
    }
    refused = SimpleNamespace(step_s=None, refused="too far from the fit", label="predicted")
    every = [*empty.values(), plots.answers([refused]), plots.answers([])]
    every += [plots.bench_curve(SimpleNamespace(rows=[], probe={}))]
    for axes in every:
        assert not axes.axison
        assert not re.search(r"measured|predicted|None", axes.get_title(loc="left"))
        assert len(axes.texts) == 1
    assert every[-3].texts[0].get_text() == "Refused: too far from the fit."


@pytest.mark.parametrize("probe", [None, [[1, 6_000_000, 100 * MS], [4, 24_000_000, 101 * MS]]])
def test_a_plot_of_rates_has_their_unit_and_no_axis_of_streams_without_a_probe(tmp_path, probe):
    axes = plots.bandwidth(Run(FakeRun(tmp_path, probe=probe).write()))
    assert axes.get_ylabel() == "Gbit/s, one way"
    assert axes.xaxis.get_visible() == bool(probe)


def test_a_page_without_the_engine_says_so(run):
    page = page_of.page(run.findings, run.verdict)
    assert "No prediction was requested." in page
    checked(page)


def test_eight_ranks_and_two_hundred_steps_stay_small(tmp_path):
    big = Run(FakeRun(tmp_path, blocks=20, block_steps=10, size=8, transports=("stock", "ofi")).write())
    assert len({step.index for step in big.trace.steps}) == 200
    assert len(big.html.encode()) < 2_000_000
    page = page_of.page(longer(big.trace, [[float(n % 7 + 1) for n in range(1024)]] * 8), big.verdict)
    assert "The whole run" in page
    assert len(page.encode()) < 2_000_000


def test_names_are_escaped_and_long_ones_keep_their_end():
    drawn = bars("a & b", [Row("<module>" * 9 + "end", "1 & 2", ((Piece("exposed", 1.0, '"<&'),),))])
    assert texts_of(drawn)[0].endswith("end")
    assert len(texts_of(drawn)[0]) == len(short_name("x" * 99))
    assert "<module" not in str(drawn)
    assert parsed(drawn).get("aria-label") == "a & b"


def test_a_bar_never_leaves_its_picture():
    drawn = bars(
        "bars", [Row("a", "", ((Piece("exposed", 3.0), Piece("wait", 9.0), Piece("other", -1.0)),))], longest=4.0
    )
    assert rects(drawn) == [(0.0, 0.75, 17.0), (0.75, 0.25, 17.0)]


finite = st.floats(-1e12, 1e12, allow_nan=False)


@given(finite, st.floats(1e-6, 1e12), st.integers(3, 9), st.booleans())
def test_ticks_are_round_values_within_the_scale(low, span, most, log):
    scale = (
        Scale(abs(low) + 1e-3, (abs(low) + 1e-3) * (1.2 + span), True)
        if log
        else Scale(low, low + span + abs(low) / 1e6)
    )
    ticks = scale.ticks(most)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= most
    assert all(0 <= scale.at(value) <= 1 for value in ticks)
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= value <= scale.high + slack for value in ticks)


def test_a_picture_keeps_its_text_above_everything_else():
    picture = Picture("p", 20)
    picture.text(0, 10, "words")
    picture.bar((0, 1), (0, 20), "exposed")
    picture.line((0, 1), (5, 5))
    assert [element.tag for element in parsed(picture)] == ["line", "rect", "text"]


def test_steps_of_an_arm_with_few_of_them_are_where_its_median_is():
    """A long run over one transport, whose trial had a few slow steps over another."""
    few, many = [(300 + n / 10) * MS for n in range(40)], [(100 + n % 7 / 10) * MS for n in range(12_000)]
    (picture,) = page_of.histograms("steps", {"few": few, "many": many}, ["#111", "#222"]).pictures
    notes = re.findall(r"#111.*?<title>(.*?)</title>", str(picture))
    lows = [float(re.search(r"of (\d+) ms to", note).group(1)) for note in notes]
    assert lows
    assert min(lows) > 290


def test_why_no_counters_are_drawn_is_true(run):
    def why(recorded, **changes):
        found = replace(run.findings, trace=replace(run.findings.trace, **changes))
        return page_of.host_use(found, recorded).missing

    assert (
        why(page_of.Recorded()) == "No host's counters were recorded: set NETBOTTLENECK_MONITOR_HZ=20 to record them."
    )
    assert why(page_of.Recorded(samples=(Samples(0),))).startswith("The hosts' counters have too few readings")
    assert why(page_of.Recorded(), recorder="torch.profiler") == "torch.profiler records no counters of the hosts."
