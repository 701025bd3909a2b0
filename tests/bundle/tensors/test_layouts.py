"""Layouts: every stride, tie and overlap comes back as it was, and no layout reaches outside."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from roundtrip import BYTES, COMPLEX, MATRIX, SPARSE, UNSORTED, bits, same_layout, through
from safetensors import safe_open
from torch import Tensor

from pytest_nancapture.bundle.tensors.file import read_tensors, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    "expected",
    [
        MATRIX.t(),
        MATRIX[:, :1].expand(4, 5),
        torch.tensor([7.0]).expand(1000),
        torch.tensor(7.0).expand(2, 3),
        MATRIX[1:3, ::2],
        MATRIX[:, 5],
        MATRIX.unfold(0, 3, 1),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0).view(2, 3, 2, 2, 1).to(memory_format=torch.channels_last_3d),
        torch.arange(8.0).view(2, 1, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(8.0).view(1, 8, 1, 1).to(memory_format=torch.channels_last),
        torch.arange(10.0).as_strided((1, 3), (7, 1)),
        torch.empty(3, 0).t(),
        torch.empty(2, 0, 5, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_every_stride(path: Path, expected: Tensor) -> None:
    """Strides decide which kernel runs, so all are kept: also those of dimensions that hold one entry or none."""
    (actual,) = through(path, {"x": expected}).values()
    same_layout(expected, actual)
    assert bits(expected) == bits(actual)


def test_an_expanded_tensor_stays_small(path: Path) -> None:
    """What is one number in memory is one number on disk."""
    record, _ = write_tensors(path, {"x": torch.tensor(1.0).expand(1000, 1000)})
    assert record.bytes < 1000


def test_a_small_view_does_not_bring_its_storage(path: Path) -> None:
    """Of a slice of a large tensor only what it spans is written."""
    record, _ = write_tensors(path, {"x": torch.zeros(10_000)[500:504]})
    assert record.bytes < 1000


def test_many_views_of_one_storage_stay_apart(path: Path) -> None:
    """Slices that don't overlap, such as those of one flat parameter, are plain tensors of the file."""
    flat = torch.arange(24.0)
    _, layouts = write_tensors(path, {"a": flat[:12], "b": flat[12:].view(3, 4)})
    assert layouts == {}
    with safe_open(path, framework="pt") as file:
        assert torch.equal(flat[12:].view(3, 4), file.get_tensor("b"))


def test_tied_tensors(path: Path) -> None:
    """Two names of one tensor are stored once and are one again: what is written to one is seen in the other."""
    weight = torch.arange(1000.0)
    alone, _ = write_tensors(path, {"a": weight})
    record, layouts = write_tensors(path, {"a": weight, "b": weight, "c": weight.view(1000)})
    assert record.bytes == alone.bytes
    loaded = read_tensors(path, layouts)
    loaded["b"][3] = -1
    assert [loaded[name][3].item() for name in "abc"] == [-1.0] * 3


def test_overlapping_views(path: Path) -> None:
    """Views that share memory share it again, of whatever dtype and stride."""
    expected = {"whole": MATRIX, "rows": MATRIX[1:3], "column": MATRIX[:, 2], "turned": MATRIX.t()}
    expected["as_int"] = MATRIX.view(torch.int32)[2:]
    loaded = through(path, expected)
    for name, tensor in expected.items():
        same_layout(tensor, loaded[name])
        assert torch.equal(tensor, loaded[name])
    loaded["turned"][2, 1] = 100
    assert [loaded["whole"][1, 2].item(), loaded["rows"][0, 2].item(), loaded["column"][1].item()] == [100.0] * 3


