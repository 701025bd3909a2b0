"""What encoding and decoding of trees agree upon: which objects are emptied and filled, and how."""

from __future__ import annotations

import collections
import functools
import inspect
import sys
import types
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

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


@functools.lru_cache(256)
def nameable_in_context(kind: Any) -> tuple[Any, ...]:
    """What the context of a registered pytree class may name: itself, and functions that every context of it names."""
    try:
        _, context = pytree_nodes()[kind].flatten_fn(kind())
    except Exception:  # it cannot be empty
        return (kind,)
    return kind, *(leaf for leaf in tree_leaves(context) if isinstance(leaf, types.FunctionType))


def is_method_of(method: types.MethodType, holder: Any) -> bool:
    """Whether it is what the object's class has under the method's name, and no code is run to find that out."""
    return inspect.getattr_static(type(holder), method.__name__, None) is method.__func__


def builtin_base(kind: type) -> type:
    """The nearest base that is not defined in Python; its ``__new__`` makes instances."""
    return next(base for base in kind.__mro__ if _is_compiled(base))


def _is_compiled(kind: type) -> bool:
    is_static = not kind.__flags__ & (1 << 9)  # Py_TPFLAGS_HEAPTYPE
    return is_static or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)


def slot_names(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [_mangled(base, name) for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _mangled(kind: type, name: str) -> str:
    """A private name as the class's own methods find it."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def slots_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in slot_names(type(value)) if hasattr(value, name)}


def wraps_own_methods(kind: type) -> bool:
    """Whether it is a metric of torchmetrics, which keeps wrappers of its own methods in itself.

    Its state is what its ``__getstate__`` gives, and its ``__setstate__``, which is torchmetrics' own and does nothing
    else, puts the wrappers back.
    """
    homes = [next((base for base in kind.__mro__ if name in vars(base)), kind) for name in _STATE_METHODS]
    return all((home.__module__, home.__qualname__) == ("torchmetrics.metric", "Metric") for home in homes)


_STATE_METHODS = ("__getstate__", "__setstate__", "_wrap_update", "_wrap_compute")
_BUILTINS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, object, type(None))
_STANDARD = {
    *("argparse", "cmath", "collections", "datetime", "decimal", "enum", "fractions", "functools", "math"),
    *("operator", "_operator", "types", "uuid"),
}
_TORCH = ("nn", "optim", "distributions", "functional", "_C._nn", "_C._linalg", "_C._special", "_C._fft")
_LIGHTNING = ("utilities.data", "utilities.parsing")
_CLI = "cli.instantiate_module"
INSTANTIATORS = frozenset({f"lightning.pytorch.{_CLI}", f"pytorch_lightning.{_CLI}"})
"""Of configuration files: functions that make a module of its class and of arguments that name classes themselves."""
_NEVER = ("numpy", "pip", "pytest", "_pytest", "pytest_nancapture", "safetensors", "setuptools")


@functools.lru_cache(4096)
def is_harmless(found: Any) -> bool:
    """Whether a tree may name this class or function: nothing that lets data run code or reach the system.

    Of the standard library, torch, Lightning and numpy only what has a place in arguments and batches; of classes none
    with a ``__del__``, which would run on what a tree fills in. What else is installed is the user's own choice.
    """
    if any(found is builtin for builtin in _BUILTINS):
        return True
    if not isinstance(found, (type, types.FunctionType, types.BuiltinFunctionType)) or hasattr(found, "__del__"):
        return False
    module = str(getattr(found, "__module__", None) or "builtins")
    top, _, below = module.partition(".")
    if top == "torch":
        return not below or below.startswith(_TORCH)
    if top in ("lightning", "lightning_fabric", "pytorch_lightning"):
        return below.endswith(_LIGHTNING)
    if top in sys.stdlib_module_names:
        return top in _STANDARD
    return top not in _NEVER or (isinstance(found, type) and issubclass(found, np.generic))
