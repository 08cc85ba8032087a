"""Import hooks: patch DDP and Horovod, or provide the name `horovod`, if the environment requests it.

`import netbottleneck` installs them. They work before and after the import of torch, and never import it themselves.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from netbottleneck import config
from netbottleneck.errors import of_handler
from netbottleneck.hooks import left_alone
from netbottleneck.runtime import job

if TYPE_CHECKING:
    from netbottleneck import _core

DDP = "torch.nn.parallel.distributed"
OPTIMIZER = "torch.optim.optimizer"
HOROVOD = "horovod"
# The Horovod version whose API this package implements.
HOROVOD_VERSION = "0.28.1"
TORCH = f"{HOROVOD}.torch"
MPI_OPS = f"{TORCH}.mpi_ops"
STAND_IN = str(Path(__file__).parent / "stand_in")
STANDS_IN = (
    "horovod is not installed: netbottleneck stands in for it, so a script that has another path without Horovod takes "
    'that of Horovod. For the other path, put `import sys; sys.modules["horovod"] = None` at the top of the script'
)
# HOLDERS: packages that only contain other modules. ALIASES: modules of Horovod whose name differs from ours. Modules
# below horovod.torch have the same name as below netbottleneck.torch.
HOLDERS = (HOROVOD, f"{HOROVOD}.common")
ALIASES = {
    f"{HOROVOD}.common.basics": "netbottleneck.runtime.horovod_common",
    f"{HOROVOD}.common.elastic": "netbottleneck.torch.elastic.state",
    f"{HOROVOD}.common.exceptions": "netbottleneck.runtime.horovod_common",
    f"{HOROVOD}.common.process_sets": "netbottleneck.runtime.collectives",
    f"{HOROVOD}.common.util": "netbottleneck.runtime.horovod_common",
}


def install() -> None:
    """Patch modules that are imported already, and those imported later. A second call changes nothing."""
    if any(isinstance(finder, _Later | _Horovod) for finder in sys.meta_path):
        return
    job.observe(_FirstOptimizer())
    settings = config.settings()
    if settings.nccl_events:
        from netbottleneck.runtime import run_folder  # only then: it needs NumPy

        run_folder.arrange_nccl_events(settings)
    if any(arm.over_nccl for arm in settings.transports):
        from netbottleneck.runtime import nccl

        nccl.arrange(settings.transports)
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
    """Make `import horovod` find this package if Horovod is not installed.

    Works in this process and in those that get sys.path from multiprocessing.
    """
    if not any(isinstance(finder, _Horovod) for finder in sys.meta_path):
        # Insert before the file finder, which would load a second copy of a module below horovod.torch.
        sys.meta_path.insert(0, _Horovod())
    if STAND_IN not in sys.path:
        sys.path.append(STAND_IN)


# Evaluated in a child process, which may not find this package.
_IN_A_CHILD = (
    "__import__('netbottleneck.hooks.imports', fromlist=['ForChildren']).ForChildren() "
    "if __import__('importlib.util').util.find_spec('netbottleneck') else None"
)


class ForChildren:
    """A value that imports this package, which installs the hooks, in a process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return eval, (_IN_A_CHILD,)


def pass_on() -> None:
    """Install the hooks in children of multiprocessing too, by spawn and forkserver, if the script does not import us.

    A process object takes over the configuration of the process that makes it, and its child unpickles it after it has
    sys.path and has imported the script.
    """
    import multiprocessing

    shared = vars(multiprocessing.current_process()).get("_config")
    if isinstance(shared, dict):  # an internal name: without it, children are not measured
        shared["netbottleneck"] = ForChildren()


def stands_in() -> bool:
    """Return whether `import horovod` finds this package."""
    return any(isinstance(finder, _Horovod) and not finder._elsewhere(None) for finder in sys.meta_path)


class _FirstOptimizer(job.Observer):
    """Observer that imports hooks.horovod, which needs torch, when the first optimizer is made.

    It also logs, once, that this package stands in for Horovod in the job.
    """

    def __init__(self) -> None:
        self._real: job.Observer | None = None
        self._said = False

    def started(self, started: job.Job) -> None:
        module = sys.modules.get(TORCH)
        replaced = module is not None and module is sys.modules.get("netbottleneck.torch")
        if replaced and started.place.rank == 0 and not self._said:
            self._said = True
            with contextlib.suppress(Exception):  # of a handler of the script
                left_alone.logger.warning("%s", STANDS_IN)

    def gradients(self, gradients: Any, optimizer: Any) -> None:
        if self._real is None:
            from netbottleneck.hooks.horovod import Measuring

            self._real = Measuring()
        self._real.gradients(gradients, optimizer)

    def joining(self, joining: job.Job) -> "Sequence[_core.Comm]":
        return () if self._real is None else self._real.joining(joining)

    def joined(self, joined: job.Job, last: int) -> int:
        return last if self._real is None else self._real.joined(joined, last)

    def stopping(self, stopping: job.Job) -> None:
        if self._real is not None:
            self._real.stopping(stopping)

    def stopped(self, stopped: job.Job) -> None:
        if self._real is not None:
            self._real.stopped(stopped)


def _create_group(options: Any, backend_options: Any) -> Any:
    from netbottleneck.torch.backend.group import create

    return create(options, backend_options)


def _patch_torch(module: Any) -> None:
    job.register_backend(_create_group)
    _patch_ddp(module)


