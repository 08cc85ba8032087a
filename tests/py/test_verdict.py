"""Each rule of the verdict: a run that it decides, and a run that it does not."""

import ast
import inspect
import math
from dataclasses import replace

import pytest

from netbottleneck.analysis import findings, intervals, rule_facts, rules, traffic, usage, verdict
from netbottleneck.analysis.bandwidth import Achievable
from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.analysis.thresholds import GAIN_MIN, NETWORK_SHARE_MIN, STEPS_MIN
from netbottleneck.report.progress import missing_text, verdict_line
from netbottleneck.report.text import NO_SCALING, saving_text, sentences
from netbottleneck.report.text import text as report_text
from netbottleneck.trace import ring_reader
from netbottleneck.trace.model import HOOKED, NOT_RECORDED, STAYS, Network, Rank, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import ms, percent
from ringwriter import BUCKETS, FakeRun


def findings_of(folder, **settings):
    return findings.find(ring_reader.load(FakeRun(folder, **settings).write()))


class Varying(FakeRun):
    """A run whose transfers take `transfer_of(transport, block, index)` ms."""

    def __init__(self, folder, transfer_of, **settings):
        super().__init__(folder, run={"network": None}, probe=[], **settings)
        self.transfer_of = transfer_of

    def _step(self, rings, begin, index, block, transport):
        self.transfer_ms[transport] = self.transfer_of(transport, block, index)
        return super()._step(rings, begin, index, block, transport)


@pytest.mark.parametrize("module", [verdict, rules, findings])
def test_the_verdict_takes_its_thresholds_from_one_module(module):
    body = ast.parse(inspect.getsource(module)).body
    numbers = [
        node.lineno
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
    ]
    assert numbers == []


def test_a_faster_transport_is_a_transport_limit(tmp_path):
    v = verdict.decide(findings_of(tmp_path, blocks=9))
    assert v.code == "TRANSPORT_LIMITED"
    assert v.why.startswith("Measured: ofi")
    assert v.next == "NETBOTTLENECK_TRANSPORT=ofi NETBOTTLENECK_STREAMS=4"


def test_a_handicapped_stock_withholds_the_gain(tmp_path):
    numbers = findings_of(tmp_path, blocks=9, bare_ms=160)
    sentence = rule_facts.handicap_sentence(numbers)
    assert sentence.startswith("Our hooks slow the stock path by 9.4 %, so no gain is reported")
    assert findings.best_gain(numbers) is None
    assert not findings.stock_is_as_good(numbers)
    assert "Our hooks slow the stock path" in verdict.decide(numbers).why


def test_a_stock_as_fast_as_the_script_is_not_handicapped(tmp_path):
    assert rule_facts.handicap_sentence(findings_of(tmp_path, blocks=9)) is None


