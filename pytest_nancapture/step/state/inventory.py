"""A module's tensors and submodules, listed once: searching thousands of modules at every step would cost too much."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_nancapture.bundle.tensors.kinds import unwritable
from pytest_nancapture.bundle.tensors.names import submodules


def is_rare(count: int) -> bool:
    """Whether to look closely at the `count`-th of many: at the first few, and then ever fewer."""
    return count.bit_count() == 1


def can_be_kept(tensor: Tensor | None) -> bool:
    """Whether it has values to copy and to look at, or will have; what else there is, training uses untouched by us."""
    return tensor is None or is_lazy(tensor) or not unwritable(tensor)


class Structure:
    """Which submodule and which parameter stands where; a step may put another in its place."""

    def __init__(self, module: nn.Module) -> None:
        parts = module.modules()
        self._homes: list[dict[str, Any]] = [home for part in parts for home in (part._modules, part._parameters)]
        self._held = [dict(home) for home in self._homes]
        self._order = _identities(self._homes)

    @property
    def is_todays(self) -> bool:
        """Whether everything stands where it stood."""
        return _identities(self._homes) == self._order

    def restore(self) -> None:
        """Put every one where it stood."""
        if self.is_todays:
            return
        for home, held in zip(self._homes, self._held, strict=True):
            home.clear()
            home.update(held)


def _identities(homes: Iterable[dict[str, Any]]) -> list[int]:
    return list(map(id, itertools.chain.from_iterable(map(dict.values, homes))))


class Inventory:
    """Where a module keeps its tensors, so that today's are found by a look into each home.

    A buffer that is put in another's place, and a new one, are seen at once; that a submodule or parameter is another
    one tells its `structure`, and then :meth:`refresh` is to be called.

    Attributes:
        structure: which submodule and which parameter stands where.
        modules: every submodule with its path.
        names: of every parameter, under every name it has.
        weights: the parameters, in that order.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.refresh()

    def refresh(self) -> None:
        """List everything anew."""
        self.structure = Structure(self._module)
        self.modules = list(submodules(self._module))
        self.names: list[str] = []
        self.weights: list[nn.Parameter] = []
        self._parameters: dict[str, tuple[dict[str, Any], str]] = {}
        self._buffers: list[tuple[str, dict[str, Any], str]] = []
        for path, submodule in self.modules:
            start = f"{path}." if path else ""
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    self.names.append(start + name)
                    self.weights.append(parameter)
                    self._parameters[start + name] = (submodule._parameters, name)
            for name, buffer in submodule._buffers.items():
                if can_be_kept(buffer):
                    self._buffers.append((start + name, submodule._buffers, name))
        self._homes = [submodule._buffers for _, submodule in self.modules]
        self._count = sum(map(len, self._homes))

    def parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Today's parameters of these names, as far as they are there."""
        found = {name: self._parameters[name] for name in names if name in self._parameters}
        return {name: home[key] for name, (home, key) in found.items() if home.get(key) is not None}

    def versions(self) -> list[int]:
        """Of the weights: how often each was written to, but through ``.data``."""
        return [parameter._version for parameter in self.weights]

    def frozen(self) -> tuple[str, ...]:
        """Parameters that require no gradient."""
        flags = [parameter.requires_grad for parameter in self.weights]
        if all(flags):
            return ()
        return tuple([name for name, flag in zip(self.names, flags, strict=True) if not flag])

    def eval_mode(self) -> tuple[str, ...]:
        """Submodules in eval mode."""
        return tuple([name for name, submodule in self.modules if not submodule.training])

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Every buffer that can be kept, under every name it has."""
        if sum(map(len, self._homes)) != self._count:
            self.refresh()
        return [(name, buffer) for name, home, key in self._buffers if (buffer := home.get(key)) is not None]
