"""Run the window's step again in place, at loss scale 1, on this rank alone: does the fault come back?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pytest_nancapture.bundle.names import buffers, unique_parameters
from pytest_nancapture.capture.check import all_finite, is_finite
from pytest_nancapture.capture.finding import Finding, look
from pytest_nancapture.capture.instant import KeptBatch, Window
from pytest_nancapture.capture.preserve import preserved


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rerun saw.

    Attributes:
        finding: at the optimizer step that was guilty in training.
        guilty: position in the window of the first micro-batch after which something was not finite; None if none was.
        dropped: gradients were not finite after backward, but the user's own hooks had mended them before the update.
    """

    finding: Finding
    guilty: int | None
    dropped: bool

    @property
    def failed(self) -> bool:
        """Whether the fault came back."""
        return bool(self.finding.found_in) and not self.dropped


@dataclass
class Rerun:
    """One rerun; while it lasts the watch hands it every backward pass and optimizer step.

    Attributes:
        target: which optimizer step of the window is the guilty one, counted from 0.
        hook: the module's own ``on_before_optimizer_step``.
    """

    trainer: Any
    module: Any
    window: Window
    optimizer: Any
    target: int
    hook: Callable[[Any], Any]
    losses: list[list[Tensor]] = field(default_factory=list)
    raw_bad: bool = False
    guilty: int | None = None
    steps: int = 0
    finding: Finding | None = None

    def run(self) -> Outcome:
        """Replay every micro-batch from the instant, and put everything back.

        Raises:
            Exception: whatever the user's step raises.
        """
        with preserved(self.trainer, self.module, updates=self.target > 0), self._quiet(), self._unscaled():
            self.window.restore_tensors(self.module)
            for batch in self.window.batches:
                self._micro_batch(batch)
            if self.finding is None:
                self.judge()
        assert self.finding is not None
        dropped = self.raw_bad and not self.finding.gradients.nonfinite and not self.finding.buffers
        return Outcome(finding=self.finding, guilty=self.guilty, dropped=dropped)

    def judge(self) -> None:
        """Look at what the guilty optimizer step is about to use."""
        if self.module.automatic_optimization:
            self.hook(self.optimizer)
        self.finding = look(self.module, self.losses, parameters_of(self.optimizer), dict(buffers(self.module)))
        if self.finding.found_in and self.guilty is None:
            self.guilty = len(self.losses) - 1

    def _micro_batch(self, kept: KeptBatch) -> None:
        trainer, module = self.trainer, self.module
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.current.ready = kept.batch_idx + 1
        batch = kept.fresh()
        self.losses.append([])
        kept.rng.restore()
        vars(module)["on_train_batch_start"].__wrapped__(batch, kept.batch_idx)
        arguments: Mapping[str, Any] = loop._build_kwargs(OrderedDict(), batch, kept.batch_idx)
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*arguments.values())
        if module.automatic_optimization:
            self._backward(output.get("loss") if isinstance(output, Mapping) else output)
        if self.guilty is None and not self._finite():
            self.guilty = len(self.losses) - 1

    def _backward(self, loss: Tensor | None) -> None:
        if loss is None:
            return
        loss = loss / self.trainer.accumulate_grad_batches
        self.losses[-1].append(loss)
        self.module.backward(loss)
        self.raw_bad = self.raw_bad or not all_finite(gradients_of(self.module))
        self.module.on_after_backward()

    def _finite(self) -> bool:
        tensors = [*gradients_of(self.module), *(buffer for _, buffer in buffers(self.module))]
        return all(map(is_finite, self.losses[-1])) and all_finite(tensors)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Nothing is logged or profiled twice; ``preserved`` takes the stand-ins off again."""
        vars(self.module).update(log=_ignore, log_dict=_ignore)
        self.trainer.profiler = _pass_through(self.trainer.profiler)
        yield

    @contextmanager
    def _unscaled(self) -> Iterator[None]:
        precision = self.trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)
        if scaler is not None:
            precision.scaler = None
        try:
            yield
        finally:
            if scaler is not None:
                precision.scaler = scaler


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(module: Any) -> list[Tensor]:
    """All gradients that there are."""
    return [parameter.grad for _, parameter in unique_parameters(module) if parameter.grad is not None]


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log``."""


def _pass_through(profiler: Any) -> Any:
    """A profiler that does nothing, from the same Lightning as `profiler`."""
    import importlib

    package = next(kind.__module__ for kind in type(profiler).__mro__ if kind.__name__ == "Profiler")
    return importlib.import_module(package.rpartition(".")[0]).PassThroughProfiler()
