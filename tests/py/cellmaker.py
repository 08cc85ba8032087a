"""Makes traces of cells with known numbers: forward, backward, one operation, an optimizer, other time."""

from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.trace.model import Bucket, Collective, Network, Parameter, Rank, Step, Trace
from netbottleneck.trace.transports import Arm

MS = 1_000_000
NBYTES = 10 << 20
VERIFIED = {
    "one_flow": {"measured_bps": 4.8e8},
    "many_flows": {"measured_bps": 1.9e9, "flows": 4, "link_burst_bytes": 10**6},
}


def trace(arms, *, size=2, rounds=3, block_steps=4, computed=None, alone_ms=100, beside_ms=(2, 8), link_bps=2e9):
    """A run of `arms`: name -> ms of exposed communication, None where nothing moves and nothing is recorded.

    Each step: 30 ms of forward and 60 of backward (times `computed` of the arm); before it and after it, beside_ms.
    """
    steps, operations = [], []
    now, index = 0, 1
    if alone_ms:
        for number in range(6):
            steps.append(Step(0, -number - 1, 0, Arm("single"), now, now + alone_ms * MS))
            now += (alone_ms + 1) * MS
    for block in range(rounds * len(arms)):
        name = list(arms)[block % len(arms)]
        for _ in range(block_steps):
            longest = 0
            for rank in range(size):
                slower = (computed or {}).get(name, 1)
                step, own = _step(name, arms[name], (rank, index, block), (now, beside_ms), slower)
                steps.append(step)
                operations += own
                longest = max(longest, step.end_ns)
            now, index = longest + MS, index + 1
    return Trace(
        "cell",
        size,
        tuple(map(Arm.parse, arms)),
        model="made up",
        network=Network("made up", link_bps, (5e8,), VERIFIED),
        ranks=tuple(Rank(rank, f"host{rank}", f"host{rank}", finished=True, cores=(0, 1)) for rank in range(size)),
        parameters=(Parameter("w", NBYTES, "float32", 0),),
        buckets=(Bucket("b", 1, NBYTES, "float32", (0,)),),
        steps=tuple(steps),
        collectives=tuple(operations),
    )


def _step(name, exposed_ms, at, since, slower):
    (rank, index, block), (begin, (input_ms, optimizer_ms)) = at, since
    ahead = begin + input_ms * MS
    middle, back = ahead + round(30 * slower * MS), ahead + round(90 * slower * MS)
    done = back + round((exposed_ms or 0) * MS)
    end = done + optimizer_ms * MS
    if name == "bare" and exposed_ms is None:
        return Step(rank, index, block, Arm(name), begin, end), []
    step = Step(
        rank,
        index,
        block,
        Arm(name),
        begin,
        end,
        forward=((ahead, middle),),
        optimizer=((done, end),) if optimizer_ms else (),
        grad_ready=((0, back),),
        waits=((0, back, done),) if done > back else (),
    )
    if name == "null":
        return step, []
    moved = Collective(rank, Arm(name), 1, index, back, NBYTES, "b", index, bucket=0, start_ns=back, done_ns=done)
    return step, [moved]


def about(value, spread=0.01):
    """An estimate around a value."""
    return Estimate(value, value * (1 - spread), value * (1 + spread))
