"""Optimizers: what they hold, to be put back in place; how often they evaluate a closure; which numbers are bad."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.step.check import has_nan, is_finite
from pytest_nancapture.step.state.objects import Objects

_PLAIN = frozenset({bool, int, float, str, tuple, type(None)})
_WORDS = {"lr": "learning rate (lr)", "betas": "beta (betas)"}


class OptimizerState:
    """All that an optimizer and those that it wraps hold now.

    It is put back in place, since ``load_state_dict`` makes new parameter groups, which a wrapped optimizer would not
    share any more, and casts what it loads.
    """

    def __init__(self, optimizer: Any, *, moments: bool = True) -> None:
        """`moments`: also what is kept for each parameter; without an update nothing of it changes."""
        family = list(with_wrapped(optimizer))
        states = [state for each in family if isinstance(state := getattr(each, "state", None), dict)]
        known = [parameter for each in family for parameter in parameters_of(each)]
        self._objects = Objects([*known, *([] if moments else states)], {"pytest_nancapture"})
        for each in family:
            self._objects.take(vars(each))
        for state in states if moments else ():
            for value in state.values():
                self._objects.take(value)

    def restore(self) -> None:
        """Make the optimizer what it was; as often as wanted."""
        self._objects.restore()


def with_wrapped(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those that it keeps in its attributes, such as the one that a sharpness-aware one wraps."""
    seen: set[int] = set()
    todo = [optimizer]
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            todo += [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]


def position_of(optimizer: Any, optimizers: Iterable[Any]) -> int:
    """Of the one among `optimizers` that is it, or wraps it."""
    return next(i for i, each in enumerate(optimizers) if any(one is optimizer for one in with_wrapped(each)))


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def hyperparameters_of(optimizers: Iterable[Any]) -> list[list[dict[str, Any]]]:
    """Of each optimizer's parameter groups, as they are now."""
    return [[_kept_group(group) for group in optimizer.param_groups] for optimizer in optimizers]


def restore_hyperparameters(optimizers: Iterable[Any], before: Iterable[list[dict[str, Any]]]) -> None:
    """Put them back, as :func:`hyperparameters_of` gave them."""
    for optimizer, groups in zip(optimizers, before, strict=False):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            # A tensor is replaced, not written: it may be one that the user's code keeps.
            group.update((name, _kept(value)) for name, value in values.items())


def _kept_group(group: dict[str, Any]) -> dict[str, Any]:
    # At every step, so without a slow look at what is no tensor.
    kept = dict(group)
    kept.pop("params", None)
    for name, value in kept.items():
        if type(value) not in _PLAIN:
            kept[name] = _kept(value)
    return kept


def _kept(value: Any) -> Any:
    """The value, or a copy where it is written in place: a learning rate may be a tensor."""
    return bare(value).clone() if isinstance(value, Tensor) else value


def evaluates_once(optimizer: Any) -> bool:
    """Whether it is known to call its closure once a step: torch's own code does, but for LBFGS."""
    home = next((kind for kind in type(optimizer).__mro__ if "step" in vars(kind)), object)
    return home.__module__.partition(".")[0] == "torch" and not issubclass(home, torch.optim.LBFGS)


def may_evaluate_again(optimizer: Any) -> bool:
    """Whether it is known to call its closure as often as it likes, be it once."""
    return isinstance(optimizer, torch.optim.LBFGS)


def bad_numbers(optimizers: Iterable[Any], scaler: Any = None) -> tuple[str, ...]:
    """The hyperparameters that are not finite, a text each: ``the learning rate (lr) of parameter group 0 is inf``."""
    optimizers = list(optimizers)
    found = []
    for position, optimizer in enumerate(optimizers):
        whose = f" of optimizer {position}" if len(optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                bad = "" if name == "params" else _bad(value)
                if bad:
                    found.append(f"the {_WORDS.get(name, name)} of parameter group {number}{whose} is {bad}")
    scale = _bad(scaler.get_scale()) if scaler is not None else ""
    return (*found, *([f"the loss scale is {scale}"] if scale else []))


def bad_states(optimizers: Iterable[Any]) -> str:
    """The first entry of an optimizer's state that is not finite, such as ``exp_avg``; empty where there is none."""
    for optimizer in optimizers:
        for each in with_wrapped(optimizer):
            for state in each.state.values() if isinstance(getattr(each, "state", None), dict) else ():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if _bad(value):
                        return str(name)
    return ""


def _bad(value: Any) -> str:
    """``nan``, ``inf`` or ``-inf``; empty where a number, or all of several, are finite."""
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_bad, value)), "")
    if isinstance(value, Tensor):
        if is_finite(value):
            return ""
        return f"{value.item()}" if value.numel() == 1 else "nan" if has_nan(value) else "inf"
    is_real = isinstance(value, numbers.Real) and not isinstance(value, int)
    return f"{float(value)}" if is_real and not math.isfinite(value) else ""
