"""The process behind warm.py: it has loaded torch, or the modules that its arguments name, and forks ranks on request.

Its stdin is a socket. A request is a line of JSON. The answers are a line with the process's id and number and, when
that process has ended, a line with its number and exit code. Numbers are never used twice, as ids are.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any

# What ranks load, but for what is tested. None of these starts a thread.
LOADED = (
    *("cloudpickle", "jinja2", "numpy", "psutil", "pytest", "rich.console", "rich.table"),
    *("torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.algorithms.ddp_comm_hooks"),
    *("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.checkpoint"),
)
for loaded in sys.argv[1:] or LOADED:
    importlib.import_module(loaded)

CONTROL = socket.socket(fileno=os.dup(0))


def send(**message: Any) -> None:
    """Send one line to the tests."""
    CONTROL.sendall(json.dumps(message).encode() + b"\n")


def become(request: dict[str, Any]) -> None:
    """Turn this forked process into the requested one, up to its first line of Python."""
    os.setsid()
    CONTROL.close()
    for name, flags, descriptor in (
        (os.devnull, os.O_RDONLY, 0),
        (request["out"], os.O_WRONLY, 1),
        (request["err"], os.O_WRONLY, 2),
    ):
        opened = os.open(name, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in folders if folder and folder not in sys.path]
    sys.modules["__main__"] = types.ModuleType("__main__")


def run(command: list[str]) -> None:
    """Run a command's script or module as Python does."""
    main = sys.modules["__main__"].__dict__
    if command[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = ["-m", *command[2:]]
        runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        return
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(command[0])
    with open(command[0], "rb") as file:
        code = compile(file.read(), command[0], "exec")
    main.update(__file__=command[0], __builtins__=__builtins__)
    exec(code, main)


def reap(numbers: dict[int, int]) -> None:
    """Say which processes have ended, and how. numbers: of those that run, by id."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            send(number=numbers.pop(pid), code=os.waitstatus_to_exitcode(status))


def serve() -> dict[str, Any] | None:
    """Fork a process for each request. Returns the request in the child, and None in the parent when the tests end."""
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to handle
    lines, count = b"", 0
    numbers: dict[int, int] = {}
    gc.collect()
    gc.freeze()  # else a rank's end looks through all of torch, which takes a second
    # A process with so many objects rarely collects its oldest ones. These ranks do as such a process does.
    gc.set_threshold(*gc.get_threshold()[:2], 10_000)
    send(threads=len(os.listdir("/proc/self/task")))
    while True:
        ready, _, _ = select.select([CONTROL, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            reap(numbers)
        if CONTROL not in ready:
            continue
        got = CONTROL.recv(1 << 20)
        if not got:
            return None
        lines += got
        while b"\n" in lines:
            line, lines = lines.split(b"\n", 1)
            request: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if pid == 0:
                woken.close()
                wakes.close()
                become(request)
                return request
            count += 1
            numbers[pid] = count
            send(started=pid, number=count)


def main() -> None:
    """Serve; in a forked process, be the rank, and end as the interpreter ends."""
    request = serve()
    if request is None:
        os._exit(0)
    try:
        run(request["command"])
    except SystemExit:
        raise
    except BaseException as error:
        # Without the frames of this file.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        # As the interpreter does for an error that nothing has caught.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


main()
