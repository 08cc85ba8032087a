"""Loaded by every Python process that a test starts: no process that used gloo ends while torch's threads are busy.

A thread of torch's that is late to free what the last operation held asks for the interpreter while it is taken down,
and the process aborts, with or without us (https://github.com/pytorch/pytorch/issues/190489). So the interpreter is
left to these threads until they sleep. With NB_TESTS_OWN_EXIT=1 a process ends as a user's does: test_exits.py.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
LOOK_S = 0.01
TASKS = Path("/proc/self/task")
GROUPS = "torch.distributed.distributed_c10d"


def gloo_threads() -> dict[str, tuple[str, str]]:
    """Return by id the state of each gloo thread of torch, and how often it has slept."""
    seen = {}
    for task in TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                seen[task.name] = (lines["State"].split()[0], lines["voluntary_ctxt_switches"].strip())
    return seen


def wait_for_torch() -> None:
    """Wait until these threads were asleep at two checks in a row, at most LIMIT_S."""
    if "torch" not in sys.modules:
        return
    deadline = time.monotonic() + LIMIT_S
    before = gloo_threads()
    while before and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = gloo_threads()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


class Finder:
    """Makes torch's destroy_process_group wait for these threads.

    A group joins its threads when it is freed, and keeps the interpreter meanwhile: a thread that then needs it to free
    what the last operation held waits for ever, and so does the process.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return the loader of torch's module, which changes the function after loading."""
        if name != GROUPS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            destroy = module.destroy_process_group

            @functools.wraps(destroy)
            def waits(*args: Any, **options: Any) -> None:
                wait_for_torch()
                destroy(*args, **options)

            module.destroy_process_group = waits

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NB_TESTS_OWN_EXIT") != "1":
    sys.meta_path.insert(0, Finder())
    # The first function that is registered is the last that is called.
    atexit.register(wait_for_torch)
