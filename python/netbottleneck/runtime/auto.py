"""Automatic choice of the transport: NETBOTTLENECK_TRANSPORT=auto.

The run begins with a trial: stock and the transports that all ranks can use take turns in short blocks of steps. The
arm that is faster than stock is kept, surely or at least probably, else stock. While an arm is kept, the ranks look at
its step time from time to time; a lasting change begins another trial. A trial that could not tell its fastest arms
apart is followed by another one of them alone, later in the run.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median, median_low
from typing import Any

from netbottleneck.analysis.comparisons import Estimate, middle, middle_of_sequence
from netbottleneck.analysis.thresholds import PAIRS_MIN
from netbottleneck.runtime.blocks import Block, Deciding, changes, ratio_of
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.units import ms

BLOCK_STEPS = 5  # in a block of a trial, and before the first trial; the first of them is not counted
TRIAL_BLOCKS = 38  # of all arms together, at most
CONFIRMED = 3  # consecutive cycles that must find a candidate slower, or all candidates equal
# A candidate is slower in a cycle whose blocks differ by this factor. It leaves after one block if its fastest step
# exceeds another's slowest step by it. Stock and the arm kept so far must be surely slower instead, or have been slower
# by this factor in HELD_CONFIRMED consecutive cycles. Equal arms are so in 1 of 32 cases at most, if cycles are
# independent.
SEPARATE = 1.2
HELD_CONFIRMED = 5
DEAR_STEPS = 15  # a candidate of slower blocks leaves if its steps have cost so many of the best one's
EQUAL = 0.02  # candidates whose step times surely differ by less than this part are equal; a smaller gain is none
# A gain that is this part of the half width of its 95 % interval away from 0 is real with a probability of 4 in 5. A
# run that waits until it is sure loses more, on average.
PROBABLE = 0.43
LOOK_S = 2.0  # time between two looks while an arm is kept
LOOK_STEPS = (5, 1000)  # limits of the steps between two looks
CHANGED = 1.15  # factor of the step time that counts as a change of the network
LOOKS = 2  # consecutive looks that must see a change
AGAIN = 3  # the next trial of arms that a trial could not tell apart begins at this multiple of the trial's last step
# Of the run's time: the cost of trials so far, before another one begins and while it runs. For the first trial the run
# counts as LEAST_RUN steps long, and as LEAST_RUN_S: what tells two arms apart costs more than that part of the few
# steps that have run.
COST_BEFORE, COST_MAX = 0.01, 0.02
LEAST_RUN, LEAST_RUN_S = 2000, 30.0


def least_run_steps(step_ns: float) -> int:
    """Return the steps of the shortest run that a first trial is for: LEAST_RUN, or those of LEAST_RUN_S if more."""
    return max(LEAST_RUN, math.ceil(LEAST_RUN_S * 1e9 / max(step_ns, 1)))


@dataclass(slots=True)
class Trial:
    """One trial. cost_ns: see Auto. least_steps: number of steps of a run whose time the cost is COST_MAX of.

    against_stock: step time over stock's, by arm, with its interval; infinite for too few pairs of blocks. again: arms
    that it could not tell apart.
    """

    first_step: int
    end_step: int = 0
    kept: str = ""
    why: str = ""
    blocks: int = 0
    cost_ns: int = 0
    least_steps: int = 0
    against_stock: dict[str, Estimate] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return what the trial found, for people."""
        found = changes(self.against_stock)
        times = f"; step time against stock (measured, 95 % interval): {found}" if found else ""
        part = f", {100 * COST_MAX:.0f} % of a run of {self.least_steps} steps" if self.cost_ns else ""
        later = f". Another trial of {' and '.join(self.again)} may follow after step {AGAIN * self.end_step}"
        return (
            f"auto: from step {self.end_step} on {self.kept}: {self.why}{times}. "
            f"Trial of steps {self.first_step} to {self.end_step - 1}: {ms(self.cost_ns)} more than the same steps "
            f"over {self.kept}{part}{later if self.again else ''}"
        )


