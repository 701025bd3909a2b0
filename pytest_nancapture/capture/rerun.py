"""Run a window's step again in place, at loss scale 1, on this rank alone: does the fault come back, and of what?"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.capture.guilty import Decision, Outcome
from pytest_nancapture.diagnose.blame import culprit_of
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.given import given_fault, given_number
from pytest_nancapture.diagnose.healing import Healing, healed_step
from pytest_nancapture.diagnose.raised import judge_raise
from pytest_nancapture.diagnose.records import Origin
from pytest_nancapture.diagnose.source import package_folder
from pytest_nancapture.diagnose.trace import Trace, traced
from pytest_nancapture.step.engine import Engine
from pytest_nancapture.step.finding import Finding, surfaces_in
from pytest_nancapture.step.run import OnItsOwn, Run
from pytest_nancapture.step.sent import NeedsOthersError, watched
from pytest_nancapture.step.state.optimizers import parameters_of
from pytest_nancapture.step.state.put_back import preserved
from pytest_nancapture.step.state.window import Window

log = logging.getLogger("pytest_nancapture")

_SLOWER = 15
"""Times that a traced rerun may take of a plain one."""
_TRANSIENT = "the fault did not come back"
_TRACE_SECONDS = 60
"""A run is not held up for longer than this to name the culprit; a replay will name it too."""


def may_be_followed(seconds: float) -> bool:
    """Whether the operations of a step that takes so long can be followed in good time."""
    return seconds * _SLOWER < _TRACE_SECONDS


class Reruns:
    """Runs windows again, and hands out what each run saw.

    Attributes:
        run: that is watched.
        engine: of the run that is under way; None else. Every backward pass and optimizer step is handed to it.
    """

    def __init__(self, run: Run, *, trace: bool, confirm: int) -> None:
        """`trace` and `confirm`: what the user asked for."""
        self.run = run
        self._trace = trace
        self._confirm = confirm
        self.engine: Engine | None = None
        self._healed: set[Any] = set()

    def alone(self) -> Reruns:
        """The same for a run that is over, on this rank alone."""
        return Reruns(cast("Run", OnItsOwn(self.run)), trace=self._trace, confirm=max(self._confirm, 1))

    def again(
        self,
        window: Window,
        optimizer: Any,
        target: int,
        trace: Trace | None = None,
        *,
        goes_on: bool = False,
        raised: bool = False,
    ) -> Outcome | None:
        """Run every micro-batch again from the instant, and put everything back; None where it could not be run.

        Args:
            optimizer: that was about to step in training.
            target: which optimizer step of the window that was, counted from 0.
            trace: follows the operations, if a culprit is wanted.
            goes_on: make the update, and look at the weights after it.
            raised: it did so in training, and may again: over what, the outcome's finding tells.
        """
        try:
            return self._run_again(window, optimizer, target, trace, goes_on=goes_on, raised=raised)
        except Exception as error:  # the user's step may raise anything; the capture goes on without its confirmation
            level = logging.DEBUG if raised or (trace is not None and trace.heals is not None) else logging.WARNING
            log.log(level, "nancapture: rerunning the step in place raised %s: %s", type(error).__name__, error)
            log.debug("nancapture: where it was raised", exc_info=True)
            return None
        finally:
            self.engine = None

    def explained(
        self, window: Window, optimizer: Any, target: int, decision: Decision, bad: Mapping[str, Tensor]
    ) -> Decision:
        """With its culprit, and with what is left to learn; every rank reruns, since the step may speak to others.

        Args:
            bad: weights that were not finite before the step.
        """
        began = time.monotonic()
        culprit, why = self.culprit(window, optimizer, target, decision.seconds, bad)
        decision = dataclasses.replace(decision, culprit=culprit, no_culprit=why)
        return self.healed(window, optimizer, target, decision, began=began)

    def raised(self, window: Window, optimizer: Any, target: int, *, goes_on: bool, follows: bool) -> Outcome | None:
        """Run a step again that has raised, to see whether a value that is not finite was the reason.

        Args:
            goes_on: it did so in the update.
            follows: follow its operations; else only bad losses, gradients and buffers are seen.
        """
        trace = _trace_of(self.run.module) if follows else None
        return self.again(window, optimizer, target, trace, goes_on=goes_on, raised=True)

    def explained_after(self, window: Window, target: int, decision: Decision) -> Decision:
        """Make a bad update again, and find out what made it so."""
        optimizer = window.last_optimizer
        if self.run.any(any(batch.problem is not None for batch in window.batches)):
            return decision
        outcomes = [self.again(window, optimizer, target, goes_on=True) for _ in range(self._confirm)]
        done = [outcome for outcome in outcomes if outcome is not None]
        seen = [outcome for outcome in done if outcome.finding.weights]
        seconds = max(outcome.seconds for outcome in done) if seen else None
        culprit, why = self.culprit(window, optimizer, target, seconds, {}, goes_on=True)
        reproduced = Reproduced(runs=len(seen), of=len(done))
        return dataclasses.replace(decision, reproduced=reproduced, culprit=culprit, no_culprit=why)

    def culprit(
        self,
        window: Window,
        optimizer: Any,
        target: int,
        seconds: float | None,
        weights: Mapping[str, Tensor],
        *,
        goes_on: bool = False,
    ) -> tuple[Culprit | None, str]:
        """Follow the operations of one more run; every rank does, since the user's step may speak to the others.

        Args:
            seconds: that a run takes; None where the fault did not come back.
            weights: those that were not finite before the step.

        Returns:
            The culprit, or why there is none and how to get one; that a fault did not come back is told elsewhere.
        """
        problem = self._problem(seconds)
        if self.run.any(bool(problem)):
            return (
                None,
                "" if problem == _TRANSIENT else problem or "it cannot be followed on every rank; a replay names it",
            )
        outcome = self.again(window, optimizer, target, _trace_of(self.run.module), goes_on=goes_on)
        if outcome is None:
            return None, "its operations could not be followed, since the rerun raised; a replay may name it"
        culprit = outcome.culprit
        batch = {name: tensor for taken in window.batches for name, tensor in taken.tensors.items()}
        given = given_fault(weights, batch)
        if given is not None and culprit == Culprit(phase=given.phase):
            return given, ""
        return culprit, "" if culprit is not None else "nothing that the rerun did leads to it; a replay may name it"

    def healed(
        self,
        window: Window,
        optimizer: Any,
        target: int,
        decision: Decision,
        *,
        began: float,
    ) -> Decision:
        """With what the step would learn with its fault healed, once for each fault; every rank reruns, or none.

        Args:
            decision: with its culprit.
            began: when the culprit's run did, by the monotonic clock.
        """
        if self.run.any(bool(self._problem(decision.seconds))):
            return decision
        culprit, gradients = decision.culprit, decision.finding.gradients
        known = (culprit and (culprit.op, culprit.file, culprit.line), gradients.nonfinite)
        is_new = self.run.rank in decision.blamed and known not in self._healed
        self._healed.add(known)
        if not self.run.any(is_new):
            return decision
        each = time.monotonic() - began

        def heal(healing: Healing) -> Finding | None:
            # All ranks or none: the user's step may speak to the others, who would wait for ever.
            if self.run.any(time.monotonic() - began + each > _TRACE_SECONDS):
                return None
            outcome = self.again(window, optimizer, target, _trace_of(self.run.module, healing))
            return outcome.finding if outcome is not None else None

        return dataclasses.replace(decision, healed=healed_step(gradients, decision.guilty, heal, self.run.any))

    def _problem(self, seconds: float | None) -> str:
        """Why operations are not followed; empty where they are."""
        if not self._trace:
            return "trace=False; a replay names it, and so does NaNCapture(trace=True)"
        if not self._confirm:
            return "confirm=0 leaves out the reruns that tell; a replay names it, and so does NaNCapture(confirm=1)"
        if seconds is None:
            return _TRANSIENT
        if not may_be_followed(seconds):
            return (
                f"a rerun took {seconds:.0f} s, and following its operations would hold up the run for more than "
                f"{_TRACE_SECONDS} s; a replay names it"
            )
        return ""

    def _run_again(
        self, window: Window, optimizer: Any, target: int, trace: Trace | None, *, goes_on: bool, raised: bool
    ) -> Outcome:
        start, run = time.perf_counter(), self.run

        def restore() -> None:
            window.restore(run.module)
            window.restore_optimizers(run.optimizers)

        engine = Engine(module=run.module, restore=restore, target=target, goes_on=goes_on, trace=trace)
        # An optimizer that calls another one does so where no gradients are recorded.
        with torch.enable_grad(), preserved(run, updates=target > 0 or goes_on), run.quiet(window):
            self.engine = engine
            behind: Sequence[Origin] = ()
            with watched() as sent, traced(trace):
                try:
                    _play(run, window, engine, optimizer)
                except Exception as error:  # goes on, but for one that is the very thing to be judged
                    if not raised or isinstance(error, NeedsOthersError):
                        raise
                    behind = judge_raise(engine, trace, error, _parameters_of(optimizer))
                if engine.finding is None:
                    engine.look(_parameters_of(optimizer))
                if goes_on and (engine.finding is None or engine.finding.raised is None):
                    engine.look_after(updated=True)
            finding = engine.finding
            assert finding is not None
            culprit = None
            if trace is not None and trace.heals is None:
                culprit = _culprit_of(trace, run.module, finding, engine, behind)
        last = len(engine.losses) - 1 if finding.found_in else None
        return Outcome(
            finding=finding,
            guilty=last if engine.guilty is None else engine.guilty,
            raw_bad=engine.raw_bad,
            seconds=time.perf_counter() - start,
            culprit=culprit,
            sent=sent.first_bad,
        )


def _play(run: Run, window: Window, engine: Engine, optimizer: Any) -> None:
    """Run the step; what the user's code raises once the fault was found takes nothing away from that.

    Raises:
        Exception: whatever the user's step raises before.
    """
    try:
        run.play(window, engine, optimizer)
    except Exception as error:  # of the user's own code, which may not be made for a step that ends early
        if engine.finding is None or not engine.finding.found_in:
            raise
        log.debug("nancapture: after the fault was found, the step raised %s: %s", type(error).__name__, error)


def _culprit_of(
    trace: Trace, module: nn.Module, finding: Finding, engine: Engine, behind: Sequence[Origin]
) -> Culprit | None:
    try:
        culprit = culprit_of(trace, module, finding, engine.losses, behind)
    except Exception:  # the fault is confirmed whether or not its way can be followed
        log.debug("nancapture: following the operations failed", exc_info=True)
        culprit = None
    phase = surfaces_in(finding)
    if culprit is None and not (engine.bad_numbers and phase == "optimizer"):
        return None
    return given_number(culprit or Culprit(phase=phase), engine.bad_numbers)


def _parameters_of(optimizer: Any) -> list[Tensor]:
    """None where there is no optimizer."""
    return parameters_of(optimizer) if optimizer is not None else []


def _trace_of(module: nn.Module, heals: Healing | None = None) -> Trace:
    return Trace(module, {}, package_folder(module), heals=heals)