def test_equal_tensors_in_different_places_are_not_tied(path: Path) -> None:
    """Only memory ties, not values."""
    loaded = through(path, {"a": torch.zeros(3), "b": torch.zeros(3)})
    loaded["a"].add_(1)
    assert torch.equal(torch.zeros(3), loaded["b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: UNSORTED,
        lambda: UNSORTED.coalesce(),
        lambda: torch.sparse_coo_tensor(size=(2, 3)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 4, dtype=torch.bfloat16), (2, 4)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1j, 2]), (2,)),
        lambda: SPARSE.to_sparse_csr(),
        lambda: SPARSE.to_sparse_csc(),
        lambda: SPARSE.to_sparse_bsr((2, 2)),
        lambda: SPARSE.to_sparse_bsc((2, 2)),
        lambda: torch.stack([SPARSE, SPARSE]).to_sparse_csr(),
        lambda: torch.zeros(2, 2).to_sparse_csr(),
    ],
    ids=["coo", "coalesced", "nothing", "hybrid", "complex", "csr", "csc", "bsr", "bsc", "batched", "zeros"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors(path: Path, make: Callable[[], Tensor]) -> None:
    """Layout, values and whether it is coalesced; one that is not keeps its duplicates, which add up in order."""
    expected = make()
    (actual,) = through(path, {"x": expected}).values()
    assert (expected.dtype, expected.shape, expected.layout) == (actual.dtype, actual.shape, actual.layout)
    assert torch.equal(expected.to_dense(), actual.to_dense())
    if expected.layout is torch.sparse_coo:
        assert expected.is_coalesced() == actual.is_coalesced()
        assert torch.equal(expected._indices(), actual._indices())
        assert torch.equal(expected._values(), actual._values())


@pytest.mark.parametrize(
    "expected",
    [COMPLEX.conj(), COMPLEX.mH, COMPLEX.conj().imag, torch._neg_view(MATRIX), COMPLEX.conj()[1:, ::2]],
    ids=["conj", "adjoint", "imag", "neg", "sliced"],
)
def test_conjugated_and_negated_views(path: Path, expected: Tensor) -> None:
    """The flag that says so has no place in a file; the values do."""
    (actual,) = through(path, {"x": expected}).values()
    assert (expected.dtype, False, False) == (actual.dtype, actual.is_conj(), actual.is_neg())
    assert torch.equal(expected.resolve_conj().resolve_neg(), actual)


STORED = {
    "b": BYTES[:16],
    "f": torch.arange(4.0),
    "i": torch.tensor([[0, 1], [1, 0]]),
    "v": torch.ones(2),
    "crow": torch.tensor([0, 1, 2]),
    "short": torch.tensor([0, 0, 1]),
    "col": torch.tensor([0, 5]),
}
OUTSIDE = "a layout reaches outside of its base"
UNFIT = "x.safetensors does not fit its layouts: "


def strided(**changes: Any) -> dict[str, Any]:
    return {"x": {"base": "b", "dtype": "float32", "shape": [2], "stride": [1], "offset": 0, **changes}}


def sparse(kind: str, shape: list[int], *parts: Any) -> dict[str, Any]:
    return {"x": {"sparse": kind, "shape": shape, "parts": list(parts), "coalesced": True}}


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (strided(offset=12), OUTSIDE),
        (strided(offset=-4), OUTSIDE),
        (strided(offset=2**62), OUTSIDE),
        (strided(offset="0"), UNFIT),
        (strided(offset=0.0), UNFIT),
        (strided(offset=1), UNFIT),
        (strided(shape=[5]), OUTSIDE),
        (strided(shape=[-1]), OUTSIDE),
        (strided(shape=[2**62]), OUTSIDE),
        (strided(shape=[2**70], stride=[0]), UNFIT),
        (strided(shape=[2**32, 2**32], stride=[0, 0]), UNFIT),
        (strided(shape=[0, 2**70], stride=[1, 1]), UNFIT),
        (strided(shape=[2.0]), UNFIT),
        (strided(shape="2"), UNFIT),
        (strided(shape=None), UNFIT),
        (strided(stride=[-1]), OUTSIDE),
        (strided(stride=[2**62]), OUTSIDE),
        (strided(stride=[2**31], shape=[2**33]), OUTSIDE),
        (strided(stride=[1, 1]), "zip() argument 2 is longer"),
        (strided(stride=[]), "zip() argument 2 is shorter"),
        (strided(shape=[0], stride=[-1]), OUTSIDE),
        (strided(dtype="float33"), "torch has no dtype 'float33' that a bundle may hold"),
        (strided(dtype="load"), "torch has no dtype 'load' that a bundle may hold"),
        (strided(dtype="quint8"), "torch has no dtype 'quint8' that a bundle may hold"),
        (strided(dtype="quint8", shape=[0]), "torch has no dtype 'quint8' that a bundle may hold"),
        (strided(dtype=3), UNFIT),
        (strided(base="nowhere"), UNFIT),
        (strided(base="f"), OUTSIDE),
        (strided(base=[]), UNFIT),
        ({"x": {}}, UNFIT),
        ({"x": None}, UNFIT),
        ({"x": {"same_as": "x"}}, UNFIT),
        ({"x": {"same_as": "y"}, "y": {"same_as": "x"}}, UNFIT),
        ({"x": {"same_as": "nowhere"}}, UNFIT),
        ({"x": {"same_as": ["f"]}}, UNFIT),
        (sparse("sparse_coo", [1, 1], "i", "v"), UNFIT),
        (sparse("sparse_coo", [2**40, 2**40], "i", "v"), UNFIT),
        (sparse("sparse_coo", [2, 2], "i"), "not enough values to unpack"),
        (sparse("sparse_coo", [2, 2], "i", "nowhere"), UNFIT),
        (sparse("sparse_coo", [2, 2], ["i"], "v"), UNFIT),
        (sparse("sparse_csr", [2, 2], "crow", "col", "v"), UNFIT),
        (sparse("sparse_csr", [2, 2], "short", "crow", "v"), UNFIT),
        (sparse("strided", [2, 2], "crow", "col", "v"), "torch has no sparse layout 'strided'"),
        (sparse("load", [2, 2], "crow", "col", "v"), "torch has no sparse layout 'load'"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_hostile_layouts(path: Path, layouts: dict[str, Any], message: str) -> None:
    """A layout is data from elsewhere: whatever it says, it gets a ValueError and no memory but its own."""
    write_tensors(path, STORED)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tensors(path, layouts)


def test_a_layout_that_fits_its_base_exactly(path: Path) -> None:
    """The check that refuses is not merely strict: the last byte may be used."""
    write_tensors(path, STORED)
    actual = read_tensors(path, strided(offset=8))["x"]
    assert bits(BYTES[8:16].view(torch.float32)) == bits(actual)