def test_one_pair_of_blocks_is_not_enough_for_a_claim(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock", "ofi"), blocks=2, run={"network": None}, probe=[])
    assert len(numbers.comparisons) == 1
    assert findings.best_gain(numbers) is None
    assert verdict.decide(numbers).code == "INCONCLUSIVE"


def test_an_inconclusive_verdict_has_the_number_of_steps_that_its_advice_names(tmp_path):
    few = verdict.decide(findings_of(tmp_path / "few", transports=("stock",), blocks=1, block_steps=4))
    pairs = {"transports": ("stock", "ofi"), "blocks": 2, "run": {"network": None}, "probe": []}
    short = verdict.decide(findings_of(tmp_path / "short", **pairs))
    for found in (few, short):
        assert found.code == "INCONCLUSIVE"
        assert found.more is not None
        assert found.next.startswith(f"Measure {found.more} more steps")
    assert few.more == 2  # the first step of a block does not count


def test_no_saving_of_the_network_is_larger_than_exposed_communication_and_waiting(tmp_path):
    numbers = findings_of(tmp_path, blocks=9)
    facts = rule_facts.Facts(numbers, numbers.base, rule_facts.Predicted(), ())
    idle = numbers.parts_ns["idle"]
    most = idle.value
    assert 0 < idle.value <= idle.high < facts.step_ns
    assert facts.bounded(Estimate(1.6 * most, 0.8 * most, 1.7 * most)) == (Estimate(most, 0.8 * most, idle.high), "")
    inside = Estimate(0.6 * most, 0.5 * most, 0.7 * most)
    assert facts.bounded(inside) == (inside, "")
    wide = replace(numbers, parts_ns={**numbers.parts_ns, "idle": Estimate(most, 0.0, 2 * facts.step_ns)})
    assert replace(facts, f=wide).bounded(Estimate(most, most, 3 * facts.step_ns))[0].high == facts.step_ns


def test_a_saving_near_the_limit_has_the_steps_after_which_its_interval_leaves_it_out(tmp_path):
    numbers = findings_of(tmp_path, blocks=9)
    facts = rule_facts.Facts(numbers, numbers.base, rule_facts.Predicted(), ())
    limit = GAIN_MIN * facts.step_ns
    steps = sum(time.steps + time.blocks for time in numbers.times.values())
    needed = facts.more_steps(Estimate(2 * limit, 0.0, 4 * limit))  # twice as wide as it may be: 4 x the steps
    assert needed["more"] == 3 * steps
    assert f"Measure {3 * steps} more steps" in needed["needs"]
    many = facts.more_steps(Estimate(1.25 * limit, 0.0, 2.5 * limit))  # 25 x the steps
    assert many["needs"].startswith("Nothing more: the saving is too near the limit to be decided here.")
    assert many["more"] == 24 * steps
    for saving in (Estimate(limit, 0.0, 2 * limit), Estimate(2 * limit, -math.inf, math.inf)):
        assert "more" not in facts.more_steps(saving)


def test_a_probe_that_reaches_more_is_a_transport_limit_to_be_measured(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock", "ofi"), blocks=2)
    probed = replace(numbers, comparisons=(), trace=replace(numbers.trace, arms=(Arm("stock"),)))
    v = verdict.decide(probed)
    assert v.code == "TRANSPORT_LIMITED"
    assert "NETBOTTLENECK_TRANSPORT=stock,ofi" in v.next


def test_advice_never_names_the_run_that_was_just_made(tmp_path):
    v = verdict.decide(findings_of(tmp_path, transports=("stock", "ofi"), blocks=2))
    assert v.code == "TRANSPORT_LIMITED"
    assert v.next.startswith("Measure 24 more steps with the same arms (a longer training)")


def test_a_run_without_a_step_is_inconclusive(tmp_path):
    trace = replace(ring_reader.load(FakeRun(tmp_path).write()), steps=(), collectives=())
    decided = verdict.decide(findings.find(trace))
    assert (decided.code, decided.more) == ("INCONCLUSIVE", None)  # the steps that were not recorded are not known
    assert decided.why.startswith("No step was recorded: a step ends where a torch optimizer updates weights")
    assert decided.next == (
        "Set NETBOTTLENECK_START_STEP=0, and measure 6 steps or more whose updates a torch optimizer makes."
    )


@pytest.mark.parametrize("arms", [("tcp",), ("bare", "tcp"), ("stock", "tcp")])
def test_steps_that_are_left_out_for_a_missing_file_need_its_copy_and_no_other_run(tmp_path, arms):
    folder = FakeRun(tmp_path, transports=arms, blocks=6, block_steps=8).write()
    (folder / "ranks" / "1.tcp.ring").unlink()
    decided = verdict.decide(findings.find(ring_reader.load(folder)))
    assert decided.next == verdict.ALL_RECORDS
    if "stock" not in arms:
        assert decided.code == "INCONCLUSIVE"
        assert decided.why == "Steps over tcp are left out: ranks/1.tcp.ring cannot be read."


def test_advice_to_measure_longer_names_what_makes_a_run_longer(unexplained):
    tried = Paired(Arm("stock"), Arm("ofi"), 9, 63, Estimate(-1e6, -4e6, 2e6), Estimate(0.99, 0.96, 1.02), 0.04)
    assert "(a longer training)" in rule_facts.more_steps(unexplained, tried)
    study = replace(unexplained, trace=replace(unexplained.trace, arms=(*unexplained.trace.arms, Arm("single"))))
    assert "(--rounds of the study)" in rule_facts.more_steps(study, tried)
    close = replace(tried, ratio=Estimate(0.9702, 0.94, 1.0))
    assert rule_facts.more_steps(unexplained, close).startswith("Nothing more: the difference is too near the limit")
    assert rule_facts.more_steps(unexplained, replace(close, pairs=2)).startswith("Measure ")
    advice = [rule_facts.SAME_ARMS, verdict.QUIET, rule_facts.more_steps(unexplained, tried)]
    assert not any("END_STEP" in text for text in advice)


def test_a_full_link_is_a_link_limit_and_stock_is_kept(tmp_path):
    numbers = findings_of(tmp_path, blocks=9, transfer_ms={"stock": (9, 31)}, bare_ms=63)
    assert findings.stock_is_as_good(numbers)
    v = verdict.decide(numbers)
    assert v.code == "LINK_LIMITED"
    assert "as good as what was tried" in v.why


def test_a_burst_beyond_the_cap_fills_the_link(tmp_path):
    numbers = findings_of(tmp_path, blocks=9, transfer_ms={"stock": (9, 31)}, bare_ms=63)
    moved = numbers.achieved[numbers.base].active_bps
    v = verdict.decide(replace(numbers, link_bps=0.7 * moved))
    assert v.code == "LINK_LIMITED"
    assert "all of the link and a burst after each pause; averaged over the step" in v.why
    assert "143 %" not in v.why


@pytest.mark.parametrize(("part", "believed"), [(0.9, False), (1.0, True)])
def test_a_stated_rate_is_not_used_if_more_moved_over_whole_steps(tmp_path, part, believed):
    settings = {"transports": ("stock",), "run": {"network": None}, "blocks": 1, "block_steps": 12}
    moved = findings_of(tmp_path / "free", **settings).achieved[Arm("stock")].average_bps
    about = {"stock": {"link_bps": int(part * moved), "interface": "eth0"}}
    numbers = findings_of(tmp_path / "stated", about=about, **settings)
    assert (numbers.link_bps is not None) == believed
    assert any("stated rate" in note for note in numbers.trace.notes) != believed


@pytest.mark.parametrize(
    ("provider", "transfer", "times", "believed"),
    [
        ("gloo", (2, 30), 1.45, True),
        ("gloo", (9, 31), 1.55, True),  # 11 ms of the stated rate beyond it
        ("gloo", (9, 80), 1.55, False),  # 24 ms
        ("gloo", (9, 80), 1.75, True),  # 33 ms, of a link that is in use 96 % of the time
        ("gloo", (1, 6), 1.55, False),  # of a link that is idle most of the time
        ("nccl", (2, 30), 1.45, True),
        ("nccl", (9, 31), 1.55, False),
    ],
)
def test_a_stated_rate_is_that_of_transfers_faster_by_a_burst_at_most(tmp_path, provider, transfer, times, believed):
    """Of NCCL, which may use another interface, a rate is not believed without readings of that one."""
    settings = {"transports": ("stock",), "run": {"network": None}, "blocks": 1, "block_steps": 12, "probe": []}
    settings |= {"transfer_ms": {"stock": transfer}, "late_ms": {0: 50, 1: 50}}
    moved = findings_of(tmp_path / "free", **settings).achieved[Arm("stock")]
    stated = int(moved.active_bps / times)
    assert moved.average_bps < stated
    about = {"stock": {"link_bps": stated, "interface": "eth0", "provider": provider}}
    numbers = findings_of(tmp_path / "stated", about=about, **settings)
    assert (numbers.link_bps is not None) == believed
    assert any("between hosts in transfer" in note for note in numbers.trace.notes) != believed
    assert verdict.decide(numbers).code != "LINK_LIMITED" or (believed and provider == "gloo")


def test_a_full_link_beside_a_faster_transport_names_it_first(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, transfer_ms={"stock": (9.9, 34.6), "ofi": (8.5, 29.7)}, bare_ms=66, probe=[]
    )
    v = verdict.decide(numbers)
    assert (v.code, [one.code for one in v.secondary]) == ("LINK_LIMITED", ["TRANSPORT_LIMITED"])
    assert "With ofi the step is " in " ".join(sentences(numbers))
    assert v.next.startswith(
        "First NETBOTTLENECK_TRANSPORT=ofi NETBOTTLENECK_STREAMS=4, which is faster. Then send less"
    )


def test_a_full_link_rules_other_transports_out_only_if_none_is_undecided(tmp_path):
    numbers = findings_of(tmp_path, blocks=9, transfer_ms={"stock": (9, 31)}, bare_ms=63)
    (pair,) = numbers.comparisons
    slow = Estimate(1.1, 1.05, 1.15)
    handicap = Paired(Arm("bare"), Arm("stock"), 4, 40, Estimate(9e6, 5e6, 13e6), slow)
    perhaps = replace(pair, ratio=Estimate(0.92, 0.8, 1.04))

    def advised(**changes):
        return rules._send_less(replace(numbers, **changes))

    sure = "another transport cannot help much."
    assert advised().endswith(sure)
    assert advised(comparisons=()).endswith(sure)
    assert advised(comparisons=(), handicap=handicap).endswith(sure)
    for changes in ({"comparisons": (perhaps,)}, {"comparisons": (pair, perhaps)}, {"handicap": handicap}):
        assert advised(**changes) == "Send less (larger batches, smaller gradients) or get a faster link."


def test_rates_are_judged_by_the_time_in_which_data_moved(tmp_path):
    numbers = findings_of(tmp_path, size=4, blocks=9, transfer_ms={"stock": (9, 31)}, bare_ms=63)
    parts = numbers.parts["stock"]
    assert parts.transfer_ns == pytest.approx(40e6, rel=0.01)
    for share, judged in ((0.19, True), (0.21, False)):
        unsure = replace(numbers, clock_error_ns=share * 40e6 / parts.operations)
        assert (rule_facts.Facts(unsure, Arm("stock"), rule_facts.Predicted(), ()).rates_known == "") == judged


def test_a_noisy_arm_does_not_hide_a_sure_gain(tmp_path):
    def transfer(transport, block, _):
        return (1, {"stock": 78, "tcp": 67}.get(transport) or (20, 110)[block // 3 % 2])

    run = Varying(tmp_path, transfer, transports=("stock", "ofi", "tcp"), blocks=12).write()
    numbers = findings.find(ring_reader.load(run))
    noisy, sure = (next(p for p in numbers.comparisons if p.other == arm) for arm in ("ofi", "tcp"))
    assert noisy.gain.value > sure.gain.value
    assert noisy.gain.low < GAIN_MIN < sure.gain.low
    assert findings.best_gain(numbers) is sure
    v = verdict.decide(numbers)
    assert (v.code, v.next.split()[0]) == ("TRANSPORT_LIMITED", "NETBOTTLENECK_TRANSPORT=tcp")
    # One that wins, but perhaps by less than what counts, is not named before a sure one either.
    maybe = replace(noisy, ratio=Estimate(0.8, 0.65, 0.99))
    assert findings.best_gain(replace(numbers, comparisons=(maybe, sure))) is sure
    assert findings.best_gain(replace(numbers, comparisons=(maybe,))) is maybe


def test_a_gain_is_as_sure_in_ns_as_in_percent_where_steps_get_longer(tmp_path):
    for at in (4, 6, 8):

        def transfer(transport, block, _, at=at):
            return (1, {"stock": (68, 168), "ofi": (64.7, 161.3)}[transport][block >= at])

        run = Varying(tmp_path / str(at), transfer, transports=("stock", "ofi"), blocks=12).write()
        numbers = findings.find(ring_reader.load(run))
        (pair,) = numbers.comparisons
        assert GAIN_MIN < pair.gain.low < pair.gain.high < 0.035
        v = verdict.decide(numbers)
        assert v.code == "TRANSPORT_LIMITED"
        assert v.evidence[0].saving.value == pytest.approx(-pair.difference_ns.value)
        assert pair.base_ns == pytest.approx(pair.difference_ns.low / (pair.ratio.low - 1))
        assert rule_facts.steps_to_decide(numbers, pair) > 0  # nobody is asked for 0 more steps


LARGE_LINK = {"network": {"how": "", "link_bps": 1e10}}


def test_advice_names_no_arm_twice(tmp_path):
    one = {"blocks": 1, "block_steps": 12, "transports": ("tcp",), "transfer_ms": {"tcp": (35, 123)}}
    probed = verdict.decide(findings_of(tmp_path / "a", run=LARGE_LINK, **one))
    assert probed.next == "Measure the difference: NETBOTTLENECK_TRANSPORT=stock,tcp NETBOTTLENECK_STREAMS=4"
    alone = verdict.decide(findings_of(tmp_path / "b", run=LARGE_LINK, probe=[], **one))
    assert alone.next.startswith("Measure NETBOTTLENECK_TRANSPORT=stock,tcp NETBOTTLENECK_STREAMS=auto")
    busy = {"busy_cores": 0.92, "meta": {"cores": [2]}, "run": {"network": None}, "transfer_ms": {"stock": (1, 3.5)}}
    few = verdict.decide(findings_of(tmp_path / "c", transports=("stock", "null"), blocks=4, **busy))
    (host,) = (one for one in few.evidence if one.code == "HOST_LIMITED")
    assert "null,null" not in few.next + host.needs
    assert "same arms" in host.needs


@pytest.mark.parametrize("arms", [("stock", "tcp"), ("tcp", "stock")])
@pytest.mark.parametrize("probe", [[[1, 6_000_000, 10**8], [4, 24_000_000, 101 * 10**6]], []])
def test_a_run_that_ended_in_its_first_block_goes_on_with_its_arms(tmp_path, probe, arms):
    slow = {"tcp": (35, 123)}
    run = FakeRun(tmp_path, transports=arms, run=LARGE_LINK, blocks=1, block_steps=12, probe=probe, transfer_ms=slow)
    found = findings.find(ring_reader.load(run.write()))
    assert verdict.decide(found).next == rule_facts.SAME_ARMS
    note = "steps over tcp are left out: ranks/1.tcp.ring cannot be read"
    assert verdict.decide(replace(found, trace=replace(found.trace, notes=(note,)))).next == verdict.ALL_RECORDS


def test_a_faster_interface_of_another_host_is_no_setting_of_this_one(tmp_path):
    class Mixed(FakeRun):
        def _meta(self, rank):
            meta = super()._meta(rank)
            meta["transports"]["stock"] |= {"interface": "eth0", "link_bps": (10, 1)[rank] * 10**9}
            return meta

    settings = {"transports": ("stock",), "run": {"network": None}, "blocks": 1, "block_steps": 12}
    settings["transfer_ms"] = {"stock": (18, 62)}  # 0.95 Gbit/s
    v = verdict.decide(findings.find(ring_reader.load(Mixed(tmp_path / "two", **settings).write())))
    assert v.code == "MISCONFIGURED"
    assert "stock uses eth0 (1.00 Gbit/s) on rank 1; eth0 on rank 0 has 10.0 Gbit/s" in v.why
    assert v.next.startswith("Look at the interface, cable and switch port of the host of rank 1")
    same = Mixed(tmp_path / "one", meta={"host_id": "one"}, **settings).write()
    assert verdict.decide(findings.find(ring_reader.load(same))).next.endswith("=eth0.")


@pytest.mark.parametrize(
    ("provider", "certain"),
    [("gloo", True), ("cpu:gloo", True), ("nccl", False), ("cpu:gloo,cuda:nccl", False), ("horovod over MPI", False)],
)
def test_a_slow_interface_counts_only_if_the_gradients_travel_there(tmp_path, provider, certain):
    about = {
        "stock": {"provider": provider, "interface": "eno1", "link_bps": 5 * 10**8},
        "tcp": {"interface": "eth1", "link_bps": 10**11},
    }
    settings = {"transports": ("stock", "tcp"), "blocks": 4, "run": {"network": None}, "about": about, "probe": []}
    numbers = findings_of(tmp_path, **settings)
    moved = 10 * sum(bucket["bytes"] for bucket in BUCKETS)  # two blocks of five counted steps

    def configured(*bytes_moved):
        uses = [
            usage.HostUse(
                rank,
                f"host{rank}",
                Arm("stock"),
                1.0,
                1.0,
                10.0,
                (usage.Use("eno1", "tx", 0.0, None, part * moved, 0.0),),
            )
            for rank, part in enumerate(bytes_moved)
        ]
        predicted = traffic.faster(numbers.trace, Arm("stock"), uses)
        found = rules.configuration(rule_facts.Facts(numbers, numbers.base, rule_facts.Predicted(), uses))
        assert (traffic.FASTER_INTERFACE in predicted) == found.applies
        return found

    assert configured(1.0, 1.0).fired
    assert configured(0.01, 0.01).applies == certain
    assert configured().applies == certain
    assert configured(0.01, 0.6).fired
    if not certain:
        assert configured().rests == "no bytes on eno1 show that stock uses it (NETBOTTLENECK_MONITOR_HZ=10)"


@pytest.mark.parametrize(
    ("link_bps", "meta", "advised"),
    [(None, {}, True), (10**11, {}, False), (None, {"host_id": "one"}, False)],
)
def test_the_links_speed_is_asked_for_where_it_is_not_known_and_matters(tmp_path, link_bps, meta, advised):
    about = {"stock": {"link_bps": link_bps, "interface": "eth0"}} if link_bps else {}
    found = findings_of(
        tmp_path,
        transports=("stock",),
        run={"network": None},
        meta={"buckets": [], **meta},
        about=about,
        blocks=1,
        block_steps=12,
    )
    v = verdict.decide(found)
    assert v.code == "INCONCLUSIVE"
    assert ("NETBOTTLENECK_LINK_GBPS" in v.next) == advised


def test_unseen_bytes_are_those_of_the_counted_steps(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=6).write())
    sent = 5 * sum(bucket["bytes"] for bucket in BUCKETS)  # the first step of a block is not counted
    interface = usage.Use("eth0", "tx", 0.0, None, sent / 0.65, 0.0)
    use = usage.HostUse(0, "host0", Arm("stock"), 1.0, 1.0, 10.0, (interface,))
    found = traffic.unseen(run, Arm("stock"), [use])
    assert found.part == pytest.approx(0.35, abs=0.001)
    assert found.surely == pytest.approx(1 - 0.65 * 1.1, abs=0.001)


def test_received_bytes_are_compared_with_received_ones(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=6).write())
    gathers = replace(run, collectives=tuple(replace(one, kind="gather") for one in run.collectives))
    receives = replace(run, collectives=tuple(replace(one, kind="recv") for one in run.collectives))
    moved = 5.0 * sum(bucket["bytes"] for bucket in BUCKETS)

    def surely(trace, **ways):
        interfaces = tuple(usage.Use("eth0", way, 0.0, None, nbytes, 0.0) for way, nbytes in ways.items())
        use = usage.HostUse(0, "host0", Arm("stock"), 1.0, 1.0, 10.0, interfaces)
        found = traffic.unseen(trace, Arm("stock"), [use])
        return None if found is None else found.surely

    assert surely(receives, rx=moved, tx=0.0) == 0
    assert surely(receives, rx=2 * moved, tx=0.0) == pytest.approx(0.45, abs=0.01)
    assert surely(receives, rx=moved, tx=moved) == 0  # it sends nothing that the other bytes compare with
    assert surely(run, rx=2 * moved, tx=moved) == pytest.approx(0.45, abs=0.01)
    assert surely(gathers, rx=9 * moved) is None  # what a rank receives is not known
    assert surely(gathers, rx=9 * moved, tx=moved / 2) is None  # nor what the root sends


def test_a_share_that_single_steps_make_is_told_from_that_of_most(tmp_path):
    run = Varying(
        tmp_path, lambda *at: (1, 40 if at[2] % 5 == 0 else 2.5), transports=("stock",), blocks=1, block_steps=41
    ).write()
    v = verdict.decide(findings.find(ring_reader.load(run)))
    assert v.code == "INCONCLUSIVE"
    assert v.why.startswith("Exposed communication and waiting are 7.2 % of the typical step, and 24 % of all steps")
    often = Varying(
        tmp_path / "often", lambda *at: (1, 0 if at[2] % 4 == 0 else 4), transports=("stock",), blocks=1, block_steps=41
    ).write()
    numbers = findings.find(ring_reader.load(often))
    assert numbers.share.high < NETWORK_SHARE_MIN < numbers.parts["stock"].exposed_ns / numbers.parts["stock"].step_ns
    assert verdict.decide(numbers).code != "NOT_NETWORK"


def test_when_stock_is_as_good_do_nothing_is_the_verdict(tmp_path):
    alike = {"blocks": 9, "bare_ms": 174, "transfer_ms": {"ofi": (35, 123)}, "probe": [[1, 6_000_000, 10**8]]}
    v = verdict.decide(findings_of(tmp_path / "known", **alike))
    assert v.code == "DO_NOTHING"
    assert v.next == "Do nothing: keep stock."
    unknown = verdict.decide(findings_of(tmp_path / "unknown", run={"network": None}, **alike))
    assert unknown.code == "INCONCLUSIVE"  # the link may be full
    assert "of the step, is left, and whether the link is full is not known" in unknown.why
    assert unknown.next.startswith("Keep stock. Measure again with NETBOTTLENECK_LINK_GBPS, the link's speed")


def test_a_run_of_one_transport_of_ours_asks_for_the_speed_of_the_link_before_it_asks_for_another_run(tmp_path):
    alike = {"transports": ("tcp",), "blocks": 9, "probe": []}
    assert "NETBOTTLENECK_LINK_GBPS" in verdict.decide(findings_of(tmp_path / "a", run={"network": None}, **alike)).next


def gaining(tmp_path, value, low, high):
    """A run whose only comparison has this gain and interval; without a probe."""
    numbers = findings_of(tmp_path, transports=("stock", "ofi"), blocks=9, run={"network": None}, probe=[])
    (pair,) = numbers.comparisons
    step_ns = numbers.times["stock"].median_ns
    difference = Estimate(-value * step_ns, -high * step_ns, -low * step_ns)
    ratio = Estimate(1 - value, 1 - high, 1 - low)
    return replace(numbers, comparisons=(replace(pair, difference_ns=difference, ratio=ratio),))


@pytest.mark.parametrize(
    ("value", "low", "high", "claimed"),
    [
        (0.10, 0.04, 0.16, True),
        (0.10, -0.01, 0.21, False),  # crosses zero
        (0.10, 0.0, 0.20, False),
        (0.03, 0.01, 0.05, False),  # not surely above the limit
        (0.04, 0.031, 0.05, True),
        (-0.10, -0.16, -0.04, False),
    ],
)
def test_a_gain_is_claimed_if_it_is_large_enough_and_its_interval_is_above_zero(tmp_path, value, low, high, claimed):
    numbers = gaining(tmp_path, value, low, high)
    assert (verdict.decide(numbers).code == "TRANSPORT_LIMITED") == claimed


@pytest.mark.parametrize(("value", "low", "claimed"), [(0.03, 0.01, True), (0.0299, 0.01, False), (0.10, -0.01, False)])
def test_a_gain_is_reported_if_its_interval_is_above_zero(tmp_path, value, low, claimed):
    assert (findings.best_gain(gaining(tmp_path, value, low, 2 * value - low)) is not None) == claimed


def test_the_interval_of_a_gain_lies_around_it(tmp_path):
    (pair,) = gaining(tmp_path, 0.1, 0.04, 0.16).comparisons
    gain = pair.gain
    assert (gain.low, gain.value, gain.high) == pytest.approx((0.04, 0.1, 0.16))
    why = verdict.decide(gaining(tmp_path, 0.1, 0.04, 0.16)).why
    assert "10.0 % (4.0 % to 16 %)" in why


def test_every_interval_of_a_run_has_its_value_inside(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock", "ofi", "tcp"), blocks=9)
    estimates = [numbers.share]
    for pair in (*numbers.comparisons, numbers.handicap):
        estimates += [pair.difference_ns, pair.ratio, pair.gain] if pair is not None else []
    assert len(estimates) > 6
    assert all(each.low <= each.value <= each.high for each in estimates)


@pytest.mark.parametrize(("times", "code"), [(1.0, "INCONCLUSIVE"), (1.2, "INCONCLUSIVE"), (1.3, "TRANSPORT_LIMITED")])
def test_a_probe_counts_from_its_ratio_on(unexplained, times, code):
    did = unexplained.achieved["stock"].active_bps
    can = Achievable("tcp", ((1, 0.5 * did), (4, times * did)), (4, times * did))
    assert verdict.decide(replace(unexplained, achievable=can)).code == code


def test_a_gain_below_the_minimum_does_not_count(tmp_path):
    numbers = findings_of(tmp_path, blocks=9, transfer_ms={"ofi": (35, 120)}, bare_ms=174)
    (pair,) = numbers.comparisons
    assert pair.difference_ns.high < 0
    assert 0 < pair.gain.value < GAIN_MIN
    assert findings.stock_is_as_good(numbers)


def test_hidden_communication_is_not_a_bottleneck(tmp_path):
    v = verdict.decide(findings_of(tmp_path, blocks=9, transfer_ms={"stock": (5, 0.5), "ofi": (5, 0.5)}, bare_ms=33))
    assert v.code == "NOT_NETWORK"
    assert v.next.startswith("Do nothing")


def test_a_rank_that_is_late_is_a_straggler(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, size=3, late_ms={2: 40}, transfer_ms={"stock": (1, 2), "ofi": (1, 2)}, bare_ms=75
    )
    v = verdict.decide(numbers)
    assert v.code == "STRAGGLER"
    assert v.why.startswith("Rank 2 makes the others wait 40.0 ms (40.0 ms to 40.0 ms) a step, step after step")
    assert "Its input takes 40.0 ms longer than on the other ranks." in v.why
    assert v.next.startswith(
        "Look at rank 2's host (host2): its data loader and disk. If the others' loaders are nearly"
    )
    assert next(one for one in v.evidence if one.code == "STRAGGLER").at_most  # their loaders may fetch meanwhile
    assert "if they are nearly as slow, a step saves less" in v.why


def test_a_wait_no_longer_than_what_our_measuring_adds_is_not_judged(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, size=3, late_ms={2: 40}, transfer_ms={"stock": (1, 2), "ofi": (1, 2)}, bare_ms=75
    )

    def straggler(added_ms):
        added, slow = added_ms * 1e6, Estimate(1.4, 1.3, 1.5)
        handicap = Paired(Arm("bare"), Arm("stock"), 4, 40, Estimate(added, added / 2, 2 * added), slow)
        rows = verdict.decide(replace(numbers, handicap=handicap)).evidence
        return next(row for row in rows if row.code == "STRAGGLER")

    assert straggler(39).fired
    assert not straggler(41).fired
    assert straggler(41).rests == "our own measuring adds 41.0 ms to a step, and may cause this wait"


def test_a_wait_between_ranks_is_as_uncertain_as_their_clocks(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, size=3, late_ms={2: 40}, transfer_ms={"stock": (1, 2), "ofi": (1, 2)}, bare_ms=75
    )
    wait = Estimate(40e6, 39e6, 41e6)
    random = replace(numbers.lateness, last=None, jitter_ns=wait, even_ns=wait, random_ns=wait, steps=30)

    def saving(code, lateness, error_ms):
        found = replace(numbers, clock_error_ns=error_ms * 1e6, lateness=lateness)
        return next(one for one in verdict.decide(found).evidence if one.code == code)

    for code, lateness in (("STRAGGLER", numbers.lateness), ("IMBALANCE", random)):
        sure, wide, none = (saving(code, lateness, error_ms) for error_ms in (0, 10, 39))
        assert sure.fired
        assert wide.fired
        assert wide.saving.low == pytest.approx(sure.saving.low - 10e6)
        assert wide.saving.high == pytest.approx(sure.saving.high + 10e6)
        assert wide.saving.value == sure.saving.value
        assert none.uncertain  # the wait is longer than the error, but not surely long enough to count
        assert none.saving.low >= 0
        assert saving(code, lateness, math.inf).rests == "the clocks of the ranks were not compared"


def test_a_wait_between_ranks_saves_at_most_the_step_that_it_is_a_part_of(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, size=3, late_ms={2: 40}, transfer_ms={"stock": (1, 2), "ofi": (1, 2)}, bare_ms=75
    )
    mean_ns = 2 * numbers.parts_ns["step"].value  # of all steps: some are longer than the middle half
    wait = Estimate(0.5 * mean_ns, 0.0, 1.2 * mean_ns)
    late = replace(numbers.lateness, last=None, jitter_ns=wait, even_ns=wait, random_ns=wait, step_ns=mean_ns, steps=30)
    undecided = verdict.decide(replace(numbers, lateness=late))
    assert undecided.why.startswith(f"Imbalance may cost {ms(wait.value)}, 50 % of the step (0.0 % to 100 %), but")
    beside = replace(numbers.lateness, even_ns=replace(wait, low=0.1 * mean_ns), step_ns=mean_ns, steps=30)
    beside = replace(beside, jitter_ns=beside.even_ns, random_ns=beside.even_ns)
    rows = verdict.decide(replace(numbers, lateness=beside)).evidence
    why = next(row.why for row in rows if row.code == "IMBALANCE")
    assert why.endswith(f"a step would be {ms(wait.value)}, 50 % of the step (10 % to 100 %) shorter.")


def test_slow_input_is_distinguished_from_a_slow_network(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, late_ms={0: 60, 1: 60}, transfer_ms={"stock": (2, 1), "ofi": (2, 1)}, bare_ms=94
    )
    assert verdict.decide(numbers).code == "INPUT_LIMITED"
    note = f"the DDP model of Other was left alone: {NOT_RECORDED}."
    beside = replace(numbers, trace=replace(numbers.trace, notes=(note,)))
    assert verdict.decide(beside).code != "INPUT_LIMITED"  # the other model may train before the forward


def test_a_scaling_factor_is_not_estimated_without_all_communication_of_a_step(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=9).write())
    note = f"the DDP model of Other was left alone: {NOT_RECORDED}."
    beside = findings.find(replace(run, notes=(note,)))
    assert findings.find(run).scaling
    assert not beside.scaling
    assert NO_SCALING in " ".join(report_text(beside, verdict.decide(beside)).split())
    alone = tuple(replace(step, arm=Arm("single"), block=99) if step.block == 0 else step for step in run.steps)
    measured = findings.find(replace(run, steps=alone, notes=(note,))).scaling
    assert {found.how for found in measured.values()} == {"measured"}


def test_a_rule_without_data_gives_no_reason(tmp_path):
    found = verdict.decide(findings_of(tmp_path, transports=("stock", "ofi"), blocks=9))
    host = next(one for one in found.evidence if one.code == "HOST_LIMITED")
    assert (host.applies, host.saving, host.why) == (False, None, "")


def test_a_run_with_a_communication_hook_is_not_sent_to_another_transport(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock",), blocks=1, block_steps=12)
    assert "NETBOTTLENECK_TRANSPORT=stock,tcp" in verdict.decide(numbers).next
    note = f"The model has a communication hook of its own (x): {HOOKED}. It is timed."
    hooked = replace(numbers, trace=replace(numbers.trace, notes=(note,)))
    assert verdict.decide(hooked).next == verdict.WITHOUT_HOOK


def test_one_rank_has_no_communication(tmp_path):
    assert verdict.decide(findings_of(tmp_path, size=1, blocks=3)).code == "NO_COMMUNICATION"


def test_steps_without_operations_have_no_communication(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=3).write())
    assert verdict.decide(findings.find(replace(run, collectives=()))).code == "NO_COMMUNICATION"
    note = "The model has a communication hook of its own (x): it is built into torch, so its buckets are not timed."
    hooked = findings.find(replace(run, collectives=(), notes=(note,)))
    assert note in verdict.decide(hooked).why
    assert "none of its communication was recorded (measured)" in sentences(hooked)[0]


def test_a_run_whose_arms_stopped_before_the_first_step_names_the_reason(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=3).write())
    note = f"{STAYS} stock, from step 10 on: inside model.join() ranks make different numbers of steps"
    v = verdict.decide(findings.find(replace(run, steps=(), collectives=(), notes=(note,))))
    assert (v.code, v.next) == ("INCONCLUSIVE", "Leave out NETBOTTLENECK_TRANSPORT to observe this script.")
    assert note in v.why


def test_a_run_of_only_the_untouched_script_has_no_communication(tmp_path):
    assert verdict.decide(findings_of(tmp_path, transports=("bare",), blocks=1)).code == "NO_COMMUNICATION"


def test_an_observing_run_with_only_bare_steps_is_too_short(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock", "bare"), blocks=2, block_steps=6).write())
    bare = tuple(step for step in run.steps if step.arm == "bare")
    v = verdict.decide(findings.find(replace(run, steps=bare, collectives=())))
    assert (v.code, v.more) == ("INCONCLUSIVE", 6 + STEPS_MIN)
    assert v.why == "Only steps of the untouched script were recorded (bare), without their communication."


def test_blocks_of_one_step_are_named_as_the_reason_that_none_counts(tmp_path):
    numbers = findings_of(tmp_path, blocks=20, block_steps=1, transports=("stock", "tcp"))
    v = verdict.decide(numbers)
    assert v.code == "INCONCLUSIVE"
    assert "each block has one step" in v.why
    assert "NETBOTTLENECK_BLOCK_STEPS" in v.next
    assert "each block has one step" in sentences(numbers)[0]


@pytest.mark.parametrize("before", [None, "null", "bare"])
def test_a_first_step_alone_is_too_little_and_not_a_run_without_communication(tmp_path, before):
    arms = ("stock", "tcp") if before is None else (before, "stock")
    run = ring_reader.load(FakeRun(tmp_path, transports=arms, blocks=1 if before is None else 2).write())
    first = min(step.index for step in run.steps if step.arm == "stock")
    numbers = findings.find(replace(run, steps=tuple(step for step in run.steps if step.index <= first)))
    v = verdict.decide(numbers)
    assert (v.code, v.more) == ("INCONCLUSIVE", STEPS_MIN)
    assert v.why == f"No step counts: {intervals.FIRST_STEP}"
    assert v.next == f"Measure {STEPS_MIN} more steps or more."
    assert missing_text(numbers, v, 0).startswith(f"{STEPS_MIN} more steps")
    if numbers.base is None:
        assert sentences(numbers) == [f"No step could be split: {intervals.FIRST_STEP}"]


def test_too_few_steps_are_inconclusive(tmp_path):
    v = verdict.decide(findings_of(tmp_path, blocks=3, block_steps=3))
    assert (v.code, v.why) == ("INCONCLUSIVE", "2 steps were counted; a verdict needs at least 5.")


def test_ranks_that_differ_in_provider_are_misconfigured(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=9).write())
    first, second = run.ranks
    other = tuple(replace(info, provider="else") for info in second.transports)
    v = verdict.decide(findings.find(replace(run, ranks=(first, replace(second, transports=other)))))
    assert v.code == "MISCONFIGURED"
    assert "gloo: rank 0; else: rank 1" in v.why
    assert v.next == "Start all ranks with the same backend of init_process_group, or with the same Horovod."
    native = replace(run, steps=tuple(step for step in run.steps if step.arm == "ofi"))
    v = verdict.decide(findings.find(replace(native, ranks=(first, replace(second, transports=other)))))
    assert (v.code, v.next) == ("MISCONFIGURED", "Set NETBOTTLENECK_PROVIDER.")
    beside = tuple(
        replace(info, provider="else" if info.name == "ofi" else info.provider) for info in second.transports
    )
    v = verdict.decide(findings.find(replace(run, ranks=(first, replace(second, transports=beside)))))
    assert v.code != "MISCONFIGURED"  # the base is stock


@pytest.fixture
def unexplained(tmp_path):
    """A run with exposed communication, far below the link, without other arms."""
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=12).write())
    return findings.find(replace(run, network=Network(link_bps=1e10)))


