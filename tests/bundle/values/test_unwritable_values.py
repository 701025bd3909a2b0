"""Values that have no form on disk: each is named, with the path to it and what to do."""

from __future__ import annotations

import collections
import functools
import io
import pathlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from samples import Bag, Boxes, Closing, Mask, Pair, Sample, Slotted, through

from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.errors import UnwritableValueError

REMEDY = "turn it into tensors, numbers, strings or containers of them"


def local() -> Any:
    class Local:
        pass

    return Local()


def endless() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


class Holder:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize(
    ("make", "where", "problem"),
    [
        (lambda: (i for i in range(3)), "['x'][1]", "a generator cannot be written"),
        (lambda: iter([1]), "['x'][1]", "a list_iterator cannot be written"),
        (lambda: map(str, [1]), "['x'][1]", "a map cannot be written"),
        (threading.Lock, "['x'][1]", "a _thread.lock cannot be written"),
        (lambda: {"a": threading.Lock()}, "['x'][1]['a']", "a _thread.lock cannot be written"),
        (lambda: Sample(io.BytesIO()), "['x'][1].x", "a BytesIO cannot be written"),
        (lambda: Slotted(io.StringIO()), "['x'][1].x", "a StringIO cannot be written"),
        (lambda: Pair(1, lambda: 2), "['x'][1][1]", "<lambda> is defined inside of a function, so no import finds it"),
        (local, "['x'][1]", "local.<locals>.Local is defined inside of a function, so no import finds it"),
        (lambda: [].append, "['x'][1]", "<built-in method append of list object at"),
        (lambda: Bag().size, "['x'][1]", "a method of another Bag cannot be written"),
        (lambda: print, "['x'][1]", "<built-in function print> is nothing that a bundle may name"),
        (lambda: open, "['x'][1]", "<built-in function open> is nothing that a bundle may name"),
        (lambda: torch.load, "['x'][1]", " is nothing that a bundle may name"),
        (lambda: collections.defaultdict(breakpoint), "['x'][1].default_factory", " is nothing that a bundle may name"),
        (lambda: functools.partial(eval, "1"), "['x'][1].func", " is nothing that a bundle may name"),
        (lambda: pathlib, "['x'][1]", "a builtins.module cannot be written"),
        (object, "['x'][1]", "a builtins.object cannot be written"),
        (lambda: Ellipsis, "['x'][1]", "a builtins.ellipsis cannot be written"),
        (lambda: ValueError("x"), "['x'][1]", "a builtins.ValueError cannot be written"),
        (lambda: list[int], "['x'][1]", "a types.GenericAlias cannot be written"),
        (lambda: __import__("random").SystemRandom(), "['x'][1]", "a random.SystemRandom cannot be written"),
        (lambda: __import__("array").array("d", [1]), "['x'][1]", "a array.array cannot be written"),
        (lambda: __import__("re").compile("x"), "['x'][1]", "a re.Pattern cannot be written"),
        (lambda: np.array([object()]), "['x'][1][0]", "a builtins.object cannot be written"),
        (lambda: np.zeros(1, "i4,f4"), "['x'][1]", "a numpy array of dtype [('f0', '<i4'), ('f1', '<f4')] cannot be"),
        (lambda: np.longdouble(1), "['x'][1]", "a numpy array of dtype"),
        (lambda: np.ones(2, np.clongdouble), "['x'][1]", "a numpy array of dtype"),
        (lambda: np.ma.masked_array([1, 2], [0, 1]), "['x'][1]", "a MaskedArray, which is more than a numpy array,"),
        (lambda: np.ones((1, 1)).view(np.matrix), "['x'][1]", "a matrix, which is more than a numpy array, cannot be"),
        (lambda: torch.ones(1, device="meta"), "['x'][1]", "it is on the meta device and has no values"),
        (lambda: Mask.A | Mask.B, "['x'][1]", "a combination that has no name of its own"),
        (lambda: Boxes(torch.ones(1), threading.Lock()), "['x'][1].context['size']", "a _thread.lock cannot be"),
        (Closing, "['x'][1]", " is nothing that a bundle may name"),
        (endless, "['x'][1][0]['again']", "it contains itself"),
        (Holder, "['x'][1].me", "it contains itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_written(make: Any, where: str, problem: str) -> None:
    """The error names the path to it, what it is, and the remedy."""
    with pytest.raises(UnwritableValueError) as caught:
        Encoder().encode({"x": (torch.ones(1), make())}, "batch")
    assert f"batch{where}" == caught.value.where
    assert problem in caught.value.problem
    assert f"{caught.value.where}: {caught.value.problem}; {REMEDY}" == str(caught.value)


def test_what_is_nested_too_deeply() -> None:
    """An error of its own, not of the interpreter's."""
    with pytest.raises(UnwritableValueError, match="it is nested too deeply"):
        Encoder().encode(deep(), "batch")


def test_the_remedy_is_the_callers() -> None:
    """A constructor's argument needs other advice than a batch."""
    with pytest.raises(UnwritableValueError) as caught:
        Encoder(remedy="give a factory").encode(object(), "argument")
    assert str(caught.value) == "argument: a builtins.object cannot be written; give a factory"


def test_the_same_value_twice_does_not_contain_itself() -> None:
    """Only what is above a value counts."""
    inner = [1]
    assert through([inner, inner, {"a": inner}]) == [[1], [1], {"a": [1]}]
