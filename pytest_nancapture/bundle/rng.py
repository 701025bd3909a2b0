"""Random states: torch on the CPU and every accelerator in use, numpy's legacy global one, python's ``random``."""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON_WORDS = 625
"""Of the Mersenne twister: 624 of state and the position."""
_MT19937_BYTES = 4 * _PYTHON_WORDS


@dataclass(frozen=True)
class RandomStates:
    """All random states of the process at one instant.

    Attributes:
        generators: ``"cpu"`` or ``"cuda:0"`` -> the generator's state, uint8 on the CPU.
        numpy: ``numpy.random.get_state(legacy=False)``.
        python: ``random.getstate()``.
        seed: what all of them are seeded with, where the states were not kept; those of accelerators are then made on
            restoring.
    """

    generators: Mapping[str, Tensor]
    numpy: Mapping[str, Any]
    python: tuple[Any, ...]
    seed: int | None = None

    @classmethod
    def take(cls) -> RandomStates:
        """The states now; an accelerator that was never used has none."""
        states = {"cpu": torch.get_rng_state()}
        module = _accelerator()
        if module is not None:
            kind = module.__name__.rpartition(".")[2]
            states.update({f"{kind}:{i}": state for i, state in enumerate(_accelerator_states(module))})
        return cls(states, _numpy_state(), random.getstate())

    @classmethod
    def seeded(cls, seed: int, devices: Iterable[str] = ()) -> RandomStates:
        """The states that a seed gives.

        Raises:
            ValueError: numpy takes no such seed.
        """
        made = torch.Generator().manual_seed(seed).get_state()
        numpy = np.random.RandomState(seed).get_state(legacy=False)
        return cls(dict.fromkeys(("cpu", *devices), made), numpy, random.Random(seed).getstate(), seed)  # noqa: S311

    def restore(self, device: torch.device | None = None) -> None:
        """Set the states; those of an accelerator that is not here are left out.

        Args:
            device: where the captured device's state is to go, if the captured run used another index.
        """
        torch.set_rng_state(self.generators["cpu"])
        for name, state in self.generators.items():
            kind, _, index = name.partition(":")
            if kind == "cpu" or not hasattr(torch, kind) or not getattr(torch, kind).is_available():
                continue
            target = device if device is not None and device.type == kind else torch.device(kind, int(index))
            if (target.index or 0) < getattr(torch, kind).device_count():
                set_state = getattr(torch, kind).set_rng_state
                if self.seed is not None:
                    state = torch.Generator(target).manual_seed(self.seed).get_state()
                set_state(state) if kind == "mps" else set_state(state, target)
        np.random.set_state(dict(self.numpy))
        random.setstate(self.python)

    def encode(self, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As JSON and tensors, the tensors' names beginning with `name`."""
        tensors = {f"{name}/torch/{device}": state for device, state in self.generators.items()}
        tensors[f"{name}/numpy"] = torch.from_numpy(self.numpy["state"]["key"].astype(np.int64))
        version, words, gauss = self.python
        tensors[f"{name}/python"] = torch.tensor(words, dtype=torch.int64)
        record = {
            "name": name,
            "torch": list(self.generators),
            "numpy": {
                "bit_generator": self.numpy["bit_generator"],
                "pos": int(self.numpy["state"]["pos"]),
                "has_gauss": int(self.numpy["has_gauss"]),
                "gauss": float(self.numpy["gauss"]),
            },
            "python": {"version": version, "gauss_next": gauss},
        }
        return record, tensors

    @classmethod
    def decode(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RandomStates:
        """The inverse of :meth:`encode`.

        Raises:
            ValueError: record and tensors do not fit each other.
        """
        try:
            if "seed" in record:
                return cls.seeded(record["seed"], record["torch"])
            name, numpy, python = record["name"], record["numpy"], record["python"]
            words = tensors[f"{name}/python"].tolist()
            if len(words) != _PYTHON_WORDS:
                raise ValueError(
                    f"rng.safetensors: expected {_PYTHON_WORDS} words of python's state, came {len(words)}"
                )
            return cls(
                {device: tensors[f"{name}/torch/{device}"] for device in record["torch"]},
                {
                    "bit_generator": numpy["bit_generator"],
                    "state": {"key": tensors[f"{name}/numpy"].numpy().astype(np.uint32), "pos": numpy["pos"]},
                    "has_gauss": numpy["has_gauss"],
                    "gauss": numpy["gauss"],
                },
                (python["version"], tuple(words), python["gauss_next"]),
            )
        except (KeyError, TypeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"rng: not a record of random states: {error}") from error


_last_numpy: tuple[bytes, Mapping[str, Any]] | None = None


def _numpy_state() -> Mapping[str, Any]:
    """Numpy's way takes longer than all else; where its memory is as it was, so is the state that it gave.

    The memory does not hold a normal number that was drawn in advance, so a state that has one is always asked for.
    """
    global _last_numpy
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    memory = _memory_of(generator).tobytes() if type(generator) is np.random.MT19937 else b""
    if _last_numpy is not None and memory and memory == _last_numpy[0] and not _last_numpy[1]["has_gauss"]:
        return _last_numpy[1]
    state = np.random.get_state(legacy=False)
    _last_numpy = (memory, state)
    return state


@functools.lru_cache(maxsize=1)
def _memory_of(generator: np.random.MT19937) -> np.ndarray[Any, Any]:
    """The live memory of a generator, which the cache keeps alive: uint8 (2500,)."""
    memory = (ctypes.c_uint8 * _MT19937_BYTES).from_address(generator.ctypes.state_address)
    return np.ctypeslib.as_array(memory)


@contextmanager
def preserved() -> Iterator[None]:
    """Put all random states back on leaving."""
    states = RandomStates.take()
    try:
        yield
    finally:
        states.restore()


def _accelerator() -> Any:
    """The accelerator's module (``torch.cuda`` ...) if it has been used in this process, else None."""
    module = _present_accelerator()
    initialized = getattr(module, "is_initialized", lambda: True)
    return module if module is not None and initialized() else None


@functools.cache
def _present_accelerator() -> Any:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return getattr(torch, device.type, None) if device is not None else None


def _accelerator_states(module: Any) -> list[Tensor]:
    if hasattr(module, "get_rng_state_all"):
        return list(module.get_rng_state_all())
    return [module.get_rng_state()]
