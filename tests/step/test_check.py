"""The check: one flag for all values, exact, and nothing is changed by it."""

import pytest
import torch

from pytest_nancapture.step.check import all_finite

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]
SIZES = [5, 2**16 + 3]
"""Looked at together with others, and added up first."""


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-3, 3, size).to(dtype)


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (bad, dtype)
        for bad in (float("nan"), float("inf"), float("-inf"))
        for dtype in FLOATS
        if bad != bad or dtype is not torch.float8_e4m3fn  # which has no Inf
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_value_among_good_ones(bad, size, dtype):
    """Wherever it is."""
    good = [values(size, dtype), values(7, torch.float32), torch.arange(3)]
    assert all_finite(good)
    wrong = values(size, torch.complex64 if dtype is torch.complex64 else torch.float32)
    wrong[size // 2] = bad
    assert not all_finite([*good, wrong.to(dtype)])


@pytest.mark.parametrize("position", [0, 255, 256, 699])
def test_one_bad_tensor_among_hundreds(position):
    """Wherever it is; and an alarm is over when the next look begins."""
    tensors = [torch.ones(3, dtype=(torch.float32, torch.bfloat16)[i % 2]) for i in range(700)]
    tensors[position] = torch.tensor(float("inf"))
    assert not all_finite(tensors)
    tensors[position] = torch.tensor(1.0)
    assert all_finite(tensors)


def test_a_class_that_cannot_be_looked_at_hides_no_other():
    """Neither alone nor beside a bad one does it break the look."""
    masked = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    assert all_finite([masked, torch.ones(3)])
    assert not all_finite([masked, torch.tensor([1.0, float("nan")])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_finite_values_whose_sum_overflows_are_finite(dtype):
    """Nor do two infinities cancel."""
    large = torch.full((2**17,), torch.finfo(dtype).max, dtype=dtype)
    assert not bool(large.sum().isfinite())
    assert all_finite([large])
    large[0], large[1] = float("inf"), float("-inf")
    assert not all_finite([large])


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_changed(size):
    """Not a bit of the values, and not the count of changes that autograd keeps."""
    tensor = values(size, torch.float32)
    tensor[0], tensor[1] = -0.0, 1e-45
    before, version = tensor.clone(), tensor._version
    assert all_finite([tensor])
    assert torch.equal(tensor.view(torch.int32), before.view(torch.int32))
    assert tensor._version == version


@pytest.mark.parametrize("size", SIZES)
def test_sparse_and_expanded_gradients(size):
    """What is stored counts."""
    rows = torch.sparse_coo_tensor(torch.arange(size)[None], values(size, torch.float32), (2 * size,))
    expanded = torch.ones(()).expand(size)
    assert all_finite([rows, expanded])
    rows._values()[1] = float("nan")
    assert not all_finite([rows])
    assert not all_finite([torch.tensor(float("inf")).expand(size)])
