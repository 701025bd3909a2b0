"""Is it a fault, whose, and which micro-batch's? Reruns in place tell, on all ranks together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from pytest_nancapture.bundle.manifest import Healed, Reproduced
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.step.finding import Finding
from pytest_nancapture.step.run import Run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rerun saw.

    Attributes:
        finding: at the optimizer step that was guilty in training.
        guilty: position in the window of the first micro-batch after which something was not finite; None if none was.
        raw_bad: gradients were not finite right after backward, before any hook.
        seconds: how long it took.
        culprit: what is to blame, if the operations were followed.
        sent: the first of the step's own collectives to which this rank brought something not finite, from 1 up; 0 for
            none.
    """

    finding: Finding
    guilty: int | None
    raw_bad: bool
    seconds: float
    culprit: Culprit | None = None
    sent: int = 0

    @property
    def dropped(self) -> bool:
        """Whether the module's own hooks mended the gradients before the update."""
        return self.raw_bad and not self.finding.gradients.nonfinite and not self.finding.buffers

    @property
    def failed(self) -> bool:
        """Whether the fault came back."""
        return bool(self.finding.found_in) and not self.dropped


class Share(IntEnum):
    """One rank's part in a step that is not finite."""

    NONE = 0
    """Nothing of its own is bad."""
    GUILTY = 1
    """Its own loss, gradients or buffers are, and it came back in a rerun, or none was asked for."""
    EXCUSED = 2
    """A scaler's overflow, or what the user's own hooks mended before the update."""
    UNPROVEN = 3
    """Something is bad, but it did not come back in a rerun."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What all ranks have agreed upon.

    Attributes:
        blamed: the ranks at fault.
        finding: this rank's; where its gradients were mixed with other ranks', those of the rerun, which are its own.
        guilty: position of the guilty micro-batch in this rank's window.
        reproduced: how often it came back.
        seconds: how long a rerun takes; None where none was made, or it did not come back.
        culprit: what is to blame, once that is known.
        no_culprit: why it is not known, and how to find out.
        healed: what is left to learn, once that is known.
    """

    blamed: tuple[int, ...]
    finding: Finding
    guilty: int
    reproduced: Reproduced
    seconds: float | None = None
    culprit: Culprit | None = None
    no_culprit: str = ""
    healed: Healed | None = None


def decide(
    finding: Finding,
    run: Run,
    *,
    scaled: bool,
    batches: int,
    confirm: int,
    rerun: Callable[[], Outcome | None],
    is_late: bool = False,
) -> Decision | None:
    """Decide about a step that is not finite on some rank; every rank comes here at the same time.

    Args:
        finding: what this rank saw.
        run: that all ranks take part in.
        scaled: whether gradients were scaled, so that an overflow is routine.
        batches: micro-batches in the window.
        confirm: how many reruns were asked for; at least one is made where only that can decide.
        rerun: runs the window again in place; None where it could not be run.
        is_late: gradients may have been clipped or dropped since they were found to be bad; a rerun has them anew.

    Returns:
        None where there was no fault.
    """
    undecided = is_late or run.world_size > 1 or (scaled and not finding.bad_losses) or finding.found_in == ("loss",)
    outcomes = [rerun() for _ in range(max(confirm, int(undecided)))]
    done = [outcome for outcome in outcomes if outcome is not None]
    seen = [outcome for outcome in done if outcome.failed]
    if is_late and seen:
        finding = seen[0].finding
    shares = run.gather(_share(finding, done, seen, scaled=scaled, alone=run.world_size == 1))
    # Who first gave bad values to the others in the step itself is to blame for theirs.
    senders = run.gather(seen[0].sent if seen else 0)
    blamed = [rank for rank, share in enumerate(shares) if share == Share.GUILTY]
    first = min((senders[rank] for rank in blamed if senders[rank]), default=0)
    blamed = [rank for rank in blamed if senders[rank] == first] if first else blamed
    if not blamed:
        unproven = [rank for rank, share in enumerate(shares) if share == Share.UNPROVEN]
        if not unproven or scaled:
            return None
        blamed = unproven[:1]
    if seen and not finding.bad_losses:
        mine = seen[0].finding
        finding = dataclasses.replace(finding, gradients=mine.gradients, kind=mine.kind, buffers=mine.buffers)
    positions = [outcome.guilty for outcome in seen if outcome.guilty is not None]
    return Decision(
        blamed=tuple(blamed),
        finding=finding,
        guilty=next(iter([*finding.bad_losses, *positions, batches - 1])),
        reproduced=Reproduced(runs=len(seen), of=len(done)) if confirm else Reproduced(),
        seconds=max(outcome.seconds for outcome in done) if done and (seen or run.world_size > 1) else None,
    )


def _share(finding: Finding, done: list[Outcome], seen: list[Outcome], *, scaled: bool, alone: bool) -> Share:
    if not finding.found_in:
        return Share.NONE
    # Callbacks are left out of reruns: what they mended in training is seen to be bad there, and only there.
    mended = finding.found_in == ("loss",) and any(outcome.raw_bad for outcome in done)
    if mended or any(outcome.dropped for outcome in done):
        return Share.EXCUSED
    if seen or finding.bad_losses:
        return Share.GUILTY
    if scaled and done:
        return Share.EXCUSED
    if done and not alone:
        # Its gradients were mixed with other ranks' before anybody could look: one of those is to blame, if any.
        return Share.UNPROVEN
    return Share.GUILTY
