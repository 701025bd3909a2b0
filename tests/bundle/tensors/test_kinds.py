"""Kinds of tensors: which have a form on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from roundtrip import COMPLEX, MATRIX, SPARSE, UNSORTED
from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import unwritable

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.empty(2, device="meta"), "it is on the meta device and has no values"),
        (
            lambda: torch.quantize_per_tensor(MATRIX, 0.1, 0, torch.quint8),
            "quantized tensors (torch.quint8) have no form in a bundle",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
            "nested tensors have no form in a bundle",
        ),
        (
            lambda: torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
            "a MaskedTensor keeps its values in other tensors",
        ),
    ],
    ids=["meta", "quantized", "nested", "masked"],
)
def test_unwritable(make: Callable[[], Tensor], problem: str) -> None:
    """What has no form is named before anything is written."""
    assert problem == unwritable(make())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "make",
    [MATRIX.t, UNSORTED.coalesce, SPARSE.to_sparse_csr, COMPLEX.conj, lambda: torch.ones(0), lambda: torch.tensor(1)],
)
def test_writable(make: Callable[[], Tensor]) -> None:
    """Nothing is said against what can be written."""
    assert unwritable(make()) == ""
