"""Arguments of a constructor that the module keeps in itself: ``self.encoder = encoder``."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

_SAME = ("int", "float", "str", "bool", "list", "tuple", "dict", "set", "copy", "deepcopy", "ModuleList", "ModuleDict")
"""Calls that give of an argument what they would give of their own result."""
NOWHERE = object()


def kept_under(module: Any, names: Iterable[str], *, made: bool = False) -> dict[str, Any]:
    """Of the arguments of these names the ones that `module` keeps, as they are now.

    Where the constructor can be read it says which attribute holds an argument; else that of the same name is taken,
    unless the constructor makes it of something else, or a property that only shows a part: ``return self._parts[0]``.

    Args:
        made: take parts of the module even so, where they have the argument's name: a constructor that converts an
            argument may let a converted one be.
    """
    assigned = _assigned(type(module))  # type: ignore[arg-type]  # classes have a hash
    found: dict[str, Any] = {}
    for name in names:
        value = attribute(module, assigned.get(name, name))
        if value is NOWHERE and _is_shown(type(module), name):  # type: ignore[arg-type]  # classes have a hash
            with suppress(Exception):  # of a class of somebody's
                value = getattr(module, name)
        if assigned.get(name, name) and value is not NOWHERE:
            found[name] = value
        elif made and isinstance(attribute(module, name), nn.Module):
            found[name] = attribute(module, name)
    return found


def told_by(module: Any, known: Collection[str]) -> dict[str, Any]:
    """Arguments that an object tells of itself, as those do that pickle by them, or that keep all ``**kwargs``.

    Args:
        known: those that were saved; where some of ``**kwargs`` were, all were.
    """
    found: dict[str, Any] = {}
    for parameter in inspect.signature(type(module).__init__).parameters.values():
        held = vars(module).get(parameter.name)
        is_it = parameter.kind is inspect.Parameter.VAR_KEYWORD and isinstance(held, dict)
        if is_it and held is not None and not held.keys() & set(known):
            found.update((name, value) for name, value in held.items() if isinstance(name, str))
    tell = getattr(type(module), "__getnewargs_ex__", None)
    with suppress(Exception):  # of a class of somebody's
        positional, named = tell(module) if tell is not None else ((), {})
        found.update(named if not positional else {})
    return {name: value for name, value in found.items() if name not in known}


def attribute(module: Any, name: str) -> Any:
    """What the module itself holds under `name`, be it a part or a plain value; `NOWHERE` where nothing is."""
    parts = (module._modules, module._parameters, module._buffers) if isinstance(module, nn.Module) else ()
    for home in (*parts, vars(module)):
        if name in home:
            return home[name]
    return NOWHERE


@contextmanager
def set_aside(value: Any, names: Iterable[str]) -> Iterator[None]:
    """Without what a training loop has put into `value` under these attributes, where that is a module."""
    modules = list(value.modules()) if isinstance(value, nn.Module) else []
    held = [(vars(part), name, vars(part)[name]) for part in modules for name in names if name in vars(part)]
    for home, name, _ in held:
        home[name] = None
    try:
        yield
    finally:
        for home, name, original in held:
            home[name] = original


@functools.lru_cache(64)
def _assigned(kind: type) -> Mapping[str, str]:
    """Argument -> the attribute that holds it; the empty one where its own name holds something made of it."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is nn.Module:
            continue
        for name, where in _assignments(base).items():
            found.setdefault(name, where)
    return found


@functools.lru_cache(256)
def _is_shown(kind: type, name: str) -> bool:
    """Whether a property of that name gives a part of the object, and does nothing else."""
    shown = inspect.getattr_static(kind, name, None)
    if not isinstance(shown, property):
        return False
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(shown.fget))).body  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    body = function.body if isinstance(function, ast.FunctionDef) else []
    said = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(said) != 1 or not isinstance(said[0], ast.Return):
        return False
    part = said[0].value
    while isinstance(part, ast.Attribute) or (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant)):
        part = part.value
    return isinstance(part, ast.Name) and part is not said[0].value


def _assignments(kind: type) -> dict[str, str]:
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__))).body  # type: ignore[misc]
    except (OSError, TypeError, ValueError, SyntaxError):  # no source: typed in, generated, compiled
        return {}
    if not isinstance(function, ast.FunctionDef):
        return {}
    arguments = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    names = {*arguments[1:], *(argument.arg for argument in function.args.kwonlyargs)}
    found: dict[str, str] = {}
    made: set[str] = set()
    for node in ast.walk(function):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == (arguments or [""])[0]
            if not is_own or not isinstance(target, ast.Attribute):
                continue
            given = [name for name in names if _is_given(node.value, name)]  # type: ignore[attr-defined]
            found.update((name, target.attr) for name in given if name not in found or target.attr == name)
            if not given and target.attr in names:
                made.add(target.attr)
    return {**dict.fromkeys(made - found.keys(), ""), **found}


def _is_given(value: ast.expr | None, name: str) -> bool:
    """Whether an expression may be the argument of that name itself."""
    if isinstance(value, ast.Name):
        return value.id == name
    if isinstance(value, ast.BoolOp):
        return any(_is_given(part, name) for part in value.values)
    if isinstance(value, ast.IfExp):
        return _is_given(value.body, name) or _is_given(value.orelse, name)
    if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
        return ast.unparse(value.func).rpartition(".")[2] in _SAME and _is_given(value.args[0], name)
    return False
