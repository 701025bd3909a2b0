"""Run the window's step again in place, at loss scale 1, on this rank alone: does the fault come back?"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
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


class _Arrived(Exception):  # noqa: N818, no error: it leaves the optimizer's own loop
    """The evaluation to judge was reached."""


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
    last_loss: Tensor | None = None

    def run(self) -> Outcome:
        """Replay every micro-batch from the instant, and put everything back.

        Raises:
            Exception: whatever the user's step raises.
        """
        with preserved(self.trainer, self.module, updates=self.target > 0), self._quiet(), self._unscaled():
            self.window.restore_tensors(self.module)
            self.window.restore_attributes(self.module)
            for position, state in self.window.states.items():
                self.trainer.optimizers[position].load_state_dict(state)
            if self.window.reevaluates and self.target:
                self._reevaluate()
            else:
                for batch in self.window.batches:
                    self._micro_batch(batch)
            if self.finding is None:
                self.judge()
        assert self.finding is not None
        dropped = self.raw_bad and not self.finding.gradients.nonfinite and not self.finding.buffers
        return Outcome(finding=self.finding, guilty=self.guilty, dropped=dropped)

    def arrive(self) -> bool:
        """An optimizer is about to step; True where this is the step to judge, and it must not be made."""
        self.steps += 1
        if self.steps <= self.target:
            for losses in self.losses:
                losses.clear()
            return False
        self.judge()
        return True

    def _reevaluate(self) -> None:
        """Let the optimizer evaluate its closure until the evaluation to judge."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            self.losses.clear()
            self._micro_batch(self.window.batches[-1])
            if self.arrive():
                raise _Arrived
            assert self.last_loss is not None
            return self.last_loss

        with suppress(_Arrived):
            self.optimizer.step(closure)

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
        self.last_loss = loss
        note = self.losses[-1]
        if loss.requires_grad:
            loss.register_hook(lambda _: note.append(loss.detach()))
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
        for submodule in self.module.modules():
            if isinstance(submodule, torch.nn.SyncBatchNorm):
                vars(submodule)["forward"] = partial(_local_batch_norm, submodule)
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


def _local_batch_norm(module: torch.nn.SyncBatchNorm, value: Tensor) -> Tensor:
    """SyncBatchNorm without the other ranks, which may not be rerunning."""
    return torch.nn.modules.batchnorm._BatchNorm.forward(module, value)


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``self.log``."""


def _pass_through(profiler: Any) -> Any:
    """A profiler that does nothing, from the same Lightning as `profiler`."""
    import importlib

    package = next(kind.__module__ for kind in type(profiler).__mro__ if kind.__name__ == "Profiler")
    return importlib.import_module(package.rpartition(".")[0]).PassThroughProfiler()
