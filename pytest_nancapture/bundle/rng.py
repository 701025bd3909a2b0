"""Random states: torch on the CPU and every accelerator in use, numpy's legacy global one, python's ``random``."""

from __future__ import annotations

import ctypes
import functools
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON_WORDS = 625
"""Of the Mersenne twister: 624 of state and the position."""
_MT19937_BYTES = 4 * _PYTHON_WORDS
_DEVICE = re.compile("cpu|[a-z_0-9]+:[0-9]{1,4}")


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
        accelerator = _accelerator()
        if accelerator is not None and accelerator.is_initialized:
            states.update(accelerator.states())
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

    def moved(self, captured: str, device: torch.device) -> RandomStates:
        """The states for a replay on `device`: it gets that of the captured device, all others stay where they were.

        A run on the third GPU may be replayed on the first, whose own state then has no place.

        Args:
            captured: the device that the module was on, such as ``cuda:2``; without an index it is the first.
        """
        kind, _, index = captured.partition(":")
        if device.type == "cpu" or device.type != kind:
            return self
        of_kind = [name for name in self.generators if name.partition(":")[0] == kind]
        source = f"{kind}:{index or 0}"
        if source not in of_kind:
            # Some kinds tell of the device in use alone, without its number.
            if len(of_kind) != 1:
                return self
            source = of_kind[0]
        return replace(self, generators={**self.generators, f"{kind}:{device.index or 0}": self.generators[source]})

    def restore(self) -> None:
        """Set the states, each on its own device; those of devices that are not here are left out."""
        torch.set_rng_state(self.generators["cpu"])
        accelerator = _accelerator()
        for name, state in self.generators.items():
            kind, _, index = name.partition(":")
            if accelerator is None or kind != accelerator.kind or int(index) >= accelerator.count:
                continue
            if self.seed is not None:
                state = torch.Generator(torch.device(kind, int(index))).manual_seed(self.seed).get_state()
            accelerator.set_state(int(index), state)
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
            unknown = [device for device in record["torch"] if not _DEVICE.fullmatch(device)]
            if unknown or "cpu" not in record["torch"]:
                raise ValueError(f"rng: expected cpu and devices such as cuda:1, came {record['torch']!r:.80}")
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


@dataclass(frozen=True)
class _Accelerator:
    """The kind of accelerator that this process has.

    Attributes:
        kind: as in a device's name.
        module: torch's for it, such as ``torch.cuda``.
    """

    kind: str
    module: Any

    @property
    def is_initialized(self) -> bool:
        """Whether it was used in this process; one that does not say so is asked for its states, which may wake it."""
        return bool(getattr(self.module, "is_initialized", lambda: True)())

    @property
    def count(self) -> int:
        return int(self.module.device_count())

    def states(self) -> dict[str, Tensor]:
        """Each device's state, by the device's name."""
        if hasattr(self.module, "get_rng_state_all"):
            states = list(self.module.get_rng_state_all())
        elif self.kind == "mps":  # has one device, and its functions take none
            states = [self.module.get_rng_state()]
        elif hasattr(self.module, "get_rng_state"):
            states = [self.module.get_rng_state(torch.device(self.kind, i)) for i in range(self.count)]
        else:
            states = []
        return {f"{self.kind}:{i}": state for i, state in enumerate(states)}

    def set_state(self, index: int, state: Tensor) -> None:
        if self.kind == "mps":
            self.module.set_rng_state(state)
        else:
            self.module.set_rng_state(state, torch.device(self.kind, index))


@functools.cache
def _accelerator() -> _Accelerator | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = getattr(torch, device.type, None) if device is not None else None
    return _Accelerator(device.type, module) if device is not None and module is not None else None
