"""What objects hold: taken all the way down through containers and plain objects, and put back in place."""

from __future__ import annotations

import logging
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pytest_nancapture.bundle.tensors.kinds import bare, bare_data, is_expanded, unwritable
from pytest_nancapture.bundle.values.generators import GENERATORS
from pytest_nancapture.bundle.values.objects import slot_names, slots_of

log = logging.getLogger("pytest_nancapture")

_DEPTH = 8
_MANY = 10_000
"""A larger container is put back itself; what lies in it is taken to be constant."""
_CONTAINERS = (OrderedDict, dict, set, list, deque, bytearray)
_NOT_THEIRS = frozenset({"torch", "logging", "threading", "multiprocessing", "typing", "pytest_nancapture"})
_WITHOUT_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_SMALL = 2**16
"""Values of a tensor; a larger one is copied anew only where its version says that it was written."""
_SMALL_ARRAY = 2**20
"""Bytes of a numpy array, whose changes nothing tells; a larger one is only taken for a rerun."""
_ATOMS: frozenset[type] = frozenset(
    {bool, int, float, complex, str, bytes, type(None), types.FunctionType, types.MethodType, type}
)


class Lasting:
    """What holds from one instant to the next: copies of large tensors, made again only once these were written.

    Attributes:
        constant: classes whose objects hold nothing that can be taken.
    """

    def __init__(self) -> None:
        self.constant: set[type] = set(_ATOMS)
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that must not be written to."""
        known = self._kept.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            known = self._kept[id(tensor)] = (weakref.ref(tensor), tensor._version, bare(tensor).clone())
        return known[2]


class Objects:
    """Takes what values hold, and all that can be reached from them through containers and plain objects.

    Deeper things, and what libraries keep in objects of their own, are taken to be constant.

    Attributes:
        count: how many were looked into.
    """

    def __init__(
        self, known: Iterable[Any] = (), foreign: Collection[str] = (), lasting: Lasting | None = None
    ) -> None:
        """What to leave alone, and how much may be copied.

        Args:
            known: things that somebody else puts back.
            foreign: packages whose objects are no user's state.
            lasting: is shared between instants, where large arrays are not taken; None for a rerun, for which all is
                copied.
        """
        self._lasting = lasting
        self._constant = lasting.constant if lasting is not None else set(_ATOMS)
        self._known = known if isinstance(known, dict) else {id(thing): thing for thing in known}
        self._seen: dict[int, Any] = {}
        self._foreign = foreign
        self._restore: list[Callable[[], None]] = []

    @property
    def count(self) -> int:
        return len(self._seen)

    def take(self, value: Any, depth: int = 0) -> None:
        """Take what `value` holds now."""
        kind = type(value)
        if kind in self._constant or id(value) in self._seen or id(value) in self._known or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        try:
            self._take(value, kind, depth)
        except Exception:  # of a class of the user's, which training may never trip over: it is taken to be constant
            log.debug("nancapture: where looking at a %s was raised", kind.__qualname__, exc_info=True)

    def _take(self, value: Any, kind: type, depth: int) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, _CONTAINERS):
            self._all(self._container(value), depth)
        elif isinstance(value, tuple):
            self._all(value, depth)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, GENERATORS):
            self._generator(value)
        elif self.is_theirs(value):
            self._object(value, depth)
        else:
            self._constant.add(kind)

    def take_attributes(self, module: Any, ignored: Collection[str]) -> None:
        """Take what a module's attributes hold; its tensors and submodules are somebody else's.

        Args:
            ignored: names of attributes to leave alone.
        """
        home, kind = vars(module), type(module)
        kept = {name: value for name, value in home.items() if name not in ignored}

        def refill() -> None:
            # A method that an instance has of its own is code, or a stand-in of ours.
            new = [name for name in home.keys() - kept.keys() - set(ignored) if not callable(getattr(kind, name, None))]
            for name in new:
                del home[name]
            home.update(kept)

        self._restore.append(refill)
        for value in kept.values():
            if type(value) not in self._constant:
                self.take(value)

    def take_marks(self, tensor: Tensor) -> None:
        """Take what a parameter or buffer has been given besides its values, which are somebody else's."""
        self._object(tensor, 0)

    def restore(self) -> None:
        """Make everything what it was."""
        for restore in self._restore:
            try:
                restore()
            except Exception as error:  # of a class of the user's: all else is put back
                log.warning("nancapture: an attribute could not be put back: %s: %s", type(error).__name__, error)

    def is_theirs(self, value: Any) -> bool:
        """Whether it is an object of a class of the user's, with attributes of its own."""
        if isinstance(value, _WITHOUT_STATE) or not (hasattr(value, "__dict__") or slot_names(type(value))):
            return False
        return not (_is_of(value, _NOT_THEIRS) or _is_of(value, self._foreign))

    def _all(self, values: Any, depth: int) -> None:
        if len(values) <= _MANY:
            for value in values:
                if type(value) not in self._constant:
                    self.take(value, depth + 1)

    def _tensor(self, value: Tensor) -> None:
        if not unwritable(value) and value.layout is torch.strided and not is_expanded(value):
            is_large = self._lasting is not None and value.numel() > _SMALL
            kept = self._lasting.copy(value) if self._lasting is not None and is_large else bare(value).clone()
            version = value._version

            def refill() -> None:
                if value.shape == kept.shape and not (is_large and value._version == version):
                    bare_data(value).copy_(kept)

            self._restore.append(refill)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if self._lasting is not None and value.nbytes > _SMALL_ARRAY:
            return
        kept = value.copy()
        self._restore.append(lambda: np.copyto(value, kept) if value.flags.writeable else None)

    def _container(self, value: Any) -> Any:
        """Take what it holds; the values to be looked into."""
        base: Any = next(kind for kind in _CONTAINERS if isinstance(value, kind))  # its methods run no code of theirs
        kept = base(value)

        def refill() -> None:
            if _identities(value, base) != _identities(kept, base):
                base.clear(value)
                (base.update if hasattr(base, "update") else base.extend)(value, kept)

        self._restore.append(refill)
        return kept.values() if isinstance(kept, dict) else kept

    def _object(self, value: Any, depth: int) -> None:
        home: dict[str, Any] = getattr(value, "__dict__", {})
        kept, slots = dict(home), slots_of(value)

        def refill() -> None:
            if _identities(home, dict) != _identities(kept, dict):
                home.clear()
                home.update(kept)
            now = slots_of(value)
            for name in now.keys() - slots.keys():
                object.__delattr__(value, name)
            for name, held in slots.items():
                if now.get(name, home) is not held:
                    object.__setattr__(value, name, held)

        self._restore.append(refill)
        self._all([*kept.values(), *slots.values()], depth)

    def _generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._state(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._state(lambda: bits.state, lambda state: setattr(bits, "state", state))
        elif isinstance(value, np.random.RandomState):
            self._state(value.get_state, value.set_state)
        else:
            self._state(value.getstate, value.setstate)

    def _state(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        state = get()
        self._restore.append(lambda: put(state))


def is_small(value: Any, leaves: int, foreign: Collection[str]) -> bool:
    """Whether a value holds no more than so many others, and neither data sets nor what serves them.

    Args:
        leaves: values, and kilobytes of tensors and arrays.
        foreign: packages whose objects do not count.
    """
    size, stack, seen = 0.0, [value], set()
    while stack:
        part = stack.pop()
        if id(part) in seen or _is_of(part, foreign):
            continue
        seen.add(id(part))
        if isinstance(part, (Dataset, DataLoader, Sampler)):
            return False
        inside = _inside(part)
        size += 1 + len(inside) + _bytes_of(part) / 1024
        if size > leaves:
            return False
        stack += inside
    return True


def _inside(part: Any) -> Collection[Any]:
    if isinstance(part, dict):
        return [*part.keys(), *part.values()] if len(part) <= _MANY * 10 else range(2 * len(part))
    if isinstance(part, (list, tuple, set, frozenset, deque)):
        return part
    if isinstance(part, (Tensor, np.ndarray, *_WITHOUT_STATE)):
        return ()
    return list(getattr(part, "__dict__", {}).values())


def _bytes_of(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.numel() * part.element_size()
    if isinstance(part, (str, bytes, bytearray)):
        return len(part)
    number = getattr(part, "nbytes", 0)  # of an array, or a table's column
    return number if isinstance(number, int) else 0


def _is_of(value: Any, packages: Collection[str]) -> bool:
    return any(base.__module__.partition(".")[0] in packages for base in type(value).__mro__)


def _identities(value: Any, base: Any) -> list[int]:
    """Of all that a container holds, as its base class tells; in order, where it has one."""
    if issubclass(base, dict):
        return [*map(id, base.keys(value)), *map(id, base.values(value))]
    held = map(id, base.__iter__(value))
    return sorted(held) if base is set else list(held)
