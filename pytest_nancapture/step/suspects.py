"""Which buffers a step may have poisoned, and which are meant to hold Inf."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pytest_nancapture.step.check import is_finite
from pytest_nancapture.step.state.inventory import Inventory, is_rare

_SMALL = 2**16
"""Values; so small a buffer is looked at whether or not its version says that it was written."""


class BufferWatch:
    """Looks at buffers; one that is not finite when a step begins, such as a running minimum, is no fault of that step.

    Attributes:
        first: name -> (id, version) when fit began.
        shapes: name -> its shape then.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        now = dict(inventory.buffers())
        self.first = {name: (id(buffer), buffer._version) for name, buffer in now.items()}
        self.shapes = {name: buffer.shape for name, buffer in now.items()}
        self._tolerated = {name for name, buffer in now.items() if not is_finite(buffer)}
        self._looks = 0
        self._seen: dict[str, tuple[int, int]] = {}

    def suspects(self) -> dict[str, Tensor]:
        """Those that a step may have written; a write through ``.data`` leaves the version as it was."""
        self._looks += 1
        if is_rare(self._looks):
            now = dict(self._inventory.buffers())
            self._tolerated = {name for name in self._tolerated if name in now and not is_finite(now[name])}
        now = {name: buffer for name, buffer in self._inventory.buffers() if name not in self._tolerated}
        self._seen = {name: (id(buffer), buffer._version) for name, buffer in now.items()}
        return {
            name: buffer
            for name, buffer in now.items()
            if buffer.numel() <= _SMALL or self._seen[name] != self.first.get(name)
        }

    def written_since(self) -> dict[str, Tensor]:
        """Those whose version says that they were written since the last look at the suspects; seldom any."""
        return {
            name: buffer
            for name, buffer in self._inventory.buffers()
            if name not in self._tolerated and self._seen.get(name) != (id(buffer), buffer._version)
        }

    def poisoned(self, suspects: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that are not finite, and were `before` the step; the others are tolerated from here on."""
        bad = {name: buffer for name, buffer in suspects.items() if not is_finite(buffer)}
        known = not_finite(before) & bad.keys()
        self._tolerated |= known
        return {name: buffer for name, buffer in bad.items() if name not in known}


def not_finite(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of those that are not finite."""
    return {name for name, tensor in tensors.items() if not is_finite(tensor)}
