"""Of all that went bad in a trace, the one operation that is to blame for what reached loss, gradients or state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from pytest_nancapture.bundle.tensors.names import buffers, unique_parameters
from pytest_nancapture.bundle.values.references import repository_root
from pytest_nancapture.diagnose.culprit import Culprit, Phase
from pytest_nancapture.diagnose.records import GivenValue, Link, Origin, Record
from pytest_nancapture.diagnose.source import Source
from pytest_nancapture.diagnose.trace import Trace
from pytest_nancapture.step.finding import Finding, surfaces_in

_CHAIN = 6
"""Lines of a chain that are told; the middle of a longer one is left out."""


def symptoms(module: nn.Module, finding: Finding, losses: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The bad tensors: losses, or where those are finite gradients, or else buffers and weights.

    Args:
        losses: of each micro-batch of the window.
    """
    bad = [loss for i in finding.bad_losses for loss in losses[i]]
    now = dict(unique_parameters(module))
    gradients = [gradient for name in finding.gradients.nonfinite if (gradient := now[name].grad) is not None]
    everything = {**now, **dict(buffers(module))}
    return bad or gradients or [everything[name] for name in (*finding.buffers, *finding.weights)]


def blame(origins: Iterable[Origin | None], phase: Phase) -> Culprit | None:
    """The culprit of bad values that ended in symptoms; file names are relative to the repository.

    The first cause counts: an Inf that was computed, or the NaN that a written Inf (a mask) became. What was bad before
    the step began comes before both.

    Args:
        origins: of the symptoms: of bad losses, or where they are finite of bad gradients, buffers or weights.
        phase: where the fault surfaces, unless it was given with batch or weights.

    Returns:
        None where nothing of the trace leads to the symptoms.
    """
    root = repository_root(Path.cwd()) or Path.cwd()
    reached = _ancestors(Link(origin) for origin in origins if origin is not None)
    given = _given(reached)
    if given:
        first = min(given, key=lambda value: value.kind != "weights")
        return Culprit(phase="weights" if first.kind == "weights" else "input")
    births = [hit for hit in reached if _is_birth(hit)]
    if births:
        return _culprit(min(births, key=_index), phase, root)
    placed = [hit for hit in reached if isinstance(hit.origin, Record) and hit.origin.source is not None]
    if placed:
        # Only what the code wrote on purpose: the line where it came out is the one that should have masked it.
        return _culprit(max(placed, key=_index), phase, root, named=False)
    return None


def culprit_of(
    trace: Trace,
    module: nn.Module,
    finding: Finding,
    losses: Sequence[Sequence[Tensor]],
    behind: Sequence[Origin] = (),
) -> Culprit | None:
    """The culprit of what was found in a step that was traced, while losses and gradients are still there.

    Args:
        behind: where the bad values came from over which the step raised.
    """
    origins: Iterable[Origin | None] = behind or map(trace.writer, symptoms(module, finding, losses))
    return blame(origins, surfaces_in(finding))


def has_birth(origin: Origin) -> bool:
    """Whether a bad value was born on the way to it, and is no mark that the code has put there."""
    hits = _ancestors([Link(origin)])
    return any(_is_birth(hit) and not (isinstance(hit.origin, Record) and hit.origin.is_literal) for hit in hits)


def has_given(origin: Origin) -> bool:
    """Whether a bad value on the way to it stood in batch or weights."""
    return bool(_given(_ancestors([Link(origin)])))


def _given(hits: Iterable[_Hit]) -> list[GivenValue]:
    """Those that were there before the step, but for constants of the code."""
    return [hit.origin for hit in hits if isinstance(hit.origin, GivenValue) and hit.origin.kind != "constant"]


@dataclass
class _Hit:
    """Something that the symptoms lead back to.

    Attributes:
        matters: the elements that do; None for all.
        led_to: the next one on a shortest way to a symptom; None for the symptom's own.
    """

    origin: Origin
    matters: Tensor | None
    led_to: _Hit | None = None


