"""Tensors of several kinds, and the way of some through a file and back."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pytest_nancapture.bundle.tensors.file import read_tensors, write_tensors

BYTES = torch.arange(64, dtype=torch.uint8)
MATRIX = torch.arange(24.0).view(4, 6)
COMPLEX = torch.complex(MATRIX, -MATRIX)
SPARSE = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0], [0, 4, 5, 0]])
UNSORTED = torch.sparse_coo_tensor([[1, 0, 1], [0, 2, 0]], [3.0, 4.0, 5.0], (2, 3), check_invariants=True)


def through(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Written and read back; any reader of safetensors can open what lies between."""
    _, layouts = write_tensors(path, tensors)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, no iterator
            file.get_tensor(name)
    return read_tensors(path, layouts)


def bits(tensor: Tensor) -> list[int]:
    """The values byte by byte, so that NaN is NaN and a dtype needs no arithmetic."""
    size = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = [step * size for step in tensor.stride()]
    return raw.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size).flatten().tolist()


def same_layout(expected: Tensor, actual: Tensor) -> None:
    assert (expected.dtype, expected.shape, expected.layout) == (actual.dtype, actual.shape, actual.layout)
    assert expected.stride() == actual.stride()
