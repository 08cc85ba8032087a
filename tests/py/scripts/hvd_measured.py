"""One rank of a training by Horovod's API, first unmeasured and then measured: `hvd_measured.py KIND`.

Says "alike" where both have the same weights after each step, on all ranks.

BREAK: "open:RANK:CALL" has the CALL-th ring of that rank fail to open, "step:RANK" the beginning of its second step.
OPENING_S: the limit of all waits for other ranks after the start of the measured job.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

TRANSPORTS = os.environ.pop("NETBOTTLENECK_TRANSPORT")  # before the import, which would have all jobs measured
import torch  # noqa: E402

import netbottleneck.torch as hvd  # noqa: E402
from netbottleneck.hooks.horovod import Measuring  # noqa: E402
from netbottleneck.runtime import job, run_folder, session  # noqa: E402

STEPS = 8


class Sixteenths(hvd.Compression.none):  # type: ignore[misc, name-defined]
    """A user's compression: sends 32-bit integers."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor * 16).round().int(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) / 16


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"compression": hvd.Compression.fp16},
    "user": {"compression": Sixteenths, "op": hvd.Sum},
    "dense": {"sparse_as_dense": True},
    "sparse": {"compression": hvd.Compression.fp16},
    "orders": {},
    "orders-fp16": {"compression": hvd.Compression.fp16},
    "joins": {},
    "joins-fp16": {"compression": hvd.Compression.fp16},
    "joins-first": {},
    "joins-first-fp16": {"compression": hvd.Compression.fp16},
}
BATCHES = {  # of both ranks in each epoch; hvd.join() ends an epoch
    "joins": ((4, 4), (7, 4), (2, 5)),
    "joins-fp16": ((4, 4), (7, 4), (2, 5)),
    "joins-first": ((2, 0), (3, 0), (0, 2), (3, 3)),
    "joins-first-fp16": ((2, 0), (3, 0), (0, 2), (3, 3)),
}


class Net(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 8, sparse=sparse)
        self.line = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(self.table(x).sum(1))
        return out


class Orders(torch.nn.Module):
    """Layers of one size, which the ranks use in different orders; rank 1 leaves one out in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.one_hot(x.sum(1) % 8, 8).float()
        places = range(4)
        if hvd.rank() == 1:
            self.step += 1
            places = range(3 if self.step % 3 == 1 else 4)[::-1]
        for place in places:
            out = self.lines[place](out)
        return out


def break_down(how: str) -> None:
    """Make a part of the measuring fail on one rank."""
    what, _, where = how.partition(":")
    rank, _, call = where.partition(":")
    if not what or os.environ["RANK"] != rank:
        return
    if what == "step":
        session.Session.begin = _failing(session.Session.begin, 2)  # type: ignore[method-assign]
    else:
        run_folder.open_ring = _failing(run_folder.open_ring, int(call))


def _failing(real: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Return a function that does the same, but fails in one call."""
    left = [call]

    def made(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    return made


def train(kind: str) -> list[str]:
    """Train in a new job; return a digest of the weights after each step."""
    hvd.init()
    if "OPENING_S" in os.environ and "NETBOTTLENECK_TRANSPORT" in os.environ:
        this = job.current()
        this.settings = replace(this.settings, start_timeout_s=float(os.environ["OPENING_S"]))
    torch.manual_seed(0)
    model = Orders() if kind.startswith("orders") else Net(kind in {"dense", "sparse"})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters(), **KINDS[kind]
    )
    torch.manual_seed(1 + hvd.rank())
    seen = []
    for counts in BATCHES.get(kind, ((STEPS, STEPS),)):
        for batch in range(counts[hvd.rank()]):
            optimizer.zero_grad()
            model(torch.randint(50, (4, 6))).square().mean().backward()
            if kind.startswith("orders"):  # where one rank has sent gradients, and the other none
                hvd.allreduce(torch.ones(1), name="metric")
            optimizer.step()
            seen.append(digest(model))
            if kind == "joins":
                present = hvd.allreduce(torch.ones(1), name="present", op=hvd.Sum)
                assert present.item() == sum(count > batch for count in counts)
        if kind in BATCHES:
            latest = hvd.join()
            assert counts[latest] == max(counts)
            hvd.broadcast_parameters(model.state_dict(), root_rank=latest)
    same = [digest(model)] if kind in BATCHES else seen  # a rank that has joined keeps its weights
    assert hvd.allgather_object(same) == [same] * hvd.size()
    hvd.shutdown()
    return seen


def digest(model: torch.nn.Module) -> str:
    content = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    kind = sys.argv[1]
    plain = train(kind)
    os.environ["NETBOTTLENECK_TRANSPORT"] = TRANSPORTS
    job.observe(Measuring())
    break_down(os.environ.get("BREAK", ""))
    assert train(kind) == plain
    assert not torch.distributed.is_initialized()
    print("alike", flush=True)


if __name__ == "__main__":
    main()
