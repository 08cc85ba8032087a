"""One rank of the checks that a measured DDP model behaves as the script's own: memory, copies, failures, steps."""

import copy
import functools
import gc
import inspect
import io
import logging
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from named_checks import check, run_named
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from netbottleneck import config
from netbottleneck.hooks import ddp, left_alone
from netbottleneck.hooks.measured_model import Measured
from netbottleneck.hooks.reducer_group import ReducerGroup
from netbottleneck.report import Run
from netbottleneck.runtime import job


def settings(transport: str, **others: str) -> config.Settings:
    given = {"transports": transport, "start_step": "0", "block_steps": "2", "timeout_s": "60", **others}
    return config.settings(given)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def measured(model: DistributedDataParallel, transport: str, **others: str) -> Measured:
    found = ddp.attach(model, settings=settings(transport, directory=f"run-{os.urandom(2).hex()}", **others))
    assert found is not None
    return found


def batch(step: int) -> torch.Tensor:
    seed = 100 * step + dist.get_rank()
    return torch.randint(-3, 4, (4, 6), generator=torch.Generator().manual_seed(seed)).float()


def train(model: torch.nn.Module, steps: int, *, optimizer: Any = None, skipped: int = -1) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).sum().backward()
        if step != skipped:
            optimizer.step()


def untouched(steps: int, **options: Any) -> torch.nn.Module:
    model = network()
    train(DistributedDataParallel(model), steps, **options)
    return model


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def folder_of(found: Measured) -> Path:
    found.session.close()
    found.session.bring()
    found.session.collect()
    dist.barrier()
    return found.session.folder


@check
def an_observed_run_joins_the_ranks_and_tells_its_own_cost() -> None:
    model = network()
    wrapped = DistributedDataParallel(model)
    found = measured(wrapped, "stock")
    train(wrapped, 24)
    same(model, untouched(24))
    folder = folder_of(found)
    assert found.session.comm is not None, found.session.notes
    if dist.get_rank() == 0:
        run = Run(folder)
        assert {rank.rank for rank in run.trace.ranks} == {0, 1}
        assert {step.arm for step in run.trace.steps} == {"stock", "bare"}
        assert all(not step.grad_ready and not step.forward for step in run.trace.steps if step.arm == "bare")
        assert {c.arm for c in run.trace.collectives} == {"stock"}
        assert "Our measuring changes the step by" in " ".join(run.text.split())
    dist.barrier()


@check
def a_model_that_is_gone_takes_its_memory_along() -> None:
    for transport in ("stock", "tcp"):
        model = DistributedDataParallel(network())
        found = measured(model, transport)
        train(model, 3)
        alive = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
        session = found.session
        del model, found
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)
        assert not session.closed  # its end may wait for other ranks, so it comes with the process's


@check
def a_model_may_go_while_an_optimizer_calls_its_hooks() -> None:
    def collect(*_: object) -> None:
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)  # before ours, so torch has those left to call
    model = DistributedDataParallel(network())
    measured(model, "stock")
    train(model, 2)
    model.module.parent = [model]  # freed by the garbage collector alone
    gone = weakref.ref(model)
    del model
    other = network()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.125)
    other(batch(0)).sum().backward()
    optimizer.step()
    handle.remove()
    assert gone() is None


@check
def copies_and_pickles_hold_nothing_of_ours() -> None:
    model = DistributedDataParallel(network())
    found = measured(model, "tcp", sample_every="1")
    train(model, 2)
    for taken in (model, model.module, list(model.parameters())):
        stream = io.BytesIO()
        torch.save(taken, stream)
        assert b"netbottleneck" not in stream.getvalue()
        assert b"netbottleneck" not in pickle.dumps(taken)
    twin = copy.deepcopy(model)
    assert ddp.measured_by(twin) is None
    train(twin, 2)
    train(model, 2)
    same(model.module, twin.module)
    folder_of(found)