def test_what_no_rule_explains_is_inconclusive(unexplained):
    found = verdict.decide(unexplained)
    assert found.code == "INCONCLUSIVE"
    assert found.why == (
        "Exposed communication and waiting are 82 % of the step (82 % to 82 %), and no rule explains them."
    )
    assert (
        found.next == "Measure NETBOTTLENECK_TRANSPORT=stock,tcp NETBOTTLENECK_STREAMS=auto: a probe and a comparison."
    )
    slow = Estimate(1.1, 1.05, 1.15)
    handicap = Paired(Arm("bare"), Arm("stock"), 4, 40, Estimate(9e6, 5e6, 13e6), slow)
    tried = Paired(Arm("stock"), Arm("ofi"), 4, 40, Estimate(-9e6, -13e6, -5e6), Estimate(0.9, 0.85, 0.95))
    withheld = verdict.decide(replace(unexplained, handicap=handicap, comparisons=(tried,)))
    assert withheld.code == "INCONCLUSIVE"
    assert "no rule explains them. Our hooks slow the stock path by 10" in withheld.why


def with_mtus(found, *mtus, **about):
    """The findings of a run whose ranks use interfaces with these MTUs."""
    ranks = [
        replace(rank, transports=tuple(replace(i, interface="eth0", mtu_bytes=mtu, **about) for i in rank.transports))
        for rank, mtu in zip(found.trace.ranks, mtus, strict=True)
    ]
    return replace(found, trace=replace(found.trace, ranks=tuple(ranks)))


