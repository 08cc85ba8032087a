"""What torch asks of a process group beside collectives: its name, its devices, and what only NCCL can do."""

from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from netbottleneck.torch.backend.others import devices_of, elsewhere_or_none

# Torch overloads its methods; one form of each is called.
_ProcessGroup: Any = dist.ProcessGroup


class Plain(_ProcessGroup):  # type: ignore[misc]
    """A process group in Python. It stands for its own backend, too: torch 2.13 has none that can be subclassed."""

    _name = ""
    _desc = ""

    def getBackendName(self) -> str:
        return "nb"

    _get_backend_name = name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *devices_of(self)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what serves a device: this, or the backend that was named for it."""
        if torch.device(device).type == "cpu":
            return self
        other = elsewhere_or_none(self, torch.device(device))
        return self if other is None else other._get_backend(device)

    # As a backend.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"<nb process group {self._name!r}: rank {self.rank()} of {self.size()}>"

    # What only NCCL can do, or no backend on CPUs does.
    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise NotImplementedError(f'{what} is not possible with the backend "nb": {instead}')

    def recv_anysource(self, tensors: Any, tag: int) -> NoReturn:
        self._refuse("recv from any source", "name the source: recv(tensor, src=…)")

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("monitored_barrier", "barrier(timeout=…) names the ranks that are missing")

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("split_group", "use new_group()")

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("merge_remote_group", "use new_group()")

    def _start_coalescing(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("coalescing of different operations", "begin them one by one with async_op=True")

    def _end_coalescing(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("coalescing of different operations", "begin them one by one with async_op=True")

    def _register_on_completion_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a hook on completion", "use work.get_future().then(…)")

    def _enable_collectives_timing(self) -> NoReturn:
        self._refuse("timing by the backend", "measure with netbottleneck (NETBOTTLENECK=1)")
