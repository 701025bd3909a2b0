"""The inverse of encoding: from JSON and tensors to values.

No constructor and no ``__setstate__`` is called: objects are made empty and filled.
"""

from __future__ import annotations

import base64
import enum
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_nancapture.bundle.objects import EMPTY, builtin_base, pytree_nodes, slot_names
from pytest_nancapture.bundle.references import Resolver
from pytest_nancapture.errors import RebuildError

_PLAIN = (bool, int, float, str, type(None))


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
        if type(node) in _PLAIN:
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
        if kind not in pytree_nodes():
            raise RebuildError(f"{kind!r} is not registered with torch.utils._pytree any more")
        return pytree_nodes()[kind].unflatten_fn(self._items(node["children"]), self.decode(node["context"]))

    def _object(self, node: dict[str, Any]) -> Any:
        kind = self._kind(node["object"], object)
        base = builtin_base(kind)
        if base not in EMPTY:
            raise RebuildError(f"{kind!r} is not a kind of object that a bundle may hold")
        make: Callable[..., Any] = base.__new__
        is_frozen = issubclass(kind, (tuple, frozenset))
        value = make(kind, self._items(node["items"])) if is_frozen else make(kind)
        if "default" in node:
            value.default_factory = self.resolve(node["default"])
        if "pairs" in node:
            put: Callable[..., None] = getattr(base, "__setitem__")  # noqa: B009, object has none
            for key, item in node["pairs"]:
                put(value, self.decode(key), self.decode(item))
        elif isinstance(value, list):
            list.extend(value, self._items(node["items"]))
        elif isinstance(value, set):
            set.update(value, self._items(node["items"]))
        for name, item in node.get("state", ()):
            if hasattr(value, "__dict__") and name not in slot_names(kind):
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

_NEVER_PASSED = {"builtins", "importlib", "io", "nt", "os", "posix", "runpy", "shutil", "subprocess", "sys"}
_PASSED_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, type(None))


def _may_be_passed(found: Any) -> bool:
    """Whether a constructor may be handed this class or function: nothing through which data reaches the system."""
    if any(found is builtin for builtin in _PASSED_BUILTINS):
        return True
    module = getattr(found, "__module__", None) or ""
    is_named = isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType))
    loads_code = module.startswith(("torch.hub", "torch.serialization", "torch.package", "torch.utils.cpp_extension"))
    return is_named and bool(module) and module.partition(".")[0] not in _NEVER_PASSED and not loads_code
