"""Buffers as they are at each instant; a large one that no step writes to is copied once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from pytest_nancapture.step.check import fingerprint
from pytest_nancapture.step.state.instant import copy_of
from pytest_nancapture.step.state.inventory import Inventory
from pytest_nancapture.step.state.pool import Pool

_SMALL = 2**16
"""Values; up to here a copy costs less than to find out whether it is needed, and native kernels (those of batch norm)
write into small buffers without telling the version counter."""


class _Constant(NamedTuple):
    buffer: weakref.ref[Tensor]
    version: int
    bits: Tensor
    copy: Tensor

    def still_is(self, buffer: Tensor) -> bool:
        return self.buffer() is buffer and buffer._version == self.version


class Snapshots:
    """Takes one at each window's instant; memory of earlier ones is used again."""

    def __init__(self, inventory: Inventory, pool: Pool) -> None:
        self._inventory = inventory
        self._pool = pool
        self._changing: set[str] = set()
        self._constants: dict[str, _Constant] = {}

    def take(self, weights: Mapping[str, Tensor], *, by_value: bool) -> dict[str, Tensor]:
        """A copy of every buffer as it is now, and of `weights`.

        Args:
            by_value: compare those taken to be constant by value, too, in case that they are written through
                ``.data``, which leaves the version counter as it was.
        """
        moving: dict[str, Tensor] = {}
        constant: dict[str, Tensor] = {}
        for name, buffer in self._inventory.buffers():
            if buffer.numel() <= _SMALL or name in self._changing:
                moving[name] = buffer
                continue
            known = self._constants.get(name)
            if known is None:
                made = _Constant(weakref.ref(buffer), buffer._version, fingerprint(buffer), copy_of(buffer))
                known = self._constants[name] = made
            elif not known.still_is(buffer) or (by_value and bool(fingerprint(buffer) != known.bits)):
                self._changing.add(name)
                del self._constants[name]
                moving[name] = buffer
                continue
            constant[name] = known.copy
        return {**self._pool.copies({**moving, **weights}), **constant}

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """A window no longer needs these."""
        shared = {id(constant.copy) for constant in self._constants.values()}
        self._pool.give_back(tensor for tensor in tensors if id(tensor) not in shared)
