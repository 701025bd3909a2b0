"""Run the window's step again in place, at loss scale 1, on this rank alone: does the fault come back?"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.names import buffers, unique_parameters
from pytest_nancapture.capture.environment import package_of
from pytest_nancapture.loops.lightning.silence import silent_logger
from pytest_nancapture.loops.lightning.wrappers import last_hook
from pytest_nancapture.step.buffers import not_finite
from pytest_nancapture.step.check import all_finite, is_finite
from pytest_nancapture.step.finding import Finding, look, note_backward, surfaces_in
from pytest_nancapture.step.state.instant import KeptBatch, Window
from pytest_nancapture.step.state.preserve import preserved

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit
    from pytest_nancapture.diagnose.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rerun saw.

    Attributes:
        finding: at the optimizer step that was guilty in training.
        guilty: position in the window of the first micro-batch after which something was not finite; None if none was.
        raw_bad: gradients were not finite right after backward, before any hook.
        seconds: how long it took.
        culprit: what is to blame, if the operations were followed.
    """

    finding: Finding
    guilty: int | None
    raw_bad: bool
    seconds: float
    culprit: Culprit | None = None

    @property
    def dropped(self) -> bool:
        """Whether the module's own hooks mended the gradients before the update."""
        return self.raw_bad and not self.finding.gradients.nonfinite and not self.finding.buffers

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
        original: gives the module's own hook by name, without the watch's wrapper around it.
        trace: follows the operations, if a culprit is wanted.
    """

    trainer: Any
    module: Any
    window: Window
    optimizer: Any
    target: int
    original: Callable[[str], Callable[..., Any]]
    trace: Trace | None = None
    losses: list[list[Tensor]] = field(default_factory=list)
    raw_bad: bool = False
    guilty: int | None = None
    steps: int = 0
    bad_before: frozenset[str] = frozenset()
    finding: Finding | None = None
    last_loss: Tensor | None = None

    def run(self) -> Outcome:
        """Replay every micro-batch from the instant, and put everything back.

        Raises:
            Exception: whatever the user's step raises.
        """
        start = time.perf_counter()
        self.bad_before = frozenset(not_finite(self.window.tensors))
        with preserved(self.trainer, self.module, updates=self.target > 0), self._quiet(), self._unscaled():
            loop, step = self.trainer.fit_loop.epoch_loop, self.window.counters["global_step"]
            loop.manual_optimization.optim_step_progress.total.completed = step
            loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
            self.window.restore_tensors(self.module)
            self.window.restore_flags(self.module)
            for position, state in self.window.states.items():
                # A copy: what is loaded becomes the optimizer's own, to write into.
                self.trainer.optimizers[position].load_state_dict(copy.deepcopy(state))
            with self._traced():
                self._steps()
            assert self.finding is not None
            culprit = self._blame(self.finding) if self.trace is not None else None
        seconds = time.perf_counter() - start
        return Outcome(finding=self.finding, guilty=self.guilty, raw_bad=self.raw_bad, seconds=seconds, culprit=culprit)

    def _steps(self) -> None:
        if self.window.reevaluates and self.target:
            self._reevaluate()
        else:
            for batch in self.window.batches:
                self._micro_batch(batch)
        if self.finding is None:
            self.judge()

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
            self._run_last_hooks()
        with self._unseen():
            self.finding = look(self.module, self.losses, parameters_of(self.optimizer), self._buffers())
        if self.finding.found_in and self.guilty is None:
            self.guilty = len(self.losses) - 1

    def _run_last_hooks(self) -> None:
        """The module's own before the update; one of them has our wrapper around it."""
        module, trainer = self.module, self.trainer
        last = last_hook(module)
        original = self.original(last)
        if last == "on_before_optimizer_step":
            original(self.optimizer)
            return
        module.on_before_optimizer_step(self.optimizer)
        original(
            self.optimizer,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
        )

    def _buffers(self) -> dict[str, Tensor]:
        """Those that were finite at the instant."""
        return {name: buffer for name, buffer in buffers(self.module) if name not in self.bad_before}

    def _micro_batch(self, kept: KeptBatch) -> None:
        trainer, module = self.trainer, self.module
        loop, position = trainer.fit_loop.epoch_loop, len(self.losses)
        loop.batch_progress.current.ready = kept.batch_idx + 1
        loop.batch_progress.total.ready = self.window.counters["total_batch_idx"] + position + 1
        loop.batch_progress.is_last_batch = self.window.last_batch and kept is self.window.batches[-1]
        with self._unseen():
            tensors = kept.copies()
            batch = kept.batch_of(tensors)
            self.losses.append([])
            kept.rng.restore()
        if self.trace is not None:
            self.trace.expect(tensors)
        self.original("on_train_batch_start")(batch, kept.batch_idx)
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
        note_backward(loss, self.losses[-1])
        self.module.backward(loss)
        self.module.on_after_backward()

    def _on_after_backward(self, original: Callable[[], Any]) -> Any:
        with self._unseen():
            self.raw_bad = self.raw_bad or not all_finite(gradients_of(self.module))
        return original()

    def _finite(self) -> bool:
        with self._unseen():
            tensors = [*gradients_of(self.module), *self._buffers().values()]
            return all(map(is_finite, self.losses[-1])) and all_finite(tensors)

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if self.trace is None:
            yield
            return
        from pytest_nancapture.diagnose.trace import traced

        with traced(self.trace):
            self.trace.start()
            yield

    def _unseen(self) -> AbstractContextManager[None]:
        """What the rerun does for itself is no part of the step."""
        return self.trace.paused() if self.trace is not None else nullcontext()

    def _blame(self, finding: Finding) -> Culprit | None:
        from pytest_nancapture.diagnose.blame import blame, symptoms

        assert self.trace is not None
        return blame(self.trace, symptoms(self.module, finding, self.losses), surfaces_in(finding))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Nothing is told, logged or profiled twice; ``preserved`` takes the stand-ins off again."""
        after_backward = partial(self._on_after_backward, self.module.on_after_backward)
        vars(self.module).update(log=_ignore, log_dict=_ignore, on_after_backward=after_backward)
        self.trainer.callbacks = []
        package = package_of(self.trainer)
        self.trainer.profiler = import_module(f"{package}.profilers").PassThroughProfiler()
        if self.trainer.loggers:
            self.trainer.loggers = [silent_logger(package, str(self.trainer.default_root_dir))]
        for submodule in self.module.modules():
            if isinstance(submodule, torch.nn.SyncBatchNorm):
                vars(submodule)["forward"] = partial(_local_batch_norm, submodule)
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
