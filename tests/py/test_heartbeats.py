"""The clock of a rank by its heartbeats: a model of two clocks, and the error that is stated."""

import random

import numpy as np
import pytest

from netbottleneck.trace import ring_file
from netbottleneck.trace.counter_files import Counters
from netbottleneck.trace.heartbeats import clock_of
from netbottleneck.trace.model import Clock

S = 10**9
US = 1000


def beats_of(rows):
    """CLOCK events: (time on the rank's clock, offset, round trip) each."""
    beats = np.zeros(len(rows), ring_file.EVENT)
    for at, (time_ns, offset, trip) in enumerate(rows):
        beats[at]["time_ns"], beats[at]["a"], beats[at]["b"] = time_ns, offset & (1 << 64) - 1, trip
    return beats


def measured(offset_at, seconds, draw, trip=lambda _at, draw: draw.randrange(200, 2000) * US):
    """A beat a second. The way there is any part of the round trip, as queues are not alike in both directions."""
    rows = []
    for second in range(seconds):
        time_ns, length = second * S, trip(second, draw)
        there = draw.uniform(0.0, 1.0) * length
        rows.append((time_ns, round(offset_at(time_ns) + there - length / 2), length))
    return rows


def worst(clock, offset_at, seconds):
    at = np.arange(0, seconds * S, S // 10, dtype=np.int64)
    truth = at - np.array([round(offset_at(int(one))) for one in at])
    return int(np.abs(clock.to_rank_0(at) - truth).max())


@pytest.mark.parametrize("seed", range(20))
def test_the_stated_error_covers_a_clock_that_drifts_steadily(seed):
    draw = random.Random(seed)
    seconds, drift, first = draw.choice((3, 8, 30, 600, 7200)), draw.uniform(-4e-5, 4e-5), draw.randrange(-S, S)

    def offset_at(time_ns):
        return first + drift * time_ns

    clock = clock_of(beats_of(measured(offset_at, seconds, draw)), 0, seconds * S)
    assert worst(clock, offset_at, seconds) <= clock.error_ns <= 3000 * US


@pytest.mark.parametrize("seed", range(5))
def test_one_quick_beat_at_the_start_does_not_hide_the_drift(seed):
    """The measurement at the join, before any traffic, has a far shorter round trip than all later ones."""
    draw = random.Random(seed)

    def offset_at(time_ns):
        return 2e-5 * time_ns

    rows = measured(offset_at, 600, draw, lambda at, draw: 30 * US if at == 0 else draw.randrange(300, 900) * US)
    clock = clock_of(beats_of(rows), 0, 600 * S)
    assert worst(clock, offset_at, 600) <= clock.error_ns < 600 * US  # 12 ms without the drift


def test_a_drift_that_changes_is_followed():
    """The drift of a host that warms up for an hour."""
    draw = random.Random(1)

    def offset_at(time_ns):
        return 5e-6 * time_ns + 1e-5 * time_ns * (time_ns / (7200 * S))

    clock = clock_of(beats_of(measured(offset_at, 7200, draw)), 0, 7200 * S)
    assert len(clock.points) > 10
    assert worst(clock, offset_at, 7200) <= clock.error_ns < 1000 * US


def test_a_single_beat_leaves_the_drift_unknown():
    clock = clock_of(beats_of([(0, 7, 2000)]), 0, 100 * S)
    assert (clock.offset_ns, clock.error_ns, clock.points) == (7, 1000 + 5000 * US, ())


def test_a_clock_that_jumped_has_no_error():
    rows = [(at * S, 0 if at < 300 else 2 * S, 1000 * US) for at in range(600)]
    clock = clock_of(beats_of(rows), 0, 600 * S)
    assert (clock.method, clock.error_ns) == ("jumped", None)


def test_counters_are_put_on_rank_0s_clock_with_the_drift():
    clock = Clock("heartbeat", 5, 0, ((0, 0), (3600 * S, 36_000_000), (7200 * S, 72_000_000)))
    time_ns = np.array([0, 1800 * S, 7200 * S, 9000 * S], np.int64)
    counters = Counters("host", "id", 1, 1, 100, ("eth0:rx_bytes",), time_ns, np.zeros((4, 1), np.int64))
    moved = counters.on_rank_0(clock).time_ns
    assert (time_ns - moved).tolist() == [0, 18_000_000, 72_000_000, 90_000_000]
