"""The replay's own callback: brings the module to the captured instant and looks at what the step makes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.manifest import Manifest
from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.tensors.names import buffers, unique_parameters
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.loops.lightning.wrappers import Wraps, last_hook
from pytest_nancapture.replay.rebuild import load_tensors, set_state
from pytest_nancapture.step.check import is_finite
from pytest_nancapture.step.finding import Finding, look, note_backward

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.trace import Trace


class Finished(BaseException):
    """Ends the replay's fit once everything was seen; no user code may catch it."""


@dataclass
class Player:
    """What happens at which moment of the replay, and what was seen.

    Attributes:
        tensors: captured weights and buffers.
        states: captured optimizer states; the update is made only where there are any.
        trace: watches the operations from the instant on, if a culprit is wanted.
        losses: of each micro-batch, those that were backpropagated.
        wraps: those in place, to be taken off after the fit.
        finding: at the guilty optimizer step, or at the window's end.
        draws: whether the step took random numbers from torch.
    """

    manifest: Manifest
    module: Any
    tensors: Mapping[str, Tensor]
    rng: Sequence[RandomStates]
    decoder: Decoder
    states: Sequence[Any] | None = None
    losses: list[list[Tensor]] = field(default_factory=list)
    finding: Finding | None = None
    trace: Trace | None = None
    wraps: Wraps = field(default_factory=Wraps)
    draws: bool = False
    _steps: int = 0
    _bad_before: frozenset[str] = frozenset()
    _instant: Mapping[str, Tensor] = field(default_factory=dict)

    def on_train_start(self, trainer: Any) -> None:
        """Put the wrappers in place."""
        if self.manifest.trainer.num_training_batches is None:
            trainer.fit_loop.max_batches = float("inf")
        wraps, strategy = self.wraps, trainer.strategy
        wraps.put(self.module, "on_train_batch_start", self._on_train_batch_start)
        wraps.put(self.module, last_hook(self.module), self._before_update)
        wraps.put(self.module, "on_train_batch_end", self._on_train_batch_end)
        wraps.put(strategy, "backward", self._backward)
        if not self.module.automatic_optimization:
            wraps.put_on_raw_steps(strategy, trainer.optimizers, self._before_raw_step)

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        position = len(self.losses)
        with self._unseen():
            if position == 0:
                self._bring_to_the_instant()
            self._note_draws()
            self.losses.append([])
            self.rng[position].restore(self.module.device)
            self._instant = RandomStates.take().generators
            if position + 1 == len(self.manifest.batch.window):
                # Lightning counts the batches of this run, and there are none before the window's.
                progress = self.module.trainer.fit_loop.epoch_loop.batch_progress
                progress.is_last_batch = self.manifest.trainer.last_batch
        if position == 0 and self.trace is not None:
            # Stopped by whoever runs the fit, since the step goes through many of Lightning's calls.
            self.trace.start()
        return original(batch, batch_idx, *rest)

    def _bring_to_the_instant(self) -> None:
        record = self.manifest.module
        initial = record.initial.all_names() if record.initial is not None else ()
        load_tensors(self.module, self.tensors, record.resized, initial)
        set_state(self.module, self.manifest.module, self.decoder)
        self._bad_before = frozenset(name for name, buffer in buffers(self.module) if not is_finite(buffer))
        for _, parameter in unique_parameters(self.module):
            parameter.grad = None
        if self.states is not None:
            self._load_states(self.states)

    def _load_states(self, states: Sequence[Any]) -> None:
        """Captured states, with today's hyperparameters where those had not changed since fit began."""
        assert self.manifest.optimizer is not None
        constant = self.manifest.optimizer.constant
        for position, (optimizer, state) in enumerate(zip(self.module.trainer.optimizers, states, strict=True)):
            today = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            names = constant[position] if position < len(constant) else ()
            for group, before, unchanged in zip(optimizer.param_groups, today, names, strict=False):
                group.update((name, before[name]) for name in unchanged if name in before)

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        note_backward(loss, self.losses[-1])
        return original(loss, *args, **kwargs)

    def _before_raw_step(self, optimizer: Any, has_closure: bool) -> None:
        if not has_closure:
            self._before_update(lambda _: None, optimizer)

    def _before_update(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        self._steps += 1
        self._look([parameter for group in optimizer.param_groups for parameter in group["params"]])
        assert self.finding is not None
        last = self._steps > self.manifest.trainer.guilty_step
        if self.finding.found_in or (last and self.states is None and not self._ends_later):
            raise Finished
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if len(self.losses) < len(self.manifest.batch.window):
            return result
        before, self.finding = self.finding, None
        self._look(())
        if before is not None:
            self._take_over_gradients(before)
        raise Finished

    def _take_over_gradients(self, before: Finding) -> None:
        assert self.finding is not None
        weights: tuple[str, ...] = ()
        if self.states is not None:
            with self._unseen():
                weights = tuple(name for name, parameter in unique_parameters(self.module) if not is_finite(parameter))
        self.finding = dataclasses.replace(self.finding, gradients=before.gradients, weights=weights)

    @property
    def _ends_later(self) -> bool:
        """Whether the fault showed only after the update, in buffers that hooks write or in the weights."""
        found_in = self.manifest.fault.found_in
        return not {"loss", "gradients"} & set(found_in)

    def _look(self, optimized: Sequence[Tensor]) -> None:
        with self._unseen():
            written = {name: buffer for name, buffer in buffers(self.module) if name not in self._bad_before}
            self.finding = look(self.module, self.losses, optimized, written)
            self._note_draws()

    def _note_draws(self) -> None:
        now = RandomStates.take().generators
        self.draws |= any(not torch.equal(state, now[name]) for name, state in self._instant.items())

    def _unseen(self) -> AbstractContextManager[None]:
        """What the replay does for itself is no part of the step."""
        return self.trace.paused() if self.trace is not None else nullcontext()
