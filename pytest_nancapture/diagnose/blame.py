"""Of all that went bad in a trace, the one operation that is to blame for what reached loss, gradients or state."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from pytest_nancapture.diagnose.source import Source
from pytest_nancapture.diagnose.trace import GivenValue, Record, Trace
from pytest_nancapture.replay.result import Culprit, Phase

Origin = Record | GivenValue


def blame(trace: Trace, symptoms: Iterable[Tensor], phase: Phase, root: Path | None) -> Culprit | None:
    """The culprit of bad values that ended in `symptoms`.

    The first cause counts: an Inf that was computed, or the NaN that a written Inf (a mask) became. What was bad before
    the step began comes before both.

    Args:
        symptoms: bad losses, or where they are finite bad gradients, buffers or weights.
        phase: where the fault surfaces, unless it was given with batch or weights.
        root: the repository, to which file names are made relative.

    Returns:
        None where nothing of the trace leads to the symptoms.
    """
    ends = [origin for tensor in symptoms if (origin := trace.writer(tensor)) is not None]
    reached = _ancestors(ends)
    given = [origin for origin in reached if isinstance(origin, GivenValue) and origin.kind != "constant"]
    if given:
        first = min(given, key=lambda value: value.kind != "weights")
        return Culprit(phase="weights" if first.kind == "weights" else "input")
    records = [origin for origin in reached if isinstance(origin, Record)]
    births = [record for record in records if record.birth == "computed" or _is_made_of_written(record)]
    if births:
        return _culprit(min(births, key=lambda record: record.index), phase, root)
    placed = [record for record in records if record.source is not None]
    if placed:
        # Only what the code wrote on purpose: the line where it came out is the one that should have masked it.
        return _culprit(max(placed, key=lambda record: record.index), phase, root, named=False)
    return None


def _ancestors(ends: Iterable[Origin]) -> list[Origin]:
    seen: dict[int, Origin] = {}
    todo = list(ends)
    while todo:
        origin = todo.pop()
        if id(origin) not in seen:
            seen[id(origin)] = origin
            todo += origin.parents if isinstance(origin, Record) else ()
    return list(seen.values())


def _is_made_of_written(record: Record) -> bool:
    """Whether a NaN was born here from infinities that the code wrote, and from nothing else."""
    if record.birth != "nan":
        return False
    above = _ancestors(record.parents)
    return all(
        origin.kind == "constant" if isinstance(origin, GivenValue) else origin.birth in ("written", "")
        for origin in above
    )


def _culprit(record: Record, phase: Phase, root: Path | None, *, named: bool = True) -> Culprit:
    forward = record.forward
    op, source, path = record.op, record.source, record.module_path
    if record.is_backward and forward is not None:
        op, source, path = forward.op, forward.source, forward.module_path
    return Culprit(
        phase=phase,
        op=op if named else "",
        file=_relative(source, root),
        line=source.line if source else 0,
        source=source.text if source else "",
        module_path=path,
        explanation=record.explanation,
    )


def _relative(source: Source | None, root: Path | None) -> str:
    if source is None:
        return ""
    path = Path(source.file)
    return path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else str(path)