def test_mtus_that_differ_are_a_verdict_only_where_nothing_else_explains_the_time(unexplained):
    different = with_mtus(unexplained, 1500, 9000)
    found = verdict.decide(different)
    assert found.code == "MISCONFIGURED"
    assert found.why == (
        "Exposed communication and waiting are 82 % of the step (82 % to 82 %), and no rule explains them. The MTUs of "
        "stock's interfaces differ: 1500 bytes on rank 0 (eth0); 9000 bytes on rank 1 (eth0)."
    )
    assert found.next.startswith("Set the same MTU on all hosts and on the switches between them; ping -M do -s SIZE")
    for other in (with_mtus(unexplained, 9000, 9000), with_mtus(unexplained, 9000, None)):
        assert verdict.decide(other).code == "INCONCLUSIVE"
        assert "MTU" not in rule_of("MISCONFIGURED", other).rests
    sure = verdict.decide(replace(different, latency_share=Estimate(0.7, 0.6, 0.8)))
    assert sure.code == "LATENCY_LIMITED"
    rests = next(one.rests for one in sure.evidence if one.code == "MISCONFIGURED")
    assert rests.endswith(
        "the MTUs of stock's interfaces differ: 1500 bytes on rank 0 (eth0); 9000 bytes on rank 1 (eth0)"
    )


