"""How the module is to be built again: its class and arguments, or a factory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import Reference, refer
from pytest_nancapture.errors import CaptureError, UnwritableValueError

_REMEDY = (
    "give NaNCapture(factory='package.module:function') a function that builds the module, or leave it out with "
    "self.save_hyperparameters(ignore=[...]) if the constructor has a default"
)


@dataclass
class Recipe:
    """What a bundle says about building the module.

    Attributes:
        target: the module's class.
        factory: the function that builds it, if one was given.
        arguments: of the constructor, encoded.
        tensors: those among the arguments, by name.
        problems: what stands in the way of a rebuild, a sentence each.
    """

    target: Reference
    factory: Reference | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def recipe_of(module: nn.Module, factory: str | None) -> Recipe:
    """The recipe of `module`; what is missing is among its problems, so that it can be told before training.

    Raises:
        CaptureError: `factory` names nothing that can be called.
    """
    kind = type(module)
    recipe = Recipe(Reference(f"{kind.__module__}:{kind.__qualname__}"))
    if factory is not None:
        recipe.factory = _factory(factory)
    try:
        recipe.target = refer(kind)
    except ValueError as error:
        recipe.problems.append(f"the module's class cannot be found again: {error}")
    accepted = _parameters(kind)
    given = _hyperparameters(module, accepted)
    encoder = Encoder(prefix="argument/", remedy=_REMEDY)
    for name, value in given.items():
        try:
            recipe.arguments[name] = encoder.encode(value, name)
        except UnwritableValueError as error:
            recipe.problems.append(f"argument {error.where} of {kind.__qualname__}: {error.problem}; {error.remedy}")
    recipe.tensors = {name: tensor.detach().clone() for name, tensor in encoder.tensors.items()}
    for name, parameter in accepted.items():
        if parameter.default is parameter.empty and name not in given:
            recipe.problems.append(
                f"argument {name!r} of {kind.__qualname__} is not among its hparams; call self.save_hyperparameters() "
                "in __init__, or give NaNCapture(factory='package.module:function') a function that builds the module"
            )
    if recipe.factory is not None:
        recipe.problems.clear()
    return recipe


def _factory(factory: str) -> Reference:
    module, colon, name = factory.partition(":")
    if not colon:
        raise CaptureError(f"NaNCapture(factory=...): expected 'package.module:function', came {factory!r}")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise CaptureError(f"NaNCapture(factory={factory!r}): {error}") from error
    if not callable(found):
        raise CaptureError(f"NaNCapture(factory={factory!r}): expected a function, came {found!r:.80}")
    try:
        return Reference(factory, refer(found).file)
    except ValueError:
        return Reference(factory)


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Of the constructor, by name, without ``self``, ``*args`` and ``**kwargs``."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in list(signature.parameters.items())[1:] if p.kind not in variable}


def _hyperparameters(module: Any, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The saved arguments that the constructor takes, or the one argument that held them all."""
    saved = dict(getattr(module, "hparams_initial", {}))
    whole = getattr(module, "_hparams_name", None)
    if saved and whole in accepted:
        return {str(whole): module.hparams_initial}
    kinds = {p.kind for p in inspect.signature(type(module).__init__).parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return {name: value for name, value in saved.items() if name in accepted or takes_any}
