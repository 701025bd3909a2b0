"""What a live module holds otherwise than one that was built anew: its state, as far as attributes tell.

What is the same in both is code, and stays today's; so the places that differ are told as deep down as they lie.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import pathlib
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytest_nancapture.bundle.tensors.kinds import bare, stored_values, unwritable
from pytest_nancapture.bundle.tensors.names import buffers, parameters, submodules
from pytest_nancapture.bundle.values.generators import GENERATORS, state_of_generator
from pytest_nancapture.bundle.values.objects import EMPTY, builtin_base, slots_of
from pytest_nancapture.step.state.places import Step, Way, tensors_of

_DEPTH = 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN_KEYS = (bool, int, float, str, bytes, type(None))
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_VALUES = (torch.dtype, torch.layout, torch.memory_format, type, types.ModuleType, pathlib.PurePath, enum.Enum)
"""Equal or not, with nothing inside."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@dataclass(frozen=True)
class Difference:
    """A place where the live module holds something else.

    Attributes:
        module: path of the submodule.
        way: from there; empty where the submodule itself is another.
        value: what the live one holds.
        problem: why that cannot be state; empty where it can.
    """

    module: str
    way: Way
    value: Any = None
    problem: str = ""


@dataclass
class Comparison:
    """Compares a live module with one built from its bundle, both at the same instant of their loop.

    Attributes:
        ignored: names of attributes that are not looked at.
        foreign: packages of the loop, whose objects are no state of the user's.
        opaque: places whose insides cannot be looked into; filled as they are met.
    """

    live: Any
    built: Any
    ignored: Collection[str]
    foreign: Collection[str]
    opaque: list[str] = field(default_factory=list)

    def differences(self) -> list[Difference]:
        """All places that differ, in the order of the live module."""
        self._names = {**_names(self.live), **_names(self.built)}
        self._seen: set[tuple[int, int]] = set()
        return list(self._modules())

    def of_objects(self) -> list[Difference]:
        """The places that differ in two objects that are no modules."""
        self._names, self._seen = {}, set()
        return [Difference("", way, value) for way, value in self._attributes(self.live, self.built)]

    def _modules(self) -> Iterator[Difference]:
        theirs = dict(submodules(self.built))
        gone: list[str] = []
        for path, module in submodules(self.live):
            if any(path.startswith(f"{above}.") for above in gone):
                continue
            other = theirs.pop(path, None)
            if other is None or not _is_same_kind(_kind_of(module), _kind_of(other)):
                gone.append(path)
                came = "is not there" if other is None else f"is a {type(other).__qualname__}"
                problem = f"a {type(module).__qualname__}, which {came} in a module built from the bundle"
                yield Difference(path, (), None, problem)
                continue
            yield from self._own_code(path, module, other)
            for way, value in itertools.chain(self._attributes(module, other), self._of_tensors(module, other)):
                yield Difference(path, way, value)
        for path in theirs:
            if not any(path == above or path.startswith(f"{above}.") for above in gone):
                problem = "not in the run's module, but in one built from the bundle"
                if "." not in path or path.rpartition(".")[0] not in theirs:
                    yield Difference(path, (), None, problem)

    def _own_code(self, path: str, live: nn.Module, built: nn.Module) -> Iterator[Difference]:
        """What no value can say: methods that the instance has of its own, attributes that are gone, other dtypes."""
        is_compiled = getattr(live, "_compiler_ctx", None) is not None
        for name, value in vars(live).items():
            if name in self.ignored or not _is_method(live, name) or _is_ours(value) or is_compiled:
                continue
            if str(getattr(value, "__module__", "")).partition(".")[0] in {*self.foreign, "torch"}:
                continue  # put there by the loop, for as long as it needs it
            other = vars(built).get(name)
            if other is None or not (_is_ours(other) or self._same(value, other, (Step("attribute", name),))):
                problem = "a method that the run's module has of its own, which a module built from the bundle lacks"
                yield Difference(path, (Step("attribute", name),), None, problem)
        for name, value in vars(built).items():
            is_state = name not in self.ignored and not _is_method(built, name) and not self._is_foreign(value)
            if is_state and name not in vars(live) and _is_same_kind(type(live), type(built)):
                problem = "gone in the run's module, but not in one built from the bundle"
                yield Difference(path, (Step("attribute", name),), None, problem)
        for name, parameter in live._parameters.items():
            other = built._parameters.get(name)
            if parameter is not None and other is not None and parameter.dtype != other.dtype:
                problem = f"of dtype {parameter.dtype}, but of {other.dtype} in a module built from the bundle"
                yield Difference(path, (Step("attribute", name),), None, problem)
        if not all(self._same_hooks(list(getattr(live, n).values()), list(getattr(built, n).values())) for n in _HOOKS):
            self.opaque.append(f"the forward hooks of {path or 'the module'}")

    def _same_hooks(self, live: list[Any], built: list[Any]) -> bool:
        way = (Step("attribute", "hooks"),)
        return len(live) == len(built) and all(self._same(a, b, way) for a, b in zip(live, built, strict=True))

    def _attributes(self, live: Any, built: Any) -> Iterator[tuple[Way, Any]]:
        mine = {k: v for k, v in vars(live).items() if k not in self.ignored and not _is_method(live, k)}
        theirs = {k: v for k, v in vars(built).items() if k not in self.ignored and not _is_method(built, k)}
        for name, value in mine.items():
            way = (Step("attribute", name),)
            if name not in theirs:
                if not self._is_foreign(value):
                    yield way, value
            else:
                yield from self._values(value, theirs[name], way)

    def _of_tensors(self, live: nn.Module, built: nn.Module) -> Iterator[tuple[Way, Any]]:
        """What parameters and buffers have been given besides their values, such as ``weight.decay = False``."""
        for name, tensor in tensors_of(live).items():
            other = tensors_of(built).get(name)
            if other is not None and type(tensor) is type(other):
                yield from self._held(vars(tensor), vars(other), (Step("attribute", name),))

    def _values(self, live: Any, built: Any, way: Way) -> Iterator[tuple[Way, Any]]:  # noqa: C901, a branch per kind
        if live is built or len(way) > _DEPTH or self._is_foreign(live):
            return
        name = self._names.get(id(live))
        if name is not None or id(built) in self._names:
            if name != self._names.get(id(built)):
                yield way, live
            return
        if not _is_same_kind(type(live), type(built)):
            yield way, live
            return
        if type(live) in _ATOMS or isinstance(live, _VALUES):
            if not _same_value(live, built):
                yield way, live
            return
        pair = (id(live), id(built))
        if pair in self._seen:
            return
        self._seen.add(pair)
        if isinstance(live, dict):
            yield from self._dicts(live, built, way)
        elif type(live) is list:
            if len(live) != len(built):
                yield way, live
            else:
                for i, (mine, theirs) in enumerate(zip(live, built, strict=True)):
                    yield from self._values(mine, theirs, (*way, Step("index", i)))
        elif isinstance(live, (tuple, list, deque)):
            items = itertools.zip_longest(live, built, fillvalue=_ABSENT)
            if getattr(live, "maxlen", 0) != getattr(built, "maxlen", 0) or not all(
                self._same(a, b, way) for a, b in items
            ):
                yield way, live
        elif isinstance(live, (set, frozenset)):
            if live != built:
                yield way, live
        elif type(live).__module__.partition(".")[0] == "omegaconf":
            if live != built:  # by values: nodes of a schema's and others may hold the same
                yield way, live
        elif self._is_open(live):
            yield from self._objects(live, built, way)
        elif not self._is_equal(live, built, way):
            yield way, live

    def _dicts(self, live: dict[Any, Any], built: dict[Any, Any], way: Way) -> Iterator[tuple[Way, Any]]:
        theirs = list(dict.keys(built))
        keys = [key for key, value in dict.items(live) if dict.__contains__(built, key) or not self._is_foreign(value)]
        # A new key at the end can be put there; any other order is the whole dict's own.
        if not self._same(getattr(live, "default_factory", None), getattr(built, "default_factory", None), way):
            yield way, live
            return
        is_plain = all(type(key) in _PLAIN_KEYS for key in (*keys, *theirs))
        can_be_told = is_plain and keys[: len(theirs)] == theirs
        if not can_be_told:
            same = len(keys) == len(theirs) and all(
                self._same(a, b, way) and self._same(dict.__getitem__(live, a), dict.__getitem__(built, b), way)
                for a, b in zip(keys, theirs, strict=True)
            )
            if not same:
                yield way, live
            return
        for key in keys:
            step = (*way, Step("key", key))
            if dict.__contains__(built, key):
                yield from self._values(dict.__getitem__(live, key), dict.__getitem__(built, key), step)
            elif not self._is_foreign(dict.__getitem__(live, key)):
                yield step, dict.__getitem__(live, key)
        if not _is_container_alone(live):
            yield from self._held(vars(live), vars(built), way)

    def _objects(self, live: Any, built: Any, way: Way) -> Iterator[tuple[Way, Any]]:
        mine = {**getattr(live, "__dict__", {}), **slots_of(live)}
        theirs = {**getattr(built, "__dict__", {}), **slots_of(built)}
        if theirs.keys() - mine.keys():
            yield way, live
            return
        yield from self._held(mine, theirs, way)

    def _held(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], way: Way) -> Iterator[tuple[Way, Any]]:
        for name, value in mine.items():
            step = (*way, Step("attribute", name))
            if name not in theirs:
                if not self._is_foreign(value):
                    yield step, value
            else:
                yield from self._values(value, theirs[name], step)

    def _same(self, live: Any, built: Any, way: Way) -> bool:
        return next(self._values(live, built, way), None) is None

    def _is_equal(self, live: Any, built: Any, way: Way) -> bool:
        if isinstance(live, Tensor):
            return same_tensor(live, built)
        if isinstance(live, (np.ndarray, np.generic)):
            return _same_array(np.asarray(live), np.asarray(built))
        if isinstance(live, GENERATORS):
            return _same_tree(state_of_generator(live), state_of_generator(built))
        if isinstance(live, _FUNCTIONS):
            return self._same_function(live, built, way)
        if isinstance(live, functools.partial):
            parts: tuple[tuple[Any, Any], ...] = ((live.func, built.func), (live.args, built.args))
            parts = (*parts, (live.keywords, built.keywords), (vars(live), vars(built)))
            return all(self._same(a, b, way) for a, b in parts)
        if isinstance(live, weakref.ref):
            return self._same(live(), built(), way)
        if isinstance(live, torch.device):
            return True  # the replay's own
        if not _is_compared_by_identity(live) and not hasattr(type(live), "__next__"):
            with suppress(Exception):  # an equality of somebody's may raise, or answer with more than a flag
                return bool(live == built)
        self.opaque.append(".".join(str(step.name) for step in way))
        return True

    def _same_function(self, live: Any, built: Any, way: Way) -> bool:
        inside = "_torchdynamo_orig_callable"
        if hasattr(live, inside) and hasattr(built, inside):  # compiled by torch, with caches of its own
            return self._same(getattr(live, inside), getattr(built, inside), way)
        if isinstance(live, types.MethodType):
            return live.__func__ is built.__func__ and self._same(live.__self__, built.__self__, way)
        if not isinstance(live, types.FunctionType) or live.__code__ is not built.__code__:
            return False
        cells = [tuple(c.cell_contents for c in f.__closure__ or () if _is_filled(c)) for f in (live, built)]
        parts = [(live.__defaults__, built.__defaults__), (live.__kwdefaults__, built.__kwdefaults__), tuple(cells)]
        return all(self._same(a, b, way) for a, b in parts)

    def _is_open(self, value: Any) -> bool:
        """Whether it is an object whose attributes are all there is to it."""
        kind = type(value)
        closed = (Tensor, np.ndarray, np.generic, *GENERATORS, *_FUNCTIONS, functools.partial, type, types.ModuleType)
        if isinstance(value, closed) or kind.__module__ == "builtins" or builtin_base(kind) not in EMPTY:
            return False  # what a stream or another thing of compiled code holds is out of sight
        return hasattr(value, "__dict__") or bool(slots_of(value))

    def _is_foreign(self, value: Any, depth: int = 0) -> bool:
        """Whether it is an object of the loop's (a trainer, a callback, a logger), or holds nothing else."""
        if isinstance(value, (dict, list, tuple, set, frozenset)):
            parts = list(value.values() if isinstance(value, dict) else value)
            return depth < _DEPTH and bool(parts) and all(self._is_foreign(part, depth + 1) for part in parts)
        if isinstance(value, (nn.Module, Tensor)):
            return False
        return any(base.__module__.partition(".")[0] in self.foreign for base in type(value).__mro__)


