"""A callback for Lightning 2."""

from typing import Any

from netbottleneck.hooks.callbacks.frameworks import framework
from netbottleneck.hooks.callbacks.run import Marks, Run

_lightning: Any = framework("LightningCallback", "lightning.pytorch", "pytorch_lightning")


class LightningCallback(_lightning.Callback):  # type: ignore[misc]
    """Measures `Trainer.fit`: one optimizer, on one process or with the strategy "ddp" on CPUs.

    A step ends with the optimizer's; accumulated batches belong to it. The report is written when the fit ends; where
    it fails, the records say so.
    """

    def __init__(self) -> None:
        self._run: Run | None = None
        self._marks: Marks | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the run. Raises ValueError for another number of optimizers than one, and as callbacks.run.Run."""
        if len(trainer.optimizers) != 1:
            raise ValueError(f"{len(trainer.optimizers)} optimizers: netbottleneck measures loops with one")
        self._marks = Marks(trainer.optimizers[0])
        self._run = Run(trainer.strategy.model, self._marks)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The backward pass is over, inside what Lightning hands to the optimizer's step."""
        if self._marks is not None:
            self._marks.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run with the error."""
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        run, self._run, self._marks = self._run, None, None
        if run is not None:
            run.end(error)
