"""Batch trees and constructor arguments as JSON, their tensors by name.

JSON's own values stand for themselves; everything else is an object with one tag::

    {"tensor": "6/batch['x']"}   {"dict": [["x", ...], ...]}   {"tuple": [...]}   {"object": "pkg.mod:Sample", ...}
"""

from __future__ import annotations

import base64
import collections
import enum
import functools
import math
import pathlib
import types
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pytest_nancapture.bundle.tensors.kinds import unwritable
from pytest_nancapture.bundle.values.generators import GENERATORS, state_of_generator, tag_of_generator
from pytest_nancapture.bundle.values.objects import (
    EMPTY,
    builtin_base,
    is_harmless,
    is_method_of,
    nameable_in_context,
    pytree_nodes,
    slots_of,
    wraps_own_methods,
)
from pytest_nancapture.bundle.values.references import refer
from pytest_nancapture.bundle.values.tables import NoFormError, encode_table, is_table
from pytest_nancapture.errors import UnwritableValueError

REMEDY = "turn it into tensors, numbers, strings or containers of them"
_PLAIN = (bool, int, str, type(None))
_ITEM = 64
"""Bytes that a thing in a container takes, about."""
_NUMPY_AS_TORCH = "biufc"
"""Kinds of numpy dtypes that torch has too."""


