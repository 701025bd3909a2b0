"""Copies of tensors: taken at every step into memory of earlier ones, and only where nothing else will do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.bundle.tensors.names import parameters
from pytest_nancapture.step.check import fingerprint
from pytest_nancapture.step.state.inventory import Inventory

_SMALL = 2**16
"""Values; up to here a copy costs less than to find out whether it is needed, and native kernels (those of batch norm)
write into small buffers without telling the version counter."""


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that shares nothing, laid out in the same way, with the same class and flags."""
    kind = type(tensor)
    with torch.no_grad():
        copy = bare(tensor).clone()
        if kind is not Tensor and not isinstance(tensor, nn.Parameter):
            copy = copy.as_subclass(kind)
            vars(copy).update(vars(tensor))
    return copy.requires_grad_() if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else copy


class Pool:
    """Free tensors by shape and kind; to fill one costs a fraction of making one."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}
        self._kinds: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Of copies that are not given back yet, by identity: to look at a tensor again costs more than to find it."""

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Nobody needs these any more; what was free before and not taken since is let go."""
        self._free = {}
        kinds, self._kinds = self._kinds, {}
        for key, tensor in {id(tensor): tensor for tensor in tensors}.items():
            known = kinds.get(key)
            if known is not None and known[0]() is tensor:
                self._free.setdefault(known[1], []).append(tensor)
            elif _is_plain(tensor):
                self._free.setdefault(_kind(tensor), []).append(tensor)

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each, by name."""
        made: dict[str, Tensor] = {}
        targets, sources = [], []
        for name, tensor in tensors.items():
            kind = _kind(tensor) if _is_plain(tensor) else None
            free = self._free.get(kind) if kind is not None else None
            if free:
                made[name] = copy = free.pop()
                targets.append(copy)
                sources.append(bare(tensor) if tensor.requires_grad else tensor)
            else:
                made[name] = copy = copy_of(tensor)
            if kind is not None:
                self._kinds[id(copy)] = (weakref.ref(copy), kind)
        if targets:
            torch._foreach_copy_(targets, sources)
        return made


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


class CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, copies a parameter just before an operation first writes into it.

    Code of the module's own that comes between the instant and the forward runs under it: a replay runs it again, so
    the weights to take are those from before it.
    """

    def __init__(self, module: nn.Module, taken: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken = taken
        self._names: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters(module):
            if parameter.layout is torch.strided and name not in taken:
                self._names.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._take(value if isinstance(value, (list, tuple)) else [value])
        return func(*args, **(kwargs or {}))

    def _take(self, written: Iterable[Any]) -> None:
        for tensor in written:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                for name, parameter in self._names.pop(tensor.untyped_storage().data_ptr(), ()):
                    self._taken[name] = copy_of(parameter)


def _is_plain(tensor: Tensor) -> bool:
    """Whether one copy is as good as another: no class of its own, no gradient, nothing sparse or overlapping."""
    is_parameter = type(tensor) is torch.nn.Parameter
    is_tensor = is_parameter or (type(tensor) is Tensor and not tensor.requires_grad)
    return is_tensor and tensor.layout is torch.strided


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
