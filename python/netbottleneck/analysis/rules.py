"""Rules: each computes what a step would save if one cause were gone. Pure. Their limits are in thresholds.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from netbottleneck.analysis import thresholds as limits
from netbottleneck.analysis.bandwidth import Achieved
from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.analysis.findings import Findings, best_gain
from netbottleneck.analysis.intervals import host_count
from netbottleneck.analysis.rank_rules import before_forward, imbalance, optimizer, straggler
from netbottleneck.analysis.rule_facts import (
    MORE_STEPS,
    NOTHING_SAVED,
    UNKNOWN_DELAYS,
    Facts,
    FullUse,
    RuleResult,
    as_good_sentence,
    carrier_text,
    handicap_sentence,
    more_steps,
    same_arms,
    share_of,
    steps_to_decide,
    within_step,
)
from netbottleneck.analysis.traffic import (
    FASTER_INTERFACE,
    NO_OTHERS,
    NO_SLOW_LINK,
    ArmLink,
    in_memory,
    on_interface,
    rating,
    rounds,
    slow_interface,
)
from netbottleneck.analysis.usage import LOOPBACK, limited, slow_link
from netbottleneck.trace.model import TransportInfo
from netbottleneck.trace.transports import NULL, SINGLE, STOCK, Arm
from netbottleneck.units import gbit, listed, ms, nbytes, percent, streams


def _streams_hint(f: Findings, arm: Arm) -> str:
    used = [i.streams_used for r in f.trace.ranks for i in r.transports if i.name == arm.transport and i.streams_used]
    return f" NETBOTTLENECK_STREAMS={max(used)}" if used else ""


def transport(facts: Facts) -> RuleResult:
    """Another transport is faster over the same link: measured against it, else predicted from the probe."""
    f = facts.f
    tried = [pair for pair in f.comparisons if pair.enough]
    withheld = handicap_sentence(f)
    if withheld is not None:
        return facts.evidence("transport", "TRANSPORT_LIMITED", rests=withheld)
    pair = best_gain(f) or max(tried, key=lambda p: p.gain.value, default=None)
    if pair is None:
        return _probe(facts)
    gain, more = pair.gain, pair.difference_ns
    saving = Estimate(-more.value, -more.high, -more.low)
    return facts.evidence(
        "transport",
        "TRANSPORT_LIMITED",
        pair.base_ns,  # so that a saving counts exactly if the gain does
        applies=gain.value >= limits.GAIN_MIN,
        saving=saving,
        source=f.label,
        rests=f"{f.label}: {pair.pairs} pairs of blocks",
        why=f"{f.label.capitalize()}: {pair.other} makes the step {ms(saving.value)} shorter "
        f"({ms(saving.low)} to {ms(saving.high)}), "
        f"{percent(gain.value)} ({percent(gain.low)} to {percent(gain.high)}), over {pair.pairs} pairs of blocks.",
        next=f"NETBOTTLENECK_TRANSPORT={pair.other}{_streams_hint(f, pair.other)}",
        needs=more_steps(f, pair),
        more=steps_to_decide(f, pair),
    )


def _probe(facts: Facts) -> RuleResult:
    f, base = facts.f, facts.base
    did, can = f.achieved.get(base), f.achievable
    unknown = facts.rates_known or facts.delays_unknown
    if did is None or can is None or unknown:
        return facts.evidence("transport", "TRANSPORT_LIMITED", rests=unknown or "no other transport, no probe")
    count, rate = can.best
    saving, bound = facts.bounded(facts.predicted.savings_ns.get("rate") or _at_rate(facts, did, rate))
    first, second = beside(f, can.transport)
    compared = next((pair for pair in f.comparisons if pair.other in (first, second)), None)
    ask = f"Measure the difference: NETBOTTLENECK_TRANSPORT={first},{second} NETBOTTLENECK_STREAMS={count}"
    if compared is None and {first, second} <= set(f.trace.arms):
        ask = same_arms(f)
    return facts.evidence(
        "transport",
        "TRANSPORT_LIMITED",
        applies=rate >= limits.PROBE_RATIO * did.active_bps,
        saving=saving,
        rests=f"predicted from the probe of {streams(count)}{bound}",
        why=f"The {base} path moved data at {gbit(did.active_bps)}; a probe with {streams(count)} reached "
        f"{gbit(rate)}, {rate / did.active_bps:.1f} times as much. At that rate the step would be "
        f"{facts.share(saving)} shorter (predicted).",
        next=ask if compared is None else more_steps(f, compared),
        needs=ask if compared is None else more_steps(f, compared),
        more=None if compared is None else steps_to_decide(f, compared),
    )


def _at_rate(facts: Facts, did: Achieved, bps: float) -> Estimate:
    """The saving if bytes moved at a rate, as a formula: time in transfer that does not depend on size stays."""
    fixed, _ = _fixed_share(facts, None)
    return facts.moving.scaled(max(0.0, 1 - (fixed.value if fixed else 0.0) - did.active_bps / bps))


def full_use(facts: Facts) -> FullUse | None:
    """The base's step if its transfers ran at the achievable rate; None if that is not known, or not shorter."""
    f, did, can = facts.f, facts.f.achieved.get(facts.base), facts.f.achievable
    if did is None or can is None or facts.rates_known or facts.delays_unknown:
        return None
    predicted = facts.predicted.savings_ns.get("rate") if can.faster is None else None  # the engine's is of the probe
    saving, _ = facts.bounded(predicted or _at_rate(facts, did, can.bps))
    how = "the what-if engine" if predicted else "step - moving * (1 - latency share - achieved / achievable)"
    return FullUse(f.parts[facts.base].step_ns - saving.value, how) if saving.value > 0 else None


