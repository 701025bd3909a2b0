"""What user code keeps in attributes: remembered, and put back in place, whatever holds it."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.file import is_expanded, unwritable

_DEPTH = 8
_MANY = 10_000
"""A larger container is put back itself; what lies in it is taken to be constant."""
_CONTAINERS = (OrderedDict, dict, set, list, deque, bytearray)
_NOT_THEIRS = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "logging", "threading", "multiprocessing"}
_WITHOUT_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class Memory:
    """Remembers values, and all that can be reached from them through containers and plain objects.

    Deeper things, and what libraries keep in objects of their own, are taken to be constant.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        """`known`: things that somebody else puts back."""
        self._seen = {id(thing): thing for thing in known}
        self._restore: list[Callable[[], None]] = []

    def remember(self, value: Any, depth: int = 0) -> None:
        """Remember what `value` holds now."""
        if id(value) in self._seen or depth > _DEPTH or type(value) in (bool, int, float, complex, str, bytes):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            kept = value.copy()
            self._restore.append(lambda: np.copyto(value, kept) if value.flags.writeable else None)
        elif isinstance(value, _CONTAINERS):
            self._container(value)
            self._all(value.values() if isinstance(value, dict) else value, depth)
        elif isinstance(value, tuple):
            self._all(value, depth)
        else:
            self._object(value, depth)

    def put_back(self) -> None:
        """Make everything what it was."""
        for restore in self._restore:
            restore()

    def _all(self, values: Any, depth: int) -> None:
        for value in values if len(values) <= _MANY else ():
            self.remember(value, depth + 1)

    def _tensor(self, value: Tensor) -> None:
        if not unwritable(value) and value.layout is torch.strided and not is_expanded(value):
            kept = value.detach().clone()

            def refill() -> None:
                if value.shape == kept.shape:
                    value.data.copy_(kept)

            self._restore.append(refill)

    def _container(self, value: Any) -> None:
        base: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))  # its methods run no code of theirs
        kept = base(value)
        before = _identities(value)

        def refill() -> None:
            if _identities(value) != before:
                base.clear(value)
                (base.update if hasattr(base, "update") else base.extend)(value, kept)

        self._restore.append(refill)

    def _object(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Generator):
            self._state(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._state(lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif isinstance(value, np.random.RandomState):
            self._state(value.get_state, value.set_state)
        elif isinstance(value, random.Random):
            self._state(value.getstate, value.setstate)
        elif _is_theirs(value):
            self.remember(vars(value), depth)

    def _state(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        state = get()
        self._restore.append(lambda: put(state))


def _is_theirs(value: Any) -> bool:
    """Whether it is an object of a class of the user's, with attributes of its own."""
    has_state = hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_STATE)
    return has_state and type(value).__module__.partition(".")[0] not in _NOT_THEIRS


def _identities(value: Any) -> list[int]:
    """Of all that a container holds, in order."""
    items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
    return list(map(id, items))
