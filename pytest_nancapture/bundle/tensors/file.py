"""Tensors to and from one safetensors file: every dtype, stride, tie and overlap, streamed and hashed in one pass."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pytest_nancapture.bundle.manifest import FileRecord, Layouts
from pytest_nancapture.bundle.tensors.recipes import build_recipe, check_recipes, find_recipe
from pytest_nancapture.bundle.text import human_size

_NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What every safetensors release in the supported range stores; other dtypes go as bytes with a layout."""

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_ALIGNMENT = 64
"""Bytes, as of torch's own memory on the CPU; in the last bit, kernels may compute something else elsewhere."""
_BLOCK = 2**24
_PATIENCE = 1.0
"""Seconds of writing after which whoever waits for it is told."""

log = logging.getLogger("pytest_nancapture")


def unwritable(tensor: Tensor) -> str:
    """Why `tensor` has no form on disk; empty where it has one."""
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.is_quantized:
        return f"quantized tensors ({tensor.dtype}) have no form in a bundle"
    if tensor.is_nested:
        return "nested tensors have no form in a bundle"
    if tensor.layout not in (torch.strided, torch.sparse_coo, *_COMPRESSED):
        return f"tensors of layout {tensor.layout} have no form in a bundle"
    if tensor.layout is torch.strided and not _has_storage(tensor):
        return f"a {type(tensor).__qualname__} keeps its values in other tensors"
    return ""


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share their memory, so that torch does not write into it."""
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def stored_values(tensor: Tensor) -> Tensor:
    """Those that a sparse tensor stores; a dense one itself."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[FileRecord, Layouts]:
    """Write `tensors` to `path`, block by block through host memory; flush to the device, hash on the way.

    Returns:
        The file's size and hash, and the layouts that :func:`read_tensors` needs.

    Raises:
        OSError: the disk is full, the folder read-only ...
    """
    plain, layouts = pack(tensors)
    return write_plain(path, plain), layouts


def write_plain(path: Path, plain: Mapping[str, Tensor]) -> FileRecord:
    """Write tensors that :func:`pack` has split off.

    Raises:
        OSError: the disk is full, the folder read-only ...
    """
    order = _order(plain)
    digest = hashlib.sha256()
    size = 0
    began: float | None = time.monotonic()
    with path.open("wb") as stream:
        for block in _blocks(_header(plain, order), [plain[name] for name in order]):
            stream.write(block)
            digest.update(block)
            size += len(block)
            if began is not None and time.monotonic() - began > _PATIENCE:
                log.warning("nancapture: writing %s, %s ...", path.name, human_size(plain_size(plain)))
                began = None
        stream.flush()
        os.fsync(stream.fileno())
    return FileRecord(bytes=size, sha256=digest.hexdigest())


def plain_size(plain: Mapping[str, Tensor]) -> int:
    """Bytes of the file that :func:`write_plain` would write."""
    data = sum(tensor.numel() * tensor.element_size() for tensor in plain.values())
    return len(_header(plain, _order(plain))) + data


def _order(plain: Mapping[str, Tensor]) -> list[str]:
    return sorted(plain, key=lambda name: (-plain[name].element_size(), name))


def _header(plain: Mapping[str, Tensor], order: Sequence[str]) -> bytes:
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        start, end = end, end + plain[name].numel() * plain[name].element_size()
        header[name] = {
            "dtype": _NATIVE[plain[name].dtype],
            "shape": list(plain[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(
    path: Path, layouts: Layouts, device: torch.device | str = "cpu", *, aligned: bool = True
) -> dict[str, Tensor]:
    """Read back what :func:`write_tensors` wrote; ties and overlaps between the tensors are restored.

    Args:
        aligned: on the CPU, put them where torch would, which is seldom where they lie in the file; for tensors to
            compute with. Those that are only copied from can do without.

    Raises:
        ValueError: file and layouts do not fit each other.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        names = file.keys()
        plain = {name: _placed(file.get_tensor(name), torch.device(device), aligned=aligned) for name in names}
    try:
        return unpack(plain, layouts, device)
    except (LookupError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path.name} does not fit its layouts: {error}") from error


def pack(tensors: Mapping[str, Tensor], *, compact: bool = False) -> tuple[dict[str, Tensor], Layouts]:
    """Split `tensors` into what safetensors can hold as it is, and how to make the rest from it.

    Args:
        compact: find those that a recipe makes, to the bit, from less.
    """
    plain: dict[str, Tensor] = {}
    layouts: Layouts = {}
    strided: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
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
        if not others and tensor.dtype in _NATIVE and tensor.stride() == _row_major(tensor.shape):
            plain[name] = tensor
            continue
        start = min(_range(tensor)[0] for tensor in cluster.values()) // _ALIGNMENT * _ALIGNMENT
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


def _placed(tensor: Tensor, device: torch.device, *, aligned: bool) -> Tensor:
    """On its device. Bytes are always aligned, since what is made of them may crash where it is not."""
    wanted = tensor.dtype is torch.uint8 or (aligned and device.type == "cpu")
    if not wanted or not tensor.data_ptr() % _ALIGNMENT:
        return tensor.to(device)
    if tensor.dtype is torch.bool:  # a copy would make every byte but 0 a 1
        return tensor.view(torch.uint8).clone().view(torch.bool).to(device)
    return tensor.clone().to(device)


def _bytes(tensor: Tensor, start: int, stop: int) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (max(stop - start, 0),), (1,)) if tensor.numel() else flat


def _sparse_parts(tensor: Tensor) -> dict[str, Tensor]:
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    outer, inner = _COMPRESSED[tensor.layout]
    return {outer: getattr(tensor, outer)(), inner: getattr(tensor, inner)(), "values": tensor.values()}


def _build_sparse(layout: Mapping[str, Any], parts: list[Tensor]) -> Tensor:
    if layout["sparse"] == "sparse_coo":
        indices, values = parts
        result = torch.sparse_coo_tensor(indices, values, layout["shape"], check_invariants=True)
        return result._coalesced_(bool(layout["coalesced"]))
    outer, inner, values = parts
    kind = getattr(torch, layout["sparse"], None)
    if kind not in _COMPRESSED:
        raise ValueError(f"torch has no sparse layout {layout['sparse']!r}")
    return torch.sparse_compressed_tensor(
        outer, inner, values, layout["shape"], layout=kind, device=values.device, check_invariants=True
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or name.startswith(("qint", "quint")):
        raise ValueError(f"torch has no dtype {name!r} that a bundle may hold")
    return dtype


def _blocks(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        # What lies on an accelerator may be larger than the memory that the host has left.
        for start in range(0, flat.numel(), _BLOCK):
            yield flat[start : start + _BLOCK].cpu().numpy().data
