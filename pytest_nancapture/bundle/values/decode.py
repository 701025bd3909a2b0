"""The inverse of encoding: from JSON and tensors to values.

No constructor and no ``__setstate__`` is called: objects are made empty and filled. A tree is data from elsewhere: what
it names is looked at before it is used.
"""

from __future__ import annotations

import base64
import enum
import functools
import inspect
import pathlib
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_nancapture.bundle.values.generators import generator_of
from pytest_nancapture.bundle.values.objects import (
    EMPTY,
    builtin_base,
    is_harmless,
    nameable_in_context,
    pytree_nodes,
    slot_names,
    wraps_own_methods,
)
from pytest_nancapture.bundle.values.references import Resolver
from pytest_nancapture.bundle.values.tables import decode_table
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
        self.resolver = resolver
        self._objects: list[Any] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self.owner: torch.nn.Module | None = None
        """The module whose own parts a tree may name."""

    def decode(self, node: Any) -> Any:
        """The value that `node` stands for.

        Raises:
            RebuildError: a class is not there any more, or is not of the kind that the tree says; or the tree is not
                one that :class:`Encoder` wrote.
        """
        if type(node) in _PLAIN:
            return node
        try:
            tag = next(tag for tag in _DECODE if tag in node)
            return _DECODE[tag](self, node)
        except (LookupError, TypeError, AttributeError, StopIteration, ValueError, RuntimeError) as error:
            raise RebuildError(f"not a tree of a bundle: {node!r:.120}") from error

    def resolve(self, reference: Any) -> Any:
        """The object that an encoded reference names."""
        if isinstance(reference, dict):
            return _graph_batch(self.resolve(reference["graphs"]))
        target, file = (reference, None) if isinstance(reference, str) else reference
        return self.resolver.resolve(target, file)

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
        if node.get("parameter"):  # one for each name, so that layers that share a weight do so again
            made = torch.nn.Parameter(value, requires_grad=bool(node.get("requires_grad")))
            return self._parameters.setdefault(node["tensor"], made)
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
        kind = self._kind(node["pytree"], object)
        if kind not in pytree_nodes():
            raise RebuildError(f"{kind!r} is not registered with torch.utils._pytree any more")
        # What an unflatten function is given as context it may call, as torch's own do with the class of a tuple.
        context = _ContextDecoder(kind, self._tensors, self.resolver).decode(node["context"])
        return pytree_nodes()[kind].unflatten_fn(self._items(node["children"]), context)

    def _object(self, node: dict[str, Any]) -> Any:
        kind = self._kind(node["object"], object)
        base = builtin_base(kind)
        if base not in EMPTY or not (isinstance(node["object"], dict) or is_harmless(kind)):
            raise RebuildError(f"{kind!r} is not a kind of object that a bundle may hold")
        make: Callable[..., Any] = base.__new__
        is_frozen = issubclass(kind, (tuple, frozenset))
        value = make(kind, self._items(node["items"])) if is_frozen else make(kind)
        if "default" in node:
            value.default_factory = self._passable(node["default"])
        if "pairs" in node:
            put: Callable[..., None] = getattr(base, "__setitem__")  # noqa: B009, object has none
            for key, item in node["pairs"]:
                put(value, self.decode(key), self.decode(item))
        elif isinstance(value, list):
            list.extend(value, self._items(node["items"]))
        elif isinstance(value, set):
            set.update(value, self._items(node["items"]))
        slots = slot_names(kind)
        self._objects.append(value)
        for name, item in node.get("state", ()):
            if name in slots:
                object.__setattr__(value, name, self.decode(item))
            else:
                vars(value)[name] = self.decode(item)
        self._objects.pop()
        return value

    def _method(self, node: dict[str, Any]) -> Any:
        holder = self._objects[-1 - node["of"]]
        function = inspect.getattr_static(type(holder), node["method"], None)
        if not isinstance(function, types.FunctionType):
            raise RebuildError(f"expected a method of {type(holder)!r:.80}, came {node['method']!r:.80}")
        return types.MethodType(function, holder)

    def _enum(self, node: dict[str, Any]) -> Any:
        return self._kind(node["enum"], enum.Enum)[node["name"]]

    def _passable(self, reference: Any) -> Any:
        found = self.resolve(reference)
        if not is_harmless(found):
            raise RebuildError(f"{reference!r}: a bundle may not name {found!r:.80}")
        return found

    def _part_of_owner(self, node: dict[str, Any]) -> Any:
        name = node["own"]
        if self.owner is None or not isinstance(name, str):
            raise RebuildError(f"{name!r:.80}: expected a part of the module, and there is no module here")
        if name.startswith("module "):
            return self.owner.get_submodule(name.removeprefix("module "))
        path, _, last = name.rpartition(".")
        home = self.owner.get_submodule(path)
        return home._parameters[last] if last in home._parameters else home._buffers[last]

    def _generator(self, node: dict[str, Any]) -> Any:
        tag = next(tag for tag in _GENERATORS if tag in node)
        return generator_of(tag, self.decode(node[tag]), self._here(node.get("device", "cpu")))

    def _here(self, device: str) -> str:
        """The device of the replay, for what was on the run's."""
        if device == "cpu" or self.owner is None:
            return "cpu"
        return str(next((parameter.device for parameter in self.owner.parameters()), "cpu"))

    def _partial(self, node: dict[str, Any]) -> Any:
        function, arguments, keywords = self._items(node["partial"])
        kind = self._passable(node["kind"]) if "kind" in node else functools.partial
        if not issubclass(kind, functools.partial) or kind.__new__ is not functools.partial.__new__:
            raise RebuildError(f"expected a plain subclass of functools.partial, came {kind!r:.80}")
        value = functools.partial.__new__(kind, function, *arguments, **keywords)
        vars(value).update((name, self.decode(item)) for name, item in node.get("state", ()))
        return value

    def _metric(self, node: dict[str, Any]) -> Any:
        kind = self._passable(node["metric"])
        if not isinstance(kind, type) or not wraps_own_methods(kind):
            raise RebuildError(f"expected a metric of torchmetrics, came {kind!r:.80}")
        value: Any = object.__new__(kind)
        self._objects.append(value)
        state = {name: self.decode(item) for name, item in node["state"]}
        self._objects.pop()
        value.__setstate__(state)
        return value

    def _array_of_objects(self, node: dict[str, Any]) -> Any:
        items = self._items(node["objects"])
        if node.get("dtype") == "T":
            return np.array(items, dtype=np.dtypes.StringDType()).reshape(node["shape"])
        array = np.empty(len(items), dtype=object)
        for position, item in enumerate(items):  # one by one: numpy would take lists apart
            array[position] = item
        return array.reshape(node["shape"])

    def _nested(self, node: dict[str, Any]) -> Tensor:
        parts = self._items(node["parts"])
        if node["nested"] == "jagged":
            values, offsets, lengths = parts
            made = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=node["dimension"])
        else:
            made = torch.nested.as_nested_tensor(parts, layout=torch.strided)
        return made.detach().requires_grad_(bool(node.get("requires_grad")))

    def _dtype(self, node: dict[str, Any]) -> Any:
        dtype = getattr(torch, node["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise RebuildError(f"torch has no dtype {node['dtype']!r:.80}")
        return dtype

    def _kind(self, reference: Any, base: type) -> Any:
        kind = self.resolve(reference)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise RebuildError(f"{reference!r}: expected a subclass of {base.__qualname__}, came {kind!r:.80}")
        return kind

    def _omegaconf(self, node: dict[str, Any]) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.create(self.decode(node["omegaconf"]))


def _graph_batch(kind: Any) -> type:
    """The class that torch_geometric makes for batches of a kind of graph."""
    from torch_geometric.data import Batch
    from torch_geometric.data.data import BaseData

    if not (isinstance(kind, type) and issubclass(kind, BaseData)):
        raise RebuildError(f"expected a class of graphs, came {kind!r:.80}")
    return type(Batch(_base_cls=kind))


class _ContextDecoder(Decoder):
    """For the context of a pytree node, which names no class but the node's own."""

    def __init__(self, kind: Any, tensors: Mapping[str, Tensor], resolver: Resolver) -> None:
        super().__init__(tensors, resolver)
        self._own = kind

    def _passable(self, reference: Any) -> Any:
        found = self.resolve(reference)
        if not any(found is one for one in nameable_in_context(self._own)):
            raise RebuildError(f"{reference!r}: the context of a {self._own!r:.80} may not name {found!r:.80}")
        return found


_GENERATORS = ("torch_generator", "numpy_generator", "random_state", "python_random")
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
    "metric": Decoder._metric,
    "objects": Decoder._array_of_objects,
    "nested": Decoder._nested,
    "table": lambda self, node: decode_table(node, self.decode),
    "namedtuple": Decoder._namedtuple,
    "pytree": Decoder._pytree,
    "object": Decoder._object,
    "weakref": lambda self, node: weakref.ref(self._objects[-1 - node["weakref"]]),
    "method": Decoder._method,
    "own": Decoder._part_of_owner,
    **dict.fromkeys(_GENERATORS, Decoder._generator),
    "float": lambda _, node: float(node["float"]),
    "complex": lambda self, node: complex(*self._items(node["complex"])),
    "bytes": lambda _, node: base64.b64decode(node["bytes"], validate=True),
    "bytearray": lambda _, node: bytearray(base64.b64decode(node["bytearray"], validate=True)),
    "slice": lambda self, node: slice(*self._items(node["slice"])),
    "range": lambda _, node: range(*node["range"]),
    "enum": Decoder._enum,
    "dtype": Decoder._dtype,
    "device": lambda _, node: torch.device(node["device"]),
    "path": lambda _, node: pathlib.Path(node["path"]),
    "reference": lambda self, node: self._passable(node["reference"]),
    "partial": Decoder._partial,
    "omegaconf": Decoder._omegaconf,
}