def _ancestors(links: Iterable[Link]) -> list[_Hit]:
    """All that the links lead back to, each with those of its elements that lead there."""
    seen: dict[int, _Hit] = {}
    todo: deque[tuple[Link, Tensor | None, _Hit | None]] = deque((link, None, None) for link in links)
    while todo:
        link, matters, led_to = todo.popleft()
        reach = link.reach
        if reach is not None and matters is not None and reach.shape == matters.shape:
            reach = reach & matters
            if not bool(reach.any()):
                continue
        now = reach if link.is_aligned else None
        hit = seen.get(id(link.origin))
        if hit is None:
            hit = seen[id(link.origin)] = _Hit(link.origin, now, led_to)
        elif hit.matters is None or (now is not None and _covers(hit.matters, now)):
            continue
        else:
            both = now is not None and now.shape == hit.matters.shape
            hit.matters = hit.matters | now if both and now is not None else None
        if isinstance(link.origin, Record):
            todo += [(above, hit.matters, hit) for above in link.origin.links]
    return list(seen.values())


def _covers(mask: Tensor, other: Tensor) -> bool:
    return mask.shape == other.shape and not bool((other & ~mask).any())


def _index(hit: _Hit) -> int:
    assert isinstance(hit.origin, Record)
    return hit.origin.index


def _is_birth(hit: _Hit) -> bool:
    """Whether what matters of it was born there."""
    record = hit.origin
    if not isinstance(record, Record):
        return False
    if record.birth == "computed":
        fresh, matters = record.fresh, hit.matters
        known = fresh is not None and matters is not None and fresh.shape == matters.shape
        return not known or _meet(fresh, matters)
    return record.birth == "nan" and _is_made_of_written(record)


def _meet(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and bool((left & right).any())


def _is_made_of_written(record: Record) -> bool:
    """Whether a NaN was born here from infinities that the code wrote, and from nothing else."""
    return all(
        hit.origin.kind == "constant" if isinstance(hit.origin, GivenValue) else hit.origin.birth in ("written", "")
        for hit in _ancestors(record.links)
    )


def _place(record: Record) -> tuple[str, Source | None, str]:
    """Operation, line and submodule; of the forward operation where the record is of its gradient."""
    forward = record.forward
    if record.is_backward and forward is not None:
        return forward.op, forward.source, forward.module_path
    return record.op, record.source, record.module_path


def _chain(hit: _Hit, root: Path | None) -> tuple[str, ...]:
    """From birth to symptom, the operations in a row on one line told once."""
    told: list[str] = []
    places: set[Source] = set()
    step: _Hit | None = hit
    while step is not None:
        record = step.origin
        if isinstance(record, Record):
            op, source, path = _place(record)
            if source is not None and source not in places:
                places.add(source)
                way = "gradient of " if record.is_backward else ""
                where = f" in {path}" if path else ""
                told.append(f"{way}{op}{where}   {relative_file(source, root)}:{source.line}   {source.text}")
        step = step.led_to
    if len(told) > _CHAIN:
        told[_CHAIN // 2 : -(_CHAIN // 2)] = [f"... {len(told) - _CHAIN // 2 * 2} more"]
    return tuple(told)


def _culprit(hit: _Hit, phase: Phase, root: Path | None, *, named: bool = True) -> Culprit:
    record = hit.origin
    assert isinstance(record, Record)
    op, source, path = _place(record)
    return Culprit(
        phase="input" if record.is_early else "optimizer" if record.in_update else phase,
        op=op if named else "",
        file=relative_file(source, root),
        line=source.line if source else 0,
        source=source.text if source else "",
        columns=source.columns if source else (0, 0),
        library=source.library if source else "",
        module_path=path,
        explanation=record.explanation,
        chain=_chain(hit, root),
    )


def relative_file(source: Source | None, root: Path | None) -> str:
    """The source's file, as a culprit names it."""
    if source is None:
        return ""
    path = Path(source.file)
    return path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else str(path)
