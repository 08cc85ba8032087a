"""One rank of the checks of elastic training that need no launcher: state, sampler and the loop, on all ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from named_checks import check, main

import netbottleneck.torch as hvd
from netbottleneck.torch.elastic.launcher import HostUpdateResult
from netbottleneck.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry


def model_of(value: float) -> torch.nn.Module:
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def values(model: torch.nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


@check
def sync_gives_rank_0s_state_and_restore_what_was_committed() -> None:
    model, other = model_of(hvd.rank() + 1.0), model_of(hvd.rank() + 5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + hvd.rank(), momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    if hvd.rank() == 0:
        optimizer.step()
    state = hvd.elastic.TorchState(model, optimizer, other=other, batch=20 + hvd.rank(), epoch=10 + hvd.rank())
    assert (state.model, state.optimizer, state.other) == (model, optimizer, other)
    state.sync()
    assert (values(model), values(other)) == ({0.5}, {5.0})
    assert (state.batch, state.epoch) == (20, 10)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(set(kept["momentum_buffer"].flatten().tolist()) == {1.0} for kept in optimizer.state.values())

    def change() -> None:
        model.load_state_dict(model_of(9.0 + hvd.rank()).state_dict())
        optimizer.param_groups[0]["lr"] = 7.0
        state.batch = 90 + hvd.rank()

    change()
    state.restore()
    assert (values(model), state.batch, optimizer.param_groups[0]["lr"]) == ({0.5}, 20, 0.5)
    change()
    state.commit()
    model.load_state_dict(model_of(0.0).state_dict())
    state.batch = 0
    state.restore()
    assert (values(model), state.batch, optimizer.param_groups[0]["lr"]) == ({9.0 + hvd.rank()}, 90 + hvd.rank(), 7.0)


@check
def each_restore_gives_the_committed_optimizer_state() -> None:
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    def momenta() -> list[list[float]]:
        return [kept["momentum_buffer"].flatten().tolist() for kept in optimizer.state.values()]

    steps()
    state = hvd.elastic.TorchState(model, optimizer)
    state.commit()
    committed = values(model), momenta()
    for _ in range(2):
        steps()
        assert momenta() != committed[1]
        state.restore()
        assert (values(model), momenta()) == committed


@check
def a_rank_whose_optimizer_is_new_has_rank_0s_weights() -> None:
    """Making its state is a step, in which weights decay."""
    model = model_of(hvd.rank() + 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if hvd.rank() == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    hvd.elastic.TorchState(model, optimizer).sync()
    weights = hvd.allgather_object([parameter.tolist() for parameter in model.parameters()])
    assert all(each == weights[0] for each in weights)


@check
def another_model_takes_the_place_of_one() -> None:
    state = hvd.elastic.TorchState(model_of(1.0))
    state.model = model_of(3.0 + hvd.rank())
    state.sync()
    assert values(state.model) == {3.0}
    assert state.optimizer is None


@check
def kinds_of_ones_own_have_their_handlers() -> None:
    class Counter:
        def __init__(self, at: int) -> None:
            self.at = at

    class CounterHandler(StateHandler):
        def __init__(self, value: Counter) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.saved = self.value.at

        def restore(self) -> None:
            self.value.at = self.saved

        def sync(self) -> None:
            self.value.at = hvd.broadcast_object(self.value.at)

    before = list(get_handler_registry())
    set_handler_registry([*before, (Counter, CounterHandler)])
    counter = Counter(hvd.rank() + 3)
    state = hvd.elastic.TorchState(counter=counter)
    state.sync()
    assert counter.at == 3
    state.commit()
    counter.at = 8
    state.restore()
    assert state.counter.at == 3
    set_handler_registry(before)


@check
def a_sampler_distributes_the_remaining_indices() -> None:
    ranks = hvd.size()
    rows = list(range(8 * ranks + 1))
    sampler = hvd.elastic.ElasticSampler(rows, seed=3)
    shares = hvd.allgather_object(list(sampler))
    assert [len(share) for share in shares] == [len(sampler)] * ranks == [9] * ranks
    assert {index for share in shares for index in share} == set(rows)
    assert shares[0] != sorted(shares[0])
    state = hvd.elastic.TorchState(sampler=sampler)
    done = {index for share in shares for index in share[:6]}
    for number in range(3):
        sampler.record_batch(number, 2)
    state.commit()
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 6 * ranks}
    sampler.record_batch(3, 2)
    state.restore()
    rest = [index for share in hvd.allgather_object(list(sampler)) for index in share]
    assert set(rest) == set(rows) - done
    assert len(rest) == 3 * ranks
    sampler.set_epoch(1)
    again = hvd.allgather_object(list(sampler))
    assert len(sampler) == 9
    assert again != shares
    plain = hvd.elastic.ElasticSampler(rows, shuffle=False)
    assert list(plain)[:3] == [hvd.rank(), hvd.rank() + ranks, hvd.rank() + 2 * ranks]
    plain.load_state_dict({"epoch": 0, "processed_num": len(rows)})
    assert (list(plain), len(plain)) == ([], 0)
    plain.load_state_dict({"epoch": 0, "processed_num": len(rows) - 1})
    assert list(plain) == [rows[-1]]


@check
def host_changes_on_rank_0_interrupt_all_ranks() -> None:
    state = hvd.elastic.TorchState(batch=1)
    state.commit()
    if hvd.rank() == 0:
        state.on_hosts_updated(1, HostUpdateResult.added)
        state.on_hosts_updated(2, HostUpdateResult.removed)
    state.batch = 2
    with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
        state.commit()
    assert not caught.value.skip_sync
    state.restore()
    assert state.batch == 2
    state.check_host_updates()
    if hvd.rank() == 0:
        state.on_hosts_updated(2, HostUpdateResult.added)  # no news
        state.on_hosts_updated(3, HostUpdateResult.removed)
    with pytest.raises(hvd.HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync


def trained(make: Callable[[Any], Any], *, fails: bool = True, kept: bool = True, renewed: Any = None) -> torch.Tensor:
    """Return the weights after training, with a failure and a change of hosts on the way where `fails` says so.

    kept: the optimizer is part of the state. renewed: called whenever the ranks have changed.
    """
    model = model_of(1.0)
    optimizer = make(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, optimizer if kept else None, batch=0)
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append(f"reset {hvd.size()}"), *([renewed] if renewed else [])])

    @hvd.elastic.run
    def train(state: Any, until: int) -> str:
        calls.append(f"from {state.batch}")
        while state.batch < until:
            optimizer.zero_grad()
            (state.model(torch.ones(1, 2)) * float(hvd.rank() + state.batch)).sum().backward()
            if fails and state.batch == 2 and len(calls) == 1:
                # A gradient is on its way, and something else fails on every rank.
                hvd.allreduce(torch.ones(2 + hvd.rank()), name="unlike")
                raise hvd.HorovodInternalError("alone")
            optimizer.step()
            state.batch += 1
            if fails and state.batch == 4 and hvd.rank() == 0:
                state.on_hosts_updated(1, HostUpdateResult.added)
            state.commit()
        return "done"

    assert train(state=state, until=6) == "done"
    reset = f"reset {hvd.size()}"
    assert calls == (["from 0", reset, "from 2", reset, "from 4"] if fails else ["from 0"])
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def goes_on(make: Callable[[Any], Any], *, kept: bool = True, weight: float | None = None) -> None:
    """Training with a failure ends as training without, at `weight` where there is one."""
    found = trained(make, kept=kept)
    assert torch.equal(found, trained(make, fails=False, kept=kept))
    wanted = 1.0 - sum(batch + (hvd.size() - 1) / 2 for batch in range(6)) if weight is None else weight
    assert set(found.tolist()) == {wanted}


@check
def training_continues_after_a_failure() -> None:
    goes_on(hvd.DistributedOptimizer)


@check
def gradients_that_travel_one_by_one_go_on_too() -> None:
    goes_on(lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16))


@check
def an_optimizer_outside_of_the_state_continues_too() -> None:
    goes_on(hvd.DistributedOptimizer, kept=False)


@check
def groups_and_a_division_before_the_sum_go_on_too() -> None:
    goes_on(lambda optimizer: hvd.DistributedOptimizer(optimizer, groups=2, gradient_predivide_factor=2.0))


@check
def sums_go_on_as_sums() -> None:
    size = hvd.size()
    wanted = 1.0 - sum(size * batch + size * (size - 1) / 2 for batch in range(6))
    goes_on(lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum), weight=wanted)


@check
def steps_that_are_joined_by_adasum_go_on_too() -> None:
    if hvd.size() == 3:  # no power of two
        return

    def make(optimizer: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)

    assert torch.equal(trained(make), trained(make, fails=False))


@check
def the_optimizer_of_a_process_set_continues_if_the_set_is_added_again() -> None:
    if hvd.size() == 1:
        return
    chosen = hvd.add_process_set(range(hvd.size() - 1))
    found = trained(
        lambda optimizer: hvd.DistributedOptimizer(optimizer, process_set=chosen),
        renewed=lambda: hvd.add_process_set(chosen),
    )
    means = [batch + (hvd.size() - 2) / 2 for batch in range(6)]
    if not chosen.included():  # alone, from where rank 0 was at the last change of hosts
        means[4:] = [batch + hvd.rank() for batch in (4, 5)]
    wanted = 1.0 - sum(means)
    assert set(found.tolist()) == {wanted}
    hvd.remove_process_set(chosen)


@check
def sparse_gradients_go_on_too() -> None:
    def trained_table(fails: bool) -> torch.Tensor:
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.ones_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters()), lr=0.5))
        state = hvd.elastic.TorchState(table, optimizer, batch=0)

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.batch < 4:
                optimizer.zero_grad()
                (table(torch.tensor([hvd.rank(), 3])) * float(state.batch + 1)).sum().backward()
                if fails and state.batch == 1 and not failed:
                    failed.append(True)
                    raise hvd.HorovodInternalError("alone")
                optimizer.step()
                state.batch += 1
                state.commit()

        failed: list[bool] = []
        train(state)
        return table.weight.detach()

    assert torch.equal(trained_table(True), trained_table(False))


@check
def a_failure_of_one_rank_in_mid_pass_makes_no_step_on_the_others() -> None:
    first, second = (torch.nn.Linear(1 << 19, 1, bias=False) for _ in range(2))
    model = torch.nn.ModuleList([first, second])
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    state = hvd.elastic.TorchState(model, optimizer, batch=0)
    failed: list[bool] = []
    found: list[tuple[int, float, float]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.batch < 4:
            optimizer.zero_grad()
            first(torch.ones(1, 1 << 19)).sum().backward()
            if state.batch == 2 and hvd.rank() == hvd.size() - 1 and not failed:
                failed.append(True)
                raise hvd.HorovodInternalError("alone")
            second(torch.ones(1, 1 << 19)).sum().backward()
            optimizer.step()
            state.batch += 1
            found.append((state.batch, *(layer.weight[0, 0].item() for layer in (first, second))))
            state.commit()

    train(state)
    assert found == [(batch, -batch, -batch) for batch in range(1, 5)]


@check
def an_optimizer_made_inside_the_loop_is_made_anew_or_refused() -> None:
    made: list[Any] = []

    def loop(keeps: bool) -> list[float]:
        model = model_of(1.0)
        state = hvd.elastic.TorchState(model, batch=0)
        made.clear()

        @hvd.elastic.run
        def train(state: Any) -> None:
            if not made or not keeps:
                made.append(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0)))
            while state.batch < 3:
                made[-1].zero_grad()
                (model(torch.ones(1, 2)) * float(hvd.rank())).sum().backward()
                made[-1].step()
                state.batch += 1
                state.commit()
                if state.batch == 1:
                    raise hvd.HorovodInternalError("alone")

        train(state)
        return model.weight.flatten().tolist()

    assert set(loop(keeps=False)) == {1.0 - 3 * (hvd.size() - 1) / 2}
    assert len(made) == 2
    with pytest.raises(RuntimeError, match=r"made inside the function that elastic\.run calls"):
        loop(keeps=True)


@check
def a_failure_that_repeats_is_logged_and_leaves() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netbottleneck").addHandler(handler)
    state = hvd.elastic.TorchState(batch=0)
    calls = itertools.count(1)

    @hvd.elastic.run
    def train(state: Any) -> None:
        number = next(calls)
        if number == 3:
            state.commit()
        raise hvd.HorovodInternalError(f"failure {number}")

    with pytest.raises(hvd.HorovodInternalError, match="failure 12"):
        train(state)
    logging.getLogger("netbottleneck").removeHandler(handler)
    restarts = [f"elastic training restarts from the last commit(): failure {number}" for number in range(1, 12)]
    assert lines == [*restarts, "elastic training ends: 10 failures in a row without a commit()"]


@check
def any_other_exception_leaves() -> None:
    state = hvd.elastic.TorchState(batch=0)

    @hvd.elastic.run
    def train(_: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(state)
    assert train.__name__ == "train"


if __name__ == "__main__":
    main()
