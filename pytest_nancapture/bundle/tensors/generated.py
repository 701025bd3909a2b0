"""Tensors that need not be stored, since a few numbers make them: layouts with the key ``recipe``.

``fill`` is one value all over; ``repeat`` a stored slice along the dimensions where it has size 1; ``palette`` a table
of at most 256 values and a byte for each element; ``noise`` is drawn anew, alike on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import bare

LIMIT = 16 * 2**30
"""Bytes that the recipes of one file may make together: they cost whoever sends a bundle nothing."""

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int16,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
    torch.bool: torch.uint8,
}
"""The dtypes that recipes make, and an integer one of the same size, in which NaNs and both zeros can be compared."""

_SMALL = 512
"""Bytes; what is smaller takes no more room in its file than a recipe would in ``bundle.json``."""
_PALETTE = 256
_PEEK = 4096
_DRAWS = 4
_EXACT = 2**53


def is_simple(tensor: Tensor) -> bool:
    """Whether a recipe may stand for it."""
    return tensor.layout is torch.strided and tensor.dtype in _BITS


def find_recipe(name: str, tensor: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The layout, and the smaller tensors it needs, that make `tensor` to the bit; None where nothing is gained."""
    if not is_simple(tensor) or tensor.numel() * tensor.element_size() < _SMALL:
        return None
    value = tensor.cpu().contiguous()
    bits = value.view(_BITS[value.dtype])
    single = _without_repeats(bits)
    base = {"dtype": _name(value.dtype), "shape": list(value.shape)}
    if single.numel() == 1:
        layout = fill(value.dtype, value.shape, value.reshape(-1)[0].item())
        made = build_recipe(layout, []).reshape(-1)[:1].view(bits.dtype)
        return (layout, {}) if torch.equal(made, bits.reshape(-1)[:1]) else None
    if single.numel() < bits.numel():
        part = f"{name}::slice"
        return {"recipe": "repeat", "parts": [part], **base}, {part: single.contiguous().view(value.dtype)}
    if value.element_size() == 1 or len(torch.unique(bits.reshape(-1)[:_PEEK])) > _PALETTE:
        return None
    table, indices = torch.unique(bits, return_inverse=True)
    if len(table) > _PALETTE:
        return None
    parts = {f"{name}::values": table.view(value.dtype), f"{name}::indices": indices.reshape(-1).to(torch.uint8)}
    return {"recipe": "palette", "parts": list(parts), **base}, parts


def _without_repeats(bits: Tensor) -> Tensor:
    """Size 1 along every dimension in which all slices are the same."""
    for dim, size in enumerate(bits.shape):
        first = bits.narrow(dim, 0, 1)
        # The last slice first: it mostly differs, and looking at all of them takes longer.
        if size > 1 and torch.equal(first, bits.narrow(dim, size - 1, 1)) and bool((bits == first).all()):
            bits = first
    return bits


def fill(dtype: torch.dtype, shape: Sequence[int], value: float) -> dict[str, Any]:
    """The layout of one value all over."""
    plain = value if math.isfinite(value) else str(value)
    return {"recipe": "fill", "dtype": _name(dtype), "shape": list(shape), "value": plain}


def noise(tensor: Tensor, seed: int) -> dict[str, Any] | None:
    """The layout of noise like `tensor`: of its mean, spread and range; None where it has no such thing."""
    if not is_simple(tensor) or tensor.numel() < 2:
        return None
    value = bare(tensor).double()
    if not bool(value.isfinite().all()):
        return None
    low, high = value.min().item(), value.max().item()
    if not tensor.dtype.is_floating_point and high - low >= _EXACT:
        return None
    return {
        "recipe": "noise",
        "dtype": _name(tensor.dtype),
        "shape": list(tensor.shape),
        "seed": seed,
        "mean": _short(value.mean().item()),
        "std": _short(value.std().item()),
        "low": low,
        "high": high,
    }


def check_recipes(layouts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse what cannot be made, before anything is.

    Raises:
        ValueError: a kind of recipe that is not known, or more bytes than :data:`LIMIT`.
    """
    total = 0
    for name, layout in layouts.items():
        if "recipe" not in layout:
            continue
        kind, shape = layout["recipe"], layout.get("shape")
        if not isinstance(kind, str) or kind not in _BUILD:
            raise ValueError(
                f"{name:.80} is made by a recipe of kind {kind!r:.40}, which this pytest-nancapture does not know; "
                "upgrade it: pip install -U pytest-nancapture"
            )
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name:.80}: expected a shape, came {shape!r:.80}")
        total += math.prod(shape) * _dtype(layout.get("dtype")).itemsize
    if total > LIMIT:
        raise ValueError(f"its recipes ask for {total} bytes, more than the {LIMIT} that are allowed")


def build_recipe(layout: Mapping[str, Any], parts: list[Tensor]) -> Tensor:
    """The tensor that a layout, looked at by :func:`check_recipes`, describes.

    Raises:
        ValueError: its numbers make no tensor.
    """
    return _BUILD[layout["recipe"]](layout, _dtype(layout["dtype"]), list(layout["shape"]), parts)


def _fill(layout: Mapping[str, Any], dtype: torch.dtype, shape: list[int], _: list[Tensor]) -> Tensor:
    value = layout["value"]
    return torch.full(shape, float(value) if isinstance(value, str) else value, dtype=dtype)


def _repeat(_: Mapping[str, Any], dtype: torch.dtype, shape: list[int], parts: list[Tensor]) -> Tensor:
    (part,) = parts
    if part.dtype != dtype:
        raise ValueError(f"expected a slice of {dtype}, came {part.dtype}")
    return part.broadcast_to(shape).contiguous()


def _palette(_: Mapping[str, Any], dtype: torch.dtype, shape: list[int], parts: list[Tensor]) -> Tensor:
    values, indices = parts
    if values.dtype != dtype or indices.numel() != math.prod(shape):
        raise ValueError("palette and indices do not fit the shape")
    return values[indices.long()].reshape(shape)


def _noise(layout: Mapping[str, Any], dtype: torch.dtype, shape: list[int], _: list[Tensor]) -> Tensor:
    """Sums of uniform numbers: unlike a logarithm, a sum has the same bits on every machine."""
    random, count = np.random.RandomState(layout["seed"]), math.prod(shape)
    mean, std, low, high = (float(layout[name]) for name in ("mean", "std", "low", "high"))
    values: Any
    if dtype is torch.bool:
        values = random.random_sample(count) < mean
    elif not dtype.is_floating_point:
        values = (np.floor(random.random_sample(count) * (high - low + 1)) + low).astype(np.int64)
    else:
        values = np.full(count, -_DRAWS / 2)
        for _draw in range(_DRAWS):
            values += random.random_sample(count)
        values = np.clip(values * (std * math.sqrt(12 / _DRAWS)) + mean, low, high)
    return torch.from_numpy(values).to(dtype).reshape(shape)


_BUILD: dict[str, Callable[[Mapping[str, Any], torch.dtype, list[int], list[Tensor]], Tensor]] = {
    "fill": _fill,
    "repeat": _repeat,
    "palette": _palette,
    "noise": _noise,
}


def _short(number: float) -> float:
    """Six digits do."""
    return float(f"{number:.6g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if isinstance(dtype, torch.dtype) and dtype in _BITS:
        return dtype
    raise ValueError(f"expected a dtype that a recipe can make, came {name!r:.80}")
