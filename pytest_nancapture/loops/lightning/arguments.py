"""Constructor arguments as Lightning keeps them: in ``hparams``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from pytest_nancapture.bundle.values.objects import INSTANTIATORS
from pytest_nancapture.capture.kept import attribute
from pytest_nancapture.capture.recipe import Arguments, constructor_parameters
from pytest_nancapture.diagnose.source import package_folder
from pytest_nancapture.loops.lightning.run import PACKAGES

_FACTORY = "give NaNCapture(factory='package.module:function') a function that builds the module"
_IGNORE = ", or leave it out with self.save_hyperparameters(ignore=[...]) if the constructor has a default"
_INSTANTIATOR = "_instantiator"
_ATTRIBUTES = ("_trainer", "_fabric")
_SERVANTS = frozenset({"Callback", "Trainer", "Logger", "Profiler"})


def saved_arguments(module: Any) -> Arguments:
    """Those that ``self.save_hyperparameters()`` saved, without callbacks and whatever else serves a run."""
    saved = dict(getattr(module, "hparams_initial", {}))
    instantiator = saved.pop(_INSTANTIATOR, None)
    values = {name: value for name, value in _accepted(module, saved).items() if not _is_servant(value)}
    is_configuration = instantiator in INSTANTIATORS
    # Whoever only uses a library cannot have its class save anything.
    is_theirs = bool(package_folder(module))
    call = "" if is_theirs else "call self.save_hyperparameters() in __init__, or "
    ignore = "" if is_theirs else _IGNORE
    return Arguments(
        values={name: _without_servants(value) for name, value in values.items()},
        instantiator=instantiator if is_configuration else None,
        configured=_with_classes if is_configuration else None,
        attributes=_ATTRIBUTES,
        door="NaNCapture",
        if_unwritable=f"{_FACTORY}{ignore}",
        if_missing=f"not among its hparams; {call}{_FACTORY}",
    )


def _accepted(module: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved arguments that the constructor takes, or the one argument that held them all."""
    accepted = constructor_parameters(type(module))
    kinds = {p.kind for p in inspect.signature(type(module).__init__).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    whole = getattr(module, "_hparams_name", None)
    if saved and whole in accepted and _is_whole(module, str(whole), saved, accepted, takes_any=takes_any):
        return {str(whole): module.hparams_initial}
    needed = [name for name, p in accepted.items() if p.default is p.empty]
    if saved and whole is None and len(needed) == 1 and not saved.keys() & accepted.keys():
        return {needed[0]: module.hparams_initial}  # made of it before it was saved
    return {name: value for name, value in saved.items() if name in accepted or takes_any}


def _is_whole(
    module: Any, name: str, saved: Mapping[str, Any], accepted: Mapping[str, Any], *, takes_any: bool
) -> bool:
    """Whether the argument of that name held them all: ``self.save_hyperparameters(config)``.

    Lightning finds the name by ``==``, which an argument may answer in a way of its own, as metrics do. But what is
    keyed by the constructor's own arguments is these, and a module or a number holds no hyperparameters.
    """
    if name in saved or isinstance(attribute(module, name), (nn.Module, bool, int, float, str, list, tuple)):
        return False
    return not saved.keys() & accepted.keys() or not (takes_any or saved.keys() <= accepted.keys())


def _is_servant(value: Any) -> bool:
    """Whether it is a callback, a logger or the like: of the run, and not of the module."""
    return any(
        base.__name__ in _SERVANTS and base.__module__.partition(".")[0] in PACKAGES for base in type(value).__mro__
    )


def _without_servants(value: Any) -> Any:
    """Containers without them; all else as it is."""
    if type(value) is dict:
        return {key: _without_servants(item) for key, item in value.items() if not _is_servant(item)}
    if type(value) in (list, tuple):
        return type(value)(_without_servants(item) for item in value if not _is_servant(item))
    return value


def _with_classes(value: Any) -> Any:
    """A configuration whose ``class_path`` are the classes themselves, so that they are written by reference.

    So is whatever else it names of the script, which has another name in a replay.
    """
    if isinstance(value, str) and value.startswith("__main__."):
        return _named(value)
    if isinstance(value, Mapping):
        return {
            key: _named(item) if key == "class_path" and isinstance(item, str) else _with_classes(item)
            for key, item in value.items()
        }
    return [_with_classes(item) for item in value] if type(value) is list else value


def _named(path: str) -> Any:
    """What a dotted path names; the path itself where nothing is found."""
    module, _, name = path.rpartition(".")
    while module:
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            module, _, above = module.rpartition(".")
            name = f"{above}.{name}"
            continue
        for part in name.split("."):
            found = getattr(found, part, None)
        return path if found is None else found
    return path
