"""From what a replay saw to its verdict.

A step that is finite passes if it was tested. Of the parameters whose gradients were bad at capture, one at least must
have a gradient, or else the fault may only be masked: a constant in place of the loss, a branch that is cut off. There
is one exception. The bundle says which of these parameters the step would teach nothing even with its fault healed,
whatever the weights (see :mod:`pytest_nancapture.diagnose.healing`): there zeros are honest. Where the loss was bad,
such parameters may then have no gradient at all, as where a term without any samples is left out, and where there is
nothing to learn for any parameter the step may be skipped. Where the loss was finite and only gradients were bad, they
must be there: a mended operation leaves zeros, one that was cut off leaves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pytest_nancapture.bundle.manifest import Fault, MissingRecord
from pytest_nancapture.bundle.text import some
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.healing import taught_by, watched
from pytest_nancapture.replay.result import Verdict
from pytest_nancapture.step.finding import Finding, surfaces_in

_MASKED = "a masked fault is not a fixed one"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its reason, what is not finite, where that comes from, and what else to know."""

    verdict: Verdict
    reason: str
    nonfinite: tuple[str, ...] = ()
    culprit: Culprit | None = None
    notes: tuple[str, ...] = ()


def judge(
    finding: Finding,
    fault: Fault,
    guilty: int,
    given: Culprit | None,
    *,
    raw: Collection[str] = (),
    updated: Collection[str] = (),
    others: str = "",
    missing: Sequence[MissingRecord] = (),
) -> Judgement:
    """Judge a step that ran to its end.

    Args:
        finding: what the replay saw.
        fault: what the capture saw.
        guilty: position of the guilty micro-batch in the window.
        given: what was bad before the step began.
        raw: names of the parameters whose gradients were not finite right after backward.
        updated: names of the parameters that the guilty update was made of.
        others: why the weights may be others than those that the fault was seen with; empty where they are not.
        missing: state of the run that this replay's module lacks.
    """
    if finding.found_in:
        return Judgement(
            verdict="nonfinite",
            reason=finding.summary,
            nonfinite=names_of(finding),
            culprit=given or Culprit(phase=surfaces_in(finding)),
            notes=(others,) if others else (),
        )
    if others:
        return Judgement(verdict="vacuous", reason=others)
    if missing:
        places = some([place.where for place in missing])
        reason = (
            f"the bundle lacks state of the run ({places}), so nothing shows that this step is the one that failed: it "
            "passes with a module that has it, built in the hook pytest_nancapture_module(bundle), or captured anew"
        )
        return Judgement(verdict="vacuous", reason=reason)
    if problem := _not_updated(fault, updated):
        return Judgement(verdict="vacuous", reason=problem)
    healed = fault.healed
    if _text(fault.losses, guilty) and not _text(finding.losses, guilty):
        if healed is None or healed.learns:
            return _vacuous(
                f"the step made no loss for micro-batch {guilty + 1} of the window, where training had one",
                "a fix that lets it make a finite one passes",
            )
        return _honest("the step makes no loss, and with its fault healed there is nothing to learn from this batch")
    mended = [name for name in watched(fault.gradients) or raw if name in raw]
    if mended:
        return _vacuous(
            f"the gradients of {some(mended)} were not finite until code after the backward pass changed them",
            "a fix that makes the backward pass itself finite passes",
        )
    return _judge_gradients(finding, fault, guilty)


def _not_updated(fault: Fault, updated: Collection[str]) -> str:
    """Why the update was not tested, where nothing else was at fault; empty where it was."""
    if fault.found_in != ("weights",) or not fault.weights or set(fault.weights) & set(updated):
        return ""
    return (
        f"no update was made of {some(fault.weights)}, and the update is what was at fault: nothing was tested; it "
        "passes once the replay's optimizer steps: see what skips it, in the code or in the hook "
        "pytest_nancapture_trainer_kwargs"
    )


def _judge_gradients(finding: Finding, fault: Fault, guilty: int) -> Judgement:
    asked, healed = watched(fault.gradients), fault.healed
    idle = set(healed.idle) if healed is not None else set()
    present = {*finding.gradients.nonzero, *finding.zeros}
    there = taught_by(finding, guilty)
    missing = [name for name in asked if name not in present]
    fine = Judgement(verdict="finite", reason="loss and gradients are finite")
    how = f"with {'non-finite' if fault.gradients.nonfinite else 'non-zero'} gradients at capture"
    if fault.raised is not None and not fault.gradients.nonfinite:
        how = f"that led to what {fault.raised.type} was raised over"
    if healed is not None and {"loss", "gradients"} & set(fault.found_in):
        # A loss that was finite is no reason to leave out a term of it.
        cut = missing if "loss" not in fault.found_in else [name for name in missing if name not in idle]
        if cut:
            verb = "are" if len(cut) > 1 else "is"
            return _vacuous(
                f"{some(cut)}, {how}, {verb} cut off from the loss now",
                "a fix that leaves gradients there, be they zeros, passes" if set(cut) <= idle else _PASSES,
            )
    if fault.raised is not None and not asked and not there:
        if healed is not None and not healed.learns:
            return _honest("no gradient is left, and with its fault healed there is nothing to learn from this batch")
        return _vacuous(f"the step does not raise any more, and teaches nothing: {_NOTHING}", _LEARNS)
    if not asked or there & set(asked):
        return fine
    if healed is not None and idle >= set(asked):
        return _honest("the gradients are zero, as those of the healed step are: this batch has nothing to teach them")
    if healed is not None and all(name in idle or (name in healed.silent and _layer_of(name, there)) for name in asked):
        return _honest("the gradients are zero where those of the healed step are, and the same layers go on learning")
    many = f"{len(asked)} parameters" if len(asked) > 1 else next(iter(asked))
    known = healed is not None
    lost = "have none, or only zeros"
    if set(asked) & set(finding.gradients.nonzero):
        lost = f"get none of micro-batch {guilty + 1} of the window, or only zeros"
    return _vacuous(
        f"{many} {how} now {lost}: {_NOTHING}",
        _PASSES if known else f"{_PASSES}; if zeros are right for this batch, capture or pin it anew to have that told",
    )


def _layer_of(name: str, learning: Collection[str]) -> bool:
    """Whether another parameter of the same submodule learns from this micro-batch."""
    layer = name.rpartition(".")[0]
    return any(other != name and other.rpartition(".")[0] == layer for other in learning)


_NOTHING = "nothing was tested"
_LEARNS = "a fix that lets it come to a loss that teaches something passes"
_PASSES = "a fix that leaves them a gradient passes"


def _vacuous(reason: str, remedy: str) -> Judgement:
    return Judgement(verdict="vacuous", reason=f"{reason}; {_MASKED}; {remedy}")


def _honest(note: str) -> Judgement:
    return Judgement(verdict="finite", reason="all there is is finite", notes=(note,))


def _text(losses: tuple[str, ...], position: int) -> str:
    return losses[position] if position < len(losses) else ""


def names_of(finding: Finding) -> tuple[str, ...]:
    """What is not finite, by name."""
    raised = (f"what {finding.raised.type} is raised over",) if finding.raised is not None else ()
    loss = (*raised, "loss") if finding.bad_losses else raised
    gradients = (f"gradient {name}" for name in finding.gradients.nonfinite)
    buffers = (f"buffer {name}" for name in finding.buffers)
    return (*loss, *gradients, *buffers, *(f"weight {name}" for name in finding.weights))
