"""A module's tensors and submodules, listed once: searching thousands of modules at every step would cost too much."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pytest_nancapture.bundle.names import submodules


class Inventory:
    """Where a module keeps its tensors, so that today's are found by a look into each home.

    A tensor that is put in another's place is seen. A new name is seen when :meth:`refresh` is called, and that of a
    buffer at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.refresh()

    def refresh(self) -> None:
        """List everything anew."""
        self.modules = list(submodules(self._module))
        self._parameters: list[tuple[str, dict[str, Any], str]] = []
        self._buffers: list[tuple[str, dict[str, Any], str]] = []
        for path, submodule in self.modules:
            start = f"{path}." if path else ""
            self._parameters += [(start + name, submodule._parameters, name) for name in submodule._parameters]
            self._buffers += [(start + name, submodule._buffers, name) for name in submodule._buffers]
        self._homes = [submodule._buffers for _, submodule in self.modules]
        self._count = len(self._buffers)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter under every name it has."""
        for name, home, key in self._parameters:
            parameter = home.get(key)
            if parameter is not None:
                yield name, parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer under every name it has."""
        if sum(map(len, self._homes)) != self._count:
            self.refresh()
        for name, home, key in self._buffers:
            buffer = home.get(key)
            if buffer is not None:
                yield name, buffer
