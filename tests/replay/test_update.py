"""A fault of the update is tested only where the update is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from pytest_nancapture import replay
from pytest_nancapture.replay.hooks import ReplayHooks

REASON = (
    "no update was made of linear.weight, linear.bias, and the update is what was at fault: nothing was tested; it "
    "passes once the replay's optimizer steps: see what skips it, in the code or in the hook "
    "pytest_nancapture_trainer_kwargs"
)


class Huge(models.Net):
    """Its learning rate is so large that the weights overflow."""

    rate = 3e38

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        return 100 * (self.linear(batch[0]).square().sum() + self.linear.bias.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@pytest.fixture(scope="module")
def overflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("huge")
    return models.capture(Huge(), folder, models.batches(3, bad=-1), settings={"optimizer_history": True})


def test_an_update_that_is_made(overflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red, and green once the rate is mended."""
    assert replay(overflow).verdict == "nonfinite"
    monkeypatch.setattr(Huge, "rate", 1e-3)
    assert replay(overflow).verdict == "finite"


def test_a_trainer_that_makes_no_update(overflow: Path) -> None:
    """It accumulates beyond the window."""
    hooks = ReplayHooks(trainer_kwargs=lambda _: {"accumulate_grad_batches": 4})
    result = replay(overflow, hooks=hooks)
    assert (result.verdict, result.reason) == ("vacuous", REASON)


def test_code_that_makes_no_update(overflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it runs forward and backward."""

    def only_the_closure(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()

    monkeypatch.setattr(Huge, "optimizer_step", only_the_closure)
    result = replay(overflow)
    assert (result.verdict, result.reason) == ("vacuous", REASON)


def test_an_update_of_other_parameters(overflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that went bad are frozen: an update without them tests nothing."""

    def frozen(self: Huge, batch: models.Batch, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True) + 0.0

    monkeypatch.setattr(Huge, "training_step", frozen)
    result = replay(overflow)
    assert (result.verdict, result.reason) == ("vacuous", REASON)


def test_an_update_of_zeros(overflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had gradients at capture, and has none any more: masked."""

    def zero(self: Huge, batch: models.Batch, batch_idx: int) -> Tensor:
        return 0 * self.linear(batch[0]).sum()

    monkeypatch.setattr(Huge, "training_step", zero)
    assert replay(overflow).verdict == "vacuous"