def test_mtus_that_differ_leave_what_is_not_decided_yet_to_be_measured(unexplained):
    different = with_mtus(unexplained, 1500, 9000)
    tried = Paired(Arm("stock"), Arm("ofi"), 9, 63, Estimate(-1e6, -4e6, 2e6), Estimate(0.99, 0.96, 1.02), 0.04)
    alone = replace(different.trace, ranks=different.trace.ranks[:1])
    for undecided in (
        replace(different, comparisons=(tried,)),
        replace(different, comparisons=(replace(tried, pairs=1),)),
        replace(different, latency_share=Estimate(0.7, 0.55, 0.9), clock_error_ns=1e9, trace=alone),
    ):
        assert verdict.decide(undecided).code == "INCONCLUSIVE"


def test_the_mtu_of_an_interface_that_nccl_may_not_use_is_no_cause(unexplained):
    different = with_mtus(unexplained, 1500, 9000, provider="nccl")
    assert verdict.decide(different).code == "INCONCLUSIVE"
    assert "MTU" not in rule_of("MISCONFIGURED", different).rests


def test_a_comparison_whose_interval_includes_the_least_gain_names_its_steps(unexplained):
    tried = Paired(Arm("stock"), Arm("ofi"), 9, 63, Estimate(-1e6, -4e6, 2e6), Estimate(0.99, 0.96, 1.02), 0.04)
    found = verdict.decide(replace(unexplained, comparisons=(tried,)))
    assert found.code == "INCONCLUSIVE"
    assert found.why == (
        "Exposed communication and waiting are 82 % of the step (82 % to 82 %). The gain of ofi is 1.0 % "
        "(-2.0 % to 4.0 %) over 9 pairs of blocks, and the interval includes 3.0 %."
    )
    assert found.more == rule_facts.steps_to_decide(unexplained, tried) > 0
    assert found.next.startswith(f"Measure {found.more} more steps with the same arms")
    surely = replace(tried, ratio=Estimate(0.967, 0.965, 0.969))  # in ns it is below the limit of the mean step
    decided = verdict.decide(replace(unexplained, comparisons=(replace(surely, difference_ns=Estimate(-1, -1, -1)),)))
    assert "the interval includes" not in decided.why


