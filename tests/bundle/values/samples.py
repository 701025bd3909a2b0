"""Values of every kind, and their way to a tree and back."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import json
import math
import pathlib
import types
import typing
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import LiveResolver


def tree_of(value: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """As strict JSON would bring it, and the tensors by name."""
    encoder = Encoder(prefix="6/", **options)
    text = json.dumps(encoder.encode(value, "batch"), allow_nan=False)
    return json.loads(text), encoder.tensors


def decode(tree: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    return Decoder(tensors or {}, LiveResolver()).decode(tree)


def through(value: Any) -> Any:
    """There and back, the tensors copied as a file would do."""
    tree, tensors = tree_of(value)
    return decode(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def content(value: Any) -> Any:
    """What can be compared with ``==`` and tells types, dtypes and NaN apart."""
    if isinstance(value, Tensor):
        extra = {name: content(item) for name, item in vars(value).items()}
        return type(value), value.dtype, value.requires_grad, value.detach().cpu().tolist(), extra
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, repr(value.tolist())
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, dict):
        return type(value), [(content(key), content(item)) for key, item in value.items()], attributes(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [content(item) for item in value], attributes(value)
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(content(item)) for item in value), attributes(value)
    known = (bool, int, str, bytes, bytearray, type(None), type, enum.Enum, slice, range, pathlib.PurePath)
    if isinstance(value, (*known, torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType)):
        return type(value), value
    if isinstance(value, functools.partial):
        return value.func, content(value.args), content(value.keywords)
    return type(value), attributes(value)


def attributes(value: Any) -> Any:
    names = [*getattr(value, "__dict__", {}), *(name for kind in type(value).__mro__ for name in slots(kind))]
    return {name: content(getattr(value, name)) for name in names}


def slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    mangled = [name if not name.startswith("__") else f"_{kind.__name__}{name}" for name in names]
    return [name for name in mangled if "weakref" not in name]


class Pair(typing.NamedTuple):
    x: Any
    y: Any = 5


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "cat"
    _score: float = math.nan


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: int = 1


@dataclasses.dataclass(frozen=True)
class Masked:
    """Two of them look alike."""

    secret: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: int = 1


class Private:
    """Slots as classes that are careful have them."""

    __slots__ = ("__hidden", "shown")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden
        self.shown = 2


class Encoding(collections.UserDict[str, Any]):
    """Like the batches of a well-known tokenizer: items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Bag(types.SimpleNamespace):
    """A namespace with a method."""

    def size(self) -> int:
        return len(vars(self))


class Stack(list[Any]):
    """A list that remembers."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.pushed = len(items)


class Triple(tuple[Any, ...]):
    """A tuple with an attribute."""


class Registry(dict[str, Any]):
    """A dict that refuses: what it is filled with must not pass by here."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("code of the class was run")


class Labels(frozenset[Any]):
    """A frozenset of the user's."""


class Colour(enum.Enum):
    RED = "r"


class Level(str, enum.Enum):
    LOW = "low"


class Mask(enum.Flag):
    A = 1
    B = 2


class Scaled(Tensor):
    """A tensor subclass; instances get a ``scale``."""


class Boxes:
    """Registered with pytree below: its children are tensors, its context is not."""

    def __init__(self, corners: Any, size: Any) -> None:
        self.corners = corners
        self.size = size


_pytree.register_pytree_node(
    Boxes, lambda boxes: ([boxes.corners], {"size": boxes.size}), lambda children, context: Boxes(*children, **context)
)


def make_table(kind: Any, columns: Any, rows: Any) -> Any:
    return kind(dict(zip(columns, rows, strict=True)))


class Table:
    """Registered with pytree below: its context names the function that makes it, as tensordict's does."""

    def __init__(self, held: Any = None) -> None:
        self.held = held or {}


_pytree.register_pytree_node(
    Table,
    lambda table: ([*table.held.values()], {"columns": [*table.held], "make": make_table, "kind": type(table)}),
    lambda rows, context: context["make"](context["kind"], context["columns"], rows),
)


class Speaking:
    """Keeps one of its own methods."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.speak = {"loud": [self.shout]}

    def shout(self) -> str:
        return self.word.upper()


class Untouchable:
    """An object whose own code must not run when a tree is decoded."""

    calls: typing.ClassVar[list[str]] = []

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.calls.append("new")
        return super().__new__(cls)

    def __init__(self, x: Any) -> None:
        self.calls.append("init")
        self.__dict__["x"] = x

    def __setattr__(self, name: str, value: Any) -> None:
        self.calls.append("setattr")

    def __setstate__(self, state: Any) -> None:
        self.calls.append("setstate")

    def __reduce__(self) -> Any:
        self.calls.append("reduce")
        return super().__reduce__()


class Closing:
    """An object that acts when it is dropped."""

    dropped: typing.ClassVar[list[Any]] = []

    def __del__(self) -> None:
        self.dropped.append(vars(self).get("name"))


CALLS: list[Any] = []


def helper(x: Any) -> Any:
    return x


def spy(*args: Any) -> Any:
    CALLS.append(args)
    return args


def scaled() -> Scaled:
    tensor = torch.ones(2).as_subclass(Scaled)
    tensor.scale = torch.tensor(3.0)
    tensor.label = "ü"
    return tensor


def with_attribute(value: Any) -> Any:
    value.note = torch.tensor(1)
    return value
