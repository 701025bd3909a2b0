"""From what a replay saw to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nancapture.bundle.manifest import Fault, MissingRecord
from pytest_nancapture.bundle.text import some
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.result import Verdict
from pytest_nancapture.step.finding import Finding, surfaces_in


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its reason, what is not finite, and where that comes from."""

    verdict: Verdict
    reason: str
    nonfinite: tuple[str, ...] = ()
    culprit: Culprit | None = None


def judge(
    finding: Finding, fault: Fault, guilty: int, given: Culprit | None, missing: Sequence[MissingRecord] = ()
) -> Judgement:
    """Judge a step that ran to its end.

    Args:
        finding: what the replay saw.
        fault: what the capture saw.
        guilty: position of the guilty micro-batch in the window.
        given: what was bad before the step began.
        missing: state of the run that this replay's module lacks.
    """
    if finding.found_in:
        return Judgement(
            verdict="nonfinite",
            reason=finding.summary,
            nonfinite=_names(finding),
            culprit=given or Culprit(phase=surfaces_in(finding)),
        )
    if _text(fault.losses, guilty) and not _text(finding.losses, guilty):
        return _vacuous(f"the step made no loss for micro-batch {guilty + 1} of the window, where training had one")
    watched = set(fault.gradients.nonfinite or fault.gradients.nonzero)
    if watched and not watched & set(finding.gradients.nonzero):
        which = f"{len(watched)} parameters" if len(watched) > 1 else next(iter(watched))
        how = "non-finite" if fault.gradients.nonfinite else "non-zero"
        return _vacuous(f"{which} with {how} gradients at capture now have none, or only zeros: nothing was tested")
    if missing:
        places = some([place.where for place in missing])
        return _vacuous(
            f"the bundle lacks state of the run ({places}), so nothing shows that this step is the one that failed: "
            "build the module with it in the hook pytest_nancapture_module(bundle), or capture anew"
        )
    return Judgement(verdict="finite", reason="loss and gradients are finite")


def _vacuous(reason: str) -> Judgement:
    return Judgement(verdict="vacuous", reason=f"{reason}; a masked fault is not a fixed one")


def _text(losses: tuple[str, ...], position: int) -> str:
    return losses[position] if position < len(losses) else ""


def _names(finding: Finding) -> tuple[str, ...]:
    loss = ("loss",) if finding.bad_losses else ()
    gradients = (f"gradient {name}" for name in finding.gradients.nonfinite)
    buffers = (f"buffer {name}" for name in finding.buffers)
    return (*loss, *gradients, *buffers, *(f"weight {name}" for name in finding.weights))