def test_time_that_does_not_depend_on_size_is_latency(unexplained):
    surely, perhaps = Estimate(0.7, 0.6, 0.8), Estimate(0.7, 0.4, 0.9)
    decided = verdict.decide(replace(unexplained, latency_share=surely))
    assert decided.code == "LATENCY_LIMITED"
    assert decided.why.startswith("70 % of transfer time (60 % to 80 %) does not depend on size")
    assert verdict.decide(replace(unexplained, latency_share=perhaps)).code == "INCONCLUSIVE"
    coarse = replace(unexplained, latency_share=surely, clock_error_ns=1e9)  # of the submissions of other ranks
    assert verdict.decide(coarse).code == "INCONCLUSIVE"


def test_small_operations_are_latency_on_a_link_of_unknown_rate(unexplained):
    parts = unexplained.parts["stock"]

    def decided(active_bps, part=1.0, operations=60):
        """part: of the transfer time, of small operations."""
        small_ns = part * parts.transfer_ns
        moved = {"small_ns": small_ns, "small_bus_bytes": active_bps * small_ns / 8e9, "small_operations": operations}
        found = replace(unexplained, parts={"stock": replace(parts, **moved)}, link_bps=None, achievable=None)
        return verdict.decide(replace(found, latency_share=None)).code

    assert decided(30e6) == "LATENCY_LIMITED"
    assert decided(90e6) == "INCONCLUSIVE"  # a link of 100 Mbit/s would be full
    assert decided(30e6, part=0.5) == "INCONCLUSIVE"  # large operations take most of the time
    assert decided(30e6, operations=4) == "INCONCLUSIVE"  # larger buckets would not help


@pytest.mark.parametrize(
    ("busy_cores", "meta", "share", "busy"),
    [
        (1.9, {"cores": [2, 3]}, 0.95, True),  # a machine each
        (1.0, {"cores": [2, 3]}, 0.5, False),
        (1.0, {"cores": [2, 3], "machine_id": "one machine"}, 1.0, True),
        (1.0, {"cores": [2, 3], "hostname": "localhost"}, 0.5, False),  # two machines of one name
        (0.48, {"cores": [2, 3], "quota_cores": 0.5, "quota_group": "/a"}, 0.96, True),
        (0.48, {"cores": [2, 3], "quota_cores": 4.0, "quota_group": "/a"}, 0.24, False),
        # Two containers of one machine: each rank's group is the top one of its container.
        (0.48, {"cores": [2, 3], "quota_cores": 0.5, "quota_group": "/", "machine_id": "one machine"}, 0.96, True),
        (1.9, {}, None, False),  # no rank recorded its cores
        (None, {"cores": [2, 3]}, None, False),  # nor of their processor time
    ],
)
def test_a_machine_whose_cores_are_all_busy_may_be_a_host_limit(tmp_path, busy_cores, meta, share, busy):
    fast = {"how": "a lab", "link_bps": 1e10}
    numbers = findings_of(
        tmp_path,
        transports=("stock",),
        blocks=1,
        block_steps=12,
        busy_cores=busy_cores,
        meta=meta,
        run={"network": fast},
    )
    assert numbers.cores_busy == (None if share is None else pytest.approx(share, rel=1e-3))
    assert rule_of("HOST_LIMITED", numbers).uncertain == busy
    starved = replace(numbers, starved=Estimate(10e6, 9e6, 11e6))
    assert rule_of("HOST_LIMITED", starved).fired == busy
    assert verdict.decide(starved).code == ("HOST_LIMITED" if busy else "INCONCLUSIVE")


def busy_machine(tmp_path):
    return findings_of(
        tmp_path, transports=("stock",), blocks=1, block_steps=12, busy_cores=1.9, meta={"cores": [2, 3]}
    )


def beside_traffic(more_ms, error_ms=0.1):
    """Forward and backward that take so many ms longer than without traffic."""
    more = Estimate(more_ms * 1e6, (more_ms - error_ms) * 1e6, (more_ms + error_ms) * 1e6)
    return Paired(Arm("null"), Arm("stock"), 4, 40, more, Estimate(1.3, 1.2, 1.4))


def test_cores_that_threads_keep_busy_while_they_wait_are_no_host_limit(tmp_path):
    numbers = busy_machine(tmp_path)

    def result(slowed):
        return rule_of("HOST_LIMITED", replace(numbers, slowed=slowed, starved=Estimate(0.0, 0.0, 0.0)))

    unknown, none, sure, unsure = map(result, (None, beside_traffic(0), beside_traffic(8), beside_traffic(8, 12)))
    assert (unknown.fired, unknown.uncertain, unknown.saving.low) == (False, True, 0.0)
    assert unknown.rests == "cores 95 % busy: threads may spin while they wait"
    assert unknown.needs.startswith("Measure NETBOTTLENECK_TRANSPORT=stock,null")
    assert (none.fired, none.uncertain, none.saving.value) == (False, False, 0.0)
    assert none.rests.endswith("but traffic does not slow compute: threads may spin while they wait")
    assert sure.fired
    assert sure.rests.endswith("cores 95 % busy")
    assert (unsure.fired, unsure.uncertain) == (False, True)


def test_compute_that_lacks_a_core_counts_once(tmp_path):
    numbers = busy_machine(tmp_path)

    def saving_ms(slower_ms, starved_ms):
        starved = Estimate(*((starved_ms + error) * 1e6 for error in (0, -0.1, 0.1)))
        found = replace(numbers, slowed=beside_traffic(slower_ms), starved=starved)
        return rule_of("HOST_LIMITED", found).saving.value / 1e6

    exposed = saving_ms(8, 0) - 8
    assert exposed > 100
    assert saving_ms(8, 6) == pytest.approx(exposed + 8)
    assert saving_ms(6, 8) == pytest.approx(exposed + 8)


def test_host_contention_costs_at_most_the_step(tmp_path):
    numbers = replace(busy_machine(tmp_path), slowed=beside_traffic(40, 60), starved=None)
    idle, step_ns = numbers.parts_ns["moving"], numbers.parts_ns["step"].value
    assert idle.high + 100e6 > step_ns  # both ends together are longer than the step
    found = rule_of("HOST_LIMITED", numbers)
    assert found.saving.low <= found.saving.value <= found.saving.high == step_ns


def test_input_and_optimizer_save_at_most_their_part_of_the_step(tmp_path):
    numbers = findings_of(
        tmp_path, blocks=9, late_ms={0: 60, 1: 60}, transfer_ms={"stock": (2, 1), "ofi": (2, 1)}, bare_ms=94
    )
    v = verdict.decide(numbers)
    assert v.why.endswith(": a step saves that at most.")
    assert saving_text(v.evidence[0]).startswith("at most 60.")
    assert "input costs at most 60." in verdict_line(v)
    assert [one.code for one in v.evidence if one.at_most] == ["INPUT_LIMITED", "OPTIMIZER_LIMITED"]


