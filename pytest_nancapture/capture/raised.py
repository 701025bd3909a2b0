"""A step that raised: run it again, and where a value that is not finite was the reason, make a bundle of it.

The exception goes on, whatever comes of it. No other rank is asked or waited for: those may be gone, or wait themselves
in the middle of the step.
"""

from __future__ import annotations

import logging
import re
import time

import torch

from pytest_nancapture.bundle import numerics
from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.bundle.paths import shown_from_start
from pytest_nancapture.capture.guilty import Decision, Outcome
from pytest_nancapture.capture.record import Recorder
from pytest_nancapture.capture.rerun import Reruns, may_be_followed
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.given import given_fault
from pytest_nancapture.diagnose.raised import raised
from pytest_nancapture.errors import NancaptureError
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.sent import refused
from pytest_nancapture.step.state.keeper import moved
from pytest_nancapture.step.state.optimizers import bad_numbers, bad_states
from pytest_nancapture.step.state.put_back import preserved
from pytest_nancapture.step.state.window import Window

_SPEAKS_OF_NAN = re.compile(r"\b(nan|inf|infinity|(non-?|not |in)finite)\b", re.IGNORECASE)

log = logging.getLogger("pytest_nancapture")


def _is_worth_a_look(error: BaseException) -> bool:
    """Whether a step that raised this may be run again: it was not ended from outside, nor for lack of memory."""
    ours, memory = (NancaptureError,), (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, Exception) and not isinstance(error, (*ours, *memory))


def capture_raised(error: BaseException, window: Window, record: Recorder, reruns: Reruns, *, in_update: bool) -> None:
    """Make a bundle of a step that raised over a value that is not finite, and tell where it is in a note of `error`.

    Module, optimizers and random states are left as the exception has left them; nothing is raised.

    Args:
        reruns: of this rank alone.
        in_update: whether an optimizer was at its update.
    """
    try:
        if _is_worth_a_look(error):
            _capture(error, window, record, reruns, in_update=in_update)
    except Exception as failure:  # nothing of ours may stand in the way of the user's own
        log.warning("nancapture: no bundle: %s: %s", type(failure).__name__, failure)
        log.debug("nancapture: where that was raised", exc_info=True)


def _capture(error: BaseException, window: Window, record: Recorder, reruns: Reruns, *, in_update: bool) -> None:
    run = reruns.run
    if window.dropped or not window.batches:
        return  # it was captured before
    if window.stepped and not window.states:
        _say_what_it_takes(run, error, in_update=in_update)
        return
    optimizer = window.last_optimizer or next(iter(run.optimizers), None)
    target = window.optimizer_steps - 1 if in_update else window.optimizer_steps
    follows = may_be_followed(time.monotonic() - window.began)
    window.written = frozenset(moved(window))
    with preserved(run, updates=bool(window.states)), refused(), numerics.preserved():
        numerics.apply(window.numerics)
        outcome = reruns.raised(window, optimizer, target, goes_on=in_update, follows=follows)
        if outcome is None or not outcome.failed:
            if outcome is None:
                _say_why_unknown(run, error)
            return
        decision = _decide(run, window, outcome, _given(window, record))
        decision = reruns.healed(window, optimizer, target, decision, began=time.monotonic() - outcome.seconds)
        window.restore(run.module)
        for parameter in run.module.parameters():
            parameter.grad = None
        path = record.write(window, target, decision)
    if path is not None and hasattr(error, "add_note"):  # of Python 3.11 on
        error.add_note(f"nancapture: the step that raised this is in the bundle {shown_from_start(path)}")


def _say_what_it_takes(run: Run, error: BaseException, *, in_update: bool) -> None:
    """Of weights that an update was moving there is no copy: tell how to have one, where it might help."""
    state = bad_states(run.optimizers) if in_update else ""
    numbers = [*bad_numbers(run.optimizers, run.scaler), *([f"{state} of its state is not finite"] if state else [])]
    if in_update and numbers:
        log.warning(
            "%snancapture: the update raised %s, and %s; capture that with NaNCapture(optimizer_history=True)",
            run.line_start,
            type(error).__name__,
            "; ".join(numbers),
        )


def _say_why_unknown(run: Run, error: BaseException) -> None:
    """Where the step could not be run again, and the exception speaks of NaN."""
    if _SPEAKS_OF_NAN.search(str(error)):
        log.warning(
            "%snancapture: no bundle: the step raised %s, and it could not be run again on this rank alone%s",
            run.line_start,
            raised(error),
            ", since it speaks to others" if run.world_size > 1 else "; the debug log says why",
        )


def _given(window: Window, record: Recorder) -> Culprit | None:
    """What was bad before the step."""
    batch = {name: tensor for taken in window.batches for name, tensor in taken.tensors.items()}
    return given_fault(record.bad_weights(window), batch)


def _decide(run: Run, window: Window, outcome: Outcome, given: Culprit | None) -> Decision:
    culprit = outcome.culprit
    if given is not None and culprit == Culprit(phase=given.phase):
        culprit = given  # explained by its values, of which the trace knows nothing
    last = len(window.batches) - 1
    return Decision(
        blamed=(run.rank,),
        finding=outcome.finding,
        guilty=min(last if outcome.guilty is None else outcome.guilty, last),
        reproduced=Reproduced(runs=1, of=1),
        seconds=outcome.seconds,
        culprit=culprit,
        no_culprit="" if culprit is not None else "nothing that the rerun did leads to it",
    )
