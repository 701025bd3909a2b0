"""The passes of a shrink, cheapest gain first; each goes on until it gains nothing more."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from pytest_nancapture.bundle.text import some
from pytest_nancapture.shrink.candidate.plan import Axis, Part, Plan, Range, Way, count, whole
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
    found = search.keep_first(
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
    """Entries of the batch, along the first dimension of all its tensors together."""
    _cut(search, _first_axes)


def dimensions(search: Search) -> None:
    """Other dimensions of what is still large: the length of a sequence, the height of an image, nodes, edges."""
    _cut(search, _other_axes)


Groups = Iterator[tuple[tuple[Axis, ...], int]]


def _cut(search: Search, choose: Callable[[Search, list[Part]], Groups]) -> None:
    for position in search.best.window:
        parts = [p for p in search.survey.parts if p.micro == position and p.group in ("batch", "list")]
        for axes, size in choose(search, parts):
            shared = [cut for cut in search.best.cuts if set(cut.axes) & set(axes)]
            if any(cut.axes != axes for cut in shared):
                continue
            kept = shared[0].kept if shared else whole(size)

            def make(ranges: tuple[Range, ...], axes: tuple[Axis, ...] = axes) -> Plan:
                return search.best.with_cut(axes, ranges)

            delete(search, kept, make, _axes_in_words(axes))


def _first_axes(_: Search, parts: list[Part]) -> Groups:
    """With the lists of the same length, then without them."""
    tensors = _by_size([(part, 0) for part in parts if part.group == "batch"])
    lists = _by_size([(part, 0) for part in parts if part.group == "list"])
    both = {size: (*tensors.get(size, ()), *lists.get(size, ())) for size in {**tensors, **lists}}
    for group in (both, tensors):
        for size, axes in sorted(group.items(), key=lambda item: -len(item[1])):
            if group is both or axes != both[size]:
                yield axes, size


def _other_axes(search: Search, parts: list[Part]) -> Groups:
    """Sets of axes of one size that may belong together, the likeliest first; single ones at last."""
    tensors = sorted((part for part in parts if part.group == "batch"), key=lambda part: -part.bytes)
    axes = [(part, dim) for part in tensors for dim in range(len(part.shape))]
    single = [(part.shape[dim], (Axis(name=part.name, dim=dim),)) for part, dim in axes]
    together = _by_size([(part, dim) for part, dim in axes if dim])
    seen = {cut.axes for cut in search.best.cuts} - set(together.values())
    for size, group in [*together.items(), *_by_size(axes).items(), *single]:
        if size > 1 and group not in seen and _is_worth(search, group):
            seen.add(group)
            yield group, size


def _by_size(axes: Sequence[tuple[Part, int]]) -> dict[int, tuple[Axis, ...]]:
    groups: dict[int, tuple[Axis, ...]] = {}
    for part, dim in axes:
        if dim < len(part.shape) and part.shape[dim] > 1:
            size = part.shape[dim]
            groups[size] = (*groups.get(size, ()), Axis(name=part.name, dim=dim))
    return groups


def _is_worth(search: Search, axes: Sequence[Axis]) -> bool:
    """Whether one of the tensors takes much room, and is not made by a recipe."""
    names = {axis.name for axis in axes} - {name for name, way in search.best.ways.items() if way != "rounded"}
    return any(part.name in names and bytes_now(search.best, part) > _SMALL for part in search.survey.parts)


def _axes_in_words(axes: Sequence[Axis]) -> str:
    dims = {axis.dim for axis in axes}
    names = {axis.name for axis in axes}
    return "samples" if dims == {0} else f"dimension {' and '.join(map(str, sorted(dims)))} of {some(sorted(names))}"


def bytes_now(plan: Plan, part: Part) -> int:
    """What is left of a tensor's bytes."""
    kept = {axis: count(cut.kept) for cut in plan.cuts for axis in cut.axes}
    share = 1.0
    for dim, size in enumerate(part.shape):
        if size:
            share *= kept.get(Axis(name=part.name, dim=dim), size) / size
    return math.ceil(part.bytes * share)


def initialisation(search: Search) -> None:
    """All weights from the code's own, where the fault comes under more than one seed.

    What another version of torch initialises otherwise must not be what the fault hangs on.
    """
    makeable = [part for part in search.survey.parts if part.group == "weights" and part.initial]
    todo = _as_captured(search, makeable)
    plan = search.best.with_ways({part.name: "initial" for part in todo})
    if todo and search.holds(dataclasses.replace(plan, initial_seed=1), "another initialisation"):
        search.consider(plan, "all weights as initialised", smaller=True)


def weights(search: Search) -> None:
    """Those that the fault does not need, from the code's initialisation; of the rest noise, or simpler."""
    parts = [part for part in search.survey.parts if part.group == "weights"]
    large = [part for part in parts if part.simple and part.bytes >= _SMALL]
    _replace(search, [part for part in parts if part.initial], "initial", "weights as initialised")
    for way in ("noise", "zeros", "rounded"):
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

    delete(search, whole(len(todo)), make, what, how="{} of {}", least=0, smaller=True)


def random_state(search: Search) -> None:
    """A seed in place of the captured states."""
    if search.best.seed is None:
        seeds = [dataclasses.replace(search.best, seed=seed) for seed in range(_SEEDS)]
        search.keep_first(seeds, "random state from a seed", smaller=True)


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
    "initialisation": initialisation,
    "samples": samples,
    "optimizer": optimizer,
    "weights": weights,
    "values": values,
    "dimensions": dimensions,
    "random state": random_state,
    "attributes": attributes,
}
