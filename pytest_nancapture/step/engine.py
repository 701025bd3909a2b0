"""Takes a window from its instant, micro-batch by micro-batch: looks, follows, and says where to stop.

Whoever plays the step (a rerun in place, a replay from a bundle) calls, for each micro-batch, :meth:`Engine.open` at
its instant, :meth:`Engine.backward` as its backward passes begin, :meth:`Engine.arrive` when an optimizer has its
gradients, and :meth:`Engine.close` at its end; :meth:`Engine.begin_update`, :meth:`Engine.evaluate` and
:meth:`Engine.end_update` around optimizer steps that evaluate a closure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.tensors.kinds import bare, stored_values
from pytest_nancapture.bundle.tensors.names import buffers, unique_parameters
from pytest_nancapture.step.check import all_finite, fingerprint, is_finite, is_zero
from pytest_nancapture.step.finding import Finding, look, note_backward
from pytest_nancapture.step.state.inventory import can_be_kept
from pytest_nancapture.step.state.optimizers import bad_numbers, parameters_of


class Enough(BaseException):
    """Ends the play of a window once everything was seen; no user code may catch it."""


class Tracer(Protocol):
    """Follows the operations of a step.

    Attributes:
        is_early: what runs now makes the batch that the step is given.
        in_update: what runs now is an optimizer's own code, and none of the step's.
    """

    is_early: bool
    in_update: bool

    def expect(self, batch: Mapping[str, Tensor]) -> None:
        """These tensors are given to the step, by name."""

    def start(self) -> None:
        """Follow from here on; again, once the module was brought to the instant once more."""

    def paused(self) -> AbstractContextManager[None]:
        """What runs meanwhile is no part of the step."""

    def end(self) -> None:
        """The step has raised: what runs from here on is no part of it."""


@dataclass(kw_only=True)
class Engine:
    """One run of a window.

    Attributes:
        module: that the step is of.
        restore: brings the module to the instant of the window.
        target: which optimizer step of the window was the guilty one, counted from 0.
        judges_all: whether to look at every update up to the guilty one, and to stop at the first fault; else only the
            guilty one is looked at.
        goes_on: whether the guilty update is made, since the fault shows only after it.
        trace: follows the operations, if a culprit is wanted.
        losses: of each micro-batch so far, those that were backpropagated.
        steps: how many times an optimizer was about to step.
        finding: of the last look; None before the first.
        guilty: the first micro-batch after which something was not finite, where :meth:`close` was called.
        raw: names of the parameters whose gradients were not finite right after a backward, before any hook.
        draws: whether the step took random numbers from torch.
        bad_numbers: hyperparameters that were not finite when the last optimizer was about to step, a text each.
        updated: names of the parameters that the guilty update, or one after it, was made of.
    """

    module: nn.Module
    restore: Callable[[], None]
    target: int = 0
    judges_all: bool = False
    goes_on: bool = False
    trace: Tracer | None = None
    losses: list[list[Tensor]] = field(default_factory=list)
    steps: int = 0
    finding: Finding | None = None
    guilty: int | None = None
    raw: set[str] = field(default_factory=set)
    draws: bool = False
    bad_numbers: tuple[str, ...] = ()
    updated: set[str] = field(default_factory=set)
    _has_begun: bool = False
    _is_early: bool = False
    _tolerated: frozenset[str] = frozenset()
    _good_weights: frozenset[str] = frozenset()
    _evaluations: int = 0
    _before_evaluation: int = 0
    _drawn_from: Mapping[str, Tensor] = field(default_factory=dict)
    _taught: list[set[str]] = field(default_factory=list)
    _bits: Mapping[str, int] = field(default_factory=dict)
    _has_noted: bool = False

    def open_early(self, rng: RandomStates, batch: Mapping[str, Tensor]) -> None:
        """The module's own hook is about to make the next micro-batch; for the first it sees the module of the instant.

        Args:
            rng: the random states as the hook is entered.
            batch: its tensors by name, before the hook.
        """
        self._is_early = True
        with self.unseen():
            if not self._has_begun:
                self.restore()
        self.drawn(rng)
        if self.trace is not None:
            self.trace.is_early = True
            self.trace.expect(batch)
            if not self._has_begun:
                self.trace.start()

    def drawn(self, rng: RandomStates) -> None:
        """Random states are these from here on, in the middle of the step: what gave it a batch has drawn."""
        with self.unseen():
            self._note_draws()
            rng.restore()
            self._drawn_from = RandomStates.take().generators

    def fetch(self, rng: RandomStates, batch: Mapping[str, Tensor]) -> None:
        """The step takes a batch itself.

        Args:
            rng: the random states right after that.
            batch: its tensors by name.
        """
        self.drawn(rng)
        if self.trace is not None:
            self.trace.expect(batch)

    def open(self, rng: RandomStates, batch: Mapping[str, Tensor]) -> None:
        """The instant of the next micro-batch; at the first, the module is brought there.

        Args:
            rng: the random states of that instant.
            batch: its tensors by name.
        """
        is_first, self._has_begun = not self._has_begun, True
        with self.unseen():
            if is_first:
                self.restore()
                now = (pair for pair in buffers(self.module) if can_be_kept(pair[1]))
                self._tolerated = frozenset(name for name, buffer in now if not is_finite(buffer))
            self._note_taught()
            self.losses.append([])
            self._taught[len(self.losses) - 1 :] = [set()]
            self._bits = {} if is_first else {name: _bits_of(grad) for name, grad in self._gradients()}
            self._has_noted = False
        self.drawn(rng)
        if self.trace is not None:
            if not self._is_early:
                self.trace.expect(batch)
            self.trace.is_early = False
            if is_first:
                self.trace.start()
        self._is_early = False

    def backward(self, loss: Tensor) -> None:
        """A backward pass is about to begin at `loss`."""
        note_backward(loss, self.losses[-1])

    def after_backward(self) -> None:
        """Gradients are there, and no hook has seen them yet."""
        with self.unseen():
            if not all_finite(gradients_of(self.module)):
                self.raw.update(name for name, gradient in self._gradients() if not is_finite(gradient))
            self._has_noted = False
            self._note_taught()

    @property
    def raw_bad(self) -> bool:
        """Whether any gradients were not finite right after backward."""
        return bool(self.raw)

    @property
    def is_due(self) -> bool:
        """Whether the next optimizer step is the guilty one."""
        return self.steps >= self.target

    def arrive(self, optimizer: torch.optim.Optimizer) -> bool:
        """An optimizer is about to step; True where enough was seen, and its update must not be made."""
        is_due = self.is_due
        self.steps += 1
        if is_due or self.judges_all:
            self.bad_numbers = bad_numbers([optimizer])
            if self.look(parameters_of(optimizer)) or (is_due and not self.goes_on):
                return True
        else:
            for losses in self.losses:
                losses.clear()
        if self.steps == 1:
            with self.unseen():
                self._good_weights = self._finite_weights()
        self._in_update(True)
        return False

    def begin_update(self) -> None:
        """An optimizer step begins; it may evaluate its closure once or several times."""
        self._evaluations = 0

    def evaluate(self) -> None:
        """An optimizer evaluates its closure: what an evaluation before gave is no part of the loss any more."""
        self._in_update(False)
        if not self._evaluations:
            self._before_evaluation = len(self.losses[-1])
        del self.losses[-1][self._before_evaluation :]
        self._evaluations += 1

    def end_update(self) -> None:
        """The optimizer step is over."""
        self._in_update(False)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's own step is over."""
        if self.steps > self.target:
            ours = {id(parameter) for parameter in parameters_of(optimizer) if parameter.grad is not None}
            self.updated.update(name for name, p in unique_parameters(self.module) if id(p) in ours)

    def close(self) -> None:
        """The micro-batch is over: was it the one that went wrong?"""
        if self.guilty is None:
            with self.unseen():
                tensors = [*gradients_of(self.module), *self._buffers().values()]
                is_good = all(map(is_finite, self.losses[-1])) and all_finite(tensors)
            if not is_good:
                self.guilty = len(self.losses) - 1

    def look(self, optimized: Iterable[Tensor]) -> bool:
        """Look at losses, buffers, and the gradients of these parameters; whether something is not finite."""
        with self.unseen():
            self._note_taught()
            found = look(self.module, self.losses, optimized, self._buffers())
            is_moved = found.found_in and self.steps > 1 and not self._good_weights <= self._finite_weights()
            taught = tuple(map(frozenset, self._taught))
            self.finding = dataclasses.replace(found, taught=taught, by_update=bool(is_moved))
            self._note_draws()
        return bool(self.finding.found_in)

    def raised(self) -> None:
        """The step has raised."""
        if self.trace is not None:
            self.trace.end()

    def look_after(self, *, updated: bool) -> None:
        """At the window's end, look also at what hooks have written since and, if `updated`, at the weights."""
        before = self.finding
        self.look(())
        assert self.finding is not None
        if before is None:
            return
        weights: tuple[str, ...] = ()
        if updated:
            with self.unseen():
                weights = tuple(name for name, weight in unique_parameters(self.module) if not is_finite(weight))
        self.finding = dataclasses.replace(
            self.finding, gradients=before.gradients, zeros=before.zeros, weights=weights
        )

    def unseen(self) -> AbstractContextManager[None]:
        """What is done meanwhile is no part of the step."""
        return self.trace.paused() if self.trace is not None else nullcontext()

    def _note_taught(self) -> None:
        """To which gradients the micro-batch has added something: right after backward, or else when it is over."""
        if not self._has_noted and self._taught:
            self._has_noted = True
            self._taught[-1].update(
                name
                for name, gradient in self._gradients()
                if not is_zero(gradient) and self._bits.get(name) != _bits_of(gradient)
            )

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in unique_parameters(self.module):
            if parameter.grad is not None:
                yield name, parameter.grad

    def _buffers(self) -> dict[str, Tensor]:
        """Those that were finite at the instant."""
        return {name: buffer for name, buffer in buffers(self.module) if name not in self._tolerated}

    def _finite_weights(self) -> frozenset[str]:
        return frozenset(name for name, weight in unique_parameters(self.module) if _is_good(weight))

    def _in_update(self, is_in: bool) -> None:
        if self.trace is not None:
            self.trace.in_update = is_in

    def _note_draws(self) -> None:
        if not self.draws and self._drawn_from:
            now = RandomStates.take().generators
            self.draws = any(not torch.equal(state, now[name]) for name, state in self._drawn_from.items())


def _is_good(weight: Tensor) -> bool:
    return is_lazy(weight) or not can_be_kept(weight) or is_finite(weight)


def _bits_of(gradient: Tensor) -> int:
    """By which a gradient is known to be another one; -0 is 0."""
    return int(fingerprint(stored_values(bare(gradient)) + 0.0))


def gradients_of(module: nn.Module) -> list[Tensor]:
    """All gradients that there are."""
    return [parameter.grad for _, parameter in unique_parameters(module) if parameter.grad is not None]
