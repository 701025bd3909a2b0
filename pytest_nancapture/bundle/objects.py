"""What encoding and decoding of trees agree upon: which objects are emptied and filled, and how."""

from __future__ import annotations

import collections
import types
from typing import Any

import torch

EMPTY = (
    object,
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.OrderedDict,
    collections.defaultdict,
    types.SimpleNamespace,
)
"""Built-in types whose subclasses can be made empty and filled without running code of theirs."""


def pytree_nodes() -> dict[Any, Any]:
    return torch.utils._pytree.SUPPORTED_NODES


def builtin_base(kind: type) -> type:
    """The nearest base that is not defined in Python; its ``__new__`` makes instances."""
    return next(base for base in kind.__mro__ if not base.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE


def slot_names(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def slots_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in slot_names(type(value)) if hasattr(value, name)}