class Encoder:
    """Turns values into JSON, putting their tensors aside.

    Attributes:
        tensors: those met so far, by name; the very tensors, not copies.
    """

    def __init__(
        self,
        *,
        prefix: str = "",
        device: torch.device | str = "cpu",
        remedy: str = REMEDY,
        own: Mapping[int, str] | None = None,
        most: float = math.inf,
    ) -> None:
        """How to write.

        Args:
            prefix: starts the tensors' names.
            device: the run's; tensors elsewhere keep a note of where.
            remedy: ends the messages of errors.
            most: bytes that arrays and containers may take; what would take more is refused before it is copied.
            own: a module's own parts by identity, such as ``encoder.weight``; a value that is one is written as its
                name.
        """
        self._own = own or {}
        self._left = most
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._device = torch.device(device)
        self._remedy = remedy
        self._above: list[int] = []
        self._objects: list[Any] = []

    def encode(self, value: Any, where: str) -> Any:
        """The JSON form of `value`; `where` is its path, for messages and for the names of its tensors.

        Raises:
            UnwritableValueError: something in it has no form on disk.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) in self._own:
            return {"own": self._own[id(value)]}
        if id(value) in self._above:
            raise self._error(where, "it contains itself")
        self._above.append(id(value))
        try:
            return self._encode(value, where)
        except RecursionError:
            raise self._error(where, "it is nested too deeply") from None
        finally:
            self._above.pop()

    def _encode(self, value: Any, where: str) -> Any:  # noqa: C901, one branch per kind of value
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, enum.Enum):
            if value.name not in kind.__members__:
                raise self._error(where, f"{value} is a combination that has no name of its own")
            return {"enum": self._refer(kind, where), "name": value.name}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is complex:
            return {"complex": [self._encode(value.real, where), self._encode(value.imag, where)]}
        if kind in (bytes, bytearray):
            return {kind.__name__: base64.b64encode(value).decode()}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._numpy(value, where)
        if kind is list or kind in (tuple, set, frozenset, torch.Size):
            return {kind.__name__: self._items(value, where)}
        if kind is dict:
            return {"dict": self._pairs(value, where)}
        if isinstance(value, GENERATORS):
            return self._generator(value, where)
        if kind is slice or kind is range:
            return {kind.__name__: self._items((value.start, value.stop, value.step), where)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value)}
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return {"reference": self._passable(value, where)}
        if isinstance(value, types.MethodType):
            return self._method(value, where)
        if isinstance(value, functools.partial):
            return self._partial(value, where)
        if is_table(value):
            try:
                return encode_table(value, where, self.encode)
            except NoFormError as error:
                raise self._error(where, str(error)) from error
        if kind.__module__.partition(".")[0] == "omegaconf":
            from omegaconf import OmegaConf

            return {"omegaconf": self.encode(OmegaConf.to_container(value, resolve=False), where)}
        return self._object(value, where)

    def _partial(self, value: functools.partial[Any], where: str) -> Any:
        """Also one of a subclass, as configuration libraries make, which takes no part in making it."""
        kind = type(value)
        func, args = value.func, value.args
        if str(getattr(func, "__module__", "")).startswith("jsonargparse.") and isinstance((*args, 0, 0)[1], type):
            func, args = args[1], args[2:]  # a command line's own way to call a class; its parser is none of the value
        parts = {"func": func, "args": args, "keywords": value.keywords}
        node: dict[str, Any] = {"partial": [self.encode(part, f"{where}.{n}") for n, part in parts.items()]}
        if kind is not functools.partial:
            if kind.__new__ is not functools.partial.__new__:
                raise self._error(where, f"a {kind.__module__}.{kind.__qualname__} cannot be written")
            node["kind"] = self._passable(kind, where)
        if vars(value):
            node["state"] = [[name, self.encode(item, f"{where}.{name}")] for name, item in vars(value).items()]
        return node

    def _object(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": self._refer(kind, where), "fields": self._items(value, where)}
        if kind in pytree_nodes() and kind not in EMPTY:
            children, context = pytree_nodes()[kind].flatten_fn(value)
            self._check_context(kind, context, where)
            return {
                "pytree": self._refer(kind, where),
                "children": self._items(children, where),
                "context": self.encode(context, f"{where}.context"),
            }
        if hasattr(kind, "__next__"):
            raise self._error(where, f"a {kind.__qualname__} cannot be written")
        if isinstance(value, weakref.ref):
            return self._weak(value, where)
        if wraps_own_methods(kind):
            self._objects.append(value)
            held = [[name, self.encode(item, f"{where}.{name}")] for name, item in value.__getstate__().items()]
            self._objects.pop()
            return {"metric": self._passable(kind, where), "state": held}
        state = self._state(value, where)
        return {"object": self._refer_kind(kind, where), **state}

    def _check_context(self, kind: Any, context: Any, where: str) -> None:
        """What it names a reader must be able to accept."""
        for leaf in tree_leaves(context):
            is_code = isinstance(leaf, (type, types.FunctionType, types.BuiltinFunctionType))
            if is_code and not any(leaf is one for one in nameable_in_context(kind)):
                problem = f"a {kind.__qualname__} that names {leaf!r:.60} cannot be written"
                raise self._error(f"{where}.context", problem)

    def _state(self, value: Any, where: str) -> dict[str, Any]:
        """Of an object: attributes, slots, and the items of a container."""
        kind = type(value)
        base = builtin_base(kind)
        names = {**getattr(value, "__dict__", {}), **slots_of(value)}
        # What is neither a container nor has attributes keeps its state in compiled code, out of our sight.
        if base not in EMPTY or (base is object and not names and not hasattr(value, "__dict__")):
            raise self._error(where, f"a {kind.__module__}.{kind.__qualname__} cannot be written")
        state: dict[str, Any] = {}
        self._objects.append(value)
        if names:
            state["state"] = [[name, self.encode(item, f"{where}.{name}")] for name, item in names.items()]
        self._objects.pop()
        if issubclass(kind, dict):
            state["pairs"] = self._pairs(value, where)
        elif issubclass(kind, (list, tuple, set, frozenset)):
            state["items"] = self._items(value, where)
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            state["default"] = self._passable(value.default_factory, f"{where}.default_factory")
        return state

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        if value.is_nested:
            return self._nested(value, where)
        problem = unwritable(value)
        if problem:
            raise self._error(where, problem)
        name = self._names.get(id(value)) or self._new_name(where)
        self._names[id(value)] = name
        self.tensors[name] = value
        node: dict[str, Any] = {"tensor": name}
        if value.device.type != self._device.type:
            node["device"] = value.device.type
        if value.requires_grad:
            node["requires_grad"] = True
        if type(value) is torch.nn.Parameter:
            node["parameter"] = True
        elif type(value) is not Tensor:
            node["subclass"] = self._refer(type(value), where)
            node["state"] = [[k, self.encode(v, f"{where}.{k}")] for k, v in vars(value).items()]
        return node

    def _nested(self, value: Tensor, where: str) -> dict[str, Any]:
        """As the tensors that it is made of."""
        plain = value.detach()
        node: dict[str, Any] = {"requires_grad": True} if value.requires_grad else {}
        if plain.layout is not torch.jagged:
            return {"nested": "strided", "parts": self._items(plain.unbind(), where), **node}
        lengths: Any = plain.lengths()  # type: ignore[attr-defined]
        parts = (plain.values(), plain.offsets(), lengths)  # type: ignore[attr-defined]
        node["dimension"] = plain._ragged_idx  # type: ignore[attr-defined]
        return {"nested": "jagged", "parts": self._items(parts, where), **node}

    def _numpy(self, value: Any, where: str) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            problem = f"a {type(value).__qualname__}, which is more than a numpy array, cannot be written"
            raise self._error(where, problem)
        array = np.asarray(value)
        self._spend(array.nbytes, where)
        if array.dtype.kind in "OT":  # objects, and strings of any length
            dtype = {"dtype": "T"} if array.dtype.kind == "T" else {}
            return {"objects": self._items(array.ravel().tolist(), where), "shape": list(array.shape), **dtype}
        name = self._new_name(where)
        node: dict[str, Any] = {"ndarray" if isinstance(value, np.ndarray) else "numpy_scalar": name}
        if array.dtype.kind in "mM":
            node["dtype"] = array.dtype.str
            array = array.view(np.int64)
        elif array.dtype.kind in "US":
            node["dtype"] = array.dtype.str
            array = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
            node["shape"] = list(np.shape(value))
        elif array.dtype.kind not in _NUMPY_AS_TORCH or array.dtype.char in "gG":  # long doubles
            raise self._error(where, f"a numpy array of dtype {array.dtype} cannot be written")
        # A copy: torch refuses what is read-only, swapped in byte order or strided backwards.
        self.tensors[name] = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
        return node

    def _generator(self, value: Any, where: str) -> dict[str, Any]:
        tag = tag_of_generator(value)
        if not tag:
            raise self._error(where, f"a {type(value).__module__}.{type(value).__qualname__} cannot be written")
        node = {tag: self.encode(state_of_generator(value), where)}
        return {**node, "device": str(value.device)} if tag == "torch_generator" else node

    def _spend(self, size: int, where: str) -> None:
        self._left -= size
        if self._left < 0:
            raise self._error(where, "it is too large")

    def _items(self, values: Any, where: str) -> list[Any]:
        self._spend(_ITEM * len(values), where)
        return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[list[Any]]:
        self._spend(_ITEM * len(value), where)
        return [
            [self.encode(key, f"{where} key"), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()
        ]

    def _new_name(self, where: str) -> str:
        """For a tensor at `where`; all keys of a dict, and items under keys of equal `repr`, are at the same place."""
        name = self._prefix + where
        return name if name not in self.tensors else f"{name} ({len(self.tensors)})"

    def _passable(self, obj: Any, where: str) -> Any:
        """A reference to what a replay will let a tree name."""
        reference = self._refer(obj, where)
        if not is_harmless(obj):
            raise self._error(where, f"{obj!r:.80} is nothing that a bundle may name")
        return reference

    def _weak(self, value: weakref.ref[Any], where: str) -> dict[str, int]:
        """A part that points back at what holds it: how many objects up that is."""
        for up, holder in enumerate(reversed(self._objects)):
            if value() is holder:
                return {"weakref": up}
        raise self._error(where, "a weak reference to something outside of it cannot be written")

    def _method(self, value: types.MethodType, where: str) -> dict[str, Any]:
        """A method that its own object keeps: the method's name, and how many objects up that is."""
        for up, holder in enumerate(reversed(self._objects)):
            if value.__self__ is holder and is_method_of(value, holder):
                return {"method": value.__name__, "of": up}
        raise self._error(where, f"a method of another {type(value.__self__).__qualname__} cannot be written")

    def _refer_kind(self, kind: type, where: str) -> Any:
        """torch_geometric makes the class of a batch at run time, from the class of its graphs."""
        first, *others = kind.__bases__
        if others and f"{first.__module__}.{first.__name__}" == "torch_geometric.data.batch.Batch":
            return {"graphs": self._passable(others[0], where)}
        return self._passable(kind, where)

    def _refer(self, obj: Any, where: str) -> Any:
        try:
            reference = refer(obj)
        except ValueError as error:
            raise self._error(where, str(error)) from error
        return reference.target if reference.file is None else [reference.target, reference.file]

    def _error(self, where: str, problem: str) -> UnwritableValueError:
        return UnwritableValueError(where, problem, self._remedy)
