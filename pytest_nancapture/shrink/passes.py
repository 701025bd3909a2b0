"""The passes of a shrink, cheapest gain first; each goes on until it gains nothing more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from pytest_nancapture.shrink.plan import Axis, Part, Plan, Range, Way, count, whole
from pytest_nancapture.shrink.search import Search, delete

_SMALL = 1024
"""Bytes; a smaller tensor stays as captured: real values are less degenerate, and little would be gained."""
_SEEDS = 4

Pass = Callable[[Search], None]


def micro_batches(search: Search) -> None:
    """The guilty micro-batch alone, or without those that the fault does not need."""
    guilty, plan = search.survey.guilty, search.best
    if len(plan.window) < 2:
        return
    change = dataclasses.replace
    alone = (guilty,)
    found = search.first(
        [change(plan, window=alone), change(plan, window=alone, alone=True)],
        "the guilty micro-batch alone",
    )
    if found is not None:
        return
    others = [position for position in plan.window if position != guilty]

    def make(kept: tuple[Range, ...]) -> Plan:
        chosen = {others[i] for part in kept for i in range(part.start, part.stop)}
        return change(search.best, window=tuple(sorted({*chosen, guilty})))

    delete(search, whole(len(others)), make, "micro-batches", least=0)


def samples(search: Search) -> None:
    """Entries of the batch: along the first dimension of all its tensors together, then along others."""
    for position in search.best.window:
        for axes, size in _axes(search, position):
            shared = [cut for cut in search.best.cuts if set(cut.axes) & set(axes)]
            if any(cut.axes != axes for cut in shared):
                continue
            kept = shared[0].kept if shared else whole(size)

            def make(ranges: tuple[Range, ...], axes: tuple[Axis, ...] = axes) -> Plan:
                return search.best.with_cut(axes, ranges)

            delete(search, kept, make, _axes_in_words(axes))


def _axes(search: Search, position: int) -> Iterator[tuple[tuple[Axis, ...], int]]:
    """Sets of axes of one size that may belong together, the likeliest first, of one micro-batch."""
    parts = [part for part in search.survey.parts if part.micro == position and part.group in ("batch", "list")]
    tensors = [part for part in parts if part.group == "batch"]
    lists = [part for part in parts if part.group == "list"]
    seen: set[tuple[Axis, ...]] = set()

    def new(axes: list[Axis]) -> bool:
        key = tuple(axes)
        if not axes or key in seen:
            return False
        seen.add(key)
        return True

    first = _by_size([(part, 0) for part in tensors])
    rest = _by_size([(part, dim) for part in tensors for dim in range(1, len(part.shape))])
    nested = _by_size([(part, 0) for part in lists])
    everything = _by_size([(part, dim) for part in parts for dim in range(len(part.shape))])
    both = {size: [*first.get(size, []), *nested.get(size, [])] for size in {**first, **nested}}
    for group, is_first in ((both, True), (first, True), (rest, False), (everything, False)):
        for size, axes in sorted(group.items(), key=lambda item: -len(item[1])):
            if new(axes) and (is_first or _is_worth(search, axes)):
                yield tuple(axes), size
    for part in sorted(tensors, key=lambda part: -part.bytes):
        for dim, size in enumerate(part.shape):
            axes = [Axis(name=part.name, dim=dim)]
            if size > 1 and part.bytes > _SMALL and new(axes):
                yield tuple(axes), size


def _by_size(axes: Sequence[tuple[Part, int]]) -> dict[int, list[Axis]]:
    groups: dict[int, list[Axis]] = {}
    for part, dim in axes:
        if dim < len(part.shape) and part.shape[dim] > 1:
            groups.setdefault(part.shape[dim], []).append(Axis(name=part.name, dim=dim))
    return groups


def _is_worth(search: Search, axes: Sequence[Axis]) -> bool:
    names = {axis.name for axis in axes}
    return any(part.name in names and bytes_now(search.best, part) > _SMALL for part in search.survey.parts)


def _axes_in_words(axes: Sequence[Axis]) -> str:
    dims = {axis.dim for axis in axes}
    return "samples" if dims == {0} else f"dimension {' and '.join(map(str, sorted(dims)))} of {len(axes)} tensors"


def bytes_now(plan: Plan, part: Part) -> int:
    """What is left of a tensor's bytes."""
    kept = {axis: count(cut.kept) for cut in plan.cuts for axis in cut.axes}
    share = 1.0
    for dim, size in enumerate(part.shape):
        if size:
            share *= kept.get(Axis(name=part.name, dim=dim), size) / size
    return math.ceil(part.bytes * share)