def link(facts: Facts) -> RuleResult:
    """The link itself is full while data move."""
    f, did = facts.f, facts.f.achieved.get(facts.base)
    unknown = facts.rates_known
    slow = None if did is None or unknown or facts.lost or configuration(facts).fired else _slow_link(facts, did)
    if slow is not None:
        return slow
    limit, what = _limit(facts)
    if limit is None:
        return facts.evidence("link", "LINK_LIMITED", rests=what)
    if did is None or unknown:
        return facts.evidence("link", "LINK_LIMITED", rests=unknown or "no rate was recorded")
    if configuration(facts).fired:
        return facts.evidence("link", "LINK_LIMITED", rests="wrong interface or full buffers: see configuration")
    on_link = replace(f.links.get(facts.base, ArmLink(limit)), bps=limit)
    used, average = on_link.used(did)
    part, sure = _part_used(used, max(used * on_link.shared.least, _on_links(facts) / limit), what)
    predicted = facts.predicted.savings_ns
    saving, bound = facts.bounded(predicted.get("link") or facts.moving.scaled(min(used, 1.0)))
    return facts.evidence(
        "link",
        "LINK_LIMITED",
        applies=used >= limits.LINK_UTILISATION,
        saving=_sure_if(sure, saving),
        rests=f"{part}; {'predicted' if 'link' in predicted else 'exposed x utilisation'}{bound}",
        why=f"In transfer {gbit(used * limit)} of {gbit(limit)}, {part}; "
        f"averaged over the step {percent(average)}. A link without limit would save "
        f"{facts.share(saving)}.{as_good_sentence(f)}",
        next=_send_less(f),
        needs=MORE_STEPS if sure else "Record NCCL's algorithm: NETBOTTLENECK_NCCL_EVENTS=1.",
    )


def _sure_if(sure: bool, saving: Estimate) -> Estimate:
    """The saving, which may be none if it is not sure."""
    return saving if sure else replace(saving, low=min(saving.low, 0.0))