class Copying(torch.nn.Module):
    """Takes a copy of its layers in each forward pass, as MAML and target networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.copies: list[Any] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.copies = [copy.deepcopy(self.layers), pickle.loads(pickle.dumps(self.layers))]
        return self.layers(x)


@check
def copies_made_in_a_sampled_forward_pass_hold_nothing_of_ours() -> None:
    inner = Copying()
    model = DistributedDataParallel(inner)
    found = measured(model, "tcp", sample_every="1")
    train(model, 4)
    for taken in inner.copies:
        assert b"netbottleneck" not in pickle.dumps(taken)
        assert not [part for part in taken.modules() if part._forward_hooks or part._forward_pre_hooks]
    same(inner.layers, untouched(4))
    folder = folder_of(found)
    if dist.get_rank() == 0:
        assert any(step.modules for step in Run(folder).trace.steps)
    dist.barrier()


@check
def a_recorder_that_fails_ends_the_recording_and_not_the_training() -> None:
    for transport in ("stock", "stock,tcp"):
        model = network()
        wrapped = DistributedDataParallel(model)
        found = measured(wrapped, transport)

        def broken(*_: object) -> None:
            raise RuntimeError("no room")

        found.guarded(broken)
        train(wrapped, 6)
        same(model, untouched(6))
        assert any("no room" in note for note in found.session.notes)
        folder_of(found)


@check
def an_optimizer_inside_the_backward_pass_sees_one_path_a_pass() -> None:
    def trained(measure: bool) -> torch.nn.Module:
        model = network()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1e-5)
        found = measured(wrapped, "stock,tcp", block_steps="1") if measure else None
        optimizers = {p: torch.optim.SGD([p], lr=0.125) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        for step in range(6):
            wrapped(batch(step)).sum().backward()
        for handle in handles:
            handle.remove()
        if found is not None:
            assert found.session.step >= 5
            folder_of(found)
        return model

    same(trained(True), trained(False))


@check
def ready_times_are_the_reducers_and_no_hook_of_ours_is_there_for_them() -> None:
    for transport in ("stock", "tcp"):
        model = network()
        wrapped = DistributedDataParallel(model)
        found = measured(wrapped, transport)
        ready: list[list[tuple[int, int]]] = []  # of each step, by hooks of this script
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(12):
            assert all(getattr(p, "_post_accumulate_grad_hooks", None) is None for p in model.parameters())
            optimizer.zero_grad()
            wrapped(batch(step)).sum().backward()
            optimizer.step()

        def note(index: int, ready: list[list[tuple[int, int]]], _parameter: torch.Tensor) -> None:
            ready[-1].append((index, job.core().now_ns()))

        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(functools.partial(note, index, ready))
        for step in range(12):
            ready.append([])
            optimizer.zero_grad()
            with wrapped.no_sync():
                wrapped(batch(step)).sum().backward()
            wrapped(batch(step)).sum().backward()
            assert [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()] == [1, 1, 1, 1]
            optimizer.step()
        folder = folder_of(found)
        times = found.session.described["ddp_times"]
        assert times["apart"] == 0 < times["passes"], times
        if dist.get_rank() == 0:
            steps = [step for step in Run(folder).trace.steps if step.rank == 0 and step.index > 12]
            steps = [step for step in steps if step.arm == transport and step.index < 24]
            assert steps
            for step in steps:
                mine = ready[step.index - 12]
                assert [index for index, _ in step.grad_ready] == [index for index, _ in mine]
                (first, second), theirs = step.forward, [at for _, at in step.grad_ready]
                assert first[1] <= theirs[0] <= theirs[3] <= second[0] <= second[1] <= theirs[4], step
                assert theirs[-1] <= step.optimizer[0][0]
        dist.barrier()


@check
def forwards_without_gradients_begin_no_pass() -> None:
    """Inside a backward pass, and between a forward pass and its backward pass."""

    def backward(wrapped: DistributedDataParallel, step: int) -> None:
        def evaluate(_gradient: torch.Tensor) -> None:
            with torch.no_grad():
                wrapped(batch(0))

        def watched(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(evaluate)

        handle = wrapped.module[1].register_forward_hook(watched)
        output = wrapped(batch(step))
        handle.remove()
        with torch.no_grad():
            wrapped(batch(step))
        output.sum().backward()

    each_step_is_one_pass(backward)


@check
def a_reduction_of_two_backward_passes_is_one_pass() -> None:
    def backward(wrapped: DistributedDataParallel, step: int) -> None:
        loss = wrapped(batch(step)).sum()
        loss.backward(inputs=list(wrapped.module[2].parameters()), retain_graph=True)
        loss.backward(inputs=list(wrapped.module[0].parameters()))

    each_step_is_one_pass(backward)


class Unused(torch.nn.Module):
    """A network with a layer in its middle that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        first, active, last = network().children()
        self.parts = torch.nn.ModuleList([first, torch.nn.Linear(8, 8), active, last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[3](self.parts[2](self.parts[0](x)))  # type: ignore[no-any-return]


@check
def a_pass_that_skips_unused_buckets_is_complete() -> None:
    options: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 1e-5}
    skips = "skip_all_reduce_unused_params"
    if skips in inspect.signature(DistributedDataParallel.__init__).parameters:
        options[skips] = True
    for transport in ("stock", "tcp"):
        model, twin = Unused(), Unused()
        wrapped = DistributedDataParallel(model, **options)
        found = measured(wrapped, transport)
        train(wrapped, 6)
        train(DistributedDataParallel(twin, **options), 6)
        same(model.parts[0], twin.parts[0])
        same(model.parts[3], twin.parts[3])
        folder = folder_of(found)
        if dist.get_rank() == 0:
            steps = [step for step in Run(folder).trace.steps if step.arm == transport]
            assert steps
            assert all(len({index for index, _ in step.grad_ready}) == 6 for step in steps), steps
        dist.barrier()


def each_step_is_one_pass(backward: Callable[[DistributedDataParallel, int], None]) -> None:
    """Check that training by `backward` is as without us, and that each gradient becomes ready once a step."""

    def trained(transport: str | None) -> tuple[torch.nn.Module, Measured | None]:
        model = network()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-5)
        found = measured(wrapped, transport) if transport is not None else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        for step in range(8):
            optimizer.zero_grad()
            backward(wrapped, step)
            optimizer.step()
        return model, found

    expected, _ = trained(None)
    for transport in ("stock", "tcp"):
        model, found = trained(transport)
        same(model, expected)
        assert found is not None
        every_gradient_is_ready_once(found, transport)