def _patch_ddp(module: Any) -> None:
    """Measure every DDP model that is built from now on. Wrappers that other code adds later stay outside ours."""
    init = module.DistributedDataParallel.__init__

    def measured(self: Any, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        try:
            from netbottleneck.hooks import ddp

            ddp.attach(self)
        except Exception as error:
            if of_handler(error) or config.settings().strict:  # settings() raises if one is wrong
                raise
            left_alone.left_alone("a DDP model", f"{type(error).__name__}: {error}")

    module.DistributedDataParallel.__init__ = functools.update_wrapper(measured, init)
    module.warnings = _Warnings(measured.__code__)


class _Warnings(ModuleType):
    """The module `warnings` for DDP's module: a warning about the caller of __init__ skips the frame of our wrapper."""

    def __init__(self, wrapper: CodeType) -> None:
        super().__init__(warnings.__name__, warnings.__doc__)
        self._wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(
        self,
        message: Warning | str,
        category: type[Warning] | None = None,
        stacklevel: int = 1,
        *others: Any,
        **options: Any,
    ) -> None:
        """Warn as warnings.warn does, at the line that it would name without our wrapper."""
        named = sys._getframe(1)
        for _ in range(stacklevel - 1):
            named = named.f_back or named
        ours = named.f_code is self._wrapper
        warnings.warn(message, category, stacklevel + 1 + ours, *others, **options)


def _patch_optimizer(module: ModuleType) -> None:
    left_alone.Unmeasured(vars(module)["register_optimizer_step_post_hook"], _attach_observed)


def _attach_observed(optimizer: Any) -> Callable[[], None]:
    from netbottleneck.hooks import observed

    return observed.attach_when_known(optimizer)


def _patch_horovod(module: ModuleType) -> None:
    if hasattr(module, "mpi_lib"):  # else the module is ours, under Horovod's name
        from netbottleneck.hooks import horovod

        horovod.install(module)


class _Later(importlib.abc.MetaPathFinder):
    """Finder that waits for the import of one module and patches it after it is loaded."""

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
    """Loader that runs the wrapped loader and then patches the module."""

    def __init__(self, loader: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)


def ours(fullname: str) -> str | None:
    """Return the name of our module that replaces a module of Horovod, or None."""
    if fullname == TORCH or fullname.startswith(f"{TORCH}."):
        return f"netbottleneck.torch{fullname.removeprefix(TORCH)}"
    return ALIASES.get(fullname)


class _Horovod(importlib.abc.MetaPathFinder):
    """Finder for `import horovod.torch` if Horovod is not installed: finds this package, which has the same API.

    A module is the same object under both names. If Horovod is found elsewhere, the finder removes itself.
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
        if real is None and fullname not in HOLDERS:
            _explain(fullname)
            return None
        if real is not None and importlib.util.find_spec(real) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Alias(), is_package=fullname in HOLDERS)

    def _elsewhere(self, path: Sequence[str] | None) -> bool:
        """Return whether Horovod itself is installed. A folder that is not a package (a checkout) does not count."""
        others = [place for place in sys.path if place != STAND_IN]
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(HOROVOD, others if finder is importlib.machinery.PathFinder else path)
            if spec is not None:
                return spec.loader is not None and spec.origin is not None
        return False


def _explain(fullname: str) -> None:
    """Raise ModuleNotFoundError with the remedy if a finder's caller imports; importlib.util.find_spec gets None.

    Its name is Horovod's, as where neither is installed: `from horovod import tensorflow` would replace it otherwise.
    """
    frame: FrameType | None = sys._getframe()
    for _ in range(3):  # the finder, importlib._bootstrap._find_spec, and what calls it
        frame = None if frame is None else frame.f_back
    if frame is not None and frame.f_code.co_name == "_find_and_load_unlocked":
        raise ModuleNotFoundError(
            f"{fullname}: netbottleneck stands in for horovod.torch only, and what it needs of horovod.common; "
            "for TensorFlow, Keras, MXNet and Horovod's launchers install Horovod itself",
            name=HOROVOD,
        )


class _Alias(importlib.abc.Loader):
    """Loader that returns a module of this package under Horovod's name for it."""

    def __init__(self) -> None:
        self._own: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if spec.name in HOLDERS:
            return ModuleType(spec.name, "Provided by netbottleneck in place of Horovod.")
        module = importlib.import_module(str(ours(spec.name)))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._own is not None:
            module.__spec__ = self._own  # the import replaced it
        elif module.__name__ == HOROVOD:
            vars(module)["__version__"] = HOROVOD_VERSION


# `netbottleneck.attach`: the explicit call for what an environment variable requests at import.


def attach(model: Any = None, optimizer: Any = None) -> Any:
    """Measure an existing model or the installed Horovod, and move its gradients by the environment's transports.

    model: a DistributedDataParallel, or the result of torch.compile on one; hooks.ddp.attach documents model and
    optimizer. Any other model is observed, and its communication stays as it is: that of FSDP2, FSDP, DeepSpeed or
    tensor parallelism, or the script's own calls; see hooks.observed.attach. None: the installed Horovod, whose next
    distributed optimizer is measured. Every rank calls it. Raises ImportError if Horovod is not installed.
    """
    if model is not None:
        from netbottleneck.hooks import ddp, observed

        return ddp.attach(model, optimizer) if ddp.has_ddp(model) else observed.attach(model, optimizer)
    from netbottleneck.hooks import horovod

    return horovod.attach()