def _part_used(used: float, least: float, what: str) -> tuple[str, bool]:
    """How much of the link is used, in words, and whether that is sure. used: by rings; least: by any algorithm."""
    if least < limits.LINK_UTILISATION <= used:
        return f"{percent(used)} of the {what} as a ring, {percent(least)} at least, by levels or trees", False
    burst = " and a burst after each pause" if used > limits.LINK_EXCEEDED else ""
    return f"{percent(used)} of the {what}" if used <= 1 else f"all of the {what}{burst}", True


def _on_links(facts: Facts) -> float:
    """The rate on the busiest interface between hosts while operations are in flight; 0.0 if it is not known."""
    uses = (use for host in facts.hosts if host.arm == facts.base and not host.mixed for use in host.interfaces)
    return max((use.active_bps or 0.0 for use in uses if use.interface != LOOPBACK and use.way == "tx"), default=0.0)


def _slow_link(facts: Facts, did: Achieved) -> RuleResult | None:
    """The link of one host is full, and slower than those of the others; None if that is not so."""
    slow = slow_link(facts.f.trace, facts.connected, facts.base)
    moved_bps = on_interface(facts.f.trace, facts.base).active * did.active_bps
    if slow is None or moved_bps < limits.LINK_UTILISATION * slow.bps:
        return None
    predicted, least = facts.predicted.savings_ns.get(NO_SLOW_LINK), 1 - slow.bps / slow.others_bps
    # Earlier transfers, which compute hides, are shorter too, so that later ones start earlier.
    saving, bound = facts.bounded(predicted or replace(facts.moving.scaled(least), high=facts.moving.high))
    names = ", ".join(dict.fromkeys(r.hostname for r in facts.f.trace.ranks if r.rank in slow.ranks and r.hostname))
    whose = f"the host of rank{'s' if slow.ranks[1:] else ''} {listed(slow.ranks)}{f' ({names})' if names else ''}"
    return facts.evidence(
        "link",
        "LINK_LIMITED",
        applies=True,
        saving=saving,
        rests=f"its connections are busy {percent(slow.busy)} of communication time; "
        f"{'predicted' if predicted else 'at least exposed x ratio of the rates'}{bound}",
        why=f"The link of {whose} is the slow one: in transfer {gbit(moved_bps)}. While its connections are busy, they "
        f"move {gbit(slow.bps)} one way at most, those between the other hosts {gbit(slow.others_bps)} or more. At "
        f"that rate the step would be {facts.share(saving)} shorter (predicted).",
        next=f"Look at the interface, cable and switch port of {whose}: their speed (ethtool) and caps.",
        needs=MORE_STEPS,
    )


def _limit(facts: Facts) -> tuple[float | None, str]:
    """The link's rate and what it is of; None and why if it is not known.

    Without the interface that an arm uses, a probe over that interface is no limit of the arm, either.
    """
    f = facts.f
    if facts.link_unproven:
        return None, f"the link's speed is not known: {facts.link_unproven}"
    if f.link_bps:
        return f.link_bps, "link"
    if f.achievable is None or len(f.achievable.points) < 2:
        return None, "the link's speed is not known"
    if (host_count(f.trace) or 0) < 2:
        return None, "the link's speed is not known: the probe did not run between two hosts"
    if not f.achievable.flat:
        return None, f"the link's speed is not known: the probe still rises at {streams(f.achievable.best[0])}"
    best = "best of the probe" if f.achievable.faster is None else f"rate of {f.achievable.faster[0]}"
    return f.achievable.bps, f"{best} (the link's speed is not known)"


def _send_less(f: Findings) -> str:
    """What to do about a full link: a transport that was measured to be faster comes first."""
    less, won = "end less (larger batches, smaller gradients) or get a faster link", best_gain(f)
    times = rounds(f.trace, f.base or STOCK)
    once = f"Reduce gradients once a step, not {times} times (no_sync() of DDP). " if times > 1 else ""
    if won is None:
        unknown = f.handicapped or any(pair.gain.high >= limits.GAIN_MIN for pair in f.comparisons)
        return f"{once}S{less}." if f.comparisons and unknown else f"{once}S{less}; another transport cannot help much."
    return (
        f"{once}First NETBOTTLENECK_TRANSPORT={won.other}{_streams_hint(f, won.other)}, which is faster. Then s{less}."
    )


