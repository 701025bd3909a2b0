"""What a live module has otherwise than one built anew: the places, as deep down as they lie."""

import collections
import dataclasses
import functools
import random
import types
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from pytest_nancapture.step.state.compare import Comparison
from pytest_nancapture.step.state.places import in_words


@dataclasses.dataclass
class Sample:
    value: Any = 1
    other: int = 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holder(nn.Module):
    """Holds a value, in a place of its own."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.value = value

    def helper(self) -> int:
        return 1


def differences(live: nn.Module, built: nn.Module) -> list[str]:
    comparison = Comparison(live, built, set(vars(nn.Module())), frozenset({"lightning"}))
    return [in_words(d.module, d.way) + (f": {d.problem}" if d.problem else "") for d in comparison.differences()]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


NESTED: list[tuple[Any, Any, list[str]]] = [
    (1, 2, ["value"]),
    (1, 1.0, ["value"]),
    (True, 1, ["value"]),
    (0.0, -0.0, ["value"]),
    ([1, [2, 3]], [1, [2, 4]], ["value[1][1]"]),
    ([1, 2], [1], ["value"]),
    ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, ["value['b']['c']"]),
    ({"a": 1, "b": 2}, {"a": 1}, ["value['b']"]),
    ({"a": 1}, {"a": 1, "b": 2}, ["value"]),
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}, ["value"]),
    ({(1, 2): 3}, {(1, 2): 4}, ["value"]),
    ((1, [2]), (1, [3]), ["value"]),
    ({1, 2}, {1, 3}, ["value"]),
    (collections.deque([1], maxlen=2), collections.deque([1], maxlen=3), ["value"]),
    (collections.deque([1], maxlen=2), collections.deque([2], maxlen=2), ["value"]),
    (Sample(other=3), Sample(), ["value.other"]),
    (Sample(Sample({"x": [1]})), Sample(Sample({"x": [2]})), ["value.value.value['x'][0]"]),
    (Slotted(1), Slotted(2), ["value.value"]),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), ["value.a"]),
    (torch.ones(2), torch.zeros(2), ["value"]),
    (torch.ones(2), torch.ones(3), ["value"]),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), ["value"]),
    ([torch.ones(2)], [torch.zeros(2)], ["value[0]"]),
    (np.ones(2), np.zeros(2), ["value"]),
    (generator(1), generator(2), ["value"]),
    (np.random.default_rng(1), np.random.default_rng(2), ["value"]),
    (np.random.RandomState(1), np.random.RandomState(2), ["value"]),
    (random.Random(1), random.Random(2), ["value"]),
    (functools.partial(int, base=2), functools.partial(int, base=3), ["value"]),
    (nn.functional.relu, nn.functional.gelu, ["value"]),
]
SAME: list[tuple[Any, Any]] = [
    (float("nan"), float("nan")),
    (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0])),
    (np.array([np.nan]), np.array([np.nan])),
    ({"a": [1, (2,)]}, {"a": [1, (2,)]}),
    (Sample([1]), Sample([1])),
    (generator(1), generator(1)),
    (random.Random(1), random.Random(1)),
    (functools.partial(int, base=2), functools.partial(int, base=2)),
    (torch.device("cuda:0"), torch.device("cpu")),
    (nn.functional.relu, nn.functional.relu),
]


@pytest.mark.parametrize(("live", "built", "expected"), NESTED, ids=map(str, range(len(NESTED))))
def test_a_value_that_differs_is_found_where_it_lies(live, built, expected):
    """As deep down as it can be put back; what cannot be changed in place is told as a whole."""
    assert differences(Holder(live), Holder(built)) == (expected if live is not built else [])


@pytest.mark.parametrize(("live", "built"), SAME, ids=map(str, range(len(SAME))))
def test_what_is_the_same_is_code(live, built):
    """And stays today's."""
    assert differences(Holder(live), Holder(built)) == []


def test_two_small_numbers_that_python_keeps_once():
    """The same pair of numbers at two places is two differences."""
    live, built = Holder([1, 1]), Holder([2, 2])
    assert differences(live, built) == ["value[0]", "value[1]"]


