"""Batch trees and constructor arguments as JSON, their tensors by name.

JSON's own values stand for themselves; everything else is an object with one tag::

    {"tensor": "0/x"}   {"dict": [["x", ...], ...]}   {"tuple": [...]}   {"dataclass": "pkg.mod:Sample", "state": {...}}

Decoding calls no constructor and no ``__setstate__``: objects are made empty and filled.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import math
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_nancapture.bundle.references import Resolver, refer
from pytest_nancapture.bundle.tensors import unwritable
from pytest_nancapture.errors import RebuildError, UnwritableValueError

_REMEDY = "turn it into tensors, numbers, strings or containers of them"
_PLAIN = (bool, int, str, type(None))
_NUMPY_AS_TORCH = "biufc"
"""Kinds of numpy dtypes that torch has too."""


class Encoder:
    """Turns values into JSON, putting their tensors aside.

    Attributes:
        tensors: those met so far, by name; the very tensors, not copies.
    """

    def __init__(self, *, prefix: str = "", device: torch.device | str = "cpu", remedy: str = _REMEDY) -> None:
        """`prefix` starts the tensors' names; `device` is the run's, and tensors elsewhere keep a note of where.

        `remedy` ends the messages of errors.
        """
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._device = torch.device(device)
        self._remedy = remedy
        self._above: list[int] = []

    def encode(self, value: Any, where: str) -> Any:
        """The JSON form of `value`; `where` is its path, for messages and for the names of its tensors.

        Raises:
            UnwritableValueError: something in it has no form on disk.
        """
        if type(value) in _PLAIN:
            return value
        if id(value) in self._above:
            raise self._error(where, "it contains itself")
        self._above.append(id(value))
        try:
            return self._encode(value, where)
        except RecursionError:
            raise self._error(where, "it is nested too deeply") from None
        finally:
            self._above.pop()

    def _encode(self, value: Any, where: str) -> Any:  # noqa: C901, PLR0911, one branch per kind of value
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, enum.Enum):
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
        if kind is slice or kind is range:
            return {kind.__name__: [value.start, value.stop, value.step]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {"path": str(value)}
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return {"reference": self._refer(value, where)}
        if kind.__module__.partition(".")[0] == "omegaconf":
            from omegaconf import OmegaConf

            return {"omegaconf": self.encode(OmegaConf.to_container(value, resolve=False), where)}
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": self._refer(kind, where), "fields": self._items(value, where)}
        if kind in _pytree_nodes():
            children, context = _pytree_nodes()[kind].flatten_fn(value)
            return {
                "pytree": self._refer(kind, where),
                "children": self._items(children, where),
                "context": self.encode(context, f"{where}.context"),
            }
        if isinstance(value, np.random.Generator) or callable(getattr(value, "__next__", None)):
            raise self._error(where, f"a {kind.__qualname__} cannot be written")
        return {"object": self._refer(kind, where), **self._state(value, where)}

    def _state(self, value: Any, where: str) -> dict[str, Any]:
        """Of an object whose class says nothing of its own about copying: attributes, slots, and items of a container."""
        kind = type(value)
        base = _builtin_base(kind)
        names = {**getattr(value, "__dict__", {}), **_slots(value)}
        # What is neither a container nor has attributes keeps its state in compiled code, out of our sight.
        if base not in _EMPTY or (base is object and not names and not hasattr(value, "__dict__")):
            raise self._error(where, f"a {kind.__module__}.{kind.__qualname__} cannot be written")
        state: dict[str, Any] = {}
        if names:
            state["state"] = [[name, self.encode(item, f"{where}.{name}")] for name, item in names.items()]
        if issubclass(kind, dict):
            state["pairs"] = self._pairs(value, where)
        elif issubclass(kind, (list, tuple, set, frozenset)):
            state["items"] = self._items(value, where)
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            state["default"] = self._refer(value.default_factory, f"{where}.default_factory")
        return state

    def _tensor(self, value: Tensor, where: str) -> dict[str, Any]:
        problem = unwritable(value)
        if problem:
            raise self._error(where, problem)
        name = self._names.setdefault(id(value), self._prefix + where)
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
            extra = {k: v for k, v in vars(value).items() if not isinstance(v, Tensor)}
            node["state"] = [[k, self.encode(v, f"{where}.{k}")] for k, v in extra.items()]
        return node

    def _numpy(self, value: Any, where: str) -> dict[str, Any]:
        array = np.asarray(value)
        name = self._prefix + where
        node: dict[str, Any] = {"ndarray" if isinstance(value, np.ndarray) else "numpy_scalar": name}
        if array.dtype.kind in "mM":
            node["dtype"] = array.dtype.str
            array = array.view(np.int64)
        elif array.dtype.kind in "US":
            node["dtype"] = array.dtype.str
            array = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
            node["shape"] = list(np.shape(value))
        elif array.dtype.kind not in _NUMPY_AS_TORCH or array.dtype.itemsize > 16 or array.dtype == np.longdouble:
            raise self._error(where, f"a numpy array of dtype {array.dtype} cannot be written")
        # A copy: torch refuses what is read-only, swapped in byte order or strided backwards.
        self.tensors[name] = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
        return node

    def _items(self, values: Any, where: str) -> list[Any]:
        return [self.encode(item, f"{where}[{i}]") for i, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[list[Any]]:
        return [[self.encode(key, f"{where} key"), self.encode(item, f"{where}[{key!r}]")] for key, item in value.items()]

    def _refer(self, obj: Any, where: str) -> Any:
        try:
            reference = refer(obj)
        except ValueError as error:
            raise self._error(where, str(error)) from error
        return reference.target if reference.file is None else [reference.target, reference.file]

    def _error(self, where: str, problem: str) -> UnwritableValueError:
        return UnwritableValueError(where, problem, self._remedy)


class Decoder:
    """Turns JSON back into values.

    Args:
        tensors: by name, already on the replay's device.
        resolver: finds the classes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], resolver: Resolver) -> None:
        self._tensors = tensors
        self._resolver = resolver

    def decode(self, node: Any) -> Any:
        """The value that `node` stands for.

        Raises:
            RebuildError: a class is not there any more, or is not of the kind that the tree says.
            ValueError: the tree is not one that :class:`Encoder` wrote.
        """
        if type(node) in (*_PLAIN, float):
            return node
        try:
            tag = next(tag for tag in _DECODE if tag in node)
            return _DECODE[tag](self, node)
        except (KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
            raise ValueError(f"not a tree of a bundle: {node!r:.120}") from error

    def resolve(self, reference: Any) -> Any:
        """The object that an encoded reference names."""
        target, file = (reference, None) if isinstance(reference, str) else reference
        return self._resolver.resolve(target, file)

    def _items(self, nodes: list[Any]) -> list[Any]:
        return [self.decode(node) for node in nodes]

    def _tensor(self, node: dict[str, Any]) -> Tensor:
        value = self._tensors[node["tensor"]]
        if "device" in node:
            value = value.to(node["device"])
        if "subclass" in node:
            kind = self._kind(node["subclass"], Tensor)
            value = value.as_subclass(kind)
            vars(value).update((name, self.decode(item)) for name, item in node["state"])
        if node.get("parameter"):
            return torch.nn.Parameter(value, requires_grad=bool(node.get("requires_grad")))
        return value.requires_grad_() if node.get("requires_grad") else value

    def _numpy(self, node: dict[str, Any]) -> Any:
        scalar = "numpy_scalar" in node
        array = self._tensors[node["numpy_scalar" if scalar else "ndarray"]].cpu().numpy()
        if "shape" in node:
            array = np.frombuffer(array.tobytes(), node["dtype"]).reshape(node["shape"]).copy()
        elif "dtype" in node:
            array = array.view(node["dtype"])
        return array[()] if scalar else array

    def _namedtuple(self, node: dict[str, Any]) -> Any:
        return tuple.__new__(self._kind(node["namedtuple"], tuple), self._items(node["fields"]))

    def _pytree(self, node: dict[str, Any]) -> Any:
        kind = self.resolve(node["pytree"])
        if kind not in _pytree_nodes():
            raise RebuildError(f"{kind!r} is not registered with torch.utils._pytree any more")
        return _pytree_nodes()[kind].unflatten_fn(self._items(node["children"]), self.decode(node["context"]))

    def _object(self, node: dict[str, Any]) -> Any:
        kind = self._kind(node["object"], object)
        base = _builtin_base(kind)
        if base not in _EMPTY:
            raise RebuildError(f"{kind!r} is not a kind of object that a bundle may hold")
        if issubclass(kind, (tuple, frozenset)):
            value = base.__new__(kind, self._items(node["items"]))  # type: ignore[call-overload]
        else:
            value = base.__new__(kind)  # type: ignore[call-overload]
        if "default" in node:
            value.default_factory = self.resolve(node["default"])
        if "pairs" in node:
            for key, item in node["pairs"]:
                base.__setitem__(value, self.decode(key), self.decode(item))  # type: ignore[attr-defined]
        elif isinstance(value, list):
            list.extend(value, self._items(node["items"]))
        elif isinstance(value, set):
            set.update(value, self._items(node["items"]))
        for name, item in node.get("state", ()):
            if hasattr(value, "__dict__") and name not in _slot_names(kind):
                vars(value)[name] = self.decode(item)
            else:
                object.__setattr__(value, name, self.decode(item))
        return value

    def _enum(self, node: dict[str, Any]) -> Any:
        return self._kind(node["enum"], enum.Enum)[node["name"]]

    def _reference(self, node: dict[str, Any]) -> Any:
        found = self.resolve(node["reference"])
        if not _may_be_passed(found):
            raise RebuildError(f"{node['reference']!r}: an argument may not name {found!r}")
        return found

    def _kind(self, reference: Any, base: type) -> Any:
        kind = self.resolve(reference)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise RebuildError(f"{reference!r}: expected a subclass of {base.__qualname__}, came {kind!r:.80}")
        return kind

    def _omegaconf(self, node: dict[str, Any]) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.create(self.decode(node["omegaconf"]))


_DECODE: dict[str, Callable[[Decoder, Any], Any]] = {
    "tensor": Decoder._tensor,
    "dict": lambda self, node: {self.decode(key): self.decode(item) for key, item in node["dict"]},
    "list": lambda self, node: self._items(node["list"]),
    "tuple": lambda self, node: tuple(self._items(node["tuple"])),
    "set": lambda self, node: set(self._items(node["set"])),
    "frozenset": lambda self, node: frozenset(self._items(node["frozenset"])),
    "Size": lambda self, node: torch.Size(self._items(node["Size"])),
    "ndarray": Decoder._numpy,
    "numpy_scalar": Decoder._numpy,
    "namedtuple": Decoder._namedtuple,
    "pytree": Decoder._pytree,
    "object": Decoder._object,
    "float": lambda _, node: float(node["float"]),
    "complex": lambda self, node: complex(*self._items(node["complex"])),
    "bytes": lambda _, node: base64.b64decode(node["bytes"]),
    "bytearray": lambda _, node: bytearray(base64.b64decode(node["bytearray"])),
    "slice": lambda _, node: slice(*node["slice"]),
    "range": lambda _, node: range(*node["range"]),
    "enum": Decoder._enum,
    "dtype": lambda _, node: getattr(torch, node["dtype"]),
    "device": lambda _, node: torch.device(node["device"]),
    "path": lambda _, node: pathlib.Path(node["path"]),
    "reference": Decoder._reference,
    "omegaconf": Decoder._omegaconf,
}

_EMPTY = (object, dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, types.SimpleNamespace)
"""Built-in types whose subclasses can be made empty and filled without running code of theirs."""

_NEVER_PASSED = {"builtins", "importlib", "io", "nt", "os", "posix", "runpy", "shutil", "subprocess", "sys"}
_PASSED_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, type(None))


def _may_be_passed(found: Any) -> bool:
    """Whether a constructor may be handed this class or function: none through which data alone could reach the system."""
    if any(found is builtin for builtin in _PASSED_BUILTINS):
        return True
    module = getattr(found, "__module__", None) or ""
    is_named = isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType))
    loads_code = module.startswith(("torch.hub", "torch.serialization", "torch.package", "torch.utils.cpp_extension"))
    return is_named and bool(module) and module.partition(".")[0] not in _NEVER_PASSED and not loads_code


def _pytree_nodes() -> dict[Any, Any]:
    return torch.utils._pytree.SUPPORTED_NODES


def _builtin_base(kind: type) -> type:
    """The nearest base that is not defined in Python; its ``__new__`` makes instances."""
    return next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE


def _slot_names(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _slot_names(type(value)) if hasattr(value, name)}
