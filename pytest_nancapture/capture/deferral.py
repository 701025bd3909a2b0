"""Looks whose answer the host need not wait for: where the optimizer can skip its update on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.step.check import fingerprint
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.inventory import is_rare
from pytest_nancapture.step.state.optimizers import parameters_of
from pytest_nancapture.step.state.window import Window

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_DEVICES = frozenset({"cuda"})
"""Where the host runs ahead of the device and fused kernels take ``found_inf``; a CPU has nothing to wait for."""
_LEARNING = 2
"""So many first windows are looked at at once: do only updates write into the weights?"""


@dataclass
class Look:
    """A step whose flag is on its way from the device.

    Attributes:
        target: which optimizer step of the window it is, counted from 0.
        suspects: buffers that were looked at.
        seen: the flag on the host, once `arrived` says so: 1 where something was not finite.
    """

    window: Window
    optimizer: Any
    target: int
    suspects: Mapping[str, Tensor]
    seen: Tensor
    arrived: Any

    @classmethod
    def begin(cls, window: Window, optimizer: Any, target: int, suspects: Mapping[str, Tensor], flag: Tensor) -> Look:
        """Give the flag to the optimizer as its ``found_inf``, and send it to the host without waiting.

        Args:
            flag: float32 without dimensions.
        """
        optimizer.found_inf = flag
        window.held = True
        if flag.device.type == "cpu":
            return cls(window, optimizer, target, suspects, flag.clone(), None)
        seen = torch.empty((), dtype=flag.dtype, pin_memory=True)
        seen.copy_(flag, non_blocking=True)
        arrived = torch.Event(flag.device)
        arrived.record()
        return cls(window, optimizer, target, suspects, seen, arrived)

    def is_alarm(self) -> bool:
        """Whether something was not finite. What the device has been given since does not have to be done for this."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return bool(self.seen)


class Deferral:
    """Decides whether a step's flag may stay on the device, and keeps the one whose answer is awaited.

    The flag is read when the next step is about to drop this one's gradients: up to then everything that a bundle needs
    is still there, if nothing but the update writes into the weights and nobody mends gradients between backward and
    update.

    Attributes:
        look: the one that is awaited.
    """

    def __init__(self, run: Run, *, history: bool) -> None:
        """`history`: weights are kept and looked at after each update, which waits anyway."""
        self.look: Look | None = None
        self._after: list[int] = []
        self._bits: Tensor | None = None
        self.is_possible = (
            run.world_size == 1
            and run.device.type in _DEVICES
            and all(parameter.device == run.device for parameter in run.module.parameters())
            and run.updates_once
            and not history
            and run.scaler is None
            and all(map(skips_on_device, run.optimizers))
            and run.mends_nothing
        )

    def may_wait(self, window: Window, optimizer: Any, flags: list[Tensor]) -> bool:
        """Whether this step's flag may be left on the device.

        An optimizer's first update is not left to the device: skipped there, SGD's momentum would begin with whatever
        the memory held.
        """
        return (
            self.is_possible
            and window.number > _LEARNING
            and len(flags) == 1
            and flags[0].device.type in _DEVICES
            and (_has_no_momentum(optimizer) or _has_begun(optimizer))
        )

    def after_update(self, window: Window, optimizer: Any) -> None:
        """Take the flag back, and remember the weights as the update left them."""
        if not self.is_possible:
            return
        vars(optimizer).pop("found_inf", None)
        self._after = [parameter._version for parameter in window.weights.parameters]
        if is_rare(window.number):  # a write through ``.data`` leaves the version as it was
            self._bits = _bits(window.weights.parameters)

    def at_the_instant(self, window: Window) -> bool:
        """Whether the weights are still as the last update left them; where not, no later flag may wait."""
        if not self.is_possible or not self._after:
            return True
        same = self._after == window.weights.versions
        if same and self._bits is not None:
            same = torch.equal(self._bits, _bits(window.weights.parameters))
        self._bits = None
        self.is_possible = same
        return same

    def take(self) -> Look | None:
        """The awaited look if it is an alarm; from here on none is awaited."""
        look, self.look = self.look, None
        if look is None:
            return None
        look.window.held = False
        if look.is_alarm():
            return look
        for batch in look.window.batches:
            batch.losses.clear()
        return None


def skips_on_device(optimizer: Any) -> bool:
    """Whether it is one of torch's fused optimizers, whose kernels change nothing where ``found_inf`` is 1."""
    groups = optimizer.param_groups
    return type(optimizer) in _FUSED and all(group.get("fused") for group in groups)


def _has_no_momentum(optimizer: Any) -> bool:
    """Whether it is plain SGD, which keeps no state."""
    return all(group.get("momentum") == 0 for group in optimizer.param_groups)


def _has_begun(optimizer: Any) -> bool:
    """Whether there is a state for every parameter that is about to be updated."""
    parameters = parameters_of(optimizer)
    count = len(optimizer.state)
    return count >= len(parameters) or count >= sum(parameter.grad is not None for parameter in parameters)


def _bits(parameters: Iterable[Tensor]) -> Tensor:
    return torch.stack([fingerprint(parameter) for parameter in parameters])