@pytest.mark.parametrize(("code", "part"), [("INPUT_LIMITED", "input"), ("OPTIMIZER_LIMITED", "optimizer")])
def test_a_part_of_the_step_is_never_negative(tmp_path, code, part):
    numbers = replace(findings_of(tmp_path, blocks=3), input_delays=None)
    step_ns = numbers.parts_ns["step"].value
    unsure = Estimate(0.53 * step_ns, -1.1 * step_ns, 2 * step_ns)
    found = rule_of(code, replace(numbers, parts_ns={**numbers.parts_ns, part: unsure}))
    assert (found.saving.low, found.saving.high) == (0.0, step_ns)
    assert found.margin == pytest.approx(-GAIN_MIN)
    assert "(0.0 % to 100 % of the step)" in found.why
    steps = sum(time.steps + time.blocks for time in numbers.times.values())
    assert found.more > 8 * steps  # by the whole width of the interval: (1.63 / 0.5) ** 2 - 1 times as many


def test_a_saving_is_measured_if_it_is_a_measured_time_alone(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock",), blocks=1, block_steps=12, late_ms={0: 60, 1: 60})
    slowed = Paired(Arm("null"), Arm("stock"), 4, 40, Estimate(8e6, 7e6, 9e6), Estimate(1.3, 1.2, 1.4))
    of_cores = {
        busy: rule_of("HOST_LIMITED", replace(numbers, slowed=slowed, cores_busy=busy)).source for busy in (0.1, 1.0)
    }
    assert of_cores == {0.1: "measured", 1.0: "predicted"}
    assert rule_of("INPUT_LIMITED", numbers).source == "measured"
    assert rule_of("LATENCY_LIMITED", replace(numbers, latency_share=Estimate(0.7, 0.6, 0.8))).source == "predicted"
    simulated = replace(numbers, trace=replace(numbers.trace, origin="simulated"))
    assert rule_of("INPUT_LIMITED", simulated).source == "predicted"


def test_a_simulated_step_keeps_no_core_busy(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, blocks=3, busy_cores=1.9, meta={"cores": [2, 3]}).write())
    assert findings.find(run).cores_busy is not None
    assert findings.find(replace(run, origin="simulated")).cores_busy is None


def test_a_saving_whose_interval_includes_the_limit_is_inconclusive(tmp_path):
    v = verdict.decide(gaining(tmp_path, 0.1, 0.01, 0.19))
    assert v.code == "INCONCLUSIVE"
    assert v.why.startswith("Transport may cost")
    assert "but the interval includes 3.0 % (measured: 4 pairs of blocks)" in v.why


def rule_of(code, numbers, **facts):
    """The result of one rule."""
    given = rule_facts.Facts(numbers, numbers.base, rule_facts.Predicted(), (), **facts)
    return next(one for one in rules.judge(given) if one.code == code)


def test_without_the_record_of_a_rank_no_rule_judges_transfers(tmp_path, unexplained):
    unrecorded = "o record of rank 1: waiting for the last rank cannot be told from transfer"

    def alone(numbers, **changes):
        trace = replace(numbers.trace, ranks=numbers.trace.ranks[:1])
        return replace(numbers, trace=trace, unheard={numbers.base: intervals.unheard(trace, numbers.base)}, **changes)

    did = unexplained.achieved["stock"].active_bps
    faster = Achievable("tcp", ((1, 0.5 * did), (4, 2 * did)), (4, 2 * did))
    for code, changes in (
        ("LINK_LIMITED", {"link_bps": did}),
        ("LATENCY_LIMITED", {"latency_share": Estimate(0.7, 0.6, 0.8)}),
        ("TRANSPORT_LIMITED", {"achievable": faster}),
    ):
        assert rule_of(code, replace(unexplained, **changes)).fired
        found = verdict.decide(alone(unexplained, **changes))
        assert (found.code, found.next) == ("INCONCLUSIVE", verdict.ALL_RECORDS)
        assert unrecorded in found.why
        assert unrecorded in rule_of(code, alone(unexplained, **changes)).rests
    hidden = findings_of(tmp_path / "hidden", transports=("stock",), blocks=2, transfer_ms={"stock": (5, 0.5)})
    assert verdict.decide(hidden).code == "NOT_NETWORK"
    assert verdict.decide(alone(hidden)).code == "INCONCLUSIVE"
    assert unrecorded in verdict.decide(alone(hidden)).why


def test_latency_is_fitted_to_counted_steps(tmp_path, monkeypatch):
    fitted = []
    monkeypatch.setattr(findings, "latency_share", lambda rows, _: fitted.extend(rows))
    findings_of(tmp_path, transports=("stock",), blocks=2)
    assert {one.step for one in fitted} == {2, 3, 4, 5, 6, 8, 9, 10, 11, 12}  # blocks of 6 steps


def test_small_operations_are_not_judged_if_rates_are_not_known(unexplained):
    parts = replace(unexplained.parts["stock"], operations=60, small_operations=60, small_ns=1e8, small_bus_bytes=6e4)
    small = replace(unexplained, parts={"stock": parts}, latency_share=None)
    others = traffic.Unseen("host0", "eth0", 1e9, 0.4, 0.4, 1e10)
    assert rule_of("LATENCY_LIMITED", small).applies
    assert not rule_of("LATENCY_LIMITED", small, unseen=others).applies
    assert rule_of("LATENCY_LIMITED", small, unseen=others).rests.startswith("unseen: ")
    assert not rule_of("LATENCY_LIMITED", replace(small, clock_error_ns=math.inf)).applies


def test_a_probe_is_the_links_rate_between_hosts_if_it_no_longer_rises(unexplained):
    did = unexplained.achieved["stock"].active_bps
    unknown = replace(unexplained, link_bps=None)
    flat = replace(unknown, achievable=Achievable("tcp", ((1, did), (4, did)), (1, did)))
    rising = replace(unknown, achievable=Achievable("tcp", ((1, 0.5 * did), (4, did)), (4, did)))
    here = replace(flat, trace=replace(flat.trace, ranks=tuple(replace(r, host_id="one") for r in flat.trace.ranks)))
    assert rule_of("LINK_LIMITED", flat).fired
    assert not rule_of("LINK_LIMITED", rising).applies
    assert "still rises at 4 streams" in rule_of("LINK_LIMITED", rising).rests
    assert not rule_of("LINK_LIMITED", here).applies


def test_delays_are_not_known_if_most_steps_are_above_a_fastest_quarter_without_spread(tmp_path):
    run = ring_reader.load(FakeRun(tmp_path, transports=("stock",), blocks=1, block_steps=3).write())
    _, one, _ = intervals.split_steps(run)[0]

    def delays(*exposed_ms):
        rows = [
            replace(one, index=i, exposed_ns=int(at * 1e6), wait_ns=0, skew_ns=0) for i, at in enumerate(exposed_ms)
        ]
        return findings._delays(rows)

    usual = [1 + 0.01 * i for i in range(19)]
    assert delays(*usual, 201).mean_ns.value == pytest.approx(10e6, rel=0.01)
    assert delays(*[1] * 10, *usual) is None  # most are above the fastest ones, and may be the usual ones
    assert delays(*[1] * 10, 2).mean_ns.value == pytest.approx(1e6 / 11)


def ring(*mbit, busy=1.0, receiver=0.0):
    """Connections from each rank to the next one, which move data at these rates while they are busy."""
    return usage.Connected(
        tuple(
            usage.ConnectionUse(
                rank=rank,
                peer=(rank + 1) % len(mbit),
                arm=Arm("stock"),
                local=("a", rank),
                remote=("b", rank),
                seconds=1.0,
                sent_bytes=busy * min(mbit) * 1e6 / 8,
                busy_s=busy * min(mbit) / rate,
                rtt_s=0.001,
                least_rtt_s=0.001,
                receiver_s=receiver * busy * min(mbit) / rate,
                buffer_s=0.0,
            )
            for rank, rate in enumerate(mbit)
        )
    )


def on_hosts(size):
    ranks = tuple(Rank(rank, f"host{rank}", f"h{rank}") for rank in range(size))
    return Trace(id="a", size=size, arms=(Arm("stock"),), ranks=ranks)


def test_the_host_of_all_slow_connections_and_of_no_fast_one_has_the_slow_link():
    found = usage.slow_link(on_hosts(4), ring(900, 100, 110, 800), Arm("stock"))
    assert found == usage.SlowLink((2,), pytest.approx(110e6), pytest.approx(800e6), pytest.approx(100 / 110))


