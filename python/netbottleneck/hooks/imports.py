"""What `import netbottleneck` changes when the environment asks for it: DDP, and Horovod's name where it is absent.

Works whether torch was imported before or comes later, and imports it never.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from netbottleneck import job

DDP = "torch.nn.parallel.distributed"
HOROVOD = "horovod"
ALIASES = {HOROVOD: "netbottleneck", f"{HOROVOD}.torch": "netbottleneck.torch"}


def install() -> None:
    """Hook into what is imported, now or later."""
    job.observe(_FirstOptimizer())
    if DDP in sys.modules:
        _patch_ddp()
    else:
        sys.meta_path.insert(0, _Later())
    if HOROVOD not in sys.modules and importlib.util.find_spec(HOROVOD) is None:
        sys.meta_path.append(_Horovod())


class _FirstOptimizer(job.Observer):
    """Stands in for hooks.horovod, which needs torch, until the first optimizer is made: by then torch is there."""

    def __init__(self) -> None:
        self._real: job.Observer | None = None

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        if self._real is None:
            from netbottleneck.hooks.horovod import Measuring

            self._real = Measuring()
        self._real.gradients(gradients, optimizer)

    def stopping(self, stopping: job.Job) -> None:
        if self._real is not None:
            self._real.stopping(stopping)


def _patch_ddp() -> None:
    from netbottleneck.hooks import ddp

    ddp.install()


class _Later(importlib.abc.MetaPathFinder):
    """Waits for DDP's module, and patches it as soon as it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != DDP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Patching(spec.loader)
        return spec


class _Patching(importlib.abc.Loader):
    """Loads as the loader it wraps, then patches."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        # `torch` itself may still be importing: whatever is built first comes after that.
        init = module.DistributedDataParallel.__init__

        def first(self: object, *args: object, **kwargs: object) -> None:
            module.DistributedDataParallel.__init__ = init
            _patch_ddp()
            module.DistributedDataParallel.__init__(self, *args, **kwargs)

        module.DistributedDataParallel.__init__ = first


class _Horovod(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import horovod.torch` where Horovod is not installed: this package, which has the same API."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ALIASES and not fullname.startswith(f"{HOROVOD}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name == HOROVOD:
            return ModuleType(HOROVOD)
        if spec.name not in ALIASES:
            raise ImportError(f"{spec.name}: netbottleneck stands in for horovod.torch only")
        return importlib.import_module(ALIASES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == HOROVOD:
            module.__path__ = []
