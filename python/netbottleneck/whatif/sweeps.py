"""The questions there are: settings of a job for each, and the aims of the inverse ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from netbottleneck.units import gbit, ms, nbytes, streams
from netbottleneck.whatif.cost import Cost, Link
from netbottleneck.whatif.inverse import NOTHING, Aim, Least, least
from netbottleneck.whatif.plan import FUSION_BYTES, Plan
from netbottleneck.whatif.questions import PREDICTED, Answer, End, Job, Setting, answer, ends, interval, play, scaling

# Where the inverse questions look.
LINK_BPS = (1e6, 1e13)
RATIO = (1.0, 1e4)
LANES_MAX = 256


@dataclass(frozen=True, slots=True)
class Codec:
    """Ns that a byte costs before it is sent, and when it has come; of uncompressed bytes."""

    encode_byte_ns: float = 0.0
    decode_byte_ns: float = 0.0


def _setting(job: Job, question: str, words: str, cost: Cost | None = None, **other: object) -> Setting:
    return replace(Setting(question, words, job.plan, cost or job.cost, job.workers), **other)  # type: ignore[arg-type]


def over(cost: Cost, bps: float) -> Cost:
    """The same cost over a link that is fully used."""
    return replace(cost, link=Link(bps))


def now(job: Job) -> Setting:
    """The recorded run itself."""
    return _setting(job, "now", "as it was")


def full_use(job: Job, bps: float) -> Setting:
    """The link that the job has, at its nominal or any other rate, with nothing lost."""
    return _setting(job, "full use", f"this link, {gbit(bps)}, fully used", over(job.cost, bps))


def attainable(job: Job) -> Iterator[Setting]:
    """What the probe reached in place of what the run did; nothing where there was no probe."""
    can = job.fit.achievable if job.fit is not None else None
    if can is not None:
        words = f"what these hosts can do, {gbit(can.rate_bps)}"
        yield _setting(job, "achievable", words, replace(job.cost, link=can))


def links(job: Job, speeds_bps: Sequence[float]) -> Iterator[Setting]:
    """Other links, fully used."""
    for bps in speeds_bps:
        yield _setting(job, "link", f"{bps / 1e9:g} Gbit/s", over(job.cost, bps))


def workers(job: Job, counts: Sequence[int]) -> Iterator[Setting]:
    """Other numbers of workers, each on a host of its own unless the cost says otherwise."""
    for count in counts:
        yield _setting(job, "workers", f"{count} workers", workers=count)


def on_hosts(job: Job, ranks: int) -> Job:
    """The same job with so many ranks on each host, which share its link: a ring becomes two levels."""
    algorithm = "two_level" if ranks > 1 and job.cost.algorithm == "ring" else job.cost.algorithm
    return replace(job, cost=replace(job.cost, ranks_per_host=ranks, algorithm=algorithm))


def _inside(job: Job) -> tuple[str, ...]:
    known = job.cost.host_bps is not None or job.cost.ranks_per_host == 1
    return () if known else ("inside a host nothing takes time: it was not measured",)


def ranks_per_host(job: Job, counts: Sequence[int]) -> Iterator[Setting]:
    """The same workers on fewer hosts; those that do not fit are left out."""
    for count in counts:
        if count <= job.workers:
            there = on_hosts(job, count)
            yield _setting(there, "ranks per host", f"{count} on a host", remarks=_inside(there))


def fusions(job: Job, sizes_bytes: Sequence[int]) -> Iterator[Setting]:
    """DDP's rule with other limits."""
    for size in sizes_bytes:
        plan = Plan.ddp(size, min(Plan.ddp().first_bytes, size), job.plan.in_flight)
        yield _setting(job, "fusion", f"buckets of {nbytes(size)}", plan=plan)


def cycles(job: Job, cycles_ns: Sequence[int]) -> Iterator[Setting]:
    """Horovod's rule with other cycles."""
    for cycle_ns in cycles_ns:
        plan = Plan.horovod(FUSION_BYTES, cycle_ns, job.plan.in_flight)
        yield _setting(job, "cycle", f"Horovod, every {ms(cycle_ns)}", plan=plan)


def compressed(cost: Cost, ratio: float, codec: Codec) -> Cost:
    """A ratio of 1 is no compression and has no codec."""
    if ratio == 1.0:
        return replace(cost, ratio=1.0, encode_byte_ns=0.0, decode_byte_ns=0.0)
    return replace(cost, ratio=ratio, encode_byte_ns=codec.encode_byte_ns, decode_byte_ns=codec.decode_byte_ns)


def compression(job: Job, ratios: Sequence[float], codec: Codec) -> Iterator[Setting]:
    """Fewer bytes on the wire."""
    for ratio in ratios:
        remarks = () if ratio == 1.0 or codec != Codec() else ("encoding and decoding take no time here",)
        made = compressed(job.cost, ratio, codec)
        yield _setting(job, "compression", f"{ratio:g}x fewer bytes", made, remarks=remarks)