class Auto(Deciding):
    """Assignment of steps to arms, by trials.

    arms: stock first. length: steps in a block of a trial. cost_ns: time of trial steps beyond that of the arm kept
    after them. elapsed_ns: time of all steps.
    """

    def __init__(self, arms: Sequence[Arm], length: int = BLOCK_STEPS) -> None:
        super().__init__(arms, length)
        self.trials: list[Trial] = []
        self.elapsed_ns = 0
        self._kept = STOCK
        self._arm = STOCK
        self._number = 0  # of the current block
        self._first = 0  # step of it
        self._trial: Trial | None = None
        self._turns: list[Arm] = []  # arms of the current cycle that have not had their block
        self._candidates: list[Arm] = []
        self._found: dict[Arm, dict[int, Block]] = {}  # by cycle
        self._cycle = 0
        self._slower: dict[Arm, int] = defaultdict(int)  # consecutive cycles that found an arm surely slower
        self._equal = 0  # consecutive cycles that found the candidates equal
        self._reference_ns = 0  # step time of the kept arm in its first window
        self._changed = 0

    def at(self, step: int) -> tuple[int, int]:
        """Return (block, index of the arm) of the current step."""
        return self._number, self.arms.index(self._arm)

    def _decide(self, step: int, block: Block) -> str:
        steps = step - self._first  # not of this rank's times: it may have made fewer, if it has joined (hvd.join())
        self._first = step
        self.elapsed_ns += block.median * steps
        self._number += 1
        line = ""
        if self._trial is not None:
            self._found[self._arm][self._cycle] = block
            if not self._turns:
                line = self._cycle_ends(step)
        elif not self.trials or self._has_changed(block.median):
            self._begins(step, self.arms)
        elif self._is_again_due(step):
            self._begins(step, [Arm.parse(name) for name in self.trials[-1].again])
        else:
            self._end = step + self._until_look(block.median)
        if self._trial is not None:
            self._arm, self._end = self._turns.pop(0), step + self.length
        return line

    def unfinished(self, step: int) -> str:
        """Return a line for people if a run that ends before this step ends within a trial, else ""."""
        if self._trial is None and self.trials:
            return ""
        begin = step if self._trial is None else self._trial.first_step
        return (
            f"auto: the run ended at step {step}, before its trial (from step {begin} on) found the fastest transport"
        )

    def described(self) -> dict[str, Any]:
        """Return the trials, for the run's record; an infinite interval is None."""
        trials = [
            {**asdict(trial), "against_stock": {arm: each.as_dict() for arm, each in trial.against_stock.items()}}
            for trial in self.trials
        ]
        return {"auto": {"trials": trials, "cost_ns": self.cost_ns, "elapsed_ns": self.elapsed_ns}}

    @property
    def cost_ns(self) -> int:
        """Time of all trials' steps beyond that of the arms kept after them."""
        return sum(trial.cost_ns for trial in self.trials)

    @property
    def _blocks(self) -> int:
        """Number of blocks of the current trial."""
        return sum(map(len, self._found.values()))

    def _begins(self, step: int, arms: Sequence[Arm]) -> None:
        self._trial = Trial(step)
        self._candidates = list(arms)
        self._turns = list(arms)
        self._found = {arm: {} for arm in self.arms}
        self._cycle = 0
        self._slower.clear()
        self._equal = 0

    def _cycle_ends(self, step: int) -> str:
        """Let slower candidates leave; end the trial or begin its next cycle."""
        self._cycle += 1
        self._leave()
        why = self._why_over()
        if why:
            return self._over(step, why)
        self._turns = self._candidates[:: 1 if self._cycle % 2 == 0 else -1]
        return ""

    def _leave(self) -> None:
        """Remove slower candidates."""
        if self._cycle == 1:
            found = {arm: self._found[arm][0] for arm in self._candidates}
            most = SEPARATE * min(block.slowest for block in found.values())
            self._candidates = [arm for arm, block in found.items() if self._is_held(arm) or block.fastest <= most]
        best = self._best()
        self._candidates = [arm for arm in self._candidates if arm == best or not self._is_out(arm, best)]
        self._slower[best] = 0

    def _is_held(self, arm: Arm) -> bool:
        """Return True if a few disturbed blocks are not enough to remove an arm: stock, and the arm kept so far."""
        return arm in (STOCK, self._kept)

    def _is_out(self, arm: Arm, best: Arm) -> bool:
        """Return True if a candidate is to leave as slower than the best one. Called once a cycle."""
        against, held = self._against(arm, best), self._is_held(arm)
        logs, separate = self._logs(arm, best), math.log(SEPARATE)
        surely = against is not None and against.low > 0 and against.value > EQUAL
        slower = surely or (not held and logs[-1] > separate)
        self._slower[arm] = self._slower[arm] + 1 if slower else 0
        may_leave = surely or against is None or not held
        always = len(logs) >= HELD_CONFIRMED and min(logs[-HELD_CONFIRMED:]) > separate
        return always or self._slower[arm] >= CONFIRMED or (may_leave and self._is_dear(arm, best))

    def _best(self) -> Arm:
        """Return the candidate of least step time, in pairs of blocks; of equal ones the first."""
        first = self._candidates[0]
        return min(self._candidates, key=lambda arm: middle(self._logs(arm, first)).value)

    def _logs(self, arm: Arm, base: Arm) -> list[float]:
        """Return the logarithms of an arm's step time over another's, for each cycle with both."""
        found, other = self._found[arm], self._found[base]
        return [math.log(max(found[c].median, 1) / max(other[c].median, 1)) for c in sorted(set(found) & set(other))]

    def _against(self, arm: Arm, base: Arm) -> Estimate | None:
        """Return `middle_of_sequence` of `_logs`; None for too few."""
        logs = self._logs(arm, base)
        return middle_of_sequence(logs) if len(logs) >= PAIRS_MIN else None

    def _are_equal(self) -> bool:
        """Return True if the candidates' step times surely differ by less than EQUAL."""
        first, *others = self._candidates
        against = [self._against(arm, first) for arm in others]
        return all(each is not None and max(abs(each.low), abs(each.high)) < EQUAL for each in against)

    def _are_surely_slower(self) -> bool:
        """Return True if all arms that have left the trial are surely slower than the one that has not."""
        (best,) = self._candidates
        against = [self._against(arm, best) for arm, found in self._found.items() if found and arm != best]
        return all(each is not None and each.low > 0 for each in against)

    def _why_over(self) -> str:
        """Return why the trial is over, "" if it is not. Notes the arms that it could not tell apart."""
        assert self._trial is not None
        if len(self._candidates) == 1:
            return "the others are slower" if self._are_surely_slower() else "the others seemed slower, not surely"
        if self._blocks + len(self._candidates) > TRIAL_BLOCKS:
            self._trial.again = [str(arm) for arm in self._candidates]
            return f"after {self._blocks} blocks of steps"
        self._equal = self._equal + 1 if self._are_equal() else 0
        if self._equal >= CONFIRMED:
            return f"the step times of {', '.join(self._candidates)} differ by less than {EQUAL:.0%}"
        if self._is_spent():
            if self.trials:
                return f"trials have cost {COST_MAX:.0%} of the run"
            self._trial.again = [str(arm) for arm in self._candidates]
            steps = least_run_steps(self._step_ns(self._best()))
            return f"another round would cost more than {100 * COST_MAX:.0f} % of a run of {steps} steps"
        return ""

    def _is_spent(self) -> bool:
        """Return True if all trials have cost COST_MAX of the run, or if another cycle of the first one would.

        The first trial goes on until an arm that seems faster than stock has pairs enough: to stay with stock costs
        more than the trial if the arm is faster, and stock's own steps cost the run nothing that it would not have
        cost without a trial.
        """
        best = self._best()
        spent = self.cost_ns + self._cost_of(best)
        if self.trials:
            return spent > COST_MAX * self.elapsed_ns
        cycle, step_ns = sum(self._excess(arm, best) for arm in self._candidates) / self._cycle, self._step_ns(best)
        is_blind = best != self._kept and self._cycle < PAIRS_MIN
        return not is_blind and spent + cycle > COST_MAX * least_run_steps(step_ns) * step_ns

    def _over(self, step: int, why: str) -> str:
        """End the trial. The arm kept so far stays, unless it has left or another one is probably faster."""
        trial = self._trial
        assert trial is not None
        kept, former = self._best(), self._kept
        if kept != former and former in self._candidates:
            gain = self._against(kept, former)
            least = math.inf if gain is None else gain.value + PROBABLE * (gain.high - gain.value)
            if gain is None or least >= 0 or gain.value > math.log(1 - EQUAL):
                kept, why = former, f"{why}; no arm is probably faster"
            elif gain.high >= 0:
                why = f"{why}; probably the fastest, not surely"
        trial.end_step, trial.kept, trial.why, trial.blocks = step, str(kept), why, self._cycle
        trial.cost_ns = self._cost_of(kept)
        trial.least_steps = math.ceil(trial.cost_ns * (1 / COST_MAX - 1) / max(self._step_ns(kept), 1))
        for arm in self.arms[1:]:
            logs = self._logs(arm, STOCK)
            if not logs:
                continue
            if len(logs) < PAIRS_MIN:
                ratio = Estimate(math.exp(sum(logs) / len(logs)), 0.0, math.inf)
            else:
                ratio = ratio_of(logs)
            trial.against_stock[str(arm)] = ratio
        self.trials.append(trial)
        self._trial, self._kept, self._arm = None, kept, kept
        self._reference_ns, self._changed = 0, 0
        self._end = step + self._until_look(round(self._step_ns(kept)))
        return trial.line()

    def _cost_of(self, kept: Arm) -> int:
        """Return the time of the trial's steps beyond that of the same number of steps of an arm."""
        return max(0, round(sum(self._excess(arm, kept) for arm in self._found)))

    def _excess(self, arm: Arm, best: Arm) -> float:
        """Return the time of an arm's steps in this trial beyond that of the same number of another's, in ns.

        By the mean of the other's blocks: what disturbs all arms alike is no cost of the trial.
        """
        own = mean(block.median for block in self._found[best].values())
        return self.length * sum(block.median - own for block in self._found[arm].values())

    def _is_dear(self, arm: Arm, best: Arm) -> bool:
        """Return True if an arm is much slower than the best one in most cycles, and its steps have cost too much."""
        most = DEAR_STEPS * max(1.0, self.length / BLOCK_STEPS) * self._step_ns(best)
        logs = self._logs(arm, best)
        return len(logs) > 1 and median_low(logs) > math.log(SEPARATE) and self._excess(arm, best) > most

    def _step_ns(self, arm: Arm) -> float:
        return median(block.median for block in self._found[arm].values())

    def _has_changed(self, step_ns: int) -> bool:
        """Return True if the step time of the kept arm has changed for good, and another trial is affordable."""
        if not self._reference_ns:
            self._reference_ns = step_ns
            return False
        ratio = step_ns / max(self._reference_ns, 1)
        self._changed = self._changed + 1 if max(ratio, 1 / max(ratio, 1e-9)) > CHANGED else 0
        return self._changed >= LOOKS and self._is_affordable()

    def _is_again_due(self, step: int) -> bool:
        """Return True if the last trial could not tell its arms apart, and the time of the next one has come."""
        last = self.trials[-1]
        return bool(last.again) and step >= AGAIN * last.end_step and self._is_affordable()

    def _is_affordable(self) -> bool:
        """Return True if trials have cost so little of the run that another one may begin."""
        return self.cost_ns <= COST_BEFORE * self.elapsed_ns

    @staticmethod
    def _until_look(step_ns: int) -> int:
        low, high = LOOK_STEPS
        return min(max(math.ceil(LOOK_S * 1e9 / max(step_ns, 1)), low), high)


def usable(arms: Sequence[Arm], of_ranks: Sequence[Mapping[Arm, str]]) -> tuple[list[Arm], list[str]]:
    """Return the arms that all ranks can use, and a note for each of the others.

    of_ranks: each rank's reasons against arms.
    """
    kept, notes = [], []
    for arm in arms:
        why = next((f"rank {rank}: {found[arm]}" for rank, found in enumerate(of_ranks) if found.get(arm)), "")
        if why:
            notes.append(f"auto leaves {arm} out: {why}")
        else:
            kept.append(arm)
    return kept, notes
