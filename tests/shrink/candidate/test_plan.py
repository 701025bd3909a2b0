"""Plans as plain values, and choices of indices."""

from __future__ import annotations

import json

from pytest_nancapture.shrink.candidate.plan import Axis, Plan, Range, count, whole, without


def indices(kept: tuple[Range, ...]) -> list[int]:
    return [i for part in kept for i in range(part.start, part.stop)]


def test_json() -> None:
    """A plan survives the way to another process."""
    plan = Plan(window=(1,), seed=3).with_cut((Axis(name="x"),), (Range(start=2, stop=4),)).with_ways({"w": "noise"})

    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    assert hash(plan)


def test_without() -> None:
    """Leaving out counts in what is left, and joins what touches."""
    kept = without(whole(10), 2, 3)

    assert indices(kept) == [0, 1, 5, 6, 7, 8, 9]
    assert indices(without(kept, 1, 2)) == [0, 6, 7, 8, 9]
    assert indices(without(kept, 0, 7)) == []
    assert count(kept) == 7
    assert without(whole(4), 0, 0) == whole(4)


def test_one_cut_for_the_same_axes() -> None:
    """A second choice along the same axes takes the place of the first."""
    axes = (Axis(name="x"), Axis(name="y"))
    plan = Plan(window=(0,)).with_cut(axes, whole(4)).with_cut(axes, whole(2))

    assert [cut.kept for cut in plan.cuts] == [whole(2)]
