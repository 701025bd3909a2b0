"""What a replay found, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_nancapture.bundle.text import printable, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_nancapture.diagnose.culprit import Culprit
    from pytest_nancapture.replay.result import ReplayResult


def result_page(result: ReplayResult, *, traced: bool, repeat: str) -> str:
    """The verdict and its reason on the first line, then what led to it.

    Args:
        result: of the replay.
        traced: whether the culprit was looked for.
        repeat: the command that repeats it.
    """
    lines = [f"{result.verdict}: {result.reason}"]
    lines += [f"  {key:10}  {value}" for key, value in _rows(result, traced, repeat)]
    if result.detail:
        lines += ["", *result.detail.expandtabs().splitlines()]
    return "\n".join(map(printable, lines))


def _rows(result: ReplayResult, traced: bool, repeat: str) -> Iterator[tuple[str, str]]:
    if result.culprit is not None:
        yield from _culprit_rows(result.culprit, traced)
    if result.nonfinite:
        yield "not finite", f"{len(result.nonfinite)}: {some(result.nonfinite)}"
    if result.loss is not None:
        yield "loss", f"{result.loss:g}"
    for note in result.notes:
        yield "note", note
    yield "ran on", f"{result.device}, {result.seconds:.1f} s"
    yield "repeat", repeat


def _culprit_rows(culprit: Culprit, traced: bool) -> Iterator[tuple[str, str]]:
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
    yield "surfaces", culprit.phase + ("" if found or traced else "   (add --trace to find the operation and its line)")
