"""Plays a bundle's window in a one-device Trainer: hands the engine each moment as Lightning comes by."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from pytest_nancapture.bundle import numerics
from pytest_nancapture.bundle.manifest import OptimizerRecord
from pytest_nancapture.loops.lightning.trainer import WindowLoader, build_trainer, framework_of, set_counters
from pytest_nancapture.loops.lightning.wrappers import Wraps, last_hook
from pytest_nancapture.loops.loop import Scene

_STAND_INS: dict[str, Callable[..., Any]] = {
    "prepare_data": lambda _: None,
    "configure_callbacks": lambda _: [],
    "on_before_batch_transfer": lambda _, batch, *__: batch,
    "transfer_batch_to_device": lambda _, batch, *__: batch,
    "on_after_batch_transfer": lambda _, batch, *__: batch,
}
"""For hooks that would fetch data, bring callbacks that write files, or move a batch that is in place already."""


class Finished(BaseException):
    """Ends the replay's fit once everything was seen; no user code may catch it."""


def play(scene: Scene) -> None:
    """See :class:`pytest_nancapture.loops.loop.Loop`."""
    player = Player(scene)
    record = scene.manifest.trainer
    trainer = build_trainer(
        scene.module,
        record,
        scene.device,
        _callback(framework_of(scene.module), player),
        scene.folder,
        scene.overrides,
    )
    numerics.apply(scene.manifest.numerics)
    set_counters(trainer, record)
    loader = WindowLoader(scene.batches, record)
    loader.trainer = trainer
    for name, stand_in in _STAND_INS.items():
        player.wraps.put(scene.module, name, stand_in)
    try:
        with suppress(Finished):
            trainer.fit(scene.fitted, train_dataloaders=loader)
    finally:
        player.wraps.take_off()


class Player:
    """What happens at which moment of the replay.

    Attributes:
        wraps: those in place, to be taken off after the fit.
    """

    def __init__(self, scene: Scene) -> None:
        self.wraps = Wraps()
        self._manifest = scene.manifest
        self._module = scene.module
        self._scene = scene
        self._engine = scene.engine

    def on_train_start(self, trainer: Any) -> None:
        """Put the wrappers in place."""
        if self._manifest.trainer.num_training_batches is None:
            trainer.fit_loop.max_batches = float("inf")
        wraps, strategy = self.wraps, trainer.strategy
        wraps.put(self._module, "on_train_batch_start", self._on_train_batch_start)
        wraps.put(self._module, last_hook(self._module), self._before_update)
        wraps.put(self._module, "on_train_batch_end", self._on_train_batch_end)
        wraps.put(self._module, "on_after_backward", self._on_after_backward)
        wraps.put(strategy, "backward", self._backward)
        wraps.put_after_steps(trainer.optimizers, self._engine.after_update)
        if not self._module.automatic_optimization:
            wraps.put_on_raw_steps(strategy, trainer.optimizers, self._before_raw_step)

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        position, trainer = len(self._engine.losses), self._module.trainer
        if position == 0 and self._scene.states is not None:
            assert self._manifest.optimizer is not None
            load_states(trainer.optimizers, self._scene.states, self._manifest.optimizer)
        if position + 1 == len(self._scene.batches):
            # Lightning counts the batches of this run, and there are none before the window's.
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self._manifest.trainer.last_batch
        self._engine.open(self._scene.rng[position], self._scene.tensors)
        return original(batch, batch_idx, *rest)

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._engine.backward(loss)
        return original(loss, *args, **kwargs)

    def _on_after_backward(self, original: Callable[..., Any]) -> Any:
        self._engine.after_backward()
        return original()

    def _before_raw_step(self, optimizer: Any, has_closure: bool) -> None:
        if not has_closure:
            self._before_update(lambda _: None, optimizer)

    def _before_update(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        if self._engine.arrive(optimizer):
            raise Finished
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if len(self._engine.losses) < len(self._scene.batches):
            return result
        self._engine.look_after(updated=self._scene.states is not None)
        raise Finished


def load_states(optimizers: Any, states: Any, record: OptimizerRecord) -> None:
    """Captured states, with today's hyperparameters where those had not changed since fit began."""
    for position, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        today = [dict(group) for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        names = record.constant[position] if position < len(record.constant) else ()
        for group, before, unchanged in zip(optimizer.param_groups, today, names, strict=False):
            group.update((name, before[name]) for name in unchanged if name in before)


def _callback(package: str, player: Player) -> Any:
    class Replay(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            player.on_train_start(trainer)

    return Replay()
