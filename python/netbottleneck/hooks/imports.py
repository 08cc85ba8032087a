"""What `import netbottleneck` changes where the environment asks for it: DDP, Horovod and, without it, its name.

Works whether torch was imported before or comes later, and imports it never.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from netbottleneck.hooks import left_alone
from netbottleneck.runtime import backend_name, job

DDP = "torch.nn.parallel.distributed"
OPTIMIZER = "torch.optim.optimizer"
HOROVOD = "horovod"
# The version of Horovod whose API this is.
HOROVOD_VERSION = "0.28.1"
TORCH = f"{HOROVOD}.torch"
MPI_OPS = f"{TORCH}.mpi_ops"
STAND_IN = str(Path(__file__).parent / "stand_in")
# Packages that only hold others, and modules under other names than here. All below horovod.torch has the same name.
HOLDERS = (HOROVOD, f"{HOROVOD}.common")
ALIASES = {
    f"{HOROVOD}.common.basics": "netbottleneck.hooks.horovod_basics",
    f"{HOROVOD}.common.elastic": "netbottleneck.hooks.horovod_elastic",
    f"{HOROVOD}.common.exceptions": "netbottleneck.hooks.horovod_exceptions",
    f"{HOROVOD}.common.process_sets": "netbottleneck.runtime.process_sets",
    f"{HOROVOD}.common.util": "netbottleneck.hooks.horovod_util",
}


def install() -> None:
    """Hook into what is imported, now or later; a second call changes nothing."""
    if any(isinstance(finder, _Later | _Horovod) for finder in sys.meta_path):
        return
    job.observe(_FirstOptimizer())
    if DDP in sys.modules:
        _patch_ddp(sys.modules[DDP])
    else:
        sys.meta_path.insert(0, _Later(DDP, _patch_torch))
    if OPTIMIZER in sys.modules:
        _patch_optimizer(sys.modules[OPTIMIZER])
    else:
        sys.meta_path.insert(0, _Later(OPTIMIZER, _patch_optimizer))
    if MPI_OPS in sys.modules:
        _patch_horovod(sys.modules[MPI_OPS])
    else:
        sys.meta_path.insert(0, _Later(MPI_OPS, _patch_horovod))
    if HOROVOD not in sys.modules:
        stand_in()


def stand_in() -> None:
    """Have Horovod's name found, where it is not installed: here, and where multiprocessing hands on sys.path."""
    if not any(isinstance(finder, _Horovod) for finder in sys.meta_path):
        # Before the finder of files, which would load a second copy of a module below horovod.torch.
        sys.meta_path.insert(0, _Horovod())
    if STAND_IN not in sys.path:
        sys.path.append(STAND_IN)


def stands_in() -> bool:
    """Return whether `import horovod` gives this package."""
    return any(isinstance(finder, _Horovod) and not finder._elsewhere(None) for finder in sys.meta_path)


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

    def stopped(self, stopped: job.Job) -> None:
        if self._real is not None:
            self._real.stopped(stopped)


def _create_group(options: Any, backend_options: Any) -> Any:
    from netbottleneck.torch.backend.opening import create

    return create(options, backend_options)


def _patch_torch(module: Any) -> None:
    backend_name.register(_create_group)
    _patch_ddp(module)


def _patch_ddp(module: Any) -> None:
    """Measure every DDP model that is built from now on. What others put around this stays around it."""
    init = module.DistributedDataParallel.__init__

    @functools.wraps(init)
    def measured(self: Any, *args: object, **kwargs: object) -> None:
        from netbottleneck.hooks import ddp

        init(self, *args, **kwargs)
        ddp.attach(self)

    module.DistributedDataParallel.__init__ = measured


def _patch_optimizer(module: ModuleType) -> None:
    left_alone.Unmeasured(vars(module)["register_optimizer_step_post_hook"])


def _patch_horovod(module: ModuleType) -> None:
    if hasattr(module, "mpi_lib"):  # else it is ours, under Horovod's name
        from netbottleneck.hooks import real_horovod

        real_horovod.install(module)


class _Later(importlib.abc.MetaPathFinder):
    """Waits for a module, and has it patched as soon as it is there."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Patching(spec.loader, self._patch)
        return spec


class _Patching(importlib.abc.Loader):
    """Loads as the loader it wraps, then patches."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def ours(fullname: str) -> str | None:
    """Return which module of this package stands for one of Horovod's; None where none does."""
    if fullname == TORCH or fullname.startswith(f"{TORCH}."):
        return f"netbottleneck.torch{fullname.removeprefix(TORCH)}"
    return ALIASES.get(fullname)


class _Horovod(importlib.abc.MetaPathFinder):
    """`import horovod.torch` where Horovod is not installed: this package, which has the same API.

    Its modules are the same objects under both names. Where Horovod is found elsewhere, it steps aside.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == HOROVOD and self._elsewhere(path):
            sys.meta_path.remove(self)
            if STAND_IN in sys.path:
                sys.path.remove(STAND_IN)
            return None
        if fullname != HOROVOD and not fullname.startswith(f"{HOROVOD}."):
            return None
        real = ours(fullname)
        if real is not None and importlib.util.find_spec(real) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Alias(), is_package=fullname in HOLDERS)

    def _elsewhere(self, path: Sequence[str] | None) -> bool:
        """Whether there is a Horovod of its own: a folder that is no package, as a checkout's root may be, is none."""
        others = [place for place in sys.path if place != STAND_IN]
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(HOROVOD, others if finder is importlib.machinery.PathFinder else path)
            if spec is not None:
                return spec.loader is not None and spec.origin is not None
        return False


class _Alias(importlib.abc.Loader):
    """Gives a module of this package under a name of Horovod's."""

    def __init__(self) -> None:
        self._own: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name in HOLDERS:
            return ModuleType(spec.name, "Held by netbottleneck, in Horovod's place.")
        real = ours(spec.name)
        if real is None:
            raise ImportError(
                f"{spec.name}: netbottleneck stands in for horovod.torch only, and what it needs of horovod.common; "
                "for TensorFlow, Keras, MXNet and Horovod's launchers install Horovod itself",
                name=spec.name,
            )
        module = importlib.import_module(real)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._own is not None:
            module.__spec__ = self._own  # the import has replaced it
        elif module.__name__ == HOROVOD:
            vars(module)["__version__"] = HOROVOD_VERSION
