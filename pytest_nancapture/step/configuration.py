"""Modules that a command line made of configuration: ``class_path`` and ``init_args``, as jsonargparse reads them.

What a configuration names is imported and called, so all of it is looked at first, in every way in which it is read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.values.objects import INSTANTIATORS, is_harmless
from pytest_nancapture.bundle.values.references import Resolver
from pytest_nancapture.errors import RebuildError

_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
_PATH, _OWN_PATH = "class_path", "_class_path"


def instantiate(kind: type, configuration: Mapping[str, Any], instantiator: str, resolver: Resolver) -> Any:
    """The module, as the function makes it that made it in training.

    Raises:
        RebuildError: that is none of the known ones, or the configuration names what no bundle may.
    """
    if instantiator not in INSTANTIATORS:
        raise RebuildError(f"expected an instantiator of {', '.join(sorted(INSTANTIATORS))}, came {instantiator!r:.80}")
    checked = _checked(dict(configuration), resolver)
    if _OWN_PATH in checked:
        checked[_OWN_PATH] = _path_of(kind)
    home, _, name = instantiator.rpartition(".")
    return getattr(importlib.import_module(home), name)(kind, checked)


def _checked(value: Any, resolver: Resolver) -> Any:
    """The same with its classes named by their paths in today's process."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == _PATH and not isinstance(item, (type, types.FunctionType)):
                raise RebuildError(f"class_path: expected a class that a bundle may name, came {item!r:.80}")
        return {key: _checked(item, resolver) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_checked(item, resolver) for item in value)
    if isinstance(value, (Mapping, argparse.Namespace, types.SimpleNamespace)):
        raise RebuildError(f"expected a configuration of dicts and lists, came a {type(value).__qualname__}")
    if isinstance(value, _NAMED):
        return _path_of(value)
    if isinstance(value, str):
        _check_text(value, resolver)
    return value


def _path_of(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def _check_text(text: str, resolver: Resolver) -> None:
    """Refuse what names code that no bundle may, also as the YAML that it is read as.

    Raises:
        RebuildError: it does.
    """
    for found in _named_by(text, resolver):
        # A constant of a module, such as a partial function, is as harmless as its class.
        if callable(found) and not is_harmless(found if isinstance(found, _NAMED) else type(found)):
            raise RebuildError(f"{text:.80}: a bundle may not name {found!r:.80}")
    for inner in _texts_in(_as_yaml(text)):
        if inner != text:
            _check_text(inner, resolver)


def _as_yaml(text: str) -> Any:
    import yaml  # comes with jsonargparse

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        for item in (*value, *(value.values() if isinstance(value, dict) else ())):
            yield from _texts_in(item)


def _named_by(path: str, resolver: Resolver) -> Iterator[Any]:
    """What a text names, if it does, in every way in which it may be taken apart."""
    parts = path.strip().split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)) or not _is_there(parts[0]):
        return
    script = _script(parts[0])
    for length in range(1, len(parts)):
        try:
            if script is None:
                yield resolver.resolve(f"{'.'.join(parts[:length])}:{'.'.join(parts[length:])}")
            elif resolver.load_script is not None:
                yield _attribute(resolver.load_script(script), parts[1:])
        except RebuildError:
            continue


def _attribute(found: Any, names: list[str]) -> Any:
    for name in names:
        found = getattr(found, name, None)
    return found


def _script(module: str) -> Path | None:
    """The file of one that is not imported yet and stands alone: ``train.csv`` is no reason to train."""
    spec = None if module in sys.modules else importlib.util.find_spec(module)
    if spec is None or not spec.has_location or spec.submodule_search_locations is not None or not spec.origin:
        return None
    is_known = module in sys.stdlib_module_names or "site-packages" in Path(spec.origin).parts
    return None if is_known or not spec.origin.endswith(".py") else Path(spec.origin)


def _is_there(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
