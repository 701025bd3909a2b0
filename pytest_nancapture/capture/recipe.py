"""How the module is to be built again: its class and arguments, or a factory."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.tensors.kinds import bare, unwritable
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import Reference, is_typed_in, refer
from pytest_nancapture.capture.kept import kept_under, set_aside, told_by
from pytest_nancapture.errors import CaptureError, UnwritableValueError

_LARGEST = 64 * 2**20
"""Bytes of an argument that nobody saved, the module's own weights aside, that are copied when training starts."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A constructor's arguments, as far as the training loop knows them.

    Attributes:
        values: by name.
        door: what the user gave `factory` to, such as ``NaNCapture``.
        if_unwritable: what to do about one that has no form on disk.
        if_missing: what is wrong with one that is not among them, and what to do about it.
        instantiator: a function that is to be called with class and arguments, since those are configuration.
        configured: makes of such an argument what is to be written.
        attributes: what the loop puts into modules, and what is no part of them.
    """

    values: Mapping[str, Any]
    door: str
    if_unwritable: str
    if_missing: str
    instantiator: str | None = None
    configured: Callable[[Any], Any] | None = None
    attributes: tuple[str, ...] = ()


@dataclass
class Recipe:
    """What a bundle says about building the module.

    Attributes:
        target: the module's class.
        factory: the function that builds it, if one was given.
        arguments: of the constructor, encoded.
        optional: those among what the module keeps that have a default: to be given only where the code by itself
            makes another one.
        tensors: those among the arguments, by name.
        problems: what stands in the way of a rebuild, a sentence each.
        instantiator: see :class:`Arguments`.
        of_data: arguments of the run's datamodule, if it has one.
    """

    target: Reference
    factory: Reference | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    instantiator: str | None = None
    of_data: Arguments | None = None


def recipe_of(
    module: Any,
    factory: str | None,
    arguments: Arguments,
    *,
    prefix: str = "argument/",
    fits: Callable[[Any], bool] = lambda _: True,
) -> Recipe:
    """The recipe of `module`; what is missing is among its problems, so that it can be told before training.

    Args:
        prefix: begins the names of tensors.
        fits: whether a value that nobody saved may be written.

    Raises:
        CaptureError: `factory` names nothing that can be called.
    """
    kind = type(module)
    recipe = Recipe(Reference(f"{kind.__module__}:{kind.__qualname__}"))
    if factory is not None:
        recipe.factory = _factory(factory, arguments.door)
    try:
        recipe.target = refer(kind)
    except ValueError as error:
        recipe.problems.append(f"the module's class cannot be found again: {error}{_remedy(kind)}")
    if factory is not None:
        recipe.problems.clear()
        return recipe
    encoder = Encoder(prefix=prefix)
    unwritable: dict[str, str] = {}
    recipe.instantiator = arguments.instantiator
    for name, value in arguments.values.items():
        try:
            recipe.arguments[name] = encoder.encode(
                value if arguments.configured is None else arguments.configured(value), name
            )
        except UnwritableValueError as error:
            unwritable[error.where] = error.problem
    own = {id(part) for part in (*module.parameters(), *module.buffers())} if isinstance(module, nn.Module) else set()
    _add_kept(recipe, module, encoder, arguments, own, fits)
    recipe.tensors = {
        name: _blank(tensor) if id(tensor) in own else bare(tensor).clone() for name, tensor in encoder.tensors.items()
    }
    there = {**arguments.values, **recipe.arguments, **recipe.optional}
    recipe.problems += _problems(module, unwritable, dataclasses.replace(arguments, values=there))
    return recipe


def _remedy(kind: type) -> str:
    """What works in a notebook."""
    if not is_typed_in(kind.__module__):
        return ""
    name, file = kind.__qualname__, f"{kind.__qualname__.lower()}.py"
    return (
        f"; replay(path, module={call_of(kind)}) replays one here; for pytest, put the class into a file (begin its "
        f"cell with %%writefile {file}) and write from {file[:-3]} import {name}"
    )


def call_of(kind: type) -> str:
    """A call of the class, as a person would write it."""
    takes = any(p.default is p.empty for p in constructor_parameters(kind).values())
    return f"{kind.__qualname__}({'...' if takes else ''})"


def _blank(tensor: Tensor) -> Tensor:
    """In place of one of the module's own, which a bundle holds among the weights: all zeros that take no memory."""
    if tensor.layout is not torch.strided or is_lazy(tensor) or unwritable(tensor):
        return bare(tensor).clone()
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _add_kept(
    recipe: Recipe,
    module: Any,
    encoder: Encoder,
    arguments: Arguments,
    own: Collection[int],
    fits: Callable[[Any], bool],
) -> None:
    """Arguments that nobody saved, where the module keeps them in itself.

    Whether they are right the comparison at the fault tells, and the proof.
    """
    own_names, known = constructor_parameters(type(module)), arguments.values
    left_out = {**own_names, **_passed_on(type(module), own_names)}
    optional = [name for name, p in left_out.items() if name not in known and p.default is not p.empty]
    kept = kept_under(module, [name for name in left_out if name not in known])
    for name, value in {**kept_under(module, optional, made=True), **kept, **told_by(module, known)}.items():
        default = left_out[name].default if name in left_out else inspect.Parameter.empty
        if not fits(value) or (default is not inspect.Parameter.empty and _is_the_same(value, default)):
            continue
        if _is_worth_writing(value, name, arguments.attributes, own):
            with set_aside(value, arguments.attributes):
                node = encoder.encode(value, name)
            (recipe.arguments if default is inspect.Parameter.empty else recipe.optional)[name] = node


