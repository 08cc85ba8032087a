"""What scripts take from horovod.common.basics, where this package has Horovod's place."""

from typing import Any

from netbottleneck.torch import basics

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Horovod's first questions as methods, whatever library it is made for."""

    def __init__(self, *library: Any) -> None:
        pass


for _name in basics.__all__:
    setattr(HorovodBasics, _name, staticmethod(getattr(basics, _name)))
