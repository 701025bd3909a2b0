"""Puts wrappers around what Lightning calls, and hands the watch each moment of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.watch import DropStep, Settings, Watch
from pytest_nancapture.loops.lightning.iterators import Told, takes_iterator
from pytest_nancapture.loops.lightning.run import LightningRun, callbacks_hooks_in_steps, makes_batches
from pytest_nancapture.loops.lightning.wrappers import Wraps, last_hook

_AHEAD = (
    "nancapture: the step takes batches from dataloader_iter ahead of the step that uses them (%d before, now %d): of "
    "those that it keeps from an earlier step a bundle holds what the module's own attributes hold, and nothing else"
)

log = logging.getLogger("pytest_nancapture")


class LightningWatch:
    """Watches one call of ``Trainer.fit``.

    Lightning comes by in this order: the instant (once a micro-batch), backward passes, the optimizer step's closure
    and in it ``on_before_optimizer_step``, the end of the micro-batch.
    """

    def __init__(self, trainer: Any, module: Any, recipe: Recipe, settings: Settings) -> None:
        self._trainer = trainer
        self._module = module
        self._wraps = Wraps()
        self._is_inside = self._is_in_hook = False
        self._most_fetched = 0
        self._has_warned = False
        self._run = LightningRun(trainer, module, self._wraps)
        self.watch = Watch(self._run, recipe, settings)

    def begin(self) -> None:
        """Put the wrappers in place."""
        put, strategy = self._wraps.put, self._trainer.strategy
        put(self._module, "on_train_batch_start", self._on_train_batch_start)
        if takes_iterator(self._trainer):
            put(self._module, "training_step", self._training_step)
        elif makes_batches(self._trainer, self._module):
            put(self._module, "on_after_batch_transfer", self._on_after_batch_transfer)
        put(self._module, last_hook(self._module), self._before_update)
        put(self._module, "on_train_batch_end", self._on_train_batch_end)
        put(strategy, "backward", self._backward)
        put(strategy, "optimizer_step", self._optimizer_step)
        if self.watch.looks_may_wait:
            put(self._module, "optimizer_zero_grad", self._zero_grad)
        for callback, hook in callbacks_hooks_in_steps(self._trainer):
            put(callback, hook, self._callbacks_hook)
        if not self._module.automatic_optimization:
            self._wraps.put_on_raw_steps(strategy, self._trainer.optimizers, self._raw_step)

    def raised(self, error: BaseException) -> None:
        """What has ended the run: was it raised by the step that is under way?"""
        if self._is_inside or self._is_in_hook:
            self.watch.raised(error, in_hook=self._is_in_hook)

    def end(self) -> None:
        """Take the wrappers off and let go of everything taken."""
        self._wraps.take_off()
        self.watch.end()

    # In the order in which Lightning comes by.

    def _on_after_batch_transfer(self, original: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        if self._is_inside or not self._trainer.training:  # the step's own call, or a validation's batch
            return original(batch, *rest)
        self.watch.before_hook(batch, self._number)
        self._is_in_hook = True
        made = original(batch, *rest)
        self._is_in_hook = False
        self.watch.after_hook(made)
        return made

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        if takes_iterator(self._trainer):  # what Lightning has to give is the batch of the step before
            guard = self.watch.enter_awaiting(self._number - 1)
        else:
            guard = self.watch.enter(batch, batch_idx)
        self._is_inside = True
        with guard or nullcontext():
            response = original(batch, batch_idx, *rest)
        if response == -1:
            self._is_inside = False
            self.watch.pass_over()
        return response

    def _training_step(self, original: Callable[..., Any], iterator: Any) -> Any:
        told = Told(iterator, self.watch.fetched, self.watch.exhausted)
        before = iterator.fetched
        try:
            return original(told)
        except StopIteration:
            self._is_inside = False
            self.watch.pass_over()
            raise
        finally:
            if iterator.fetched - before != told.count:
                self.watch.lacks_batch("the step took a batch past the iterator that it is given")
            self._look_ahead(told)

    def _look_ahead(self, told: Told) -> None:
        """Say once that batches are used in another step than the one that took them."""
        if told.count < self._most_fetched and not (told.is_exhausted or self._has_warned):
            self._has_warned = True
            log.warning(_AHEAD, self._most_fetched, told.count)
        self._most_fetched = max(self._most_fetched, told.count)

    @property
    def _number(self) -> int:
        """How many micro-batches of the epoch Lightning has begun."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _callbacks_hook(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.watch.others_code():
            return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.watch.backward(loss)
        return original(loss, *args, **kwargs)

    def _optimizer_step(
        self, original: Callable[..., Any], optimizer: Any, closure: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def evaluated() -> Any:
            self.watch.evaluate()
            return closure()

        if self.watch.is_over:
            return None
        self.watch.begin_update()
        try:
            result = original(optimizer, evaluated, *args, **kwargs)
        except DropStep:
            self._run.forget_scaling()
            return None
        finally:
            self.watch.after_update(optimizer)
        self.watch.end_update(optimizer)
        return result

    def _raw_step(self, original: Callable[..., Any], optimizer: Any, closure: Any) -> Any:
        """Torch's own, past Lightning, and so past its hooks."""

        def step(optimizer: Any, evaluated: Any) -> Any:
            def looked_at() -> Any:
                result = evaluated()
                self.watch.before_update(optimizer)
                return result

            if closure is not None:
                return original(looked_at)
            self.watch.before_update(optimizer)
            return original(None)

        return self._optimizer_step(step, optimizer, closure)

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.watch.settle_look()
        return original(*args, **kwargs)

    def _before_update(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self.watch.before_update(optimizer)
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._is_inside = False
        self.watch.leave()
        return result
