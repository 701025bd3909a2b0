"""What a person reads when a bundle's test fails: the verdict first, then why, then how to repeat it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from pytest_nancapture.bundle.describe import headline
from pytest_nancapture.bundle.text import printable, some
from pytest_nancapture.diagnose.excerpt import excerpt

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.bundle.manifest import Fault
    from pytest_nancapture.diagnose.culprit import Culprit
    from pytest_nancapture.replay.result import ReplayResult

_WIDTH = 80
_LABEL = 11
_GRADIENT = "gradient "
AS_IT_IS = "|"
"""The label of a line of source code or a command, which is not wrapped."""


Rows = Iterable[tuple[str, str]]
"""A label and a text each; the text is wrapped, and the label may be empty."""


class BundleFailure(Exception):  # noqa: N818, a verdict, not an error of ours
    """Ends a bundle's test: the verdict and its reason on one line, and the whole report."""

    def __init__(self, headline: str, text: str) -> None:
        super().__init__(text)
        self.headline = headline


class StillFaulty(BundleFailure):
    """The replay was not finite: the one failure that a known fault may have."""


def failure_text(headline: str, rows: Rows, detail: str, command: str) -> str:
    """The report: the headline, then `rows`, then `detail` as it is, and the command that repeats it."""
    lines = [*textwrap.wrap(headline, _WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    for label, text in rows:
        lines += _row(label, text)
    if detail:
        lines += ["", *(printable(line) for line in detail.rstrip().splitlines()), ""]
    return "\n".join([*lines, f"{'repeat':{_LABEL}}{command}"])


def result_rows(result: ReplayResult, bundle: Bundle) -> Iterator[tuple[str, str]]:
    """What a replay found, and what was seen at capture."""
    if result.culprit is not None:
        yield from _culprit_rows(result.culprit)
    if result.nonfinite:
        yield "not finite", _nonfinite(result.nonfinite)
    for note in result.notes:
        yield "note", note
    yield from capture_rows(bundle, with_culprit=result.culprit is None or not result.culprit.op)


def capture_rows(bundle: Bundle, *, with_culprit: bool = True) -> Iterator[tuple[str, str]]:
    """What was seen when the bundle was captured."""
    fault = bundle.fault
    yield (
        "captured",
        f"step {fault.global_step}, epoch {fault.epoch}, batch {fault.batch_idx}, on {bundle.manifest.device_kind}: "
        f"{headline(fault)}",
    )
    if with_culprit and fault.culprit:
        op, file, line, source = (str(fault.culprit.get(name, "")) for name in ("op", "file", "line", "source"))
        yield "", ", ".join(part for part in (op, f"{file}:{line}" if file else "", source.strip()) if part)
    yield "", confirmation(fault)


def confirmation(fault: Fault) -> str:
    """Whether a pass of this bundle proves anything."""
    runs, of = fault.reproduced.runs, fault.reproduced.of
    if not of:
        return "never proven at capture: no replay of the bundle was made, so whether its fault comes back is not known"
    where = ", in the training process: globals, environment and files were those of the run" * (
        fault.reproduced.how == "here"
    )
    return f"reproduced {runs} of {of} at capture{where}"


def short_source(culprit: Culprit | None) -> str:
    """``file:line``; empty where unknown."""
    if culprit is None or not culprit.file:
        return ""
    return f"{culprit.file}:{culprit.line}" if culprit.line else culprit.file


def terminal_repr(failure: BundleFailure, path: Path) -> ReprExceptionInfo:
    """The report in the one form that keeps its ``reprcrash``, and so the summary's reason, through xdist."""
    entry = ReprEntryNative([f"{failure}\n"])
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback(reprentries=[entry], extraline=None, style="native"),
        reprcrash=ReprFileLocation(str(path), 1, failure.headline),
    )


def _culprit_rows(culprit: Culprit) -> Iterator[tuple[str, str]]:
    where = f"in {culprit.module_path}" if culprit.module_path else ""
    parts = (culprit.op, short_source(culprit), where, f"surfaces in the {culprit.phase}")
    yield "culprit", ", ".join(part for part in parts if part)
    lines = excerpt(culprit)
    yield from ((AS_IT_IS, line) for line in lines)
    if culprit.source and not lines:
        yield "", f"> {culprit.source.strip()}"
    if culprit.library:
        yield "", f"there {culprit.library}"
    if culprit.explanation:
        yield "", culprit.explanation
    for position, step in enumerate(culprit.chain[1:]):
        yield "" if position else "then", step


def _nonfinite(names: tuple[str, ...]) -> str:
    gradients = [name.removeprefix(_GRADIENT) for name in names if name.startswith(_GRADIENT)]
    others = [name for name in names if not name.startswith(_GRADIENT)]
    if gradients:
        others.append(f"{len(gradients)} gradient{'s' if len(gradients) > 1 else ''}: {some(gradients, 4)}")
    return "; ".join(others)


def _row(label: str, text: str) -> Iterator[str]:
    if label == AS_IT_IS:
        yield f"{'':{_LABEL}}{printable(text)}"
        return
    first, rest = f"{label:{_LABEL}}", " " * _LABEL
    yield from textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
