"""One rank process: runs idioms one after another in one mode, and reports each on a pipe as a line of JSON.

usage: rank.py PLAN.json REPORT_FD, with torchrun's variables and those of the mode set.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.remove(str(HERE))

from harness.modes import MODES, UNTOUCHED, Mode  # noqa: E402 - found by the path above


class Notes(logging.Handler):
    """What the package logs while an idiom runs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


class Rank:
    """Runs the plan: {mode, size, items: [[idiom, width], …], folder, reference, deadline_s}."""

    def __init__(self, plan: dict[str, Any], report: Any) -> None:
        self.plan = plan
        self.mode: Mode = MODES[plan["mode"]]
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.folder = Path(plan["folder"])
        self.reference = Path(plan["reference"])
        self.notes = Notes()
        self._report = report
        self._watch: Any = None

    def report(self, event: str, **what: Any) -> None:
        self._report.write(json.dumps({"event": event, **what}) + "\n")
        self._report.flush()

    def run(self) -> None:
        if self.mode.imported:
            import netbottleneck  # noqa: F401 - the one line of a script that changes
        logging.getLogger("netbottleneck").addHandler(self.notes)
        os.environ.update(self.mode.later)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=self.plan["deadline_s"]))
        self._follow_models()
        self._offer_horovod()
        importlib.import_module("torch._dynamo")  # which the first DDP model imports
        gc.collect()
        gc.freeze()  # collections between idioms look only at what idioms leave
        dist.barrier()
        self.report("ready")
        for index, (name, width) in enumerate(self.plan["items"]):
            self.report("begin", item=index)
            result = self._one(name, width)
            gc.collect()
            dist.barrier()
            self.report("end", item=index, **result)
        self.report("done")
        if dist.is_initialized():
            dist.destroy_process_group()

    def _one(self, name: str, width: str) -> dict[str, Any]:
        import numpy as np
        import torch

        from harness.context import Context, Skipped
        from harness.served import Served, forget_lines
        from harness.watch import Watch

        reference = None
        if self.mode.name != UNTOUCHED:
            paths = [self.reference / f"{name}-{width}-{rank}.pt" for rank in range(self.size)]
            reference = [torch.load(path, weights_only=False, mmap=True) for path in paths]
        idiom = importlib.import_module(name)
        kind = getattr(idiom, "KIND", "ddp")
        reordered = self.mode.bound or kind != "ddp"
        watch = Watch(
            self.rank, reference, bounded=self.size > 2 and reordered, sums=self.size > 2 and reference is None
        )
        self._watch = watch
        untouched = self.reference / f"{name}-{width}-{self.rank}"
        here = untouched if reference is None else self.folder / untouched.name
        context = Context(self.rank, self.size, width, watch, here, untouched)
        if self.mode.kinds == ("loop",):
            context.profile = _profile
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002 - the state that old scripts use
        torch.manual_seed(3)
        served = Served()
        if self.mode.imported:
            watch.on_event = served.look
            forget_lines()
        self.notes.lines.clear()
        skipped = lack = ""
        try:
            idiom.train(context)
        except Skipped as why:
            skipped = str(why)
        except Exception as error:
            # Others may wait for this rank: what is result ends them.
            result = traceback.format_exc()
            self.report("failed", error=f"{type(error).__name__}: {error}"[:400], trace=result[-3000:])
            signal.pause()
        watch.end()
        if kind == "horovod":  # one optimizer of a job is measured, so the next idiom begins another job
            importlib.import_module("horovod.torch").shutdown()
        if self.mode.measures and not getattr(idiom, "QUIET", False) and not skipped:
            stays = getattr(idiom, "STEPLESS", False) and self.mode.turns
            lack = served.lack(moves=self.mode.moves and not stays)
        if reference is None:
            torch.save(watch.log, self.reference / f"{name}-{width}-{self.rank}.pt")
        return {"differences": watch.differences, "notes": self.notes.lines[:20], "skipped": skipped, "lack": lack}

    def _follow_models(self) -> None:
        """See each DDP model that is built: for the sums of its gradients, and to attach to it."""
        from torch.nn.parallel import DistributedDataParallel

        attaches = self.mode.name == "attach"
        if not attaches and self.size == 2:
            return
        before = DistributedDataParallel.__init__

        def init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            before(ddp, *args, **kwargs)
            self._watch.sum_gradients(ddp.parameters())
            if attaches:
                self._attach(ddp)

        DistributedDataParallel.__init__ = init  # type: ignore[method-assign]

    def _follow(self, parameters: Any) -> None:
        self._watch.sum_gradients(parameters)

    def _attach(self, ddp: Any) -> None:
        import netbottleneck

        try:
            netbottleneck.attach(ddp)
        except (ValueError, TypeError) as error:
            self.notes.lines.append(("REFUSED", f"left alone: {error}"))

    def _offer_horovod(self) -> None:
        """Have `import horovod.torch` find the reference, or the package where no variable made it stand in."""
        if self.mode.name == UNTOUCHED:
            from harness import horovod_reference as offered

            offered.follow = self._follow
        elif self.mode.name == "import":
            offered = importlib.import_module("netbottleneck.torch")
        else:
            return
        parent = type(sys)("horovod")
        parent.torch = offered  # type: ignore[attr-defined]
        sys.modules.setdefault("horovod", parent)
        sys.modules.setdefault("horovod.torch", offered)


@contextlib.contextmanager
def _profile(model: Any, optimizer: Any) -> Iterator[None]:
    import netbottleneck

    with netbottleneck.profile(model, optimizer, transport=os.environ["NETBOTTLENECK_TRANSPORT"]):
        yield


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as report:
        Rank(plan, report).run()


if __name__ == "__main__":
    main()
