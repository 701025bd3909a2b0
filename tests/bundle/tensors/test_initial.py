"""Weights that are not stored, and random states from a seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from pytest_nancapture.bundle.manifest import InitialRecord
from pytest_nancapture.bundle.rng import RandomStates, preserved

NAMES = ["fc.bias", "fc.weight", "head.bias", "head.weight", "scale", "norm.0.weight"]


def test_names() -> None:
    """Names that end alike are written together, and come back."""
    record = InitialRecord.of(NAMES, seed=3)

    assert record.names == {"bias weight": ("fc", "head"), "scale": ("",), "weight": ("norm.0",)}
    assert sorted(record.all_names()) == sorted(NAMES)


def test_seed() -> None:
    """A record of a seed is what seeding gives."""
    with preserved():
        RandomStates.decode({"seed": 5, "torch": ["cpu"]}, {}).restore()
        drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        assert drawn == (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())


@pytest.mark.parametrize("seed", [-1, "five", 2**70, None])
def test_hostile_seed(seed: object) -> None:
    """What is no seed is a clear error."""
    with pytest.raises(ValueError, match=r"rng|Seed|Overflow"):
        RandomStates.decode({"seed": seed, "torch": []}, {})
