"""One training run under watch: looks at each step before its update, and acts when one is not finite."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.capture.decide import Decision, decide
from pytest_nancapture.capture.deferral import Deferral, Look
from pytest_nancapture.capture.ranks import Ranks
from pytest_nancapture.capture.react import OnCapture, Reaction
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.record import Recorder, captured
from pytest_nancapture.capture.retention import Shelf
from pytest_nancapture.loops.lightning.rerun import Outcome, Rerun, parameters_of
from pytest_nancapture.loops.lightning.wrappers import Wraps, is_inherited, last_hook
from pytest_nancapture.step.buffers import BufferWatch
from pytest_nancapture.step.check import alarms, all_finite, has_nan, is_finite
from pytest_nancapture.step.finding import look, note_backward
from pytest_nancapture.step.state.instant import Window
from pytest_nancapture.step.state.inventory import Inventory
from pytest_nancapture.step.state.keeper import Keeper

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit
    from pytest_nancapture.diagnose.trace import Trace

log = logging.getLogger("pytest_nancapture")

_SLOWER = 15
"""Times that a traced rerun may take of a plain one."""
_TRACE_SECONDS = 60
"""A run is not held up for longer than this to name the culprit; a replay will name it too."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked of :class:`NaNCapture`."""

    dirpath: Path
    on_capture: OnCapture
    max_bundles: int
    confirm: int
    optimizer_history: bool
    trace: bool


class DropStep(Exception):  # noqa: N818, no error: it leaves the optimizer's closure so that the update is not made
    """Ends an optimizer step before its update; never seen outside of this module."""


