"""How a rank of a study opens its run, whatever it then does. No torch here."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.runtime.session import Session, open_session
from netbottleneck.study.task import Task

WARM_BYTES = 32 << 20
WARM_TIMES = 3
MONITOR_HZ = 100  # where the environment says nothing: a study looks at its hosts, too


@contextmanager
def opened(task: Task) -> Generator[Session, None, None]:
    """Open the session of a task; in the end close it, and on rank 0 gather the records of all.

    Every rank calls it. Raises as open_session.
    """
    session = _open(task)
    try:
        yield session
    except BaseException as error:
        session.close(f"{type(error).__name__}: {error}")
        raise
    session.close()
    if session.place.rank == 0:
        session.collect()


def _open(task: Task) -> Session:
    given = config.settings({"directory": task.folder, "provider": task.provider})
    settings = replace(
        given,
        monitor_hz=given.monitor_hz if "monitor_hz" in given.sources else MONITOR_HZ,
        block_steps=task.block_steps,
        start_step=0,
        end_step=0,
        sample_every=task.block_steps + 3,  # never the same step of a block twice in turn
        transports=tuple(arm for arm in task.arms if arm != "bare") or ("stock",),
    )
    return open_session(
        settings,
        arms=task.arms,
        directory=task.folder,
        model=task.title,
        network=task.network,
        notes=task.notes,
        alone=task.alone > 0,
    )


def warm(session: Session) -> None:
    """Let every transport of ours carry something before it counts: the first large transfer tries numbers of lanes."""
    core = connect.core()
    for name, arm in session.arms.items():
        comm = getattr(arm, "comm", None)
        if comm is None:
            continue
        arena = core.Arena(WARM_BYTES)
        comm.map(arena)
        for number in range(WARM_TIMES):
            comm.submit(f"study.warm.{name}.{number}", core.ALLREDUCE, arena, core.FLOAT32, keep=arena).wait()
