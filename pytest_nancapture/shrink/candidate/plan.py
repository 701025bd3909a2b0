"""What a candidate is, told relative to the bundle as it was captured: plain values that cross a process boundary."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from pytest_nancapture.bundle.schema import read

Way = Literal["initial", "noise", "zeros", "constant", "rounded"]
"""What takes the place of a tensor's values: those of the code's own initialisation, noise like them, or simpler."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of a tensor of the batch, or a list in its tree (`dim` 0, its path in place of a name)."""

    name: str
    dim: int = 0


@dataclass(frozen=True, kw_only=True)
class Range:
    """Indices from `start` up to but not including `stop`."""

    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which indices are kept along several axes of one size."""

    axes: tuple[Axis, ...]
    kept: tuple[Range, ...]


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A tensor whose values others take the place of."""

    name: str
    way: Way


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A candidate.

    Attributes:
        window: positions of the micro-batches that are kept.
        alone: whether the update follows on each micro-batch, without accumulation.
        initial_seed: what the module is built under where weights are left as the code makes them.
        seed: of the random state; None for the captured one.
        optimizer: whether the optimizer's state is kept.
        attributes: whether the attributes that changed since fit began are.
    """

    window: tuple[int, ...]
    alone: bool = False
    cuts: tuple[Cut, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    initial_seed: int = 0
    seed: int | None = None
    optimizer: bool = True
    attributes: bool = True

    def with_cut(self, axes: tuple[Axis, ...], kept: tuple[Range, ...]) -> Plan:
        """With another choice along these axes."""
        others = tuple(cut for cut in self.cuts if cut.axes != axes)
        return dataclasses.replace(self, cuts=(*others, Cut(axes=axes, kept=kept)))

    def with_ways(self, ways: dict[str, Way]) -> Plan:
        """With these replacements besides its own."""
        merged = {**self.ways, **ways}
        return dataclasses.replace(
            self, replaced=tuple(Replaced(name=name, way=merged[name]) for name in sorted(merged))
        )

    @property
    def ways(self) -> dict[str, Way]:
        """Name of a tensor -> what takes the place of its values."""
        return {entry.name: entry.way for entry in self.replaced}

    def as_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The inverse of :meth:`as_dict`.

        Raises:
            SchemaError: it is none.
        """
        return read(cls, data, "plan")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of the bundle, or a list in a batch's tree.

    Attributes:
        name: the tensor's, or the list's path.
        group: ``weights``, ``batch``, ``optimizer`` or ``list``.
        shape: a list's is its length.
        bytes: those that its values take.
        micro: position in the window, of what belongs to a batch.
        simple: whether a recipe may stand for it.
        initial: whether the code makes one of the same shape, and the same one under the same seed.
    """

    name: str
    group: Literal["weights", "batch", "optimizer", "list"]
    shape: tuple[int, ...]
    bytes: int = 0
    micro: int = 0
    simple: bool = False
    initial: bool = False


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What there is to make smaller.

    Attributes:
        size: bytes of the whole bundle.
        window: number of micro-batches.
        guilty: position of the guilty one.
        attributes: how many were captured.
    """

    size: int
    window: int
    guilty: int
    attributes: int
    optimizer: bool
    parts: tuple[Part, ...] = ()


def whole(size: int) -> tuple[Range, ...]:
    """All indices."""
    return (Range(start=0, stop=size),)


def count(kept: tuple[Range, ...]) -> int:
    """How many indices they are."""
    return sum(part.stop - part.start for part in kept)


def without(kept: tuple[Range, ...], start: int, size: int) -> tuple[Range, ...]:
    """All but `size` of them from the `start`-th on."""
    left: list[Range] = []
    position = 0
    for part in kept:
        length = part.stop - part.start
        before = min(max(start - position, 0), length)
        after = min(max(start + size - position, 0), length)
        left += [
            Range(start=a, stop=b) for a, b in ((part.start, part.start + before), (part.start + after, part.stop))
        ]
        position += length
    merged: list[Range] = []
    for part in left:
        if part.start == part.stop:
            continue
        if merged and merged[-1].stop == part.start:
            merged[-1] = Range(start=merged[-1].start, stop=part.stop)
        else:
            merged.append(part)
    return tuple(merged)