def test_a_part_of_the_module_is_compared_by_its_name():
    """A list of layers or parameters differs only where it holds others."""
    live, built = Holder(), Holder()
    live.value, built.value = [live.layer, live.layer.weight], [built.layer, built.layer.weight]
    assert differences(live, built) == []
    built.value = [built.layer, built.layer.bias]
    assert differences(live, built) == ["value[1]"]


def test_a_module_in_a_list():
    """Which nobody registers: its parameters and attributes are state like any other."""
    live, built = Holder([nn.Linear(2, 1)]), Holder([nn.Linear(2, 1)])
    built.value[0].load_state_dict(live.value[0].state_dict())
    assert differences(live, built) == []
    with torch.no_grad():
        live.value[0].weight += 1
    assert differences(live, built) == ["value[0]._parameters['weight']"]


def test_another_submodule():
    """Cannot be written: it is named with what stands in its place."""
    live, built = Holder(), Holder()
    live.layer = nn.Bilinear(2, 2, 2)
    assert differences(live, built) == [
        "layer: a Bilinear, which is a Linear in a module built from the bundle",
    ]


def test_a_function_made_in_the_constructor():
    """Is the same where its code and what it closes over are."""

    def make(value: Any) -> Any:
        return lambda: value

    assert differences(Holder(make(1)), Holder(make(1))) == []
    assert differences(Holder(make(1)), Holder(make(2))) == ["value"]


def test_a_method_of_the_module():
    """Is the same on both."""
    live, built = Holder(), Holder()
    live.value, built.value = live.helper, built.helper
    assert differences(live, built) == []


def test_things_that_contain_each_other():
    """Are gone through once."""
    live, built = [1], [2]
    live.append(live)
    built.append(built)
    assert differences(Holder(live), Holder(built)) == ["value[0]"]


def test_what_nobody_can_look_into_is_noted():
    """And taken to be the same."""
    comparison = Comparison(Holder(iter([1])), Holder(iter([2])), set(vars(nn.Module())), frozenset())
    assert (comparison.differences(), comparison.opaque) == ([], ["value"])


def test_an_equality_that_raises():
    """Is nobody's fault but its own."""

    class Odd:
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None

    assert differences(Holder(Odd()), Holder(Odd())) == []


def test_almost_equal():
    """The sign of zero, the factory of a dict, and kinds of numbers are state, too."""
    live = Holder([0.0, torch.zeros(1), collections.defaultdict(list), torch.float32])
    built = Holder([-0.0, -torch.zeros(1), collections.defaultdict(dict), torch.float64])
    assert differences(live, built) == [f"value[{i}]" for i in range(4)]


def test_what_no_value_can_say():
    """A method of the instance's own, an attribute that is gone, and weights of another dtype are named as missing."""
    live, built = Holder(), Holder()
    live.helper = lambda: 0
    del live.value
    live.layer.double()
    assert [line.partition(":")[0] for line in differences(live, built)] == [
        "helper",
        "value",
        "layer.weight",
        "layer.bias",
    ]


def test_objects_of_the_loop_are_no_state():
    """Nor are containers of nothing else."""
    live = Holder({"callbacks": [pl.Callback()], "rate": 1})
    assert differences(live, Holder({})) == ["value['rate']"]


def test_a_class_that_is_defined_in_a_function():
    """Is made anew at each call, and the same all the same."""

    def make() -> nn.Module:
        class Local(nn.Module):
            level = 1

        return Local()

    live, built = Holder(), Holder()
    live.part, built.part = make(), make()
    live.part.rate = 2
    assert differences(live, built) == ["part.rate"]


def test_what_a_parameter_was_given_is_state():
    """As marks that an optimizer's groups are made by."""
    live, built = nn.Linear(2, 1), nn.Linear(2, 1)
    live.weight.decay, built.weight.decay = 0.5, 0.1
    live.bias.decay = built.bias.decay = 0.5
    found = Comparison(live, built, (), ()).differences()
    assert [(in_words(d.module, d.way), d.value) for d in found] == [("weight.decay", 0.5)]