def _is_the_same(value: Any, default: Any) -> bool:
    """Of plain values; what else there is may compare in ways of its own."""
    is_plain = isinstance(value, (bool, int, float, str)) and type(value) is type(default)
    return value is default or (is_plain and bool(value == default))


def _is_worth_writing(value: Any, name: str, attributes: Collection[str], own: Collection[int]) -> bool:
    """Whether it has a form on disk, and one that nobody minds: what is kept may be all of the data."""
    encoder = Encoder(most=_LARGEST)
    try:
        with set_aside(value, attributes):
            encoder.encode(value, name)
        return sum(tensor.nbytes for tensor in encoder.tensors.values() if id(tensor) not in own) <= _LARGEST
    except Exception:  # of a class of somebody's
        return False


def _problems(module: Any, unwritable: Mapping[str, str], arguments: Arguments) -> Iterator[str]:
    """What is wrong with the arguments, a sentence for all of a kind."""
    kind = type(module)
    left_out = {name: p for name, p in constructor_parameters(kind).items() if name not in arguments.values}
    absent = [name for name, parameter in left_out.items() if parameter.default is parameter.empty]
    if unwritable:
        what = "; ".join(f"{where}: {problem}" for where, problem in unwritable.items())
        yield f"argument{_plural(unwritable)} of {kind.__qualname__}: {what}; {arguments.if_unwritable}"
    if absent:
        names = ", ".join(map(repr, absent))
        are = "are" if len(absent) > 1 else "is"
        yield f"argument{_plural(absent)} {names} of {kind.__qualname__} {are} {arguments.if_missing}"
    others = [
        name for name, p in left_out.items() if name not in absent and _is_another_module(module, name, p.default)
    ]
    if others:
        names = ", ".join(map(repr, others))
        yield (
            f"argument{_plural(others)} {names} of {kind.__qualname__} {'are' if len(others) > 1 else 'is'} not the "
            f"default{_plural(others)}, which a replay would take, and {arguments.if_missing}"
        )


def _is_another_module(module: Any, name: str, default: Any) -> bool:
    """Whether what the module keeps under an argument's name is a submodule of another class than the default."""
    kept = getattr(module, "_modules", {}).get(name)
    return kept is not None and type(kept) is not type(default)


def _plural(things: Collection[Any]) -> str:
    return "s" if len(things) > 1 else ""


def _factory(factory: str, door: str) -> Reference:
    module, colon, name = factory.partition(":")
    if not colon:
        raise CaptureError(f"{door}(factory=...): expected 'package.module:function', came {factory!r}")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"{door}(factory={factory!r}): {error}") from error
    if not callable(found):
        raise CaptureError(f"{door}(factory={factory!r}): expected a function, came {found!r:.80}")
    try:
        return Reference(factory, refer(found).file)
    except ValueError:
        return Reference(factory)


def _passed_on(kind: type, own: Collection[str]) -> dict[str, inspect.Parameter]:
    """Optional arguments that the constructor hands on to its bases' unseen, as ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        found = {**{p.name: p for p in parameters if p.default is not p.empty and p.name not in own}, **found}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return found


def constructor_parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Of the constructor, by name, without ``self``, ``*args`` and ``**kwargs``."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in list(signature.parameters.items())[1:] if p.kind not in variable}
