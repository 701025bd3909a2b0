"""Sources of random numbers that user code holds: their states, and sources made of states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""The kinds there are. Of their subclasses, which may keep more, only the state that the base knows is known."""
_BITS: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def state_of_generator(value: Any) -> Any:
    """What its next numbers come from: a tensor, a dict or a tuple, as its own library gives it."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate()


def tag_of_generator(value: Any) -> str:
    """How a tree names its kind; empty where the state is out of our sight."""
    kind = type(value)
    if kind is torch.Generator:
        return "torch_generator"
    if kind is np.random.Generator and type(value.bit_generator).__name__ in _BITS:
        return "numpy_generator"
    if kind is np.random.RandomState:
        return "random_state"
    return "python_random" if kind is random.Random else ""


def generator_of(tag: str, state: Any, device: str = "cpu") -> Any:
    """A new source that goes on from `state`.

    Raises:
        LookupError, TypeError, ValueError, RuntimeError: `state` is none of that kind.
    """
    if tag == "torch_generator":
        made = torch.Generator(device)
        made.set_state(state.cpu())
        return made
    if tag == "numpy_generator":
        bits = _BITS[state["bit_generator"]]()
        bits.state = state
        return np.random.Generator(bits)
    if tag == "random_state":
        legacy = np.random.RandomState()
        legacy.set_state(state)
        return legacy
    made_here = random.Random()  # noqa: S311, no secret
    made_here.setstate(state)
    return made_here
