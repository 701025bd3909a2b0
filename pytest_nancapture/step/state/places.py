"""Where a value stands below a module: the way there in steps, as text for people, and putting a value there."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from pytest_nancapture.errors import RebuildError

Kind = Literal["attribute", "key", "index"]


class Step(NamedTuple):
    """One step of a way: an attribute's name, a dict's key, or a list's index."""

    kind: Kind
    name: Any


Way = tuple[Step, ...]


def in_words(module: str, way: Sequence[Step]) -> str:
    """As code would reach it: ``encoder.counts['seen'][0]``."""
    text = module
    for kind, name in way:
        text += (f".{name}" if text else str(name)) if kind == "attribute" else f"[{name!r:.40}]"
    return text


def put(module: nn.Module, way: Sequence[Step], value: Any) -> bool:
    """Put `value` where the way leads, below `module`; False where today's code has no such place.

    Raises:
        RebuildError: it would take the place of code: a method, a property, or what is special to Python.
    """
    if way[0].name in ("_parameters", "_buffers", "_modules"):
        return False  # those of the module's own tree are brought back otherwise
    holder: Any = module
    for step in way[:-1]:
        found = _follow(holder, step)
        if found is _NOTHING:
            return False
        holder = found
    kind, name = way[-1]
    if kind == "attribute":
        _check_name(holder, name)
        if not hasattr(holder, "__dict__"):
            if not _has_slot(holder, name):
                return False
            object.__setattr__(holder, name, value)
        else:
            vars(holder)[name] = value
        return True
    if kind == "key" and isinstance(holder, dict):
        dict.__setitem__(holder, name, value)
        return True
    if kind == "index" and isinstance(holder, list) and isinstance(name, int) and name < len(holder):
        list.__setitem__(holder, name, value)
        return True
    return False


_NOTHING = object()


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers, by name."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _follow(holder: Any, step: Step) -> Any:
    if step.kind == "attribute":
        own: dict[str, Any] = getattr(holder, "__dict__", {})
        if isinstance(holder, nn.Module) and step.name not in own:
            own = dict(tensors_of(holder))
        return own.get(step.name, _NOTHING)
    if step.kind == "key":
        return dict.get(holder, step.name, _NOTHING) if isinstance(holder, dict) else _NOTHING
    is_there = isinstance(holder, (list, tuple)) and isinstance(step.name, int) and step.name < len(holder)
    return holder[step.name] if is_there else _NOTHING


def _has_slot(holder: Any, name: str) -> bool:
    return any(name in _listed(vars(kind).get("__slots__", ())) for kind in type(holder).__mro__)


def _listed(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _check_name(holder: Any, name: Any) -> None:
    """State takes the place of state only: what a class defines as code stays what today's class makes of it."""
    is_special = not isinstance(name, str) or (name.startswith("__") and name.endswith("__"))
    of_class = None if is_special else getattr(type(holder), name, None)
    is_code = callable(of_class) or hasattr(of_class, "__get__")
    is_place = isinstance(of_class, (functools.cached_property, types.MemberDescriptorType))
    if is_special or (is_code and not is_place):
        raise RebuildError(f"state at {name!r:.60}: expected a place for values, came one for code")
