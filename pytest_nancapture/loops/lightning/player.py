"""Plays a bundle's window in a one-device Trainer: hands the engine each moment as Lightning comes by."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle import numerics
from pytest_nancapture.bundle.manifest import OptimizerRecord
from pytest_nancapture.errors import RebuildError
from pytest_nancapture.loops.lightning.iterators import Fetched, Played, takes_iterator
from pytest_nancapture.loops.lightning.trainer import (
    WindowLoader,
    build_trainer,
    check_data_class,
    framework_of,
    set_counters,
)
from pytest_nancapture.loops.lightning.wrappers import Wraps, is_inherited, last_hook
from pytest_nancapture.step.data import build_data, put_data
from pytest_nancapture.step.engine import Enough
from pytest_nancapture.step.scene import Scene

_STAND_INS: dict[str, Callable[..., Any]] = {
    "prepare_data": lambda _: None,
    "configure_callbacks": lambda _: [],
    "on_before_batch_transfer": lambda _, batch, *__: batch,
    "transfer_batch_to_device": lambda _, batch, *__: batch,
}
"""For hooks that would fetch data, bring callbacks that write files, or move a batch that is in place already.

A step that calls them itself gets the module's own.
"""

_HOOKS_OF_DATA = ("teardown", "on_exception")


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
        anomaly=bool((scene.manifest.numerics.get("anomaly_mode") or [False])[0]),
    )
    numerics.apply(scene.manifest.numerics)
    set_counters(trainer, record)
    player.loader.trainer = trainer
    for name, stand_in in _STAND_INS.items():
        player.wraps.put(scene.module, name, partial(player.stand_in, stand_in))
    player.wraps.put(scene.module, "on_after_batch_transfer", player.on_after_batch_transfer)
    try:
        with _current_device(scene.device), _an_optimizer(scene), suppress(Enough):
            trainer.fit(scene.fitted, train_dataloaders=player.loader)
    finally:
        player.wraps.take_off()
    if player.lacked:  # by code that has caught what was raised
        raise RebuildError(player.lacked[0])


class Player:
    """What happens at which moment of the replay.

    Attributes:
        wraps: those in place, to be taken off after the fit.
        loader: gives the micro-batches to a step that does not take them itself.
        lacked: what the code has read of the datamodule, and is not there; a sentence each.
    """

    def __init__(self, scene: Scene) -> None:
        self.wraps = Wraps()
        self._manifest = scene.manifest
        self._module = scene.module
        self._scene = scene
        self._engine = scene.engine
        self._is_inside = False
        self._has_begun = False
        self._iterators: dict[int, Played] = {}
        self.lacked: list[str] = []
        self._data: Any = None
        pairs = zip(scene.batches, scene.manifest.batch.window, strict=True)
        batches = [
            (number, given if micro.fetches is None else next(iter(given), None)) for (number, given), micro in pairs
        ]
        self.loader = WindowLoader(batches, scene.manifest.trainer)

    def stand_in(self, instead: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `instead`, but from within a step."""
        return original(*args, **kwargs) if self._is_inside else instead(original, *args, **kwargs)

    def on_after_batch_transfer(self, original: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Run the module's own hook where the batch is the one from before it."""
        position = len(self._engine.losses)
        if self._is_inside:
            return original(batch, *rest)
        states = self._scene.hooks[position] if position < len(self._scene.hooks) else None
        if states is None:
            return batch
        self._begin(position)
        self._engine.open_early(states, self._scene.tensors)
        return original(batch, *rest)

    def give_data(self, trainer: Any) -> None:
        """Have the user's code read the datamodule, from its ``setup`` on; it fetches nothing, and gives no batch."""
        record, given = self._manifest.datamodule, self._scene.overrides.get("datamodule")
        if given is None and record is not None:
            given = self._data = build_data(record, self._scene.decoder(), check_data_class, self.lacked)
        if given is None:
            return
        for name in _HOOKS_OF_DATA:
            self.wraps.put(given, name, lambda *_, **__: None)
        trainer.datamodule = given
        vars(given)["trainer"] = trainer

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
        wraps.put(strategy, "optimizer_step", self._optimizer_step)
        wraps.put_after_steps(trainer.optimizers, self._engine.after_update)
        if not self._module.automatic_optimization:
            wraps.put_on_raw_steps(strategy, trainer.optimizers, self._raw_step)
        if takes_iterator(trainer):
            wraps.put(self._module, "training_step", self._training_step)

    def on_exception(self) -> None:
        """What Lightning does to end the fit is no part of the step."""
        self._engine.raised()

    def _begin(self, position: int) -> None:
        """What the user's code reads of optimizers and loader in the next micro-batch is as it was."""
        trainer = self._module.trainer
        if not self._has_begun and self._scene.states is not None:
            assert self._manifest.optimizer is not None
            load_states(trainer.optimizers, self._scene.states, self._manifest.optimizer)
        if not self._has_begun and self._data is not None:
            assert self._manifest.datamodule is not None
            put_data(self._data, self._manifest.datamodule, self._scene.decoder())
        self._has_begun = True
        if position + 1 == len(self._scene.batches):
            # Lightning counts the batches of this run, and there are none before the window's.
            trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self._manifest.trainer.last_batch

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        position, trainer = len(self._engine.losses), self._module.trainer
        if position == len(self._scene.batches):  # the last one's step was left early
            raise Enough
        if takes_iterator(trainer):
            self.loader.count(position)
            trainer.fit_loop.epoch_loop.batch_progress.increment_ready()
        self._begin(position)
        self._is_inside = True
        states, fetched = self._scene.rng[position], self._scene.fetches[position]
        if fetched and not takes_iterator(trainer):  # today's step is given what it took itself at capture
            states = fetched[0]
        self._engine.open(states, self._scene.tensors)
        return original(batch, batch_idx, *rest)

    def _training_step(self, original: Callable[..., Any], iterator: Any) -> Any:
        position = len(self._engine.losses) - 1
        if position not in self._iterators:
            is_end = self._manifest.batch.window[position].exhausted
            self._iterators[position] = Played(iterator, self._fetches(position), is_end=is_end)
        return original(self._iterators[position])

    def _fetches(self, position: int) -> Iterator[Fetched]:
        (_, batches), micro = self._scene.batches[position], self._manifest.batch.window[position]
        if micro.fetches is None:  # a step that took its batch as an argument at capture
            yield batches, micro.batch_idx, 0
            return
        for batch, states, record in zip(batches, self._scene.fetches[position], micro.fetches, strict=True):
            self._engine.fetch(states, self._scene.tensors)
            yield batch, record.batch_idx, record.dataloader_idx

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._engine.backward(loss)
        return original(loss, *args, **kwargs)

    def _on_after_backward(self, original: Callable[..., Any]) -> Any:
        self._engine.after_backward()
        return original()

    def _optimizer_step(
        self, original: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def evaluated() -> Any:
            self._engine.evaluate()
            return closure()

        self._engine.begin_update()
        try:
            return original(optimizer, evaluated, *args, **kwargs)
        finally:
            self._engine.end_update()

    def _raw_step(self, original: Callable[..., Any], optimizer: Any, closure: Any) -> Any:
        """Torch's own, past Lightning, and so past its hooks."""

        def step(optimizer: Any, evaluated: Any) -> Any:
            def looked_at() -> Any:
                result = evaluated()
                self._before_update(lambda _: None, optimizer)
                return result

            if closure is not None:
                return original(looked_at)
            self._before_update(lambda _: None, optimizer)
            return original(None)

        return self._optimizer_step(step, optimizer, closure)

    def _before_update(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        if self._engine.arrive(optimizer):
            raise Enough
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._is_inside = False
        if len(self._engine.losses) < len(self._scene.batches):
            return result
        self._engine.look_after(updated=self._scene.states is not None)
        raise Enough


@contextmanager
def _an_optimizer(scene: Scene) -> Iterator[None]:
    """One that makes no update, for a module whose own code has none: the run gave it one, as LightningCLI does.

    Raises:
        RebuildError: the update is to be made.
    """
    module, name = scene.module, "configure_optimizers"
    if not is_inherited(module, name) or name in vars(module):
        yield
        return
    if scene.states is not None:
        raise RebuildError(
            f"the step's update is to be made, and {type(module).__qualname__} has no configure_optimizers of its own: "
            "the run gave it one; build the module with it in the hook pytest_nancapture_module of a conftest.py"
        )
    idle = partial(lambda module: torch.optim.SGD(module.parameters(), lr=0.0), module)
    vars(module)[name] = idle
    try:
        yield
    finally:
        del vars(module)[name]


@contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    """Lightning makes the replay's device the current one; put back what was."""
    if device.type == "cpu":
        yield
        return
    before = torch.accelerator.current_device_index()
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


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
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            player.give_data(trainer)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            player.on_train_start(trainer)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            player.on_exception()

    return Replay()