def _small_share(facts: Facts) -> tuple[Estimate, str] | None:
    """The part of transfer time that is latency of small operations if these are many, and its source; None if not."""
    f, parts = facts.f, facts.f.parts[facts.base]
    if parts.small_operations < limits.SMALL_OPERATIONS_MIN or not parts.small_ns:
        return None
    limit = facts.link_bps or (f.achievable.bps if f.achievable else limits.SLOWEST_LINK_BPS)
    share = max(0.0, parts.small_ns - 8e9 * parts.small_bus_bytes / limit) / parts.transfer_ns
    each = f"{parts.small_operations:.0f} operations of at most {nbytes(limits.SMALL_BYTES)}"
    return Estimate(share, share, share), f"{each}, far below the link's rate"


def _timeouts(facts: Facts) -> str:
    """Why time that does not depend on size may be that of lost packets; "" if it is not."""
    delays = facts.f.delays
    if not facts.lost or (delays is not None and delays.mean_ns.low <= limits.GAIN_MIN * facts.step_ns):
        return ""
    return facts.delays_unknown or "packets are lost, and the time until they are sent again does not depend on size"


def _fixed_share(facts: Facts, fitted: Estimate | None) -> tuple[Estimate | None, str]:
    """The part of transfer time that does not depend on size, None if not known, and its source or why not."""
    unknown = facts.rates_known
    if not facts.coarse_clocks and facts.f.latency_share is not None:
        return facts.f.latency_share, "least squares over the sizes"
    small = None if unknown else _small_share(facts)
    if small is not None:
        return small
    if fitted is not None and facts.moving.value > 0:
        part = fitted.scaled(1 / facts.moving.value)
        share = Estimate(min(1.0, part.value), min(1.0, part.low), min(1.0, part.high))
        return share, "fit of the what-if engine"
    return None, unknown or "the operations' sizes give no fit"


def latency(facts: Facts) -> RuleResult:
    """Operations cost time that does not depend on their size."""
    f = facts.f
    if facts.missing or _timeouts(facts):
        return facts.evidence("latency", "LATENCY_LIMITED", rests=facts.missing or _timeouts(facts))
    fitted = facts.predicted.savings_ns.get("latency")
    share, rests = _fixed_share(facts, fitted)
    if share is None:
        return facts.evidence("latency", "LATENCY_LIMITED", rests=rests)
    moving = facts.moving
    scaled = Estimate(moving.value * share.value, moving.low * share.low, moving.high * share.high)
    saving, bound = facts.bounded(fitted or scaled)
    how = "predicted" if fitted is not None else "exposed x share"
    return facts.evidence(
        "latency",
        "LATENCY_LIMITED",
        applies=share.low > limits.LATENCY_SHARE,
        saving=saving,
        rests=f"{rests}; {how}{bound}",
        why=f"{percent(share.value)} of transfer time ({percent(share.low)} to {percent(share.high)}) does not depend "
        f"on size ({rests}): {f.parts[facts.base].operations:.0f} operations a step. Without it the step would be "
        f"{facts.share(saving)} shorter.{facts.predicted.costs}{as_good_sentence(f)}",
        next=_fewer_operations(facts),
        needs=MORE_STEPS,
    )


def _fewer_operations(facts: Facts) -> str:
    """What to do about latency."""
    if facts.f.gradient_operations >= limits.FUSED_OPERATIONS_MIN:
        return "Fewer, larger operations: larger buckets (bucket_cap_mb of DDP, HOROVOD_FUSION_THRESHOLD)."
    if facts.f.parts[facts.base].operations >= limits.FUSED_OPERATIONS_MIN:
        return "Fewer, larger operations: the script's calls on joined tensors, or fully_shard on larger modules."
    return "A path with less delay, or gradients of several batches in one step (no_sync() of DDP)."


