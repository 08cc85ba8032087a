"""What scripts take from horovod.common.exceptions, where this package has Horovod's place."""

from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return what is to be said of a framework in another version than Horovod was built for."""
    return f"Horovod was built for {name} {version}, and {installed_version} is installed"


class HorovodVersionMismatchError(ImportError):
    """A framework in another version than Horovod was built for. Never raised here: nothing is built for one."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
