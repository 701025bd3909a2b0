"""What people read of a shrunk bundle."""

from __future__ import annotations

from typing import Any

import nets
import torch

from pytest_nancapture.bundle.describe import page


def test_page(capture: Any, shrunk: Any) -> None:
    """Recipes are told in plain words, and gradients that were left out are not taken for zeros."""
    generator = torch.Generator().manual_seed(3)
    mask = (torch.rand(6, 32, 32, generator=generator) < 0.5).float()
    mask[2] = 0
    bundle = shrunk(capture(nets.Wide(), [(torch.randn(6, 3, 32, 32, generator=generator), mask)])).bundle
    text = page(bundle)

    assert "9 weights are as the code makes them under seed 0" in text
    assert "random state\n  micro-batch 0  seed 0 of torch, numpy and python" in text
    assert ", noise from -" in text
    assert "all zero" not in text