def buckets(facts: Facts) -> RuleResult:
    """Other bucket sizes would overlap better or cost less."""
    predicted = facts.predicted.savings_ns.get("buckets")
    if predicted is None:
        return facts.evidence(
            "bucket sizes", "BUCKET_SIZES", rests=facts.predicted.refused or facts.predicted.no_buckets
        )
    if latency(facts).fired:
        return facts.evidence("bucket sizes", "BUCKET_SIZES", rests="larger buckets: see latency")
    saving, bound = facts.bounded(predicted)
    return facts.evidence(
        "bucket sizes",
        "BUCKET_SIZES",
        applies=True,
        saving=saving,
        rests=f"predicted: {facts.predicted.buckets}{bound}",
        why=f"With {facts.predicted.buckets} the step would be {facts.share(saving)} shorter (predicted).",
        next=f"Set {facts.predicted.buckets} (bucket_cap_mb of DDP, HOROVOD_FUSION_THRESHOLD), and measure again.",
        needs=MORE_STEPS,
    )


def _busy_cores(facts: Facts, slowed: Estimate | None) -> tuple[Estimate | None, str]:
    """(ns that a step loses because all cores are busy, None if that is not so, and what it rests on).

    It is compute without a core, and exposed time. Threads that spin while they wait keep cores busy, too. So exposed
    time counts surely only if compute surely lacks cores, and not at all if it surely does not. slowed: compute beside
    traffic against compute without, None if that was not measured.
    """
    f, limit, idle = facts.f, limits.GAIN_MIN * facts.step_ns, facts.moving
    busy = f.cores_busy or 0.0
    if busy < limits.CORES_BUSY:
        return None, ""
    rests, spin = f"cores {percent(busy)} busy", "threads may spin while they wait"
    lacks = [one for one in (slowed, f.starved) if one is not None] or [NOTHING_SAVED]
    if slowed is not None and all(one.high <= limit for one in lacks):
        return None, f"{rests}, but traffic does not slow compute: {spin}"
    # Compute without a core is longer, and so is part of the difference to steps without traffic.
    lost = max(lacks, key=lambda one: one.value)
    surely = lost.low if slowed is None or f.undisturbed is None else min(lost.low, f.undisturbed.low)
    # If the cores are busy for a part b of the step, they are so for at least 1 - (1 - b) / e of a part e of it.
    least = max(0.0, 1 - (1 - min(busy, 1.0)) * facts.step_ns / idle.value) if idle.value > 0 else 0.0
    sure = any(one.low > limit for one in lacks)
    low = surely + idle.low * least * sure
    saving = Estimate(lost.value + idle.value * (1 + least) / 2, low, lost.high + idle.high)
    return saving, rests if sure else f"{rests}: {spin}"


def _hides(f: Findings, slowed: Estimate | None, busy: Estimate | None) -> bool:
    """True if the time that compute loses to traffic is longer than what a step saves without that."""
    if busy is not None or slowed is None or f.undisturbed is None:
        return False
    return f.undisturbed.value < limits.HIDDEN_LESS * slowed.value


def _host_saving(f: Findings, slowed: Estimate | None, busy: Estimate | None) -> tuple[Estimate, str]:
    """(what a step saves with enough cores, whether that is measured)."""
    if busy is not None:
        return busy, "predicted"
    saving = slowed if slowed is None or f.undisturbed is None else f.undisturbed
    return saving or NOTHING_SAVED, "predicted" if _hides(f, slowed, busy) else f.label