def weights(search: Search) -> None:
    """From the code's own initialisation where the fault comes under more than one seed; else noise, or simpler."""
    parts = [part for part in search.survey.parts if part.group == "weights"]
    makeable = [part for part in parts if part.initial]
    everything = search.best.with_ways({part.name: "initial" for part in _as_captured(search, makeable)})
    # What another version of torch initialises otherwise must not be what the fault hangs on.
    other = dataclasses.replace(everything, initial_seed=1)
    if everything == search.best or not makeable or not search.holds(other, "another initialisation"):
        makeable = [part for part in makeable if search.best.ways.get(part.name) == "initial"]
    else:
        _replace(search, makeable, "initial", "weights as initialised")
    large = [part for part in parts if part.simple and part.bytes >= _SMALL]
    _replace(search, large, "noise", "noise for weights")
    _replace(search, [part for part in parts if part.initial], "initial", "weights as initialised")
    for way in ("zeros", "rounded"):
        _replace(search, large, way, f"{way} for weights")


def values(search: Search) -> None:
    """Of the batch's larger tensors."""
    for way in ("noise", "constant", "zeros", "rounded"):
        parts = [part for part in search.survey.parts if part.group == "batch" and part.micro in search.best.window]
        large = [part for part in parts if part.simple and bytes_now(search.best, part) >= _SMALL]
        _replace(search, large, way, f"{way} for the batch")


def _as_captured(search: Search, parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.name not in search.best.ways]


def _replace(search: Search, parts: Sequence[Part], way: Way, what: str) -> None:
    """Take the way with as many of the tensors as can be, of those that are as captured."""
    todo = _as_captured(search, parts)
    if not todo:
        return
    start = search.best

    def make(kept: tuple[Range, ...]) -> Plan:
        left = {todo[i].name for part in kept for i in range(part.start, part.stop)}
        return start.with_ways({part.name: way for part in todo if part.name not in left})

    delete(search, whole(len(todo)), make, what, least=0, smaller=True)


def random_state(search: Search) -> None:
    """A seed in place of the captured states."""
    if search.best.seed is None:
        seeds = [dataclasses.replace(search.best, seed=seed) for seed in range(_SEEDS)]
        search.first(seeds, "random state from a seed", smaller=True)


def optimizer(search: Search) -> None:
    """Without the optimizer's state, or with noise in it."""
    if not search.survey.optimizer or not search.best.optimizer:
        return
    if not search.consider(dataclasses.replace(search.best, optimizer=False), "no optimizer state"):
        parts = [part for part in search.survey.parts if part.group == "optimizer"]
        large = [part for part in parts if part.simple and part.bytes >= _SMALL]
        for way in ("noise", "zeros", "rounded"):
            _replace(search, large, way, f"{way} for the optimizer's state")


def attributes(search: Search) -> None:
    """Without the attributes that changed since fit began."""
    if search.survey.attributes and search.best.attributes:
        search.consider(dataclasses.replace(search.best, attributes=False), "no changed attributes")


PASSES: dict[str, Pass] = {
    "micro-batches": micro_batches,
    "samples": samples,
    "optimizer": optimizer,
    "weights": weights,
    "values": values,
    "random state": random_state,
    "attributes": attributes,
}
