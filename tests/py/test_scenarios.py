"""Every scenario of tests/scenarios with one seed, a few known answers of each kind, and some trainings in labs.

A scenario gets its verdict and saving, and its twin does not get that verdict. `make scenarios` runs all trainings.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

import run as program
from scenario import known, lengths, matrix
from scenario.cases import CASES
from scenario.job import Job, work_of
from scenario.judge import judge, number, run
from scenario.live import measure
from scenario.trainings import LIVE

from netbottleneck.lab import Lab, LabError

SEED = 1
# A saving differs from the difference to the twin by at most this part.
ERROR_MAX = 0.25
# Of these seeds, an answer needs at most so many jobs until one has a length that is long enough to be judged.
DRAWS_MAX = 4


@pytest.fixture
def labs():
    """Skips where trainings cannot run in labs."""
    pytest.importorskip("torch")
    try:
        with Lab(1, "none", ways=("root", "user")):
            pass
    except LabError as error:
        pytest.skip(f"no network namespaces on this machine: {error}")


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_scenario_gets_its_verdict_and_its_twin_does_not(make):
    result = run(make(random.Random(f"{SEED}/{make.__name__}")), SEED, judge)
    assert result.wrong == ()
    if result.error is not None:
        assert abs(result.error) < ERROR_MAX


@pytest.mark.usefixtures("labs")
@pytest.mark.parametrize(
    "name",
    [
        "live_few_steps",
        "live_slow_input_of_one_rank",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("live_sharded", "live_two_levels")),
    ],
)
def test_a_training_in_a_lab_gets_its_verdict(name):
    make = next(make for make in LIVE if make.__name__ == name)
    case = make(random.Random(f"{SEED}/{name}"))
    got = measure(case.job, SEED)
    assert got.verdict.code in case.expected, got.verdict.why
    assert case.says in got.verdict.why
    assert case.advises in got.verdict.next


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", known.KINDS, ids=lambda kind: kind.name)
def test_a_report_shows_an_injected_length_within_5_percent(kind, number):
    found = known.answer(kind, random.Random(f"test/{kind.name}/{number}"), number)
    assert found.draws <= DRAWS_MAX
    assert found.shown_ms == pytest.approx(found.truth_ms, rel=0.05)


@pytest.mark.full
@pytest.mark.usefixtures("labs")
def test_a_report_of_a_training_shows_what_its_script_counted():
    draw, wanted = next(iter(lengths.KINDS.items()))
    found = list(lengths.answers_of(draw(random.Random(SEED)), wanted, SEED))
    assert [one.kind for one in found] == list(wanted)
    for one in found:
        assert one.shown_ms == pytest.approx(one.truth_ms, rel=ERROR_MAX), one


def test_the_clock_counts_what_was_injected():
    work, _ = work_of(Job(sleeps_ms={1: 20.0}, input_ms=7.0, noise=0.0, latency_ms=1.0, link_bps=1e30, flow_bps=1e30))
    spent = [work.spent[0, rank] for rank in range(2)]
    assert [one["input"] for one in spent] == pytest.approx([7, 7])
    assert [one["waiting"] for one in spent] == pytest.approx([20, 0])
    assert [one["wire"] for one in spent] == pytest.approx([4, 4])
    assert [one["exposed"] for one in spent] == pytest.approx([1, 1])
    assert [one["slowed"] for one in spent] == [0, 0]


def test_the_clock_counts_compute_slowed_by_traffic():
    # Four buckets at 15, 30, 45 and 60 ms of compute, 1 ms of traffic after each: three of them beside compute.
    work, _ = work_of(Job(noise=0.0, latency_ms=1.0, link_bps=1e30, flow_bps=1e30, contention=2.0))
    assert work.spent[0, 0]["slowed"] == pytest.approx(1.5)
    assert work.steps[0].duration_ns == pytest.approx(1e6 * (0.5 + 30 + 60 + 1.5 + 1 + 2))


def test_a_number_of_the_summary_has_a_path():
    values = {"probe": {"points": [{"streams": 1, "bits_per_s": 5}]}, "comparisons": [{"other": "tcp", "gain": 0.5}]}
    assert number(values, "probe.points.0.bits_per_s") == 5
    assert number(values, "comparisons.tcp.gain") == 0.5
    for path in ("probe.points.1.bits_per_s", "comparisons.ofi.gain", "probe", "comparisons.tcp.other"):
        with pytest.raises(LookupError):
            number(values, path)


def test_a_number_beyond_its_limits_and_a_failed_check_are_wrong():
    make = next(make for make in CASES if make.__name__ == "slow_input")
    case = make(random.Random(SEED))
    numbers = {"split.stock.input_s": (0.0, 0.001), "split.tcp.input_s": (0.0, 1.0)}
    case = replace(case, numbers=numbers, checks=(lambda got, twin: [f"{got.verdict.code}, {twin.verdict.code}"],))
    wrong = run(case, SEED, judge).wrong
    assert [text.split(" is ")[0] for text in wrong] == [
        "split.stock.input_s",
        "the summary has no split.tcp.input_s",
        "INPUT_LIMITED, NOT_NETWORK",
    ]


def test_weights_that_differ_from_those_of_the_other_training_are_wrong():
    case = replace(next(make for make in CASES if make.__name__ == "few_steps")(random.Random(SEED)), same=Job())

    def weighed(job, seed):
        return replace(judge(job, seed), weights=str(job.blocks))

    assert run(case, SEED, weighed).wrong == ("the weights differ from those of the other training",)


def test_a_matrix_has_a_row_for_a_cause_and_one_for_its_twin():
    make = next(make for make in CASES if make.__name__ == "slow_input")
    found = matrix.rows([run(make(random.Random(seed)), seed, judge) for seed in (1, 2)])
    assert [(row["cause"], row["runs"], row["wrong"]) for row in found] == [
        ("INPUT_LIMITED", 2, 0),
        ("INPUT_LIMITED removed", 2, 0),
    ]
    assert found[0]["verdicts"] == {"INPUT_LIMITED": 2}


def test_one_run_counts_scenarios_trainings_and_lengths_and_a_failure_skips_none(capsys, monkeypatch):
    ran = []

    def answers(what):
        def yielded(count, seed, only):
            for at in range(count):
                ran.append(what)
                yield known.Answer("input", what, 10.0, 10.0, 20.0 if at == 0 else 10.0, 100.0)

        return yielded

    monkeypatch.setattr(known, "answers", answers("jobs"))
    monkeypatch.setattr(lengths, "answers", answers("trainings"))
    monkeypatch.setattr(program, "LIVE", [])
    wrong = program.main(["--live", "--known", "2", "--lengths", "3", "--only", "one rank stalls once"])
    printed = capsys.readouterr().out
    assert wrong == 1
    assert ran == ["jobs"] * 2 + ["trainings"] * 3
    assert printed.count(" passed, ") == 1
    assert printed.endswith("4 passed, 2 failed\n")  # a scenario, and the answers but for the first of each
    assert "known answers of jobs" in printed
    assert "known answers of trainings" in printed
    program.main(["--lengths", "1"])
    assert ran[5:] == ["trainings"]


def test_a_run_of_no_scenario_fails(capsys):
    assert program.main(["--only", "no such scenario"]) == 1
    assert capsys.readouterr().out.endswith("0 passed, 0 failed\n")


def test_several_seeds_make_one_matrix(capsys):
    assert program.main(["--seeds", "3-4", "--only", "slow optimizer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "OPTIMIZER_LIMITED             2     0              2    ." in lines
    assert lines[-1] == "2 passed, 0 failed"
