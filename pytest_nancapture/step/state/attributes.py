"""What user code keeps in attributes: compared with what it was when fit began, and put back in place."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytest_nancapture.bundle.tensors.kinds import is_expanded, unwritable
from pytest_nancapture.bundle.tensors.names import submodules
from pytest_nancapture.step.state.inventory import is_rare

_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 8
_MANY = 10_000
"""A larger container is put back itself; what lies in it is taken to be constant."""
_CONTAINERS = (OrderedDict, dict, set, list, deque, bytearray)
_NOT_THEIRS = frozenset({"torch", "logging", "threading", "multiprocessing"})
_WITHOUT_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class AttributeWatch:
    """Finds the plain attributes that change during fit: a temperature that a callback anneals is state.

    Those of the root, and of submodules whose classes are not torch's own, are noted before each step. To look through
    everything before every step would cost too much: that is done before the first steps and then ever more rarely.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        """`ignored`: names of attributes that the training loop itself changes."""
        self._module = module
        self._ignored = {*vars(nn.Module()), *ignored}
        self._first = self._all()
        self._watched = {key for key in self._first if key[0] and not _is_torchs_own(module.get_submodule(key[0]))}
        self._homes: dict[str, dict[str, Any]] = {}
        self._looks = 0

    def take(self) -> dict[tuple[str, str], Any]:
        """The attributes as they are now, by submodule and name."""
        self._looks += 1
        if is_rare(self._looks):
            self._watched |= self._changed(self._all()).keys()
            modules = dict(submodules(self._module))
            self._homes = {path: vars(modules[path]) for path, _ in self._watched if path in modules}
        found = {
            (path, name): self._homes[path][name]
            for path, name in self._watched
            if path in self._homes and name in self._homes[path]
        }
        return {**found, **self._of("", self._module)}

    def changed(self, taken: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        """Every plain attribute that is not what it was when fit began.

        Args:
            taken: what :meth:`take` gave; the others are as they are now.
        """
        now = {key: value for key, value in self._all().items() if key[0] and key not in self._watched}
        return self._changed({**now, **taken})

    def _changed(self, values: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        return {
            key: value
            for key, value in values.items()
            if type(value) in _PLAIN and _differs(self._first.get(key, _ABSENT), value)
        }

    def _all(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for path, submodule in submodules(self._module):
            found.update(self._of(path, submodule))
        return found

    def _of(self, path: str, module: nn.Module) -> dict[tuple[str, str], Any]:
        ignored = self._ignored
        return {
            (path, name): value for name, value in vars(module).items() if type(value) in _PLAIN and name not in ignored
        }


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


_ABSENT = object()


def _differs(before: Any, now: Any) -> bool:
    return type(before) is not type(now) or not (before == now or (before != before and now != now))  # NaN is NaN


class Objects:
    """Takes what values hold, and all that can be reached from them through containers and plain objects.

    Deeper things, and what libraries keep in objects of their own, are taken to be constant.
    """

    def __init__(self, known: Iterable[Any], foreign: Collection[str] = ()) -> None:
        """`known`: things that somebody else puts back; `foreign`: packages whose objects are no user's state."""
        self._seen = {id(thing): thing for thing in known}
        self._foreign = _NOT_THEIRS.union(foreign)
        self._restore: list[Callable[[], None]] = []

    def take(self, value: Any, depth: int = 0) -> None:
        """Take what `value` holds now."""
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

    def restore(self) -> None:
        """Make everything what it was."""
        for restore in self._restore:
            restore()

    def _all(self, values: Any, depth: int) -> None:
        for value in values if len(values) <= _MANY else ():
            self.take(value, depth + 1)

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
        elif self._is_theirs(value):
            self.take(vars(value), depth)

    def _is_theirs(self, value: Any) -> bool:
        """Whether it is an object of a class of the user's, with attributes of its own."""
        has_state = hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_STATE)
        return has_state and type(value).__module__.partition(".")[0] not in self._foreign

    def _state(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        state = get()
        self._restore.append(lambda: put(state))


def _identities(value: Any) -> list[int]:
    """Of all that a container holds, in order."""
    items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
    return list(map(id, items))
