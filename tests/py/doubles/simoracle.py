"""A simple, slow simulator in steps of one nanosecond, as a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from netbottleneck.whatif.cost import Cost, Table
from netbottleneck.whatif.plan import Plan


@dataclass
class RankStep:
    """Compute of one rank in a step: before its backward pass, before each gradient, until it waits, after it."""

    head: int
    gaps: list[tuple[int, int]]  # (tensor, ns before it)
    post: int
    tail: int


@dataclass
class Op:
    step: int
    tensors: list[int]
    nbytes: int
    agreed: int
    start: int = -1
    done: int = -1
    parts: list[tuple[int, list[list[object]]]] = field(default_factory=list)  # (delay, [[resources, left], …])


def near(x: float) -> int:
    return math.floor(x + 0.5)


def sum_of(cost: Cost, nbytes: float) -> float:
    return cost.add.at(nbytes) if isinstance(cost.add, Table) else nbytes * cost.add


def parts_of(cost: Cost, workers: int, nbytes: int, members: int) -> list[tuple[int, list[list[object]]]]:
    """The phases of an operation: a delay, then the time that each part uses each resource."""
    n, g = workers, min(cost.ranks_per_host, workers)
    if n < 2:
        return []
    h = -(-n // g)
    levels = n.bit_length() - 1
    fold = n != 1 << levels
    inside = min(g.bit_length() - 1, levels - 1) if h > 1 else levels
    data = nbytes / cost.ratio
    summed = nbytes if cost.whole_sums else data
    steps = wire = host_steps = host_wire = 0.0
    if cost.algorithm == "ring":
        if h > 1:
            steps, wire = 2 * (n - 1), 2 * (n - 1) / n
        else:
            host_steps = 2 * (n - 1)
        host_wire = 2 * (n - 1) / n if g > 1 else 0.0
        sums = (n - 1) * sum_of(cost, summed / n)
    elif cost.algorithm in {"two_level", "tree"}:
        steps = 2 * (h - 1) if cost.algorithm == "two_level" else 2 * math.ceil(math.log2(h))
        wire, host_steps, host_wire = 2 * (h - 1) / h, 2 * (g - 1), 2 * (g - 1) / g
        sums = ((g > 1) + (h > 1)) * sum_of(cost, summed)
        if cost.algorithm == "two_level":
            sums = (g - 1) * sum_of(cost, summed / g) + (h - 1) * sum_of(cost, summed / (g * h))
    else:
        halving = cost.algorithm == "halving_doubling"
        steps, host_steps = (1 + halving) * (levels - inside), (1 + halving) * inside
        wire = 2 * g * (0.5**inside - 0.5**levels) if halving else g * (levels - inside)
        host_wire = 2 * (1 - 0.5**inside) if halving else inside
        if fold and g > 1:
            host_steps, host_wire = host_steps + 2, host_wire + 2
        elif fold:
            steps, wire = steps + 2, wire + 2
        sums = (levels + fold) * sum_of(cost, summed)
        if halving:
            sums = sum(sum_of(cost, summed * 0.5**i) for i in range(1, levels + 1)) + fold * sum_of(cost, summed)
    copy = cost.copy_byte_ns if members > 1 else 0.0
    host_byte_ns = 0.0 if cost.host_bps is None else 8e9 / cost.host_bps
    on_wire: list[object] = ["up down", Fraction(near(data * wire * cost.link.byte_ns))]
    in_host: list[object] = ["inner", Fraction(near(data * host_wire * host_byte_ns))]
    adding: list[object] = ["cpu", Fraction(near(sums))]
    delay = near(cost.fixed_ns) + near(steps * cost.alpha_ns) + near(host_steps * cost.host_alpha_ns)
    moving = [(delay, [on_wire, in_host, adding])]
    if not cost.pipelined:
        together = [on_wire, in_host] if cost.algorithm == "ring" else [on_wire]
        apart = [in_host] * (cost.algorithm != "ring")
        moving = [(delay, together), (0, apart), (0, [adding])]
    before: list[object] = ["cpu", Fraction(near(nbytes * (copy + cost.encode_byte_ns)))]
    after: list[object] = ["cpu", Fraction(near(nbytes * (copy + cost.decode_byte_ns)))]
    return [(0, [before]), *moving, (0, [after])]


class Oracle:
    """One run. After `run`: ops, and of each rank the ends of its steps."""

    def __init__(
        self, ranks: list[list[RankStep]], sizes: list[int], kinds: list[str], plan: Plan, cost: Cost, workers: int
    ) -> None:
        self.sizes, self.kinds, self.plan, self.cost, self.workers = sizes, kinds, plan, cost, workers
        order = [tensor for tensor, _ in ranks[0][0].gaps]
        self.buckets = plan.resolve(sizes, kinds, order)
        self.todo = [[item for step in steps for item in self.items(step)] for steps in ranks]
        self.ops: list[Op] = []
        self.ends: list[list[int]] = [[] for _ in ranks]
        self.begins = [0 for _ in ranks]
        self.now = 0
        self.step_begin(0)

    def items(self, step: RankStep) -> list[list[object]]:
        ready = [[Fraction(ns), tensor] for tensor, ns in step.gaps]
        return [[Fraction(step.head), "backward"], *ready, [Fraction(step.post), "wait"], [Fraction(step.tail), "end"]]

    def step_begin(self, step: int) -> None:
        self.step = step
        self.ready: list[list[int]] = [[] for _ in self.todo]
        self.submitted: dict[int, int] = {}
        self.pending: list[int] = []
        self.sent = 0
        self.last_send = self.now

    def send(self, tensors: list[int]) -> None:
        launch = near(self.cost.launch_ns) if self.workers > 1 else 0
        nbytes = sum(self.sizes[t] for t in tensors)
        op = Op(self.step, tensors, nbytes, self.now + launch)
        op.parts = parts_of(self.cost, self.workers, nbytes, len(tensors))
        self.ops.append(op)
        self.sent += len(tensors)
        self.pending = [t for t in self.pending if t not in tensors]

    def bucket_whole(self, rank: int, bucket: int) -> bool:
        last = bucket if self.plan.rule == "explicit" else None
        needed = self.buckets[bucket] if last is not None else [t for b in self.buckets[: bucket + 1] for t in b]
        return set(needed) <= set(self.ready[rank])

    def gradient(self, rank: int, tensor: int) -> None:
        before = [self.bucket_whole(rank, b) for b in range(len(self.buckets))]
        self.ready[rank].append(tensor)
        for bucket, was in enumerate(before):
            if not was and self.bucket_whole(rank, bucket):
                self.submitted[bucket] = self.submitted.get(bucket, 0) + 1
                if self.submitted[bucket] == len(self.todo):
                    self.send(list(self.buckets[bucket]))
        if self.plan.rule in {"horovod", "paper2020"} and all(tensor in own for own in self.ready):
            self.pending.append(tensor)
            if self.plan.rule == "paper2020":
                self.arrival()

    def arrival(self) -> None:
        waiting = sum(self.sizes[t] for t in self.pending)
        last = self.sent + len(self.pending) == len(self.sizes)
        if last or waiting >= self.plan.fusion_bytes or self.now - self.last_send >= self.plan.cycle_ns:
            self.send(list(self.pending))
            self.last_send = self.now

    def timer(self) -> bool:
        since = self.now - self.begins[0]
        if self.plan.rule != "horovod" or not self.pending or since == 0 or since % self.plan.cycle_ns:
            return False
        while self.pending:
            first, total, passed, chosen = self.pending[0], self.sizes[self.pending[0]], 0, [self.pending[0]]
            for tensor in self.pending[1:]:
                size = self.sizes[tensor]
                if self.kinds[tensor] == self.kinds[first] and total + size <= self.plan.fusion_bytes:
                    chosen.append(tensor)
                    total += size
                    continue
                passed += size
                if total + passed > self.plan.fusion_bytes:
                    break
            self.send(chosen)
        return True

    def under_way(self) -> list[Op]:
        return [op for op in self.ops if op.start >= 0 and op.done < 0]

    def end_operations(self) -> bool:
        ended = False
        for op in self.under_way():
            while op.parts and op.parts[0][0] == 0 and all(left == 0 for _, left in op.parts[0][1]):
                op.parts.pop(0)
            if not op.parts:
                op.done = self.now
                ended = True
        return ended

    def go_on(self, rank: int) -> bool:
        """One item of a rank, if it is due."""
        if not self.todo[rank] or self.todo[rank][0][0] != 0:
            return False
        code = self.todo[rank][0][1]
        own = len(self.ends[rank])
        of_step = [op for op in self.ops if op.step == own]
        open_ = own == self.step and (self.sent < len(self.sizes) or any(op.done < 0 for op in of_step))
        if code == "wait" and open_:
            return False
        self.todo[rank].pop(0)
        if code == "backward" and self.sent == 0:
            self.last_send = self.now
        elif code == "end":
            self.ends[rank].append(self.now)
            self.begins[rank] = self.now
            if self.todo[rank] and len(self.ends[rank]) > self.step:
                self.step_begin(len(self.ends[rank]))
        elif isinstance(code, int):
            self.gradient(rank, code)
        return True

    def moment(self) -> None:
        again = True
        while again:
            more = True
            while more:
                more = self.end_operations()
                for rank in range(len(self.todo)):
                    while self.go_on(rank):
                        more = True
            again = self.timer()
            for op in [op for op in self.ops if op.start < 0 and op.agreed <= self.now]:
                if len(self.under_way()) < self.plan.in_flight:
                    op.start = self.now
                    again = True

    def nanosecond(self) -> None:
        flying = self.under_way()
        users: dict[str, int] = {}
        active = [use for op in flying if op.parts[0][0] == 0 for use in op.parts[0][1] if use[1] != 0]
        for use in active:
            for resource in str(use[0]).split():
                users[resource] = users.get(resource, 0) + 1
        for use in active:
            share = Fraction(1, max(users[resource] for resource in str(use[0]).split()))
            use[1] = max(Fraction(0), use[1] - share)  # type: ignore[operator]
        for op in flying:
            delay, uses = op.parts[0]
            op.parts[0] = (max(0, delay - 1), uses)
        pace = Fraction(10_000, round(self.cost.contention * 10_000)) if flying else Fraction(1)
        for items in self.todo:
            if items:
                items[0][0] = max(Fraction(0), items[0][0] - pace)  # type: ignore[operator]
        self.now += 1

    def run(self) -> Oracle:
        self.moment()
        while any(self.todo):
            self.nanosecond()
            self.moment()
        return self
