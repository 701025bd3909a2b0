"""Copies of weights made once, in the first window, that stay good for as long as nothing writes into the weights.

A forward may write a parameter, as data-dependent initialisation does: mostly in the first step, and else the first
time that its layer is used, when no update has touched the parameter yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.step.check import fingerprint
from pytest_nancapture.step.state.inventory import Inventory
from pytest_nancapture.step.state.window import Weights, Window

_MOST_BYTES = 2**30
"""Of all copies together: less than a second to make them. Small ones go first: those are what forwards write."""
_SHARE = 4
"""Of the memory that is free, no more than one part in so many."""


class _Kept(NamedTuple):
    parameter: nn.Parameter
    version: int
    copy: Tensor
    bits: Tensor

    def is_good(self) -> bool:
        return self.parameter._version == self.version


class Untouched:
    """The copies, by the parameters' names; a tied one has one copy under each."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    @property
    def ids(self) -> set[int]:
        """Of the copies' own tensors, which nobody may write into."""
        return {id(kept.copy) for kept in self._kept.values()}

    def begin(self, weights: Weights, bits: Mapping[str, Tensor], taken: Iterable[str]) -> None:
        """Copy what can be copied to the host's memory, all but those that somebody has `taken`.

        Args:
            bits: fingerprints of the weights, by name.
        """
        left = min(_MOST_BYTES, _free_memory() // _SHARE)
        known = set(taken)
        copies: dict[int, _Kept] = {}
        every = zip(weights.names, weights.parameters, weights.versions, strict=True)
        for name, parameter, version in sorted(every, key=lambda one: one[1].numel() if not is_lazy(one[1]) else 0):
            if name in known or is_lazy(parameter) or name not in bits:
                continue
            if parameter.layout is not torch.strided or parameter.is_meta:
                continue
            if id(parameter) not in copies:
                left -= parameter.numel() * parameter.element_size()
                if left < 0:
                    break
                copy = bare(parameter).to("cpu", copy=True)
                copies[id(parameter)] = _Kept(parameter, version, copy, bits[name])
            self._kept[name] = copies[id(parameter)]

    def give(self, window: Window, inventory: Inventory, *, by_value: bool) -> None:
        """At an instant: put the copies that are still good among the window's, and let go of the others.

        Args:
            inventory: tells today's parameters.
            by_value: compare by value, too, for those that are written through ``.data``.
        """
        if not self._kept:
            return
        now = inventory.parameters(self._kept)
        self._kept = {
            name: kept
            for name, kept in self._kept.items()
            if now.get(name) is kept.parameter
            and kept.is_good()
            and not (by_value and bool(fingerprint(kept.parameter) != kept.bits))
        }
        for name, kept in self._kept.items():
            window.tensors.setdefault(name, kept.copy)

    def learn(self, window: Window, written: set[str] | None) -> set[str]:
        """Before the window's first update: let go of those that updates will touch, once compared by value.

        Args:
            written: those that the step itself has written, as far as that is known already; None where it is not.

        Returns:
            Those that the step itself has written.
        """
        found: set[str] = set()
        for name, kept in list(self._kept.items()):
            is_touched = kept.parameter.grad is not None or not kept.parameter.requires_grad
            if written is not None:
                is_other = name in written
            else:
                is_other = is_touched and bool(fingerprint(kept.parameter) != kept.bits)
            if is_other or not kept.is_good():
                found.add(name)
                del self._kept[name]
            elif is_touched:
                # As it was at the instant, so nothing has to be put back.
                if window.tensors.get(name) is kept.copy:
                    del window.tensors[name]
                del self._kept[name]
        return found


def _free_memory() -> int:
    """Of the host, bytes; where that cannot be told, so much that it sets no bound."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123, read line by line
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return _SHARE * _MOST_BYTES
