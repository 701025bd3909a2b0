"""``NaNCapture``: the Lightning callback. It only wires; the work is in its neighbour ``watch``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from lightning.pytorch import Callback
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.tensors.kinds import unwritable
from pytest_nancapture.bundle.tensors.names import buffers, parameters
from pytest_nancapture.capture.react import OnCapture
from pytest_nancapture.capture.recipe import recipe_of
from pytest_nancapture.capture.watch import Settings
from pytest_nancapture.errors import CaptureError, NonFiniteError
from pytest_nancapture.loops.lightning.arguments import saved_arguments
from pytest_nancapture.loops.lightning.watch import LightningWatch

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")

log = logging.getLogger("pytest_nancapture")


class NaNCapture(Callback):
    """Export a reproduction bundle at the step whose loss, gradients or buffers are not finite.

    The weights never see such a step.

    Args:
        dirpath: the folder for bundles; made when the first is written.
        on_capture: ``raise`` ends the run with :class:`~pytest_nancapture.errors.NonFiniteError`, ``stop`` ends it
            cleanly, ``skip`` drops the step and goes on. In all three the weights stay as they were before the step,
            and buffers are put back.
        max_bundles: how many this run keeps: the newest faults that differ. One that is seen again is counted in its
            bundle, not stored again.
        factory: ``package.module:function`` that builds the module without arguments, for constructors whose arguments
            are not all in ``hparams``.
        confirm: how often a bundle is replayed, to prove that its fault comes back from it: each time in a fresh
            process, or where that would take more than a minute in this one; 0 for not at all.
        optimizer_history: keep a copy of weights and optimizer state from before each update, so that a fault that is
            born in the update itself can be captured. Costs that copy at every step, and its memory.
        trace: name the culprit when a fault was confirmed, by one more rerun that follows its operations; not made
            where it would take more than a minute.

    Raises:
        CaptureError: an argument is not what is expected.

    Example:
        >>> trainer = Trainer(callbacks=[NaNCapture("nan-bundles")])  # doctest: +SKIP
    """

    def __init__(
        self,
        dirpath: str | PathLike[str] = "nan-bundles",
        *,
        on_capture: OnCapture = "raise",
        max_bundles: int = 8,
        factory: str | None = None,
        confirm: int = 1,
        optimizer_history: bool = False,
        trace: bool = True,
    ) -> None:
        super().__init__()
        if on_capture not in get_args(OnCapture):
            raise CaptureError(f"on_capture: expected one of {', '.join(get_args(OnCapture))}, came {on_capture!r:.40}")
        for name, value in {"max_bundles": max_bundles, "confirm": confirm}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CaptureError(f"{name}: expected a number from 0 up, came {value!r:.40}")
        self._settings = Settings(
            dirpath=Path(dirpath).absolute(),
            on_capture=on_capture,
            max_bundles=max_bundles,
            confirm=confirm,
            optimizer_history=bool(optimizer_history),
            trace=bool(trace),
        )
        self._factory = factory
        self._watch: LightningWatch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check what a bundle of this run will lack, and begin to watch."""
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            raise CaptureError(
                f"NaNCapture cannot capture under {strategy}: no rank holds the whole module; use DDP or one device"
            )
        count = sum(isinstance(callback, NaNCapture) for callback in trainer.callbacks)
        if count > 1:
            raise CaptureError(f"expected one NaNCapture in a run, came {count}: each would capture the other's reruns")
        recipe = recipe_of(pl_module, self._factory, saved_arguments(pl_module))
        if trainer.datamodule is not None:
            recipe.of_data = saved_arguments(trainer.datamodule)
        for problem in recipe.problems if trainer.is_global_zero else ():
            log.warning("nancapture: bundles of this run cannot be replayed without help: %s", problem)
        for problem in _unwritable(pl_module) if trainer.is_global_zero else ():
            log.warning("nancapture: this run will write no bundle: %s", problem)
        self._watch = LightningWatch(trainer, pl_module, recipe, self._settings)
        self._watch.begin()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See that the epoch's last step is known to be good before anybody acts upon the epoch."""
        self._settle_look()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """See that the last step is known to be good before the weights are judged."""
        self._settle_look()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """See that the last step is known to be good before it is kept."""
        self._settle_look()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching, once all ranks know what one of them found after the last step."""
        if self._watch is not None:
            self._watch.watch.settle()
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching, whatever ended the run: this step, or the one before, may have gone wrong."""
        try:
            self._settle_look()
        except NonFiniteError:
            pass  # the step before was bad, and so is what this one was given
        else:
            if self._watch is not None:
                self._watch.raised(exception)
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching."""
        self._end()

    def _settle_look(self) -> None:
        if self._watch is not None:
            self._watch.watch.settle_look()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


def _unwritable(module: Any) -> Iterator[str]:
    for name, tensor in (*parameters(module), *buffers(module)):
        problem = "" if is_lazy(tensor) else unwritable(tensor)
        if problem:
            yield f"{name}: {problem}"
