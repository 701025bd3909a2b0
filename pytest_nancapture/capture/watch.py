"""A training run under watch, whatever loop makes it: looks at each step before its update, and acts on a fault.

The loop comes by in this order: :meth:`Watch.enter` at the instant of each micro-batch, :meth:`Watch.backward` before
each backward pass, :meth:`Watch.before_update` and :meth:`Watch.after_update` around an optimizer step, and
:meth:`Watch.leave` at the end of the micro-batch. While a step is rerun in place the same calls reach the engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.capture.deferral import Deferral, Look
from pytest_nancapture.capture.guilty import Decision, decide
from pytest_nancapture.capture.raised import capture_raised
from pytest_nancapture.capture.react import OnCapture, Reaction
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.record import Recorder, captured
from pytest_nancapture.capture.rerun import Reruns
from pytest_nancapture.capture.retention import Retention
from pytest_nancapture.step.check import alarms, all_finite, has_nan, is_finite
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.finding import look, note_backward
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.inventory import Inventory
from pytest_nancapture.step.state.keeper import Keeper, moved
from pytest_nancapture.step.state.optimizers import bad_numbers, hyperparameters_of, parameters_of
from pytest_nancapture.step.state.tensors import CopyOnWrite
from pytest_nancapture.step.state.window import Window
from pytest_nancapture.step.suspects import BufferWatch

log = logging.getLogger("pytest_nancapture")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for."""

    dirpath: Path
    on_capture: OnCapture
    max_bundles: int
    confirm: int
    optimizer_history: bool
    trace: bool


class DropStep(Exception):  # noqa: N818, no error: it leaves the optimizer's closure so that the update is not made
    """Ends an optimizer step before its update; the loop that called catches it."""