def _host_reasons(f: Findings, slowed: Estimate | None, busy: Estimate | None) -> list[str]:
    """A sentence for each way in which the host's processors make the step longer."""
    reasons = []
    if slowed is not None:
        reasons.append(
            f"Forward and backward take {ms(slowed.value)} longer ({ms(slowed.low)} to {ms(slowed.high)}) while "
            "gradients travel than without."
        )
    if _hides(f, slowed, busy):
        reasons.append("Transfers that this work hides would show.")
    if busy is not None:
        waits = "" if f.starved is None else f"; compute waits {ms(f.starved.value)} a step for a core"
        reasons.append(
            f"The ranks of one machine keep {percent(f.cores_busy or 0.0)} of its cores busy over the whole step, also "
            f"while communication is exposed{waits}."
        )
    return reasons


def host(facts: Facts) -> RuleResult:
    """Traffic and compute share the host's processors: compute is slower beside traffic, or all cores are busy."""
    f = facts.f
    pair = f.slowed if f.slowed is not None and f.slowed.enough else None
    slowed = None if pair is None else pair.difference_ns
    busy, rests = _busy_cores(facts, slowed)
    reasons = _host_reasons(f, slowed, busy)
    lost, source = _host_saving(f, slowed, busy)
    guessed = " (predicted)" if source == "predicted" and f.label != source else ""
    sources = [] if pair is None else [f"{f.label}: {pair.pairs} pairs with {NULL}{guessed and ', saving predicted'}"]
    sources += [rests] if rests else []
    saving = within_step(lost, facts.step_ns)
    enough = f"With enough cores the step would be {facts.share(saving)} shorter{guessed}.{as_good_sentence(f)}"
    return facts.evidence(
        "host contention",
        "HOST_LIMITED",
        applies=bool(reasons),
        saving=saving if reasons else None,
        source=source,
        rests="; ".join(sources)
        or f"{'too few pairs' if NULL in f.trace.arms else 'no steps'} without traffic ({NULL})",
        why=" ".join([*reasons, enough]) if reasons else "",
        next="Give the ranks more cores, or fewer threads to the model.",
        **(facts.more_steps(lost) if pair is not None else {"needs": without_traffic(f)}),
    )


def without_traffic(f: Findings) -> str:
    """Ask for steps that move nothing, beside the same arms."""
    if not f.trace.buckets:  # no transport of ours can move its gradients
        return MORE_STEPS
    if NULL in f.trace.arms:
        return same_arms(f)
    named = ",".join(name for name in (*f.trace.arms, NULL) if name != SINGLE)
    return (
        f"Measure NETBOTTLENECK_TRANSPORT={named} in a short test: it moves no gradients, so the training of that run "
        "is not valid."
    )


def beside(f: Findings, transport: str) -> tuple[str, str]:
    """Two arms that compare a transport with the base, or with stock if it is the base itself."""
    assert f.base is not None
    return (STOCK, f.base) if f.base.transport == transport else (f.base, transport)


VARIABLES = {STOCK: "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"}


def configuration(facts: Facts) -> RuleResult:
    """The base uses a slower interface than is there, or than the other ranks use, or its sockets' buffers limit it.

    MTUs that differ are stated beside: what they cost is not known.
    """
    found, unequal = _interface(facts), facts.unequal_mtus
    return replace(found, rests=f"{found.rests}; {unequal}") if unequal else found