def every_gradient_is_ready_once(found: Measured, transport: str) -> None:
    folder = folder_of(found)
    assert found.session.described["ddp_times"]["apart"] == 0, found.session.described
    if dist.get_rank() == 0:
        steps = [step for step in Run(folder).trace.steps if step.arm == transport and step.index > 0]
        assert steps
        for step in steps:
            assert sorted(index for index, _ in step.grad_ready) == [0, 1, 2, 3], step
            assert step.forward[0][1] <= step.grad_ready[0][1], step
            assert step.grad_ready[-1][1] <= step.optimizer[0][0], step
    dist.barrier()


@check
def a_users_hook_is_called_as_without_us_and_timed() -> None:
    def counted(calls: list[int]) -> Any:
        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
            calls.append(bucket.index())
            work = dist.all_reduce(bucket.buffer().mul_(0.5), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        return hook

    ours, theirs = [], []
    model, twin = network(), network()
    wrapped = DistributedDataParallel(model)
    found = measured(wrapped, "stock")
    wrapped.register_comm_hook(None, counted(ours))
    train(wrapped, 4)
    reference = DistributedDataParallel(twin)
    reference.register_comm_hook(None, counted(theirs))
    train(reference, 4)
    assert ours == theirs
    same(model, twin)
    folder = folder_of(found)
    if dist.get_rank() == 0:
        run = Run(folder)
        own = [c for c in run.trace.collectives if c.rank == 0 and not c.by_script]  # the twin's hook is not timed
        assert [c.finished for c in own] == [True] * 2  # of the steps that are stamped
        assert any("communication hook of its own" in note for note in run.trace.notes)
    dist.barrier()


def waiting_hook(reducer: Any) -> Any:
    """Return a hook that waits for the reducer's own all-reduce, as torch's for updates in the backward pass does."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        reducer._run_allreduce_hook(bucket).wait()
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer().div_(dist.get_world_size()))
        return done

    return hook


@check
def a_hook_may_wait_for_the_reducers_own_all_reduce() -> None:
    twin = network()
    reference = DistributedDataParallel(twin)
    reference.register_comm_hook(None, waiting_hook(reference.reducer))
    train(reference, 6)
    for transport in ("stock", "tcp", "tcp,stock"):
        model = network()
        wrapped = DistributedDataParallel(model)
        found = measured(wrapped, transport)
        wrapped.register_comm_hook(None, waiting_hook(wrapped.reducer))
        train(wrapped, 6)
        same(model, twin)
        folder = folder_of(found)
        if dist.get_rank() == 0:
            trace = Run(folder).trace
            stamped = [step for step in trace.steps if step.rank == 0 and step.arm == "stock"]
            own = [c for c in trace.collectives if c.rank == 0 and not c.by_script]
            assert stamped
            assert len(own) == len(stamped), (own, stamped)  # of one bucket
        dist.barrier()


@check
def a_built_in_hook_that_comes_in_a_bare_block_leaves_the_reducer_its_own_group() -> None:
    wrapped = DistributedDataParallel(network())
    found = measured(wrapped, "stock,bare", block_steps="1")
    assert isinstance(found.gradients, ReducerGroup)
    train(wrapped, 1)
    assert found.session.arm == "bare"
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert not found.gradients.inside
    train(wrapped, 1)
    assert not found.gradients.inside
    train(wrapped, 1)
    assert found.gradients.inside
    folder_of(found)


def arms_around_a_late_hook(before: int, after: int) -> list[str]:
    """Train `before` steps of tcp and stock in turns, then `after` with a hook. Return the arms of recorded steps."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    wrapped = DistributedDataParallel(network())
    found = measured(wrapped, "tcp,stock")
    train(wrapped, before)
    wrapped.register_comm_hook(None, hook)  # the next step has begun
    train(wrapped, after)
    folder = folder_of(found)
    arms: list[str] = []
    if dist.get_rank() == 0:
        run = Run(folder)
        steps = run.trace.steps
        assert len({(step.block, step.arm) for step in steps}) == len({step.block for step in steps})
        assert run.text
        arms = [str(step.arm) for step in steps if step.rank == 0]
    dist.barrier()
    return arms


@check
def a_hook_that_comes_late_leaves_earlier_steps_their_arms() -> None:
    arms = arms_around_a_late_hook(4, 8)
    assert arms in ([], [*(2 * ["tcp"]), *(5 * ["stock"]), *(4 * ["bare"]), "stock"])


@check
def a_step_over_another_path_in_which_a_hook_comes_is_not_recorded() -> None:
    arms = arms_around_a_late_hook(1, 5)
    assert arms in ([], ["tcp", *(2 * ["stock"]), *(2 * ["bare"])])


@check
def models_that_are_left_alone_log_it_once_and_train() -> None:
    other = DistributedDataParallel(network())
    first = measured(other, "stock")
    model = network()
    second = DistributedDataParallel(model)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("netbottleneck").addHandler(handler)
    assert ddp.attach(second, settings=settings("stock")) is None
    logging.getLogger("netbottleneck").removeHandler(handler)
    assert "another DDP model is measured already (" in records[0].getMessage()
    other_has, this_has = ddp._contents(other), ddp._contents(second)
    assert f"({other_has}; this one: {this_has})" in records[0].getMessage()
    assert this_has.startswith(f"{type(model).__name__}, {len(list(model.parameters()))} parameters, ")
    (note,) = [note for note in first.session.notes if "was left alone" in note]
    assert note.startswith(f"a DDP model ({this_has}) was left alone: ")
    assert note.endswith(f'counts as "other". The measured one is {other_has}.')
    train(second, 3)
    same(model, untouched(3))
    folder_of(first)


def logged(work: Callable[[], None]) -> list[str]:
    """Run `work` and return the messages of the package's log."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("netbottleneck").addHandler(handler)
    try:
        work()
    finally:
        logging.getLogger("netbottleneck").removeHandler(handler)
    return [record.getMessage() for record in records]


@check
def a_model_whose_gradients_pass_the_reducer_by_is_left_alone() -> None:
    compiled = DistributedDataParallel(network())
    # As with torch._dynamo.config.optimize_ddp = "python_reducer", which imports the compiler.
    compiled._use_python_reducer = True
    model = network()
    model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    options: Any = {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": named[-1][1]}
    delayed = DistributedDataParallel(model, **options)
    for wrapped, why in ((compiled, '"python_reducer"'), (delayed, "delay_all_reduce_named_params")):
        for transport in ("stock", "tcp"):
            left_alone._said.clear()
            lines = logged(functools.partial(ddp.attach, wrapped, settings=settings(transport)))
            assert ddp.measured_by(wrapped) is None
            assert [line for line in lines if why in line], lines


def in_own_groups(model: torch.nn.Module, alone: Any) -> None:
    """Train, with steps of this rank alone in the middle."""
    wrapped = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.125)
    whole = wrapped.process_group
    for group, steps in ((whole, 3), (alone, 5), (whole, 6)):
        wrapped._update_process_group(new_process_group=group)
        train(wrapped, steps, optimizer=optimizer)


@check
def another_process_group_ends_the_measuring_and_stays() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    twin = network()
    in_own_groups(twin, alone)
    for transport in ("stock", "tcp"):
        model = network()
        wrapped = DistributedDataParallel(model)
        found = measured(wrapped, transport)
        messages = logged(functools.partial(in_own_groups, wrapped, alone))
        same(model, twin)
        assert [text for text in messages if "got another process group" in text], messages
        assert found.session.step == 3  # the same group again, before, ended nothing
        folder_of(found)


class ByValue(torch.optim.SGD):  # noqa: PLW1641 - no __hash__
    """Compares by value, so it is unhashable."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.125)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue)


class Hidden(torch.optim.SGD):
    """Keeps its parameters elsewhere."""

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, lr=0.125)
        self.param_groups = [{"lr": 0.125}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.data -= 0.125 * parameter.grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.mine:
            parameter.grad = None


class Wrapper(DistributedDataParallel):  # noqa: PLW1641 - no __hash__
    """Compares by value, so it is unhashable."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wrapper)


class Adapters(torch.nn.Sequential):
    """Lists only its last layer's parameters."""

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return (pair for pair in super().named_parameters(*args, **options) if pair[0].startswith("2"))


@check
def classes_of_the_scripts_may_compare_and_list_as_they_like() -> None:
    for kind in (ByValue, Hidden):
        model, twin = network(), network()
        train(DistributedDataParallel(twin), 4, optimizer=kind(twin.parameters()))
        wrapped = DistributedDataParallel(model)
        found = measured(wrapped, "stock")
        train(wrapped, 4, optimizer=kind(model.parameters()))
        same(model, twin)
        folder_of(found)
    model = network()
    wrapped = Wrapper(model)
    found = measured(wrapped, "stock")
    assert ddp.measured_by(wrapped) is found
    train(wrapped, 4, optimizer=torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5))
    same(model, untouched(4))
    folder_of(found)
    listed = Adapters(*network())
    adapted = DistributedDataParallel(listed)
    found = measured(adapted, "stock")
    assert sum(each for _, each, _ in found.gradients.tensors) == 4 * sum(p.numel() for p in network().parameters())
    folder_of(found)


