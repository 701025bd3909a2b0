"""Tensors through one safetensors file: every dtype and value, whole or in blocks, onto any device."""

from __future__ import annotations

import errno
import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
from roundtrip import BYTES, COMPLEX, MATRIX, bits, same_layout, through
from torch import Tensor

from pytest_nancapture.bundle.manifest import FileRecord
from pytest_nancapture.bundle.tensors import file as tensors_module
from pytest_nancapture.bundle.tensors.file import read_tensors, write_tensors
from pytest_nancapture.bundle.text import human_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


DTYPES = [
    dtype
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    if "qint" not in str(dtype) and "quint" not in str(dtype)
]
"""All that this torch knows, sub-byte integers too; quantized ones are refused."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda flat: flat,
        lambda flat: flat[3],
        lambda flat: flat[:0].view(0, 3),
        lambda flat: flat[1::2],
        lambda flat: flat.view(2, 2).t(),
    ],
    ids=["row", "scalar", "empty", "sliced", "transposed"],
)
def test_every_dtype(path: Path, dtype: torch.dtype, make: Callable[[Tensor], Tensor]) -> None:
    """Every dtype comes back bit for bit, with its shape and strides: a whole row, a scalar, nothing, a slice."""
    expected = make(BYTES[: 4 * dtype.itemsize].view(dtype))
    (actual,) = through(path, {"x": expected}).values()
    same_layout(expected, actual)
    assert bits(expected) == bits(actual)


@pytest.mark.parametrize(
    "values", [[float("nan")], [float("inf"), -float("inf")], [-0.0, 5e-324, 1e308]], ids=["nan", "inf", "edges"]
)
def test_what_is_not_finite(path: Path, values: list[float]) -> None:
    """NaN, Inf, minus zero and denormals are what this package is about."""
    expected = torch.tensor(values, dtype=torch.float64)
    assert bits(expected) == bits(through(path, {"x": expected})["x"])


def test_names(path: Path) -> None:
    """Any text names a tensor, such as the path to a leaf of a batch."""
    names = ["", "fc.weight", "0/batch['ü \n\x00\"']", "a" * 5000]
    loaded = through(path, {name: torch.tensor([float(i)]) for i, name in enumerate(names)})
    assert {name: float(i) for i, name in enumerate(names)} == {name: x.item() for name, x in loaded.items()}


def test_no_tensors(path: Path) -> None:
    """A file without any is a safetensors file all the same."""
    assert through(path, {}) == {}


def test_a_parameter_is_written_as_its_values(path: Path) -> None:
    """A gradient's graph has no place in a file, and nothing is changed by writing."""
    parameter = torch.nn.Parameter(torch.ones(2))
    (actual,) = through(path, {"x": parameter * 2}).values()
    assert torch.equal(torch.full((2,), 2.0), actual)
    assert not actual.requires_grad


def test_record_and_order_do_not_depend_on_chance(path: Path) -> None:
    """Size and hash are the file's; the same tensors in another order give the same bytes."""
    tensors = {"b": MATRIX, "a": MATRIX.t().contiguous(), "c": torch.tensor([True])}
    record, _ = write_tensors(path, tensors)
    content = path.read_bytes()
    assert FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()) == record
    again, _ = write_tensors(path, dict(reversed(tensors.items())))
    assert record == again


def test_what_is_read_may_be_written_to(path: Path) -> None:
    """A step that changes its batch in place changes no file."""
    _, layouts = write_tensors(path, {"x": MATRIX, "y": MATRIX.t()})
    before = path.read_bytes()
    for tensor in read_tensors(path, layouts).values():
        tensor.mul_(2)
    assert before == path.read_bytes()


def test_device(path: Path) -> None:
    """All tensors go to the device asked for, whatever they are made from."""
    tensors = {"plain": MATRIX, "turned": MATRIX.t(), "nothing": torch.empty(2, 0).t(), "complex": COMPLEX}
    _, layouts = write_tensors(path, tensors)
    assert dict.fromkeys(sorted(tensors), "meta") == {
        name: tensor.device.type for name, tensor in read_tensors(path, layouts, "meta").items()
    }


def test_memory_is_aligned(path: Path) -> None:
    """As torch's own: at other addresses kernels may compute other last bits, and complex ones may crash."""
    tensors = {
        "a": BYTES[:5],
        "b": BYTES[:7:6],
        "c": COMPLEX.to(torch.complex128),
        "d": MATRIX.double().t(),
        "e": MATRIX[0],
        "f": MATRIX[:1] > 0,
        "g": MATRIX[2].half(),
    }
    loaded = through(path, tensors)
    assert dict.fromkeys("abcdefg", 0) == {name: loaded[name].data_ptr() % 64 for name in sorted(loaded)}
    assert torch.equal(tensors["c"] + 1, loaded["c"] + 1)


def test_large_tensors_go_block_by_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a block at a time is brought to the host, and the file is the one that a whole would give."""
    values = {"x": torch.randn(100), "y": torch.randn(3, 7).bfloat16(), "z": torch.tensor(True)}
    whole, _ = write_tensors(path, values)
    brought: list[int] = []
    to_host = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        brought.append(tensor.numel() * tensor.element_size())
        return to_host(tensor)

    monkeypatch.setattr(tensors_module, "_BLOCK", 64)
    monkeypatch.setattr(Tensor, "cpu", cpu)
    record, _ = write_tensors(path, values)
    assert record == whole
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert brought == [64] * 6 + [16, 42, 1]


def test_a_long_write_is_told_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits for it learns what takes so long; a short one says nothing."""
    values = {f"x{i}": torch.zeros(1000) for i in range(5)}
    write_tensors(path, values)
    assert caplog.messages == []
    monkeypatch.setattr(tensors_module, "_PATIENCE", -1)
    record, _ = write_tensors(path, values)
    assert caplog.messages == [f"nancapture: writing x.safetensors, {human_size(record.bytes)} ..."]


def test_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says about the disk is passed on as it is."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(path, {"x": MATRIX})