def _interface(facts: Facts) -> RuleResult:
    """The base uses a slower interface than is there, or than the other ranks use; else, what its buffers cost."""
    f, base = facts.f, facts.base
    slow = slow_interface(f.trace, base, facts.hosts)
    if slow is None:
        return _buffers(facts)
    used, there, moved = rating(slow[0]), rating(slow[1]), _moved_bps(facts, slow[0])
    full = moved is not None and moved >= limits.LINK_UTILISATION * used
    predicted = facts.predicted.savings_ns.get(FASTER_INTERFACE)
    saving, bound = facts.bounded(predicted or facts.moving.scaled(1 - used / there))
    saving = _sure_if(full, saving)
    variable = VARIABLES.get(Arm(base.transport), "NETBOTTLENECK_IFNAME")
    whose, then = "", f"Set {variable}={slow[1].interface}."
    needs = f"Measure over the faster interface: {variable}={slow[1].interface}."
    own, others = ([rank for rank in f.trace.ranks if info in rank.transports] for info in slow)
    ranks = ", ".join(str(rank.rank) for rank in own)
    if not {rank.host_id for rank in own} & {rank.host_id for rank in others}:
        whose = f"on rank {others[0].rank} "
        then = (
            f"Look at the interface, cable and switch port of the host of rank {ranks}, or choose another: {variable}."
        )
        needs = "Measure again when that interface has the rate of the others."
    return facts.evidence(
        "configuration",
        "MISCONFIGURED",
        applies=True,
        saving=saving,
        rests=f"ratings of the interfaces; {_part_of_rating(moved, used)}; "
        f"{'predicted' if predicted else 'exposed x their ratio'}{bound}",
        why=f"{base} uses {slow[0].interface} ({gbit(used)}) on rank {ranks}; {slow[1].interface} {whose}has "
        f"{gbit(there)}. At that rate the step would be up to {facts.share(saving)} shorter.",
        next=then,
        needs=needs,
    )


def _moved_bps(facts: Facts, info: TransportInfo) -> float | None:
    """The rate on an interface of the base while operations are in flight; None if it is not known.

    The larger one of its counters and of the time in transfer: counters have the bytes of others too.
    """
    did = facts.f.achieved.get(facts.base)
    known = did is not None and not facts.transfer_unknown
    rates = [did.active_bps * on_interface(facts.f.trace, facts.base).active] if did is not None and known else []
    ids = {rank.rank: rank.host_id for rank in facts.f.trace.ranks}
    own = {rank.host_id for rank in facts.f.trace.ranks if info in rank.transports}
    hosts = [host for host in facts.hosts if host.arm == facts.base and ids.get(host.rank) in own]
    uses = [use for host in hosts for use in host.interfaces]
    rates += [use.active_bps for use in uses if use.interface == info.interface and use.active_bps is not None]
    return max(rates, default=None)


def _part_of_rating(moved_bps: float | None, rated_bps: int) -> str:
    """How full an interface is while operations are in flight."""
    how = "at an unknown rate" if moved_bps is None else f"{percent(moved_bps / rated_bps)} full"
    return f"the used one is {how}"


def _buffers(facts: Facts) -> RuleResult:
    """The receive windows or send buffers of the base's connections are full for a large part of communication."""
    found = limited(facts.connected, facts.base)
    if found is None or found.share < limits.BUFFER_SHARE:
        perhaps = slow_interface(facts.f.trace, facts.base)
        rests = "no faster interface is recorded"
        if perhaps is not None:
            rests = carrier_text(perhaps[0].interface or "", facts.base)
        return facts.evidence("configuration", "MISCONFIGURED", rests=rests)
    (saving, bound), share = facts.bounded(facts.moving.scaled(found.share)), percent(found.share)
    return facts.evidence(
        "configuration",
        "MISCONFIGURED",
        applies=True,
        saving=saving,
        rests=f"full {found.what}: {share} of communication time; exposed x that part{bound}",
        why=f"The {found.what} limits {facts.base}'s connections for {share} of communication time (round trip "
        f"{ms(found.rtt_s * 1e9)}). Without that the step would be {facts.share(saving)} shorter (predicted).",
        next=found.remedy(facts.link_bps),
        needs=MORE_STEPS,
    )