def free(job: Job) -> Setting:
    """The most that any network could gain."""
    return _setting(job, "free", "communication that takes no time", Cost.free())


def grid(
    job: Job, counts: Sequence[int], speeds_bps: Sequence[float], ratios: Sequence[float], codec: Codec
) -> Iterator[Setting]:
    """Each compression, then number of workers, then link fully used, as compat2020.sweep goes."""
    for ratio, count, bps in product(ratios, counts, speeds_bps):
        words = f"{count} workers, {bps / 1e9:g} Gbit/s, {ratio:g}x"
        cost = compressed(over(job.cost, bps), ratio, codec)
        yield _setting(job, "grid", words, cost, workers=count, remarks=_inside(job))


def ideal_overlap(job: Job, base: Answer) -> Answer:
    """All communication beside all compute: the longer of the two, whichever order the gradients come in."""
    setting = replace(base.setting, question="overlap", words="all communication beside compute")
    if base.outcome is None or base.step_s is None:
        return replace(base, setting=setting)
    found = base.outcome
    others = ends(job, base.setting.cost)
    nothing = replace(base.setting, cost=Cost.free())

    def longer(end: End) -> float:
        # Communication alone grows or shrinks, as the step did over compute; or compute does.
        return max(play(end.job, nothing).step_ns, found.communication_ns * end.slower)

    value_ns, at_ends = longer(End("", job)), [longer(end) for end in others]
    step = interval(value_ns / 1e9, others, [at / 1e9 for at in at_ends])
    factors = [scaling(end.job, at) for end, at in zip(others, at_ends, strict=True)]
    factor = interval(scaling(job, value_ns), others, factors)
    ended = replace(found, step_ns=value_ns, communication_end_ns=value_ns)
    return Answer(setting, ended, step, factor, base.interval, PREDICTED, base.notes)


def answers(job: Job, settings: Iterator[Setting] | Sequence[Setting]) -> tuple[Answer, ...]:
    """Each setting's answer."""
    return tuple(answer(job, setting) for setting in settings)


def _to_target(target: float) -> Callable[[End], float]:
    return lambda end: end.job.alone_ns / target


def least_link(job: Job, target: float) -> Least:
    """The slowest link, fully used, with a scaling factor of at least `target`; bits a second."""
    aim = Aim("least link", f"a scaling factor of {target:g}", LINK_BPS)
    return least(job, aim, lambda bps: next(links(job, [bps])), _to_target(target))


def least_compression(job: Job, target: float, codec: Codec) -> Least:
    """The least ratio over the link as it was used."""
    aim = Aim("least compression", f"a scaling factor of {target:g}", RATIO)
    return least(job, aim, lambda ratio: next(compression(job, [ratio], codec)), _to_target(target))


def least_lanes(job: Job, target: float, link_bps: float | None) -> Least:
    """The fewest network streams, each as fast as the probe's first, together no faster than the link."""
    aim = Aim("least lanes", f"a scaling factor of {target:g}", (1, LANES_MAX), True)
    lane_bps = job.lane_bps
    if lane_bps is None:
        reason = "it is not known what one stream reaches: no probe was made"
        return Least(aim.question, aim.words, None, reason, workers=job.workers)

    def make(count: float) -> Setting:
        link = Link(link_bps if link_bps is not None else LINK_BPS[1], int(count), lane_bps)
        return _setting(job, "lanes", streams(int(count)), replace(job.cost, link=link))

    return least(job, aim, make, _to_target(target))


def enough_link(job: Job) -> Least:
    """The link beyond which a faster one makes the step shorter by no more than NOTHING."""
    endless = next(links(job, [LINK_BPS[1]]))

    def limit_ns(end: End) -> float:
        return (1 + NOTHING) * play(end.job, endless, end.bent(endless.cost)).step_ns

    aim = Aim("enough link", f"a faster one gains no more than {100 * NOTHING:g} %", LINK_BPS)
    return least(job, aim, lambda bps: next(links(job, [bps])), limit_ns)


@dataclass(frozen=True, slots=True)
class Told:
    """All answers about a job.

    tables: each with its title; leasts: of the inverse questions; missing: what could not be asked, and why."""

    job: Job
    tables: tuple[tuple[str, tuple[Answer, ...]], ...]
    leasts: tuple[Least, ...] = ()
    missing: tuple[str, ...] = ()

    def of(self, question: str) -> Answer | None:
        """The first answer of a kind that was not refused."""
        found = (one for _, own in self.tables for one in own if one.setting.question == question)
        return next((one for one in found if not one.refused), None)
