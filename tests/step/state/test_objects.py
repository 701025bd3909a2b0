"""What lies in attributes is put back in place, whatever holds it."""

from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from pytest_nancapture.loops.lightning.wrappers import Wrapper
from pytest_nancapture.step.state.objects import Objects


class Loud(dict):
    """Its own methods must not run."""

    def clear(self):
        raise AssertionError

    def update(self, *args):
        raise AssertionError


def change(value):
    """Change a container in place, all of it."""
    if isinstance(value, dict):
        dict.pop(value, next(iter(value))) if not isinstance(value, OrderedDict) else value.popitem()
        value["new"] = 1
    elif isinstance(value, set):
        value.add("new")
    else:
        value.append(1)
        value[0] = 1


CONTAINERS = [
    [5, 6],
    {"a": 5, "b": 6},
    OrderedDict(b=5, a=6),
    defaultdict(list, a=[5]),
    Counter("aab"),
    Loud(a=5),
    {"a", "b"},
    deque([5, 6], maxlen=3),
    bytearray(b"ab"),
]


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_a_container_holds_again_what_it_held(value):
    """In its order, and it is the same container still."""
    before = repr(value)
    objects = Objects([])
    objects.take({"deep": [(value,)]})
    change(value)
    assert repr(value) != before
    objects.restore()
    assert repr(value) == before
    change(value)


class Slow:
    def __init__(self):
        self.count, self.inner = 0, [torch.zeros(2), np.zeros(2)]


def test_objects_tensors_and_arrays_are_put_back():
    """In place: others may hold them too."""
    thing, objects = Slow(), Objects([])
    tensor, array = thing.inner
    objects.take(thing)
    thing.count, thing.late = 1, 2
    tensor += 1
    array += 1
    thing.inner = []
    objects.restore()
    assert (thing.count, hasattr(thing, "late")) == (0, False)
    assert (thing.inner[0] is tensor, thing.inner[1] is array) == (True, True)
    assert (tensor.tolist(), array.tolist()) == ([0.0, 0.0], [0.0, 0.0])


class Slotted:
    __slots__ = ("count", "inner", "late")

    def __init__(self):
        self.count, self.inner = 0, [5]


class Derived(Slotted):
    """Has attributes of both kinds."""


@pytest.mark.parametrize("kind", [Slotted, Derived])
def test_slots_are_put_back(kind):
    """As attributes are: those that came since are gone, those that went are there again."""
    thing, objects = kind(), Objects([])
    inner = thing.inner
    objects.take([thing])
    thing.count, thing.late = 1, 2
    inner.append(6)
    del thing.inner
    objects.restore()
    assert (thing.count, thing.inner, hasattr(thing, "late")) == (0, [5], False)
    assert thing.inner is inner


def test_what_somebody_else_puts_back_is_let_be():
    """Nor is anything looked at that holds itself twice."""
    known, loop = torch.zeros(2), []
    loop.append(loop)
    objects = Objects([known])
    objects.take([known, loop])
    known += 1
    objects.restore()
    assert known.tolist() == [1.0, 1.0]


def test_what_holds_no_state_of_theirs_costs_no_look_inside():
    """Our own stand-ins for hooks, and the types that they are annotated with, stand in every module at every step."""

    class Owner:
        def hook(self, batch: int | None) -> None: ...

    owner, objects = Owner(), Objects()
    objects.take(Wrapper(owner, "hook", lambda original, batch: original(batch)))
    assert objects.count == 1
