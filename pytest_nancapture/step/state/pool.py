"""Copies that are made at every step, into memory that an earlier step's copies no longer need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.step.state.instant import copy_of


class Pool:
    """Free tensors by shape and kind; to fill one costs a fraction of making one."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Nobody needs these any more; what was free before and not taken since is let go."""
        self._free = {}
        for tensor in tensors:
            if _is_plain(tensor):
                self._free.setdefault(_kind(tensor), []).append(tensor)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each, by name."""
        made: dict[str, Tensor] = {}
        targets, sources = [], []
        for name, tensor in tensors.items():
            free = self._free.get(_kind(tensor)) if _is_plain(tensor) else None
            if free:
                made[name] = free.pop()
                targets.append(made[name])
                sources.append(tensor.detach() if tensor.requires_grad else tensor)
            else:
                made[name] = copy_of(tensor)
        if targets:
            torch._foreach_copy_(targets, sources)
        return made


def _is_plain(tensor: Tensor) -> bool:
    """Whether one copy is as good as another: no class of its own, no gradient, nothing sparse or overlapping."""
    is_parameter = type(tensor) is torch.nn.Parameter
    is_tensor = is_parameter or (type(tensor) is Tensor and not tensor.requires_grad)
    return is_tensor and tensor.layout is torch.strided


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
