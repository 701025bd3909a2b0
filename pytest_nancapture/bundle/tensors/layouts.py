"""Layouts: how tensors that safetensors cannot hold as they are come back from plain ones: strides, ties, overlaps.

What a few numbers make has a layout too, a recipe: see :mod:`pytest_nancapture.bundle.tensors.generated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.manifest import Layouts
from pytest_nancapture.bundle.tensors.generated import build_recipe, check_recipes, find_recipe
from pytest_nancapture.bundle.tensors.kinds import COMPRESSED, NATIVE, bare

ALIGNMENT = 64
"""Bytes, as of torch's own memory on the CPU; in the last bit, kernels may compute something else elsewhere."""


def pack(tensors: Mapping[str, Tensor], *, compact: bool = False) -> tuple[dict[str, Tensor], Layouts]:
    """Split `tensors` into what safetensors can hold as it is, and how to make the rest from it.

    Args:
        compact: find those that a recipe makes, to the bit, from less.
    """
    plain: dict[str, Tensor] = {}
    layouts: Layouts = {}
    strided: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = bare(tensor)
        if value.layout is torch.strided:
            strided[name] = value.resolve_conj().resolve_neg()
        else:
            parts = _sparse_parts(value)
            layouts[name] = {
                "sparse": str(value.layout).removeprefix("torch."),
                "shape": list(value.shape),
                "parts": [f"{name}::{part}" for part in parts],
                "coalesced": value.is_coalesced() if value.layout is torch.sparse_coo else True,
            }
            strided.update({f"{name}::{part}": values for part, values in parts.items()})
    for group in _by_storage(strided):
        _pack_group(group, plain, layouts)
    for name in list(plain) if compact else ():
        found = None if name.endswith("::base") else find_recipe(name, plain[name])
        if found is not None:
            del plain[name]
            layouts[name] = found[0]
            plain.update(found[1])
    return plain, layouts


def unpack(plain: Mapping[str, Tensor], layouts: Layouts, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The inverse of :func:`pack`; `device` is where the plain ones are."""
    check_recipes(layouts)
    done: dict[str, Tensor] = {}
    parts = {part for layout in layouts.values() for part in layout.get("parts", ())}
    bases = {layout["base"] for layout in layouts.values() if "base" in layout}

    def value(name: str) -> Tensor:
        if name not in done:
            done[name] = plain[name] if name not in layouts else build(layouts[name])
        return done[name]

    def build(layout: Mapping[str, Any]) -> Tensor:
        if "recipe" in layout:
            return build_recipe(layout, [plain[part] for part in layout.get("parts", ())]).to(device)
        if "sparse" in layout:
            return _build_sparse(layout, [value(part) for part in layout["parts"]])
        if "same_as" in layout:
            return value(layout["same_as"])
        dtype, shape, stride = _dtype(layout["dtype"]), layout["shape"], layout["stride"]
        span = _span(shape, stride) * dtype.itemsize
        raw = plain[layout["base"]][layout["offset"] : layout["offset"] + span]
        # A layout is data from elsewhere: as_strided checks it against the whole storage, we against its own span.
        if min([*shape, *stride, layout["offset"], 0]) < 0 or raw.numel() != span:
            raise ValueError("a layout reaches outside of its base")
        if not span:
            return torch.empty_strided(shape, stride, dtype=dtype, device=raw.device)
        return raw.view(dtype).as_strided(shape, stride)

    wanted = [name for name in (*plain, *layouts) if name not in parts and name not in bases]
    return {name: value(name) for name in sorted(wanted)}


def _pack_group(group: dict[str, Tensor], plain: dict[str, Tensor], layouts: Layouts) -> None:
    """Of tensors in one storage: those that stand alone are plain, equal ones tied, others views of a common base."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in list(group.items()):
        key = (tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            layouts[name] = {"same_as": first[key]}
            del group[name]
        first.setdefault(key, name)
    for cluster in _overlapping(group):
        (name, tensor), *others = cluster.items()
        if not others and tensor.dtype in NATIVE and tensor.stride() == _row_major(tensor.shape):
            plain[name] = tensor
            continue
        start = min(_range(tensor)[0] for tensor in cluster.values()) // ALIGNMENT * ALIGNMENT
        stop = max(_range(tensor)[1] for tensor in cluster.values())
        base = f"{name}::base"
        plain[base] = _bytes(tensor, start, stop)
        for name, tensor in cluster.items():
            layouts[name] = {
                "base": base,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": _range(tensor)[0] - start if tensor.numel() else 0,
            }


def _by_storage(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    groups: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else name
        groups.setdefault(key, {})[name] = tensor
    return list(groups.values())


def _overlapping(group: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Clusters of tensors whose byte ranges overlap, directly or through others."""
    cluster: dict[str, Tensor] = {}
    reach = -1
    for name, tensor in sorted(group.items(), key=lambda item: _range(item[1])):
        start, stop = _range(tensor)
        if cluster and start >= reach:
            yield cluster
            cluster = {}
        cluster[name] = tensor
        reach = max(reach, stop)
    if cluster:
        yield cluster


def _range(tensor: Tensor) -> tuple[int, int]:
    """First byte and first byte after, in the tensor's storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + _span(tensor.shape, tensor.stride()) * tensor.element_size()


def _span(shape: Any, stride: Any) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum(int((size - 1) * step) for size, step in zip(shape, stride, strict=True))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that reading gives; `is_contiguous` asks less, of dimensions of size 0 or 1 nothing at all."""
    return torch.empty(shape, device="meta").stride()


def _bytes(tensor: Tensor, start: int, stop: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (max(stop - start, 0),), (1,)) if tensor.numel() else flat


def _sparse_parts(tensor: Tensor) -> dict[str, Tensor]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    outer, inner = COMPRESSED[tensor.layout]
    return {outer: getattr(tensor, outer)(), inner: getattr(tensor, inner)(), "values": tensor.values()}


def _build_sparse(layout: Mapping[str, Any], parts: list[Tensor]) -> Tensor:
    if layout["sparse"] == "sparse_coo":
        indices, values = parts
        result = torch.sparse_coo_tensor(indices, values, layout["shape"], check_invariants=True)
        return result._coalesced_(bool(layout["coalesced"]))
    outer, inner, values = parts
    kind = getattr(torch, layout["sparse"], None)
    if kind not in COMPRESSED:
        raise ValueError(f"torch has no sparse layout {layout['sparse']!r}")
    return torch.sparse_compressed_tensor(
        outer, inner, values, layout["shape"], layout=kind, device=values.device, check_invariants=True
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith(("qint", "quint")):
        raise ValueError(f"torch has no dtype {name!r} that a bundle may hold")
    return dtype
