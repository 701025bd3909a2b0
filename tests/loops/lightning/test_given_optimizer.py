"""A module whose optimizer the run made outside of its code, as LightningCLI does, is replayed without that."""

from __future__ import annotations

import types
from typing import Any

import lightning.pytorch as pl
import torch
from training import batches, capture_one, fault

from pytest_nancapture import replay


class Bare(pl.LightningModule):
    """Has no ``configure_optimizers``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean() * fault(batch[1])


def given(module: Any, rate: float = 0.1) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=rate)
    module.configure_optimizers = types.MethodType(lambda self: optimizer, module)
    module.configure_optimizers.__func__.__module__ = "lightning.pytorch.cli"
    return module


def test_a_step_whose_update_is_not_made(tmp_path: Any) -> None:
    """It needs no optimizer but one that does nothing."""
    bundle = capture_one(given(Bare()), batches(), tmp_path)
    assert (bundle.fault.reproduced.runs, replay(bundle).verdict) == (1, "nonfinite")


def test_an_update_that_is_to_be_made(tmp_path: Any) -> None:
    """It takes the optimizer, and says who can give it."""
    bundle = capture_one(given(Bare(), rate=float("inf")), batches(bad=()), tmp_path, optimizer_history=True)
    result = replay(bundle)
    assert result.verdict == "error"
    assert "Bare has no configure_optimizers of its own: the run gave it one" in result.reason
    assert replay(bundle, module=given(Bare(), rate=float("inf"))).verdict == "nonfinite"
