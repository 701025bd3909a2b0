"""What a replay found, as plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from pytest_nancapture.diagnose.culprit import Culprit

Verdict = Literal["finite", "nonfinite", "vacuous", "mismatch", "error"]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        verdict: ``finite`` (passes), ``nonfinite``, ``vacuous`` (nothing was tested), ``mismatch`` (the captured
            tensors no longer fit the code) or ``error`` (the step could not be run).
        loss: the sum over the window's micro-batches, as training would accumulate it; None where there was none.
        nonfinite: names of what is not finite, such as ``loss``, ``gradient fc.weight``, ``buffer bn.running_mean``.
        culprit: where it comes from; None unless the verdict is ``nonfinite``.
        reason: one sentence that says why the verdict is what it is.
        detail: what to print below the reason, such as the traceback of an ``error``; may be empty.
        notes: what a reader should know before trusting the verdict, a sentence each.
        device: the device the step ran on, such as ``cpu`` or ``cuda:0``.
        seconds: wall-clock time of the replay.
    """

    verdict: Verdict
    loss: float | None
    nonfinite: tuple[str, ...]
    culprit: Culprit | None
    reason: str
    detail: str = ""
    notes: tuple[str, ...] = ()
    device: str
    seconds: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradients were computed and are finite: the only verdict that passes."""
        return self.verdict == "finite"

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON-ready values; a non-finite loss becomes its name, since JSON has none."""
        data = {**dataclasses.asdict(self), "finite": self.finite}
        if self.loss is not None and self.loss - self.loss != 0:
            data["loss"] = str(self.loss)
        return data
