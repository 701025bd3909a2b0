"""Are all these values finite? One pass over the memory, one host read a device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import bare, bare_data, stored_values, unwritable

_FUSED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU = -1
"""What ``get_device`` says of tensors there."""
_LARGE = 2**16
"""Values; below, one call for all of them is the fastest."""
_TOGETHER = 256
"""Tensors; thousands of new objects at once would have python's garbage collector search all others."""
_TINY = 5e-324
"""Times 1 it is 0 where the processor flushes denormals; then writing gradients back would change them."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or Inf; dense, sparse, complex and low-precision floats alike, integers pass."""
    return not any(bool(flag) for flag in alarms(tensors))


def alarms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One flag a device, float32 and without dimensions, left there: 1 where a value is NaN or Inf, else 0.

    The flags are for reading. The values are looked at by the fused kernel of GradScaler, which multiplies by 1 and so
    writes every one back as it was; ``.data`` keeps autograd from taking that for a change.
    """
    flags: dict[int, Tensor] = {}
    rest = iter(tensors)
    while some := list(itertools.islice(rest, _TOGETHER)):
        for (index, dtype), values in _by_kind(some).items():
            if index == _CPU:
                flags[_CPU] = _clear_flag()
                if _raise_here(values, dtype, flags[_CPU]):
                    _clear_flag.cache_clear()
                    return list(flags.values())
                continue
            if index not in flags:
                flags[index] = torch.zeros((), dtype=torch.float32, device=values[0].device)
            _raise(values, dtype, flags[index])
    return list(flags.values())


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[int, torch.dtype], list[Tensor]]:
    """Their values, where those are floats or complex numbers, by device and dtype."""
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype in _FUSED and tensor.layout is torch.strided:
            values = bare_data(tensor)
        elif dtype.is_floating_point or dtype.is_complex:
            values = _dense(bare_data(tensor))
            dtype = values.dtype
        else:
            continue
        key = (tensor.get_device(), dtype)
        group = groups.get(key)
        if group is None:
            groups[key] = [values]
        else:
            group.append(values)
    return groups


def _raise_here(values: list[Tensor], dtype: torch.dtype, flag: Tensor) -> bool:
    """Raise a clear flag on the CPU if a value is not finite, and say so.

    Here the sum of a large tensor, which only reads it, is cheaper; where a sum is not finite, be it that finite values
    overflowed, everything is looked at.
    """
    is_large = [dtype in _FUSED and value.numel() >= _LARGE for value in values]
    if any(is_large):
        pairs = zip(values, is_large, strict=True)
        _raise([value.sum() if large else value for value, large in pairs], dtype, flag)
        if not flag.item():
            return False
        flag.zero_()
    _raise(values, dtype, flag)
    return bool(flag)


def _raise(values: list[Tensor], dtype: torch.dtype, flag: Tensor) -> None:
    """Raise `flag` if a value is not finite."""
    if not (dtype in _FUSED and _TINY * 1.0 and _fused_check(values, flag)):
        for value in values:
            if not unwritable(value):  # else its class keeps the values elsewhere; it was named when training began
                flag.logical_or_(~_finite(value).all())


def _fused_check(values: list[Tensor], flag: Tensor) -> bool:
    """Raise `flag` if a value is not finite; False for what the kernel cannot write into, as an expanded tensor."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(values, flag, _one(flag.device))
    except (RuntimeError, TypeError):
        return False
    return True


@functools.cache
def _clear_flag() -> Tensor:
    """On the CPU, where its value is known as soon as it is asked for: the same one again until it is raised."""
    return torch.zeros((), dtype=torch.float32)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value of one tensor is NaN or Inf."""
    return not _is_number(tensor) or bool(_finite(_dense(bare(tensor))).all())


def has_nan(tensor: Tensor) -> bool:
    """Whether any value of one tensor is NaN."""
    return _is_number(tensor) and bool(_upcast(_dense(bare(tensor))).isnan().any())


def is_zero(tensor: Tensor) -> bool:
    """Whether every value of one tensor is 0."""
    return not bool(_upcast(_dense(bare(tensor))).any())


def fingerprint(tensor: Tensor) -> Tensor:
    """A sum of the bits, int64: different for different values but by chance; it stays on the device."""
    values = _dense(bare(tensor))
    return values.view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def _is_number(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _dense(tensor: Tensor) -> Tensor:
    """The stored values of a sparse tensor, complex numbers as pairs."""
    tensor = stored_values(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _finite(values: Tensor) -> Tensor:
    return _upcast(values).isfinite()


def _upcast(values: Tensor) -> Tensor:
    """Eight-bit floats know no arithmetic."""
    return values.float() if values.dtype.is_floating_point and values.dtype not in _FUSED else values