def other_traffic(facts: Facts) -> RuleResult:
    """An interface moves bytes that this record does not have: of other jobs, or of calls that are not recorded."""
    more = facts.unseen
    if more is None:
        return facts.evidence("other traffic", "OTHER_TRAFFIC", rests=_not_compared(facts))
    surely, part, interface, name = more.surely, more.part, more.interface, more.hostname
    speed = facts.speed_of(more)
    full = speed is not None and more.active_bps >= limits.LINK_UTILISATION * speed
    predicted = facts.predicted.savings_ns.get(NO_OTHERS)
    saving, bound = facts.bounded(predicted or facts.moving.scaled(part))
    saving = replace(saving, low=saving.low * surely / part if part and full else min(saving.low, 0.0))
    used = (
        "the link's speed is not known" if speed is None else f"{percent(more.active_bps / speed)} of the link is used"
    )
    return facts.evidence(
        "other traffic",
        "OTHER_TRAFFIC",
        applies=facts.others is not None,
        saving=saving,
        rests=f"unseen: {nbytes(round(more.bytes))}, {percent(part)} of {interface}'s bytes; {used}; "
        f"{'predicted' if predicted else 'exposed x that part'}{bound}",
        why=f"{percent(part)} of the bytes on {interface} of {name or 'a host'} during the steps belong to no recorded "
        f"operation. Without them the step would be up to {facts.share(saving)} shorter.",
        next="Find what else uses the network of this host: another job, a copy, data loading or checkpoints over the "
        "network, or communication of this job outside of its gradients.",
        needs="Measure while nothing else uses the network: no other job, and data from a local disk or memory."
        if speed is not None or interface == LOOPBACK
        else "Measure while nothing else uses the network, or with NETBOTTLENECK_LINK_GBPS, the link's speed, which "
        "tells whether these bytes fill it.",
    )


def _not_compared(facts: Facts) -> str:
    """Why an interface's bytes are not compared with those of the operations."""
    if not any(host.interfaces for host in facts.hosts if host.arm == facts.base):
        return "too few readings of the interfaces, or none"
    if any(in_memory(one) for one in facts.f.trace.collectives if one.arm == facts.base):
        return "operations moved their bytes through shared memory"
    return "not known how many of the operations' bytes are on an interface"


def loss(facts: Facts) -> RuleResult:
    """Connections lose packets, and some steps wait until they are sent again."""
    lost, delays = facts.lost, facts.f.delays
    if not lost:
        some = percent(limits.LOSS_SHARE)
        rests = f"no connection lost {some} of its packets" if facts.connected.ends else "no connections were recorded"
        return facts.evidence("packet loss", "PACKET_LOSS", rests=rests)
    if delays is None:
        return facts.evidence("packet loss", "PACKET_LOSS", rests=UNKNOWN_DELAYS)
    saving = delays.mean_ns
    return facts.evidence_of_mean(
        "packet loss",
        "PACKET_LOSS",
        delays.rest_ns,
        saving,
        applies=True,
        source=facts.f.label,
        rests=f"{facts.f.label}: longer transfers of single steps, in the mean of all steps",
        why=f"{lost} Single steps take longer to move data than most do. Without that the mean step would be "
        f"{share_of(saving, facts.step_ns, delays.rest_ns)} shorter.",
        next="Find where packets are dropped on the way between these ranks: counters of interfaces (ethtool -S), of "
        "switch ports, and of queues (tc -s qdisc).",
        needs=MORE_STEPS,
    )


Rule = Callable[[Facts], RuleResult]
RULES: tuple[Rule, ...] = (
    configuration,
    transport,
    link,
    latency,
    buckets,
    host,
    straggler,
    imbalance,
    before_forward,
    optimizer,
    other_traffic,
    loss,
)


def judge(facts: Facts) -> tuple[RuleResult, ...]:
    """Ask every rule. Those that fired come first, then the uncertain, then the others; larger savings first."""

    def place(one: RuleResult) -> tuple[bool, bool, float]:
        counted = one.saving.value if one.saving is not None and one.applies else 0.0
        return not one.fired, not one.uncertain, -counted

    return tuple(sorted((rule(facts) for rule in RULES), key=place))
