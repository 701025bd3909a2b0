"""Are all these values finite? One pass over the memory, one host read a device."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors import stored_values

_FUSED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU = -1
"""What ``get_device`` says of tensors there."""
_LARGE = 2**14
"""Values; up to here the call costs more than the memory, and one for all is the fastest."""
_TINY = 5e-324
"""Times 1 it is 0 where the processor flushes denormals; then writing gradients back would change them."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or Inf; dense, sparse, complex and low-precision floats alike, integers pass."""
    return not any(bool(flag) for flag in alarms(tensors))


def alarms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One flag a device, float32 and without dimensions, left there: 1 where a value is NaN or Inf, else 0.

    Large tensors on a CPU are added up, which only reads them; where a sum is not finite, be it that finite values
    overflowed, they are looked at like all others: by the fused kernel of GradScaler, which multiplies by 1 and so
    writes every value back as it was. ``.data`` keeps autograd from taking that for a change.
    """
    groups: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype in _FUSED and tensor.layout is torch.strided:
            values = tensor.data
        elif dtype.is_floating_point or dtype.is_complex:
            values = _dense(tensor.data)
            dtype = values.dtype
        else:
            continue
        key = (tensor.get_device(), dtype)
        group = groups.get(key)
        if group is None:
            groups[key] = [values]
        else:
            group.append(values)
    flags: dict[int, Tensor] = {}
    for (index, dtype), group in groups.items():
        if index not in flags:
            flags[index] = torch.zeros((), dtype=torch.float32, device=group[0].device)
        if index == _CPU and dtype in _FUSED:
            group = _without_finite_sums(group)
        if not (dtype in _FUSED and _TINY * 1.0 and _fused_check(group, flags[index])):
            for value in group:
                flags[index].logical_or_(~_finite(value).all())
    return list(flags.values())


def _without_finite_sums(values: list[Tensor]) -> list[Tensor]:
    """Those that are small, and the large ones as well unless their sums show that they are finite."""
    sums = [value.sum() for value in values if value.numel() >= _LARGE]
    if sums and bool(torch.stack(sums).sum().isfinite()):
        return [value for value in values if value.numel() < _LARGE]
    return values


def _fused_check(values: list[Tensor], flag: Tensor) -> bool:
    """Raise `flag` if a value is not finite; False where the kernel cannot write, as into an expanded tensor."""
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(values, flag, _one(flag.device))
    except RuntimeError:
        return False
    return True


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value of one tensor is NaN or Inf."""
    return not _is_number(tensor) or bool(_finite(_dense(tensor.detach())).all())


def has_nan(tensor: Tensor) -> bool:
    """Whether any value of one tensor is NaN."""
    return _is_number(tensor) and bool(_upcast(_dense(tensor.detach())).isnan().any())


def is_zero(tensor: Tensor) -> bool:
    """Whether every value of one tensor is 0."""
    return not bool(_upcast(_dense(tensor.detach())).any())


def fingerprint(tensor: Tensor) -> Tensor:
    """A sum of the bits, int64: different for different values but by chance; it stays on the device."""
    values = _dense(tensor.detach())
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
