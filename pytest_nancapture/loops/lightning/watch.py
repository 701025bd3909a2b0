"""Puts wrappers around what Lightning calls, and hands the watch each moment of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.watch import DropStep, Settings, Watch
from pytest_nancapture.loops.lightning.run import LightningRun
from pytest_nancapture.loops.lightning.wrappers import Wraps, last_hook


class LightningWatch:
    """Watches one call of ``Trainer.fit``.

    Lightning comes by in this order: the instant (once a micro-batch), backward passes, the optimizer step's closure
    and in it ``on_before_optimizer_step``, the end of the micro-batch.
    """

    def __init__(self, trainer: Any, module: Any, recipe: Recipe, settings: Settings) -> None:
        self._trainer = trainer
        self._module = module
        self._wraps = Wraps()
        self._run = LightningRun(trainer, module, self._wraps)
        self.watch = Watch(self._run, recipe, settings)

    def begin(self) -> None:
        """Put the wrappers in place."""
        put, strategy = self._wraps.put, self._trainer.strategy
        put(self._module, "on_train_batch_start", self._on_train_batch_start)
        put(self._module, last_hook(self._module), self._before_update)
        put(self._module, "on_train_batch_end", self._on_train_batch_end)
        put(strategy, "backward", self._backward)
        put(strategy, "optimizer_step", self._optimizer_step)
        if self.watch.looks_may_wait:
            put(self._module, "optimizer_zero_grad", self._zero_grad)
        if not self._module.automatic_optimization:
            self._wraps.put_on_raw_steps(strategy, self._trainer.optimizers, self._raw_step)

    def end(self) -> None:
        """Take the wrappers off and let go of everything taken."""
        self._wraps.take_off()
        self.watch.end()

    # In the order in which Lightning comes by.

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        with self.watch.enter(batch, batch_idx) or nullcontext():
            response = original(batch, batch_idx, *rest)
        if response == -1:
            self.watch.pass_over()
        return response

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
        self.watch.leave()
        return result