class Watch:
    """Watches one call of ``Trainer.fit``.

    Lightning comes by in this order: the instant (once a micro-batch), backward passes, the optimizer step's closure
    and in it ``on_before_optimizer_step``, the end of the micro-batch.
    """

    def __init__(self, trainer: Any, module: Any, recipe: Recipe, settings: Settings) -> None:
        self._trainer = trainer
        self._module = module
        self._settings = settings
        self._wraps = Wraps()
        inventory = Inventory(module)
        self._keeper = Keeper(trainer, module, inventory)
        self._ranks = Ranks(trainer)
        self._rerun: Rerun | None = None
        self._buffers = BufferWatch(inventory)
        self._always_backward = is_inherited(module, "backward") and "backward" not in vars(module)
        self._goes_on = not (module.automatic_optimization and is_inherited(module, "on_train_batch_end"))
        self._reaction = Reaction(trainer, self._ranks, settings.on_capture)
        shelf = Shelf(settings.dirpath, settings.max_bundles)
        self._record = Recorder(trainer, module, recipe, self._keeper, self._buffers, shelf)
        self._deferral = Deferral(trainer, module, history=settings.optimizer_history)

    def begin(self) -> None:
        """Put the wrappers in place."""
        put, strategy = self._wraps.put, self._trainer.strategy
        put(self._module, "on_train_batch_start", self._on_train_batch_start)
        put(self._module, last_hook(self._module), self._before_update)
        put(self._module, "on_train_batch_end", self._on_train_batch_end)
        put(strategy, "backward", self._backward)
        put(strategy, "optimizer_step", self._optimizer_step)
        if self._deferral.is_possible:
            put(self._module, "optimizer_zero_grad", self._zero_grad)
        if not self._module.automatic_optimization:
            self._wraps.put_on_raw_steps(strategy, self._trainer.optimizers, self._before_raw_step)

    def settle(self) -> None:
        """Act upon what a rank found alone after the last step; for the end of training, to which all ranks come.

        Raises:
            NonFiniteError: the run is to end by it.
        """
        self.settle_look()
        if self._ranks.any(self._reaction.owes):
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
        """Take the wrappers off and let go of everything kept."""
        self._wraps.take_off()
        self._keeper.window = None

    # The wrappers, in the order in which Lightning comes by.

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        own_hook = self._keeper.keep_batch(batch, batch_idx)
        if self._keeper.window is not None and not self._deferral.at_the_instant(self._keeper.window):
            self.settle_look()
        with own_hook or nullcontext():
            response = original(batch, batch_idx, *rest)
        if response == -1:
            self._keeper.drop_batch()
        return response

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        window = self._keeper.window
        if self._rerun is not None:
            note_backward(loss, self._rerun.losses[-1])
        elif window is not None and window.batches and not window.dropped:
            note_backward(loss, window.batches[-1].losses, is_certain=self._always_backward)
        return original(loss, *args, **kwargs)

    def _optimizer_step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        window = self._keeper.window
        is_over = window is not None and window.dropped if self._rerun is None else self._rerun.finding is not None
        if is_over:
            return None
        try:
            return original(optimizer, *args, **kwargs)
        except DropStep:
            self._forget_scaling()
            return None
        finally:
            if window is not None and self._rerun is None:
                self._deferral.after_update(window, optimizer)

    def _zero_grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle_look()
        return original(*args, **kwargs)

    def _before_raw_step(self, optimizer: Any, has_closure: bool) -> None:
        """An update past Lightning cannot be held up; without gradients it changes nothing."""
        rerun, window = self._rerun, self._keeper.window
        if rerun is not None:
            is_over = rerun.finding is not None or rerun.arrive()
        elif window is None or not window.batches:
            return
        elif has_closure:  # no gradients to look at yet
            window.stepped = True
            return
        else:
            if not window.dropped:
                with suppress(DropStep):
                    self._check(window, optimizer)
            is_over = window.dropped
        for parameter in parameters_of(optimizer) if is_over else ():
            parameter.grad = None

    def _before_update(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        rerun, window = self._rerun, self._keeper.window
        if rerun is not None:
            if rerun.arrive():
                raise DropStep
        elif window is not None and window.batches:
            self._check(window, optimizer)
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._reaction.insist()
        window = self._keeper.window
        if window is not None and window.dropped:
            self._clean(window)
        elif window is not None and window.stepped:
            self._check_after(window)
        return result

    # Looking.

    def _check(self, window: Window, optimizer: Any) -> None:
        """Look at what the optimizer is about to use; on a fault, act before it does."""
        self.settle_look()
        if window.dropped:
            raise DropStep
        target = window.optimizer_steps
        window.optimizer_steps += 1
        window.stepped = True
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
        if self._ranks.any(not finite or self._reaction.owes):
            self._reaction.settle()
            if self._ranks.any(not finite):
                self._decide(window, optimizer, target, suspects)
        for batch in window.batches:
            batch.losses.clear()
        self._keeper.keep_before_update(optimizer)
        if self._settings.optimizer_history:
            self._keeper.keep_all()

    def _decide(
        self, window: Window, optimizer: Any, target: int, suspects: Mapping[str, Tensor], *, is_late: bool = False
    ) -> None:
        """Find out whether it is a fault and whose; if so, act and drop the step.

        Args:
            is_late: the update is over, which the device has left out.
        """
        losses = [batch.losses for batch in window.batches]
        bad_buffers = self._buffers.poisoned(suspects, window.tensors)
        # The user's step may itself speak to other ranks, so all of them run it again or none does.
        is_kept = not self._ranks.any(any(batch.problem is not None for batch in window.batches))
        decision = decide(
            look(self._module, losses, parameters_of(optimizer), bad_buffers),
            self._ranks,
            scaled=self._scaler is not None,
            batches=len(window.batches),
            confirm=self._settings.confirm,
            rerun=lambda: self._rerun_once(window, optimizer, target) if is_kept else None,
            is_late=is_late,
        )
        if decision is not None:
            culprit = self._culprit(window, optimizer, target, decision) if is_kept else None
            self._capture(window, target, dataclasses.replace(decision, culprit=culprit))
            raise DropStep

    def _culprit(self, window: Window, optimizer: Any, target: int, decision: Decision) -> Culprit | None:
        """Follow the operations of one more rerun; every rank does, since the user's step may speak to the others."""
        is_wanted = self._settings.trace and self._settings.confirm > 0
        worth_it = is_wanted and decision.seconds is not None and decision.seconds * _SLOWER < _TRACE_SECONDS
        if self._ranks.any(not worth_it):
            return None
        from pytest_nancapture.diagnose.given import given_fault
        from pytest_nancapture.diagnose.source import package_folder
        from pytest_nancapture.diagnose.trace import Trace

        batch = {name: tensor for kept in window.batches for name, tensor in kept.tensors.items()}
        trace = Trace(self._module, {}, package_folder(self._module))
        outcome = self._rerun_once(window, optimizer, target, trace)
        culprit = outcome.culprit if outcome is not None else None
        bad = self._record.bad_before(window)
        weights = {name: value for name, value in self._record.weights(window).items() if name in bad}
        given = given_fault(weights, batch)
        if culprit is not None and given is not None and culprit.phase == given.phase:
            return given
        return culprit

    def _check_after(self, window: Window) -> None:
        """Look at what was written since the last look: buffers by hooks, and weights by an update with a history."""
        # Without code of the user's in between this reads nothing, and so does not wait for the device.
        suspects = self._buffers.suspects() if self._goes_on else self._buffers.written_since()
        bad = {} if all_finite(suspects.values()) else self._buffers.poisoned(suspects, window.tensors)
        weights: tuple[str, ...] = ()
        if self._settings.optimizer_history and window.states:
            now = dict(unique_parameters(self._module))
            if not all_finite(now.values()):
                weights = tuple(name for name, parameter in now.items() if not is_finite(parameter))
        if not bad and not weights:
            return
        finding = look(self._module, [batch.losses for batch in window.batches], (), bad)
        if weights:
            has = any(has_nan(p) for name, p in unique_parameters(self._module) if name in weights)
            finding = dataclasses.replace(finding, weights=weights, kind="nan" if has else "inf")
        window.stepped = True
        # The update is the same on every rank; a buffer is this rank's own, and the others hear of it at the next step.
        is_mine = not weights or self._ranks.mine == 0
        decision = Decision(
            blamed=(self._ranks.mine if is_mine else 0,),
            finding=finding,
            guilty=len(window.batches) - 1,
            reproduced=Reproduced(),
        )
        target = max(window.optimizer_steps - 1, 0)
        if weights or self._ranks.count == 1:
            self._capture(window, target, decision, dropped=bool(weights or window.states))
        else:
            path = self._record.write(window, target, decision)
            window.restore_tensors(self._module)
            self._reaction.owe(captured(window, decision, path, dropped=False))

    def _rerun_once(self, window: Window, optimizer: Any, target: int, trace: Trace | None = None) -> Outcome | None:
        self._rerun = Rerun(self._trainer, self._module, window, optimizer, target, self._wraps.original, trace)
        try:
            return self._rerun.run()
        except Exception as error:  # the user's step may raise anything; the capture goes on without its confirmation
            log.warning("nancapture: rerunning the step in place raised %s: %s", type(error).__name__, error)
            log.debug("nancapture: where it was raised", exc_info=True)
            return None
        finally:
            self._rerun = None

    # Acting.

    def _capture(self, window: Window, target: int, decision: Decision, *, dropped: bool = True) -> None:
        """Write the bundle if this rank is to blame, clean up, and end the run if that is wanted; on all ranks."""
        is_mine = self._ranks.mine in decision.blamed
        path = self._record.write(window, target, decision) if is_mine else None
        self._ranks.wait()
        for position, state in window.states.items():
            self._trainer.optimizers[position].load_state_dict(state)
        window.dropped = True
        self._clean(window)
        self._reaction.act(captured(window, decision, path, dropped=dropped))

    def _clean(self, window: Window) -> None:
        """Undo what a dropped step did to the module; once more at its end, since the user's code has gone on."""
        window.restore_tensors(self._module)
        for parameter in self._module.parameters():
            parameter.grad = None

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)

    def _forget_scaling(self) -> None:
        """Let the scaler begin the next step afresh, its scale as it is."""
        scaler = self._scaler
        if scaler is not None and scaler._scale is not None:
            scaler.update(scaler.get_scale())