class Watch:
    """Watches one run from its first step to its last.

    Attributes:
        looks_may_wait: whether a step's flag may stay on the device until the next step.
    """

    def __init__(self, run: Run, recipe: Recipe, settings: Settings) -> None:
        self._run = run
        self._module = run.module
        self._settings = settings
        inventory = Inventory(run.module)
        self._keeper = Keeper(run, inventory, has_history=settings.optimizer_history)
        self._reruns = Reruns(run, trace=settings.trace, confirm=settings.confirm)
        self._buffers = BufferWatch(inventory)
        self._told_of_scale = False
        self._is_updating = False
        self._reaction = Reaction(run, settings.on_capture)
        retention = Retention(settings.dirpath, settings.max_bundles, run)
        self._record = Recorder(run, recipe, self._keeper, self._buffers, retention, proofs=settings.confirm)
        self._deferral = Deferral(run, history=settings.optimizer_history)
        self.looks_may_wait = self._deferral.is_possible
        self._has_told = run.rank != 0

    def settle(self) -> None:
        """Act upon what a rank found alone after the last step; for the end of training, to which all ranks come.

        Raises:
            NonFiniteError: the run is to end by it.
        """
        self.settle_look()
        if self._run.any(self._reaction.owes):
            self._reaction.settle()

    def settle_look(self) -> None:
        """Wait for a flag that is still on its way from the device, and act if it is up.

        Raises:
            NonFiniteError: the run is to end by it.
        """
        alarm = self._deferral.take()
        if alarm is None:
            return
        window, current = alarm.window, self._keeper.window
        try:
            self._decide(window, alarm.optimizer, alarm.target, alarm.suspects, is_late=True)
        except DropStep:
            if current is not None and current is not window:
                # The next step is under way, with buffers of the bad one: it is dropped too.
                current.tensors, current.dropped = window.tensors, True
                window.tensors = {}
            self._deferral.is_possible = self._settings.on_capture == "skip"
        else:
            step = window.counters["global_step"]
            log.warning(
                "nancapture: step %d was not finite, and nothing shows it any more: its update was left out", step
            )
            for batch in window.batches:
                batch.losses.clear()

    def end(self) -> None:
        """Let go of everything taken."""
        self._keeper.window = None

    def raised(self, error: BaseException, *, in_hook: bool = False) -> None:
        """The step that is under way has raised; `in_hook`: in the module's own hook that makes its batch."""
        self._reruns = self._reruns.alone()
        if in_hook:
            self._keeper.take_unmade()
        if self._keeper.window is not None:
            capture_raised(error, self._keeper.window, self._record, self._reruns, in_update=self._is_updating)

    # The calls of the loop, in the order in which it comes by.

    def before_hook(self, batch: Any, batch_idx: int) -> None:
        """The module's own hook is about to make of this what the next micro-batch's step is given."""
        self._keeper.take_before_hook(batch, batch_idx)

    def after_hook(self, made: Any) -> None:
        """It made this."""
        self._keeper.take_after_hook(made)

    def enter(self, batch: Any, batch_idx: int) -> CopyOnWrite | None:
        """The instant of a micro-batch.

        Returns:
            A context manager for the user's code that runs before the forward; None where there is none.
        """
        return self._entered(self._keeper.take_batch(batch, batch_idx))

    def enter_awaiting(self, number: int) -> CopyOnWrite | None:
        """The instant of a micro-batch whose step takes its batches itself; `number` is the loop's own."""
        return self._entered(self._keeper.await_batches(number))

    def fetched(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """The step has taken a batch from its iterator."""
        self._keeper.take_fetched(batch, batch_idx, dataloader_idx)

    def lacks_batch(self, why: str) -> None:
        """The step has got a batch that nobody was told of."""
        if not self._keeper.lacks_batch(why):
            log.warning("nancapture: bundles of this run cannot be replayed: %s", why)

    def exhausted(self) -> None:
        """The step has found its iterator at its end."""
        if self._keeper.window is not None and self._keeper.window.batches:
            self._keeper.window.batches[-1].exhausted = True

    def _entered(self, guard: CopyOnWrite | None) -> CopyOnWrite | None:
        if not self._has_told:
            self._tell_of_the_batch()
        if self._keeper.window is not None and not self._deferral.at_the_instant(self._keeper.window):
            self.settle_look()
        return guard

    def _tell_of_the_batch(self) -> None:
        """Say at the first one that is known to be unwritable that no bundle can be made of it."""
        window = self._keeper.window
        problem = window.batches[-1].problem if window is not None else None
        if problem is not None:
            self._has_told = True
            log.warning("%snancapture: this run will write no bundle: %s", self._run.line_start, problem)

    def pass_over(self) -> None:
        """The micro-batch that was entered is not trained on."""
        self._keeper.drop_batch()

    @contextmanager
    def others_code(self) -> Iterator[None]:
        """Around code in a step that is not the module's: the learning rates that it sets are state."""
        before = hyperparameters_of(self._run.optimizers)
        yield
        self._keeper.note_hyperparameters(before)

    def backward(self, loss: Tensor) -> None:
        """A backward pass is about to begin."""
        window = self._keeper.window
        if self._engine is not None:
            self._engine.backward(loss)
        elif window is not None and window.batches and not window.dropped:
            note_backward(loss, window.batches[-1].losses, is_certain=self._run.always_backward)

    @property
    def is_over(self) -> bool:
        """Whether a fault was found in this window: no update is made any more."""
        if self._engine is not None:
            return self._engine.finding is not None
        return self._keeper.window is not None and self._keeper.window.dropped

    def begin_update(self) -> None:
        """An optimizer step begins; it may evaluate its closure once or several times."""
        self._is_updating = False
        if self._engine is not None:
            self._engine.begin_update()
        else:
            self._keeper.begin_update()

    def evaluate(self) -> None:
        """An optimizer evaluates its closure."""
        if self._engine is not None:
            self._engine.evaluate()

    def before_update(self, optimizer: Any) -> None:
        """An optimizer has its gradients, and no code of the user's comes before its update.

        Raises:
            DropStep: the update must not be made.
            NonFiniteError: the run is to end.
        """
        window = self._keeper.window
        if self._engine is not None:
            if self._engine.arrive(optimizer):
                raise DropStep
        elif window is not None and window.batches:
            self._check(window, optimizer)
            self._is_updating = True

    def after_update(self, optimizer: Any) -> None:
        """The optimizer step is over, whether it made an update or not."""
        if self._engine is not None:
            self._engine.end_update()
        elif self._keeper.window is not None:
            self._deferral.after_update(self._keeper.window, optimizer)

    def end_update(self, optimizer: Any) -> None:
        """The same, where nothing was found in it."""
        if self._engine is None:
            self._is_updating = False
            self._keeper.end_update(optimizer)

    def leave(self) -> None:
        """The end of a micro-batch; all that the user's code does in it is done.

        Raises:
            NonFiniteError: the run is to end.
        """
        self._reaction.insist()
        window = self._keeper.window
        if window is not None and window.dropped:
            self._clean(window)
        elif window is not None and window.stepped:
            self._check_after(window)

    # Looking.

    def _check(self, window: Window, optimizer: Any) -> None:
        """Look at what the optimizer is about to use; on a fault, act before it does."""
        self.settle_look()
        if window.dropped:
            raise DropStep
        target = window.optimizer_steps
        window.optimizer_steps += 1
        window.stepped = True
        window.last_optimizer = optimizer
        if target == 0:
            self._keeper.learn()
        suspects = self._buffers.suspects()
        # The first parameters come last: the optimizer begins with them, and their gradients are in the cache then.
        gradients = (grad for p in reversed(parameters_of(optimizer)) if (grad := p.grad) is not None)
        flags = alarms(itertools.chain(window.losses, suspects.values(), gradients))
        if self._deferral.may_wait(window, optimizer, flags):
            self._deferral.look = Look.begin(window, optimizer, target, suspects, flags[0])
            return
        finite = not any(map(bool, flags))
        if self._run.any(not finite or self._reaction.owes):
            self._reaction.settle()
            if self._run.any(not finite):
                self._decide(window, optimizer, target, suspects)
        for batch in window.batches:
            batch.losses.clear()
        self._keeper.take_before_update(optimizer)
        if self._settings.optimizer_history:
            self._keeper.take_all()
            window.bad_numbers = bad_numbers(self._run.optimizers)

    def _decide(
        self, window: Window, optimizer: Any, target: int, suspects: Mapping[str, Tensor], *, is_late: bool = False
    ) -> None:
        """Find out whether it is a fault and whose; if so, act and drop the step.

        Args:
            is_late: the update is over, which the device has left out.
        """
        if not is_late:  # else the device has left the weights as they were
            window.written = frozenset(moved(window))
        losses = [batch.losses for batch in window.batches]
        bad_buffers = self._buffers.poisoned(suspects, window.tensors)
        # The user's step may itself speak to other ranks, so all of them run it again or none does.
        is_kept = not self._run.any(any(batch.problem is not None for batch in window.batches))
        decision = decide(
            look(self._module, losses, parameters_of(optimizer), bad_buffers),
            self._run,
            scaled=self._run.scaler is not None,
            batches=len(window.batches),
            confirm=self._settings.confirm,
            rerun=lambda: self._reruns.again(window, optimizer, target) if is_kept else None,
            is_late=is_late,
        )
        if decision is None:
            self._warn_of_scale()
            return
        if is_kept:
            bad = self._record.bad_weights(window)
            decision = self._reruns.explained(window, optimizer, target, decision, bad)
        self._capture(window, target, decision, late=is_late)
        raise DropStep

    def _warn_of_scale(self) -> None:
        """An overflow is routine, but not one of a scale that never gets finite again."""
        (words,) = bad_numbers([], self._run.scaler) or ("",)
        if words and not self._told_of_scale:
            self._told_of_scale = True
            log.warning("%snancapture: %s: every update from here on is left out", self._run.line_start, words)

    def _check_after(self, window: Window) -> None:
        """Look at what was written since the last look: buffers by hooks, and weights by an update with a history."""
        # Without code of the user's in between this reads nothing, and so does not wait for the device.
        suspects = self._buffers.suspects() if self._run.ends_with_code else self._buffers.written_since()
        bad = {} if all_finite(suspects.values()) else self._buffers.poisoned(suspects, window.tensors)
        weights: tuple[str, ...] = ()
        if self._settings.optimizer_history and window.states:
            now = dict(unique_parameters(self._module))
            if not all_finite(now.values()):
                weights = tuple(name for name, parameter in now.items() if not is_finite(parameter))
        if not bad and not weights:
            return
        # What is left of the gradients is what the update was made of.
        used = self._module.parameters() if weights else ()
        finding = look(self._module, [batch.losses for batch in window.batches], used, bad)
        if weights:
            has = any(has_nan(p) for name, p in unique_parameters(self._module) if name in weights)
            finding = dataclasses.replace(finding, weights=weights, kind="nan" if has else "inf")
        window.stepped = True
        # The update is the same on every rank; a buffer is this rank's own, and the others hear of it at the next step.
        is_mine = not weights or self._run.rank == 0
        target = max(window.optimizer_steps - 1, 0)
        decision = Decision(
            blamed=(self._run.rank if is_mine else 0,),
            finding=finding,
            guilty=len(window.batches) - 1,
            reproduced=Reproduced(),
        )
        if weights and window.last_optimizer is not None:
            decision = self._reruns.explained_after(window, target, decision)
        if weights or self._run.world_size == 1:
            self._capture(window, target, decision, dropped=bool(weights or window.states))
        else:
            window.restore(self._module)
            path = self._record.write(window, target, decision)
            self._reaction.owe(captured(window, decision, path, dropped=False))

    @property
    def _engine(self) -> Engine | None:
        return self._reruns.engine

    # Acting.

    def _capture(
        self, window: Window, target: int, decision: Decision, *, dropped: bool = True, late: bool = False
    ) -> None:
        """Clean up, write the bundle if this rank is to blame, and end the run if that is wanted; on all ranks.

        Args:
            late: the update is over, which the device has left out.
        """
        is_mine = self._run.rank in decision.blamed
        window.dropped = True
        self._clean(window)
        path = self._record.write(window, target, decision) if is_mine else None
        self._run.any(False)  # so that no rank ends the run while another still writes
        if not late:  # else a schedule has gone on
            window.restore_optimizers(self._run.optimizers)
        self._reaction.act(captured(window, decision, path, dropped=dropped))

    def _clean(self, window: Window) -> None:
        """Undo what a dropped step did to the module; once more at its end, since the user's code has gone on."""
        window.restore(self._module)
        for parameter in self._module.parameters():
            parameter.grad = None
