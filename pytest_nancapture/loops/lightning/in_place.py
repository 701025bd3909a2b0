"""A window's step again, in the live Trainer and on this rank alone: what Lightning does around the user's step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from pytest_nancapture.loops.lightning.iterators import Fetched, Played
from pytest_nancapture.loops.lightning.silence import silent_logger
from pytest_nancapture.loops.lightning.wrappers import is_inherited, last_hook
from pytest_nancapture.step.alone import alone
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.state.batch import TakenBatch
from pytest_nancapture.step.state.window import Window


@contextmanager
def quiet(trainer: Any, module: Any, window: Window, package: str) -> Iterator[None]:
    """Counters as they were at the instant, this rank alone; nothing told, logged, profiled or scaled.

    The Trainer is put back.

    What is put into the module's attributes is left to whoever puts these back.
    """
    restore = _trainers_own(trainer)
    loop, step = trainer.fit_loop.epoch_loop, window.counters["global_step"]
    loop.manual_optimization.optim_step_progress.total.completed = step
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    if "_param_requires_grad_state" in vars(module):  # of toggle_optimizer
        vars(module)["_param_requires_grad_state"] = {}
    vars(module).update(log=_ignore, log_dict=_ignore)
    trainer.callbacks = []
    trainer.profiler = import_module(f"{package}.profilers").PassThroughProfiler()
    if trainer.loggers:
        trainer.loggers = [silent_logger(package, str(trainer.default_root_dir))]
    if "_model_averager" in vars(trainer.strategy):  # of several ranks' weights, after every few updates
        trainer.strategy._model_averager = None
    modules = dict.fromkeys([*module.modules(), *trainer.strategy.model.modules()])
    try:
        with _unscaled(trainer.precision_plugin), alone(modules):
            yield
    finally:
        restore()


class InPlace:
    """One run of the window's micro-batches."""

    def __init__(
        self,
        trainer: Any,
        module: Any,
        window: Window,
        engine: Engine,
        optimizer: Any,
        original: Callable[[str], Callable[..., Any]],
    ) -> None:
        """See :meth:`pytest_nancapture.step.run.Run.play`.

        Args:
            original: gives the module's own hook by name, without the watch's wrapper around it.
        """
        self._trainer = trainer
        self._module = module
        self._window = window
        self._engine = engine
        self._optimizer = optimizer
        self._original = original
        self._last_loss: Tensor | None = None
        self._iterators: dict[int, Played] = {}

    def run(self) -> None:
        """From the first micro-batch to the look that comes before the guilty update."""
        engine, module = self._engine, self._module
        vars(module)["on_after_backward"] = partial(self._on_after_backward, module.on_after_backward)
        *others, last = self._window.batches
        for batch in others:
            self._evaluate(batch, self._enter(batch))
            engine.close()
        entered = self._enter(last)
        if module.automatic_optimization and (
            engine.target or engine.goes_on or not is_inherited(module, "optimizer_step")
        ):
            self._step(last, entered)
        else:
            self._evaluate(last, entered)
        engine.close()
        if engine.finding is None and module.automatic_optimization:
            self._run_last_hooks()

    def _step(self, taken: TakenBatch, batch: Any) -> None:
        """Have the user's code and the optimizer make the step, since they move weights between evaluations."""
        trainer, module = self._trainer, self._module
        optimizer = next(o for o in trainer.strategy._lightning_optimizers if o.optimizer is self._optimizer)
        zeroes = taken.batch_idx % trainer.accumulate_grad_batches == 0
        evaluations = 0

        def closure() -> Tensor | None:
            nonlocal evaluations
            evaluations += 1
            self._last_loss = None
            self._evaluate(taken, batch, zeroes=zeroes and evaluations > 1)
            return self._last_loss

        module.optimizer_step(trainer.current_epoch, taken.batch_idx, optimizer, closure)

    def _run_last_hooks(self) -> None:
        """The module's own before the update; one of them has our wrapper around it."""
        module, trainer = self._module, self._trainer
        last = last_hook(module)
        original = self._original(last)
        if last == "on_before_optimizer_step":
            original(self._optimizer)
            return
        module.on_before_optimizer_step(self._optimizer)
        original(
            self._optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    def _enter(self, taken: TakenBatch) -> Any:
        """Come to the instant of a micro-batch; the batch as it was then."""
        trainer, engine, window = self._trainer, self._engine, self._window
        loop, position = trainer.fit_loop.epoch_loop, len(engine.losses)
        progress = loop.batch_progress
        progress.current.ready, progress.total.ready = taken.number, window.counters["total_batch_idx"] + position
        progress.is_last_batch = window.last_batch and taken is window.batches[-1]
        batch, tensors = self._batch(taken)
        if taken.hook is not None:
            engine.open_early(taken.hook, tensors)
            batch = self._original("on_after_batch_transfer")(batch, 0)
        progress.current.ready += 1
        progress.total.ready += 1
        engine.open(taken.rng, tensors)
        self._original("on_train_batch_start")(batch, taken.batch_idx)
        return batch

    def _evaluate(self, taken: TakenBatch, batch: Any, *, zeroes: bool = False) -> None:
        """The user's step, and its backward pass where Lightning would make it.

        Args:
            zeroes: drop the gradients in between, as Lightning does.
        """
        trainer, module = self._trainer, self._module
        loop = trainer.fit_loop.epoch_loop
        with trainer.precision_plugin.train_step_context():
            if taken.fetches is not None:
                output = self._original("training_step")(self._iterator(taken))
            else:
                arguments: Mapping[str, Any] = loop._build_kwargs(OrderedDict(), batch, taken.batch_idx)
                output = module.training_step(*arguments.values())
        if module.automatic_optimization:
            if zeroes:
                module.on_before_zero_grad(self._optimizer)
                module.optimizer_zero_grad(trainer.current_epoch, taken.batch_idx, self._optimizer)
            self._backward(output.get("loss") if isinstance(output, Mapping) else output)

    def _batch(self, taken: TakenBatch) -> tuple[Any, Mapping[str, Tensor]]:
        """The batch and its tensors by name, that nobody else holds; none where the step takes it itself."""
        if taken.fetches is not None:
            return None, {}
        with self._engine.unseen():
            tensors = taken.copies()
            return taken.batch_of(tensors), tensors

    def _iterator(self, taken: TakenBatch) -> Played:
        """For all evaluations of a step, each of which goes on where the last one was."""
        if self._iterators.get(id(taken)) is None:
            original = self._trainer.fit_loop._data_fetcher.iterator_wrapper
            self._iterators[id(taken)] = Played(original, self._fetches(taken), is_end=taken.exhausted)
        return self._iterators[id(taken)]

    def _fetches(self, taken: TakenBatch) -> Iterator[Fetched]:
        for fetch in taken.fetches or ():
            with self._engine.unseen():
                tensors = fetch.copies()
                batch = fetch.batch_of(tensors)
            self._engine.fetch(fetch.rng, tensors)
            yield batch, fetch.batch_idx, fetch.dataloader_idx

    def _backward(self, loss: Tensor | None) -> None:
        if loss is None:
            return
        loss = loss / self._trainer.accumulate_grad_batches
        self._last_loss = loss.detach()
        self._engine.backward(loss)
        self._module.backward(loss)
        self._module.on_after_backward()

    def _on_after_backward(self, original: Callable[[], Any]) -> Any:
        self._engine.after_backward()
        return original()


def _trainers_own(trainer: Any) -> Callable[[], None]:
    """Keep what a rerun changes of the Trainer; the function returned puts it back."""
    loop = trainer.fit_loop.epoch_loop
    homes = [(loop, "batch_progress"), (loop.automatic_optimization, "optim_progress")]
    homes.append((loop.manual_optimization, "optim_step_progress"))
    saved = [(owner, name, copy.deepcopy(getattr(owner, name))) for owner, name in homes]
    others = [(trainer, name, getattr(trainer, name)) for name in ("profiler", "should_stop", "callbacks", "loggers")]
    fetcher = trainer.fit_loop._data_fetcher
    names = [name for name in ("_batch", "_batch_idx", "_dataloader_idx") if hasattr(fetcher, name)]
    others += [(fetcher, name, getattr(fetcher, name)) for name in names]
    strategy, ours = trainer.strategy, {"_model_averager", "_pl_static_graph_delay_done"}
    others += [(strategy, name, value) for name, value in vars(strategy).items() if name in ours]

    def restore() -> None:
        for owner, name, value in [*saved, *others]:
            setattr(owner, name, value)

    return restore


@contextmanager
def _unscaled(precision: Any) -> Iterator[None]:
    scaler = getattr(precision, "scaler", None)
    if scaler is not None:
        precision.scaler = None
    try:
        yield
    finally:
        if scaler is not None:
            precision.scaler = scaler


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log``."""