_ABSENT = object()


def same_tensor(left: Tensor, right: Tensor) -> bool:
    """The same kind, shape and values; NaN is NaN."""
    if (left.shape, left.dtype, left.layout, left.requires_grad) != (
        right.shape,
        right.dtype,
        right.layout,
        right.requires_grad,
    ):
        return False
    if unwritable(left) or unwritable(right):
        return left is right
    mine, theirs = (stored_values(bare(tensor)).cpu() for tensor in (left, right))
    if mine.shape != theirs.shape:
        return False
    if mine.dtype.itemsize == 1:
        return torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    if not torch.equal(mine.isnan(), theirs.isnan()) or not torch.equal(mine.nan_to_num(), theirs.nan_to_num()):
        return False
    # 0 and -0 are equal, but not the same.
    return mine.is_complex() or torch.equal(mine.signbit() & ~mine.isnan(), theirs.signbit() & ~theirs.isnan())


def _same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    if not np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM"):
        return False
    return left.dtype.kind != "f" or np.array_equal(np.signbit(left), np.signbit(right))


def _same_value(left: Any, right: Any) -> bool:
    """NaN is NaN, and -0 is not 0."""
    if isinstance(left, float) and left == right:
        return math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right) or (left != left and right != right)


def _same_tree(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return _same_array(left, np.asarray(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_tree(left[key], right[key]) for key in left)
    return bool(left == right)


def _names(module: nn.Module) -> dict[int, str]:
    """Its own parts by identity; two modules' parts are the same where their names are."""
    parts = itertools.chain(parameters(module), buffers(module), submodules(module))
    names: dict[int, str] = {}
    for name, part in parts:
        names.setdefault(id(part), f"{'module ' if isinstance(part, nn.Module) else ''}{name}")
    return names


def _kind_of(module: nn.Module) -> type:
    """Parametrizations make classes of their own, one a module; lazy modules become others in their first forward."""
    kind = type(module)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.cls_to_become is not None:
        return module.cls_to_become
    return kind.__bases__[0] if kind.__name__.startswith("Parametrized") and kind.__bases__ else kind


def _is_same_kind(left: type, right: type) -> bool:
    """A class that is defined inside of a function is made anew at each call."""
    names = [(kind.__module__, kind.__qualname__) for kind in (left, right)]
    return left is right or ("<locals>" in left.__qualname__ and names[0] == names[1])


def _is_method(owner: Any, name: str) -> bool:
    """A method that an instance has of its own is code, or a stand-in of ours."""
    return callable(getattr(type(owner), name, None))


def _is_ours(value: Any) -> bool:
    """A stand-in that watches or plays, and is gone when it is over."""
    return type(value).__module__.partition(".")[0] == "pytest_nancapture"


def _is_container_alone(value: Any) -> bool:
    return not getattr(value, "__dict__", None)


def _is_compared_by_identity(value: Any) -> bool:
    own: Any = type(value).__eq__
    return own is object.__eq__


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018, asked for whether it is there
    except ValueError:
        return False
    return True
