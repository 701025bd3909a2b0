"""What a replay found, as plain values."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pytest_nancapture.bundle.text import printable, some
from pytest_nancapture.diagnose.culprit import Culprit

Verdict = Literal["finite", "nonfinite", "vacuous", "mismatch", "error"]


_UNTRACED = "   (give replay trace=True to find the operation and its line)"


@dataclass(frozen=True, kw_only=True, repr=False)
class ReplayResult:
    """What a replay found; shows as a few lines of text, in a notebook's cell as a table.

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

    def lines(self, *, untraced: str = _UNTRACED, more: Iterable[tuple[str, str]] = ()) -> list[str]:
        """The verdict and its reason on the first line, then what led to it.

        Args:
            untraced: what to add where the culprit was not looked for.
            more: further rows, a label and a text each.
        """
        first = f"{self.verdict}: {self.reason}"
        rows = [f"  {label:10}  {text}" for label, text in (*self._rows(untraced), *more)]
        return [first, *rows, *(["", *self.detail.expandtabs().splitlines()] if self.detail else [])]

    def __repr__(self) -> str:
        return "\n".join(map(printable, self.lines()))

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        rows = "".join(
            f"<tr><td style='text-align:left'>{_html(label)}</td><td style='text-align:left'>{_html(text)}</td></tr>"
            for label, text in self._rows(_UNTRACED)
        )
        detail = f"<pre>{_html(self.detail.expandtabs())}</pre>" if self.detail else ""
        colour = "green" if self.finite else "firebrick"
        return (
            f"<div><b style='color:{colour}'>{_html(self.verdict)}</b>: {_html(self.reason)}"
            f"<table>{rows}</table>{detail}</div>"
        )

    def _rows(self, untraced: str) -> Iterator[tuple[str, str]]:
        if self.culprit is not None:
            yield from _culprit_rows(self.culprit, untraced)
        if self.nonfinite:
            yield "not finite", f"{len(self.nonfinite)}: {some(self.nonfinite)}"
        if self.loss is not None:
            yield "loss", f"{self.loss:g}"
        for note in self.notes:
            yield "note", note
        yield "ran on", f"{self.device}, {self.seconds:.1f} s"


def _html(text: str) -> str:
    """A bundle is data from elsewhere, and so is what it says."""
    return html.escape("\n".join(map(printable, text.splitlines())))


def _culprit_rows(culprit: Culprit, untraced: str) -> Iterator[tuple[str, str]]:
    if culprit.source:
        yield "culprit", culprit.source.strip()
    place = f"{culprit.file}:{culprit.line}" if culprit.file else ""
    module = f"in {culprit.module_path}" if culprit.module_path else ""
    if found := "   ".join(part for part in (place, culprit.op, module) if part):
        yield "born at", found
    if culprit.library:
        yield "inside", culprit.library
    if culprit.explanation:
        yield "because", culprit.explanation
    for position, step in enumerate(culprit.chain[1:]):
        yield "" if position else "then", step
    yield "surfaces", culprit.phase + ("" if found else untraced)
