"""Tensors to and from one safetensors file, streamed and hashed in one pass."""

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
from pytest_nancapture.bundle.tensors.kinds import NATIVE
from pytest_nancapture.bundle.tensors.layouts import ALIGNMENT, pack, unpack
from pytest_nancapture.bundle.text import human_size

_BLOCK = 2**24
_PATIENCE = 1.0
"""Seconds of writing after which whoever waits for it is told."""

log = logging.getLogger("pytest_nancapture")


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
            "dtype": NATIVE[plain[name].dtype],
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


def _placed(tensor: Tensor, device: torch.device, *, aligned: bool) -> Tensor:
    """On its device. Bytes are always aligned, since what is made of them may crash where it is not."""
    wanted = tensor.dtype is torch.uint8 or (aligned and device.type == "cpu")
    if not wanted or not tensor.data_ptr() % ALIGNMENT:
        return tensor.to(device)
    if tensor.dtype is torch.bool:  # a copy would make every byte but 0 a 1
        return tensor.view(torch.uint8).clone().view(torch.bool).to(device)
    return tensor.clone().to(device)


def _blocks(head: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield head
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        # What lies on an accelerator may be larger than the memory that the host has left.
        for start in range(0, flat.numel(), _BLOCK):
            yield flat[start : start + _BLOCK].cpu().numpy().data
