"""Takes what a bundle would need: each window from its instant on, and weights from before something moves them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.numerics import settings_of_a_context
from pytest_nancapture.bundle.tensors.names import parameters
from pytest_nancapture.errors import UnwritableValueError
from pytest_nancapture.step.check import all_finite, fingerprint, is_finite
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.attributes import AttributeWatch
from pytest_nancapture.step.state.batch import Early, TakenBatch
from pytest_nancapture.step.state.inventory import Inventory, can_be_kept, is_rare
from pytest_nancapture.step.state.optimizers import (
    OptimizerState,
    bad_states,
    evaluates_once,
    hyperparameters_of,
    may_evaluate_again,
    parameters_of,
    position_of,
    with_wrapped,
)
from pytest_nancapture.step.state.tensors import CopyOnWrite, Pool, Snapshots
from pytest_nancapture.step.state.untouched import Untouched
from pytest_nancapture.step.state.window import Weights, Window

_FINGERPRINTED = 2
"""So many first windows take fingerprints of all weights: a write through ``.data`` leaves the version as it was."""


class Keeper:
    """Opens windows and fills them.

    A step must not cost a copy of the weights, so they are taken only where they may move between the instant and the
    look at the gradients: under code that runs before the forward (copied as they are written), in the step itself (a
    teacher's average, a layer that initialises itself; kept from the first window where no update has touched them,
    else found in the first windows and by version counters, then taken before each step), and in updates that further
    looks of the same step follow (taken before the update), be it that the optimizer evaluates its closure again.

    Attributes:
        window: the one that is open, or closed by the last optimizer step; None before the first.
        attributes: tells which of them have changed.
        hyperparameters: of each optimizer's parameter groups, when fit began.
        health: what was seen of the weights.
    """

    def __init__(self, run: Run, inventory: Inventory, *, has_history: bool = False) -> None:
        """`has_history`: :meth:`take_all` is called before every update."""
        self.window: Window | None = None
        self.attributes = AttributeWatch(run)
        self.hyperparameters = hyperparameters_of(run.optimizers)
        self.health = Health()
        self._has_history = has_history
        self._run = run
        self._module = run.module
        self._inventory = inventory
        self._pool = Pool()
        self._snapshots = Snapshots(inventory, self._pool)
        self._closed: list[Window] = []
        self._is_closed = False
        self._early: Early | None = None
        self._takes_early = True
        self._lacks_batches = False
        self._moving: set[str] = set()
        self._fingerprints: dict[str, Tensor] = {}
        self._windows = 0
        self._most_steps = 0
        self._untouched = Untouched()
        self._evaluations = 0
        self._once = {id(optimizer) for optimizer in run.optimizers if evaluates_once(optimizer)}
        self._repeats = {id(optimizer) for optimizer in run.optimizers if may_evaluate_again(optimizer)}

    def take_batch(self, batch: Any, batch_idx: int) -> CopyOnWrite | None:
        """Take a micro-batch, into a new window if the last was closed.

        Returns:
            A context manager for what the user's code does before the forward, or None where it has none to run.
        """
        window = self._window_of(batch_idx)
        early, self._early = self._early, None
        taken = early.taken_for(batch) if early is not None else None
        if taken is None:
            # What happened to one batch after the hook will happen to others: none is taken twice for long.
            self._takes_early = self._takes_early and early is None
            taken = TakenBatch.take(batch, batch_idx, self._run.device, self._pool.copies)
        window.batches.append(taken)
        return CopyOnWrite(self._module, window.tensors) if self._run.starts_with_code else None

    def await_batches(self, number: int) -> CopyOnWrite | None:
        """The instant of a step that takes its batches itself; `number` is the loop's, the guard as above."""
        window = self._window_of(number)
        window.batches.append(TakenBatch.awaited(number))
        return CopyOnWrite(self._module, window.tensors) if self._run.starts_with_code else None

    def take_fetched(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """The step has taken a batch."""
        assert self.window is not None
        self.window.batches[-1].fetch(batch, batch_idx, dataloader_idx, self._run.device, self._pool.copies)

    def lacks_batch(self, why: str) -> bool:
        """The step has got a batch that cannot be taken; whether that is known of an earlier one."""
        is_known, self._lacks_batches = self._lacks_batches, True
        for taken in self.window.batches[-1:] if self.window is not None else ():
            taken.problem = UnwritableValueError("batch", why, "take it with next(dataloader_iter)")
        return is_known

    def take_before_hook(self, batch: Any, batch_idx: int) -> None:
        """Take the micro-batch to come, of which the module's own hook is about to make what the step is given."""
        self._early = None
        if self._takes_early:
            if self._opens_at(batch_idx):
                self._close()
            self._early = Early(
                TakenBatch.take(batch, batch_idx, self._run.device, self._pool.copies), self._run.device
            )

    def take_after_hook(self, made: Any) -> None:
        """The hook made this."""
        if self._early is not None:
            self._early.note(made, may_change=self._run.changes_batches)

    def take_unmade(self) -> None:
        """The module's own hook has raised, and made nothing of the micro-batch that was taken before it."""
        early, self._early = self._early, None
        if early is not None:
            taken = early.unmade()
            self._window_of(taken.batch_idx).batches.append(taken)

    def _opens_at(self, batch_idx: int) -> bool:
        return self.window is None or self.window.stepped or self._run.starts_anew(batch_idx)

    def _window_of(self, batch_idx: int) -> Window:
        """The open one, or a new one if the last was closed."""
        if self._opens_at(batch_idx):
            self._open()
        assert self.window is not None
        self.window.last_batch = self._run.is_last_batch
        self.window.began = time.monotonic()
        return self.window

    def drop_batch(self) -> None:
        """The last micro-batch is not trained on: the user's code ended the epoch before the forward."""
        assert self.window is not None
        self.window.batches.pop()

    def begin_update(self) -> None:
        """An optimizer step begins."""
        self._evaluations = 0

    def take_before_update(self, optimizer: Any) -> None:
        """Take the weights and the state of an optimizer that has its gradients, where another look may follow.

        Before its step is over, if it evaluates its closure again, or after it, if the window has other updates.
        """
        window = self.window
        assert window is not None
        self._evaluations += 1
        if self._evaluations > 1:
            self._once.discard(id(optimizer))
            self._repeats.add(id(optimizer))
        one_look = self._run.updates_once or window.optimizer_steps >= self._most_steps > 0
        if one_look and id(optimizer) in self._once:
            return
        position = position_of(optimizer, self._run.optimizers)
        if position not in window.states and self._evaluations == 1:
            self._take(window, position)

    def end_update(self, optimizer: Any) -> None:
        """An optimizer step is over, and none of its evaluations was found to be bad."""
        window, ours = self.window, id(optimizer)
        if self._evaluations != 1 or ours in self._once or ours in self._repeats:
            return
        self._once.add(ours)
        if window is not None and self._run.updates_once and not self._has_history:
            # Taken since it might have evaluated again: they must not take up room in the next forward.
            position = position_of(optimizer, self._run.optimizers)
            window.states.pop(position, None)
            for name in window.before_update.pop(position, ()):
                window.tensors.pop(name, None)

    def _take(self, window: Window, position: int) -> None:
        optimizer = self._run.optimizers[position]
        ours = {id(parameter) for each in with_wrapped(optimizer) for parameter in parameters_of(each)}
        now = {
            name: parameter
            for name, parameter in parameters(self._module)
            if id(parameter) in ours and name not in window.tensors
        }
        window.tensors.update(self._pool.copies(now))
        window.before_update[position] = tuple(now)
        window.states[position] = OptimizerState(optimizer)

    def take_all(self) -> None:
        """Take all weights and all optimizers' states."""
        window = self.window
        assert window is not None
        now = {name: p for name, p in parameters(self._module) if name not in window.tensors}
        window.tensors.update(self._pool.copies(now))
        for position, optimizer in enumerate(self._run.optimizers):
            if position not in window.states:
                window.states[position] = OptimizerState(optimizer)

    def note_hyperparameters(self, before: list[list[dict[str, Any]]]) -> None:
        """Those that code outside of the module has set since `before` are state: a replay does not run it."""
        now = hyperparameters_of(self._run.optimizers)
        for was, today, kept in zip(before, now, self.window.hyperparameters if self.window else (), strict=False):
            for group, after, ours in zip(was, today, kept, strict=False):
                ours.update({n: v for n, v in after.items() if v is not group.get(n) and not _is_same(group.get(n), v)})

    def learn(self) -> None:
        """Before the window's first update: which weights has the step itself moved?"""
        window = self.window
        assert window is not None
        if self._fingerprints:
            now = self._inventory.parameters(self._fingerprints)
            before = self._fingerprints.items()
            self._moving |= {name for name, value in before if name in now and bool(fingerprint(now[name]) != value)}
            self._fingerprints = {}
        self._moving |= self._untouched.learn(window, self._moving if window.number == 1 else None)
        if is_rare(self._windows):
            self._moving |= moved(window)

    def _close(self) -> None:
        """Nobody needs the last window any more: the next one gets its memory."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.window is not None:
            self._most_steps = max(self._most_steps, self.window.optimizer_steps)
            self._closed.append(self.window)
        free = [window for window in self._closed if not window.held]
        self._closed = [window for window in self._closed if window.held]
        kept = [tensors for window in free for tensors in (window.tensors, *(b.tensors for b in window.batches))]
        untouched = self._untouched.ids
        self._snapshots.give_back(t for tensors in kept for t in tensors.values() if id(t) not in untouched)

    def _open(self) -> None:
        self._close()
        self._is_closed = False
        self._windows += 1
        inventory = self._inventory
        is_other = not inventory.structure.is_todays
        if is_rare(self._windows) or is_other:
            inventory.refresh()
        weights = Weights(inventory.names, inventory.weights, inventory.versions())
        if self._windows <= _FINGERPRINTED:
            self._fingerprints = fingerprints(weights)
        window = Window(
            number=self._windows,
            tensors=self._snapshots.take(inventory.parameters(self._moving), by_value=is_rare(self._windows)),
            objects=self.attributes.take(anew=is_other),
            structure=inventory.structure,
            eval_mode=inventory.eval_mode(),
            frozen=inventory.frozen(),
            counters=self._run.counters,
            weights=weights,
            hyperparameters=hyperparameters_of(self._run.optimizers),
            numerics=settings_of_a_context(),
        )
        if self._windows == 1:
            self._untouched.begin(weights, self._fingerprints, window.tensors)
        self._untouched.give(window, inventory, by_value=is_rare(self._windows))
        if is_rare(self._windows):
            self.health.look(window, self._run)
        self.window = window


@dataclass
class Health:
    """What rare looks at the weights have shown, for the words of blame.

    Attributes:
        bad_at_first: weights that were not finite when training began.
        bad_state: what of an optimizer's state was not finite then, such as ``exp_avg``; empty where nothing was, or
            it did not come from a checkpoint.
        good_at: the last step at whose instant all weights were seen to be finite; None before the first such.
    """

    bad_at_first: frozenset[str] = frozenset()
    bad_state: str = ""
    good_at: int | None = None

    def look(self, window: Window, run: Run) -> None:
        """At the instant of a window."""
        names, weights, _ = window.weights
        kept = {name: weight for name, weight in zip(names, weights, strict=True) if can_be_kept(weight)}
        kept = {name: weight for name, weight in kept.items() if not is_lazy(weight)}
        if all_finite(kept.values()):
            self.good_at = window.counters["global_step"]
        elif window.number == 1:
            self.bad_at_first = frozenset(name for name, weight in kept.items() if not is_finite(weight))
        if window.number == 1 and run.checkpoint:
            self.bad_state = bad_states(run.optimizers)


def moved(window: Window) -> set[str]:
    """Weights that were written since the instant and before any update, without having been taken."""
    names, parameters, versions = window.weights
    pairs = zip(names, parameters, versions, strict=True)
    changed: dict[int, str] = {}  # a tied one goes by its first name
    for name, parameter, version in pairs:
        if parameter._version != version:
            changed.setdefault(id(parameter), name)
    return {name for name in changed.values() if name not in window.tensors}


def fingerprints(weights: Weights) -> dict[str, Tensor]:
    """Of every parameter, left on its device."""
    pairs = zip(weights.names, weights.parameters, strict=True)
    return {name: fingerprint(parameter) for name, parameter in pairs if can_be_kept(parameter)}


def constant_hyperparameters(first: list[dict[str, Any]], groups: list[dict[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Per parameter group, the names of those that have not changed.

    Args:
        first: as they were when fit began.
        groups: as they are now.
    """
    return tuple(
        tuple(sorted(name for name, value in before.items() if name in now and _is_same(value, now[name])))
        for before, now in zip(first, groups, strict=False)
    )


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return isinstance(before, Tensor) and isinstance(now, Tensor) and torch.equal(before, now)
    return type(before) is type(now) and bool(before == now)
