"""A call of ``Trainer.fit`` as the watch sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_nancapture.bundle.manifest import TrainerRecord
from pytest_nancapture.loops.lightning import loop
from pytest_nancapture.loops.lightning.in_place import InPlace, quiet
from pytest_nancapture.loops.lightning.loop import check_class
from pytest_nancapture.loops.lightning.player import play
from pytest_nancapture.loops.lightning.wrappers import Wraps, is_inherited
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.scene import Scene
from pytest_nancapture.step.state.window import Counters, Window

PACKAGES = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "jsonargparse"})
_MENDING_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_STEP_HOOKS = (
    *_MENDING_HOOKS,
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "on_train_batch_end"),
)


class LightningRun:
    """Fills :class:`pytest_nancapture.step.run.Run`, whose docstrings say what is what."""

    packages = PACKAGES
    distributions: tuple[str, ...] = ("lightning", "pytorch-lightning")

    def __init__(self, trainer: Any, module: Any, wraps: Wraps) -> None:
        """`wraps`: around the module's hooks; a rerun calls what is inside."""
        self._trainer = trainer
        self._wraps = wraps
        self._zeroes = module.automatic_optimization and is_inherited(module, "optimizer_zero_grad")
        self.module: Any = module
        self.rank: int = trainer.global_rank
        self.world_size: int = trainer.world_size
        self.restores = (trainer,)
        self.attributes = _own_attributes(module)
        self.updates_once: bool = module.automatic_optimization
        self.always_backward = is_inherited(module, "backward") and "backward" not in vars(module)
        self.changes_batches = not all(_leaves(callback, ("on_train_batch_start",)) for callback in trainer.callbacks)
        self.starts_with_code = not is_inherited(module, "on_train_batch_start")
        self.ends_with_code = not (module.automatic_optimization and is_inherited(module, "on_train_batch_end"))
        self.data: Any = trainer.datamodule
        self.checkpoint = str(trainer.ckpt_path or "")
        self.mends_nothing = _leaves(module, _STEP_HOOKS) and all(
            _leaves(callback, _MENDING_HOOKS) for callback in trainer.callbacks
        )

    @property
    def optimizers(self) -> Sequence[Any]:
        return self._trainer.optimizers  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.module.device  # type: ignore[no-any-return]

    @property
    def scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)

    @property
    def counters(self) -> Counters:
        trainer = self._trainer
        return {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "total_batch_idx": trainer.fit_loop.epoch_loop.total_batch_idx,
        }

    @property
    def is_last_batch(self) -> bool:
        return bool(self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

    @property
    def line_start(self) -> str:
        return "\n" if self._trainer.progress_bar_callback is not None else ""

    def starts_anew(self, batch_idx: int) -> bool:
        """As after an epoch that ended early."""
        return bool(self._zeroes and batch_idx % self._trainer.accumulate_grad_batches == 0)

    def any(self, mine: bool) -> bool:
        if self.world_size == 1:
            return mine
        return bool(self._trainer.strategy.reduce_boolean_decision(mine, all=False))

    def gather(self, mine: int) -> list[int]:
        if self.world_size == 1:
            return [mine]
        number = torch.tensor([mine], device=self._trainer.strategy.root_device)
        return [int(value) for value in self._trainer.strategy.all_gather(number).flatten()]

    def stop(self) -> None:
        self._trainer.should_stop = True
        # Lightning goes on until these are met, and the run cannot get better by it.
        self._trainer.fit_loop.min_epochs = 0
        self._trainer.fit_loop.epoch_loop.min_steps = None

    def forget_scaling(self) -> None:
        """Let the scaler begin the next step afresh, its scale as it is."""
        scaler = self.scaler
        if scaler is not None and scaler._scale is not None:
            scaler.update(scaler.get_scale())

    def describe(self, window: Window, target: int) -> TrainerRecord:
        trainer, counters = self._trainer, window.counters
        batches = trainer.num_training_batches
        return TrainerRecord(
            framework=package_of(trainer),
            precision=str(trainer.precision),
            autocasts=_kind_of_autocast(trainer, self.device.type) == self.device.type,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            automatic_optimization=self.module.automatic_optimization,
            global_step=counters["global_step"],
            epoch=counters["epoch"],
            total_batch_idx=counters["total_batch_idx"],
            num_training_batches=int(batches) if batches != float("inf") else None,
            last_batch=window.last_batch,
            guilty_step=target,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm and str(trainer.gradient_clip_algorithm.value),
            logger=trainer.logger is not None,
            strategy=type(trainer.strategy).__name__,
            world_size=trainer.world_size,
            rank=trainer.global_rank,
        )

    def check_class(self, kind: type, source: str) -> None:
        check_class(kind, source)

    def rehearse(self, scene: Scene) -> None:
        with loop.quiet():
            play(scene)

    @contextmanager
    def quiet(self, window: Window) -> Iterator[None]:
        with quiet(self._trainer, self.module, window, package_of(self._trainer)):
            yield

    def play(self, window: Window, engine: Engine, optimizer: Any) -> None:
        original = partial(self._wraps.original, self.module)
        InPlace(self._trainer, self.module, window, engine, optimizer, original).run()


def package_of(trainer: Any) -> str:
    """``lightning.pytorch`` or ``pytorch_lightning``, whichever the Trainer or its base comes from."""
    base = [kind for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"][-1]
    return base.__module__.partition(".trainer")[0]


def _kind_of_autocast(trainer: Any, default: str) -> str:
    """The kind of device that mixed precision is meant for; `default` where there is none of that."""
    kind = getattr(trainer.precision_plugin, "device", default)
    return kind if isinstance(kind, str) else default


def _own_attributes(module: nn.Module) -> frozenset[str]:
    """What every LightningModule has, and Lightning itself changes."""
    base = next((kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"), nn.Module)
    return frozenset(vars(base()))


def makes_batches(trainer: Any, module: Any) -> bool:
    """Whether Lightning calls an ``on_after_batch_transfer`` of the module's own; a datamodule's goes before it."""
    hook = "on_after_batch_transfer"
    if _leaves(module, (hook,)):
        return False
    selector = trainer._data_connector._datahook_selector
    return selector is None or selector.get_instance(hook) is selector.model


def callbacks_hooks_in_steps(trainer: Any) -> list[tuple[Any, str]]:
    """The callbacks with hooks of the user's that run between a step's instant and its update, and each hook's name."""
    hooks = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
    return [(callback, hook) for callback in trainer.callbacks for hook in hooks if not _leaves(callback, (hook,))]


def _leaves(owner: Any, hooks: Iterable[str]) -> bool:
    """Whether these hooks are Lightning's own, which mend nothing."""
    return all(is_inherited(owner, name) and name not in vars(owner) for name in hooks)
