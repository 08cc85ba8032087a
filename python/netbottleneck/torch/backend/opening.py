"""From what torch.distributed hands over, a store, a rank and a size, to a process group."""

import atexit
import contextlib
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from netbottleneck import config
from netbottleneck.launch import connect
from netbottleneck.launch.rendezvous import Meeting
from netbottleneck.launch.stores import Store
from netbottleneck.torch.backend.group import NbGroup
from netbottleneck.torch.backend.link import Link
from netbottleneck.torch.backend.moves import Ranks


@dataclass
class _Process:
    """The links of this process, and that of its default group."""

    links: list[Link] = field(default_factory=list)
    default: Link | None = None


_process = _Process()


def create(options: Any, backend_options: Any) -> NbGroup:
    """Return a process group: of all ranks over a link of its own, of some over the default group's if it is ours too.

    Every rank of the group calls it. Raises as connect.connect; ValueError for options, of which there are none.
    """
    if backend_options is not None:
        raise ValueError(f'the backend "nb" takes no pg_options, not {type(backend_options).__name__}')
    some = list(options.global_ranks_in_group)
    default = _process.default
    if some and default is not None and not default.closed and default.rank == some[options.group_rank]:
        return NbGroup(default, _ranks(default, some, options), options.store, options.timeout, owner=False)
    size = options.group_size
    link = _open(options.store, options.group_rank, size, options.timeout)
    if not some:
        _process.default = link
    ranks = Ranks(0, range(size), options.group_rank, range(size))
    return NbGroup(link, ranks, options.store, options.timeout, owner=True)


def _ranks(link: Link, jobs: list[int], options: Any) -> Ranks:
    """Return the ranks of a group beside others: its first one gives it a number."""
    if options.group_rank == 0:
        number = link.fresh_number()
        options.store.set("netbottleneck/number", str(number))
    else:
        number = int(options.store.get("netbottleneck/number"))
    order = sorted(range(len(jobs)), key=lambda rank: jobs[rank])
    return Ranks(number, jobs, options.group_rank, order)


def _open(store: Any, rank: int, size: int, timeout: timedelta) -> Link:
    settings = config.settings()
    limit_s = timeout.total_seconds()
    stall_s = min(settings.stall_s, limit_s / 2) if settings.stall_s else 0.0
    settings = replace(settings, start_timeout_s=min(settings.start_timeout_s, limit_s), stall_s=stall_s)
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # a store that cannot forget is new
            store.delete_key("netbottleneck/left")
    meeting = Meeting(Store(lambda: store, "torch.distributed's store"))
    place = connect.Place(rank, size, None, None, None, None, "torch.distributed")
    link = Link(connect.connect_at(settings, place, meeting), store)
    _process.links = [other for other in _process.links if not other.closed]
    _process.links.append(link)
    return link


@atexit.register
def _end() -> None:
    """Leave in good order where the program has not; torch's own end comes too late for threads and tensors."""
    if not all(link.is_here for link in _process.links):
        return
    ours = _process.default is not None and not _process.default.closed
    if ours and dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            dist.destroy_process_group()
    for link in reversed(_process.links):
        link.close()