@pytest.mark.parametrize(
    "connected",
    [
        ring(900, 900, 900, 900),
        ring(900, 100, 900, 900),  # one direction: of either host
        ring(900, 100, 100, 100),  # of two hosts
        ring(180, 100, 100, 180),  # less than twice as fast
        ring(900, 100, 100, 900, busy=0.4),  # idle most of the time: the link is not full
        ring(900, 100, 100, 900, receiver=0.9),  # the receiver is slow, not the link
        ring(100, 100),
        usage.Connected(ring(900, 100, 100, 900).ends[:3]),
        usage.NO_CONNECTIONS,
    ],
)
def test_no_link_is_the_slow_one_without_evidence(connected):
    size = max((end.peer + 1 for end in connected.ends), default=4)
    assert usage.slow_link(on_hosts(size), connected, Arm("stock")) is None


def test_no_link_is_the_slow_one_if_a_rank_has_no_record():
    assert usage.slow_link(on_hosts(3), ring(900, 100, 100, 900), Arm("stock")) is None


LOSSY = usage.ConnectionUse(0, 1, Arm("stock"), ("a", 1), ("b", 2), 1.0, 1e9, 70_000.0, 1400.0)


def delayed_at_times(tmp_path, part):
    """A run of which this part of the steps waits for a timeout of 200 ms."""

    def transfer(_, __, index):
        return 1, 40 + index * 3 % 10 / 10 + 200 * (index * 7 % 20 < 20 * part)

    run = Varying(tmp_path, transfer, transports=("stock",), blocks=1, block_steps=41).write()
    found = findings.find(ring_reader.load(run))
    did = found.achieved["stock"].active_bps
    return replace(
        found,
        achievable=Achievable("tcp", ((1, did), (4, 10 * did)), (4, 10 * did)),
        latency_share=Estimate(0.9, 0.9, 0.9),
    )


@pytest.mark.parametrize("part", [0.2, 0.4, 0.6])
def test_lost_packets_are_named_with_their_part_of_the_mean_step(tmp_path, part):
    numbers, connected = delayed_at_times(tmp_path, part), usage.Connected((LOSSY,))
    found = rule_of("PACKET_LOSS", numbers, connected=connected)
    steps = [step.duration_ns for step in intervals.counted(numbers.trace)]
    mean_ns = sum(steps) / len(steps)
    assert found.saving.value == pytest.approx(part * 200e6, rel=0.03)
    assert found.step_ns == pytest.approx(mean_ns, rel=0.001)
    assert f"{percent(found.saving.value / mean_ns)} of the step (" in found.why
    v = verdict.decide(numbers, connected=connected)
    assert v.code == "PACKET_LOSS"
    # The other rules are about the steps without these delays.
    rate = rule_of("TRANSPORT_LIMITED", numbers, connected=connected)
    assert rate.saving.value < 0.95 * 41e6
    fixed = rule_of("LATENCY_LIMITED", numbers, connected=connected)
    assert not fixed.applies
    assert fixed.rests.startswith("packets are lost, and the time until")
    assert rule_of("LATENCY_LIMITED", numbers).applies


@pytest.mark.parametrize(("low_ms", "named"), [(1.3, True), (1.2, False)])
def test_the_interval_that_is_shown_decides_whether_lost_packets_are_named(tmp_path, low_ms, named):
    """The rest of the mean step is 40 ms, of which 3 % of the whole are 1.24 ms. The saving is much longer."""
    numbers, connected = delayed_at_times(tmp_path, 0.2), usage.Connected((LOSSY,))
    saving = Estimate(60e6, low_ms * 1e6, 120e6)
    delays = replace(numbers.delays, mean_ns=saving, rest_ns=40e6)
    numbers = replace(numbers, delays=delays, achievable=None, latency_share=None)
    found = rule_of("PACKET_LOSS", numbers, connected=connected)
    assert (found.fired, found.uncertain) == (named, not named)
    assert found.share == f"60.0 ms, 60 % of the step ({3.1 if named else 2.9} % to 75 %)"
    v = verdict.decide(numbers, connected=connected)
    assert (v.code == "PACKET_LOSS") == named
    assert found.share in v.why


def test_a_doubt_is_told_as_a_part_of_the_step_that_it_is_judged_by(tmp_path):
    """A straggler's saving is of the mean step, which is longer than the typical one."""
    doubt = rule_facts.RuleResult("straggler", "STRAGGLER", True, Estimate(4e6, 2e6, 6e6), limit_ns=3e6, step_ns=1e8)
    assert doubt.uncertain
    assert doubt.share == "4.00 ms, 4.0 % of the step (2.0 % to 6.0 %)"


def test_packet_loss_that_delays_most_steps_is_not_judged(tmp_path):
    numbers, connected = delayed_at_times(tmp_path, 0.8), usage.Connected((LOSSY,))
    assert numbers.delays is None
    for code in ("PACKET_LOSS", "TRANSPORT_LIMITED", "LATENCY_LIMITED"):
        found = rule_of(code, numbers, connected=connected)
        assert not found.applies
        assert found.rests.endswith(rule_facts.UNKNOWN_DELAYS)
    v = verdict.decide(numbers, connected=connected)
    assert v.code == "INCONCLUSIVE"
    assert "Packet loss: stock sent 2.0 % of 70000 segments" in v.why
    assert rule_of("TRANSPORT_LIMITED", numbers).applies


def test_lost_packets_that_cost_little_leave_latency_to_be_judged(tmp_path):
    numbers = delayed_at_times(tmp_path, 0)
    assert numbers.delays.mean_ns.value < 1e6
    assert rule_of("LATENCY_LIMITED", numbers, connected=usage.Connected((LOSSY,))).applies


def test_no_arm_is_asked_for_where_no_gradients_can_be_moved(tmp_path):
    numbers = findings_of(tmp_path, transports=("stock",), blocks=1, block_steps=12, transfer_ms={"stock": (5, 0.5)})
    without = replace(numbers, trace=replace(numbers.trace, buckets=()))
    assert "null" in rule_of("HOST_LIMITED", numbers).needs + verdict.decide(numbers).next
    assert "null" not in rule_of("HOST_LIMITED", without).needs + verdict.decide(without).next


def test_every_code_of_a_rule_is_listed(unexplained):
    facts = rule_facts.Facts(unexplained, Arm("stock"), rule_facts.Predicted(), ())
    codes = [rule(facts).code for rule in rules.RULES]
    assert len(codes) == len(set(codes))
    assert set(codes) < set(verdict.CODES)


def test_html_is_escaped():
    assert "&lt;b&gt;" in verdict.Verdict("INCONCLUSIVE", "<b>", "x")._repr_html_()


def test_threads_that_run_side_by_side_do_not_tell_whether_compute_had_a_core(tmp_path):
    one, two = (findings_of(tmp_path / str(cores), size=2, busy_cores=cores) for cores in (1, 2))
    assert one.starved is not None
    assert two.starved is None
    busy = rule_of("HOST_LIMITED", replace(two, cores_busy=0.97))
    assert "cores busy" in busy.why
    assert "for a core" not in busy.why


@pytest.mark.parametrize("code", ["LINK_LIMITED", "LATENCY_LIMITED", "BUCKET_SIZES"])
def test_no_cause_in_the_network_saves_more_than_steps_without_traffic(tmp_path, code):
    numbers = findings_of(tmp_path, blocks=9, transfer_ms={"stock": (9, 31)}, bare_ms=63)
    if code == "LATENCY_LIMITED":
        numbers = replace(numbers, latency_share=Estimate(0.8, 0.7, 0.9))
    causes = {"LINK_LIMITED": "link", "LATENCY_LIMITED": "latency", "BUCKET_SIZES": "buckets"}
    engine = rule_facts.Predicted({causes[code]: Estimate(29e6, 27e6, 30e6)})

    def found(low_ms, value_ms, high_ms, pairs=6, script_ns=0.0):
        less = Estimate(-value_ms * 1e6, -high_ms * 1e6, -low_ms * 1e6)
        headroom = Paired(Arm("stock"), Arm("null"), pairs, 60, less, Estimate(0.9, 0.8, 0.95))
        beside = replace(numbers, headroom=headroom, script_ns=script_ns)
        results = rules.judge(rule_facts.Facts(beside, numbers.base, engine, ()))
        return next(one for one in results if one.code == code)

    assert found(5, 8, 11).saving == Estimate(8e6, 5e6, 11e6)
    assert "at most the 8.00 ms that steps without traffic save (measured: 6 pairs)" in found(5, 8, 11).rests
    assert found(5, 8, 11).fired
    assert not found(-3, 0, 3).fired
    assert found(-3, -1, 3).saving == Estimate(0.0, 0.0, 3e6)
    assert found(5, 8, 11, script_ns=4e6).saving == Estimate(12e6, 9e6, 15e6)  # null leaves the script's own calls
    for bound in (found(33, 35, 37), found(5, 8, 11, pairs=2)):
        assert bound.saving == Estimate(29e6, 27e6, 30e6)
        assert "without traffic" not in bound.rests
