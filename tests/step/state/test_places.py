"""Putting a value where it stood, below a module of today's code."""

import collections
import functools
from typing import Any

import pytest
from torch import nn

from pytest_nancapture.errors import RebuildError
from pytest_nancapture.step.state.places import Step, put


class Config:
    def __init__(self) -> None:
        self.rates = {"low": [1, 2]}


class Slotted:
    __slots__ = ("rate",)


class Holder(nn.Module):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.slotted = Slotted()
        self.names = ("a", Config())
        self.ordered = collections.OrderedDict(a=1)

    @property
    def width(self) -> int:
        return 2

    @functools.cached_property
    def table(self) -> int:
        return 4


def way(*steps: Any) -> tuple[Step, ...]:
    kinds = {str: "attribute", int: "index", tuple: "key"}
    return tuple(Step(kinds[type(step)], step[0] if isinstance(step, tuple) else step) for step in steps)


@pytest.mark.parametrize(
    ("steps", "read"),
    [
        (("limit",), lambda m: m.limit),
        (("table",), lambda m: m.table),
        (("new",), lambda m: m.new),
        (("config", "rates", ("low",), 1), lambda m: m.config.rates["low"][1]),
        (("config", "rates", ("high",)), lambda m: m.config.rates["high"]),
        (("slotted", "rate"), lambda m: m.slotted.rate),
        (("names", 1, "rates"), lambda m: m.names[1].rates),
        (("ordered", ("a",)), lambda m: m.ordered["a"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_a_value_is_put_where_the_way_leads(steps, read):
    """Through attributes, keys and indices, of objects with slots and of what cannot be changed itself."""
    module = Holder()
    assert put(module, way(*steps), "here")
    assert read(module) == "here"


@pytest.mark.parametrize(
    "steps",
    [("gone", "rate"), ("config", "rates", ("gone",), 0), ("config", "rates", ("low",), 7), ("names", 0, "x", "y")],
    ids=str,
)
def test_a_place_that_is_gone(steps):
    """Today's code has it no more: nothing happens, and that is told."""
    assert not put(Holder(), way(*steps), "here")


@pytest.mark.parametrize("name", ["width", "forward", "train", "__class__", "__dict__"])
def test_a_place_for_code(name):
    """Is refused: what a class defines as code stays today's."""
    with pytest.raises(RebuildError, match="expected a place for values, came one for code"):
        put(Holder(), way(name), "here")