@check
def a_log_handler_that_raises_ends_nothing() -> None:
    def refuse(record: logging.LogRecord) -> None:
        raise RuntimeError(f"strict: {record.getMessage()}")

    measured_model = DistributedDataParallel(network())
    first = measured(measured_model, "stock")
    handler = logging.Handler(logging.WARNING)
    handler.emit = refuse  # type: ignore[method-assign]
    log = logging.getLogger("netbottleneck")
    log.addHandler(handler)
    try:
        left_alone._said.clear()
        assert ddp.attach(DistributedDataParallel(network()), settings=settings("stock")) is None
        first.failed(RuntimeError("of the measurement"))
    finally:
        log.removeHandler(handler)
    folder_of(first)


@check
def a_rank_that_skips_a_step_does_not_block_others() -> None:
    """Arms stop alternating, because ranks would use different ones. The last check: the job stops measuring."""
    left_out = 2 if dist.get_rank() == 1 else -1
    model = network()
    wrapped = DistributedDataParallel(model)
    found = measured(wrapped, "stock,tcp")
    train(wrapped, 8, skipped=left_out)
    same(model, untouched(8, skipped=left_out))
    assert found.session.stays is not None
    folder_of(found)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    run_named()
    dist.barrier()
    dist.destroy_process_group()
