"""Learning rates that the step's own code sets: a bundle holds those from before it, and a replay sets them again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from training import Net, batches, capture_one, fit

from pytest_nancapture import NaNCapture, NonFiniteError, replay
from pytest_nancapture.bundle.bundle import Bundle


class Rated(Net):
    """A hook of its own sets the learning rate by the gradient's norm; that of a bad batch is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return (self.layer(x).mean() * good).square()

    def rate(self, norm: Tensor) -> Tensor:
        return 0.01 / norm

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
        optimizer.param_groups[0]["lr"] = self.rate(norm).item()


class Bounded(Rated):
    """Mended."""

    def rate(self, norm: Tensor) -> Tensor:
        return 0.01 / norm.clamp(min=0.1)


class Decaying(Net):
    """Makes the learning rate smaller in each step, in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5


class Meddler(pl.Callback):
    """Of training only: sets the learning rate after the gradients are there."""

    def __init__(self, rates: dict[int, float]) -> None:
        self.rates = rates

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = self.rates.get(trainer.global_step, 0.1)


def rate_in(bundle: Bundle) -> Any:
    """The learning rate that the bundle holds."""
    assert bundle.manifest.optimizer is not None
    (state,) = bundle.manifest.optimizer.states
    (groups,) = [value for key, value in state["dict"] if key == "param_groups"]
    (group,) = groups["list"]
    return dict(group["dict"])["lr"]


def test_the_rate_is_that_from_before_the_hook(tmp_path: Any) -> None:
    """The hook's Inf is in no bundle: that of the step before is."""
    bundle = capture_one(Rated(), batches(bad=[3]), tmp_path, optimizer_history=True)
    assert bundle.fault.weights
    assert 0 < rate_in(bundle) < float("inf")


def test_the_line_that_made_the_rate_is_named(tmp_path: Any) -> None:
    """The update's Inf is followed through the plain number that the learning rate is."""
    bundle = capture_one(Rated(), batches(bad=[3]), tmp_path, optimizer_history=True)
    culprit = replay(bundle, trace=True).culprit
    assert culprit is not None
    assert (culprit.source, culprit.phase) == ("return 0.01 / norm", "optimizer")


def test_a_mended_hook_is_green(tmp_path: Any) -> None:
    """Today's hook makes today's learning rate."""
    bundle = capture_one(Rated(), batches(bad=[3]), tmp_path, optimizer_history=True)
    assert [replay(bundle, module=kind()).verdict for kind in (Rated, Bounded)] == ["nonfinite", "finite"]


@pytest.mark.parametrize("confirm", [0, 2])
def test_a_dropped_step_leaves_the_rate_alone(tmp_path: Any, confirm: int) -> None:
    """However often it was rerun: it is as it was before the step's hooks, and training goes on from there."""
    module, rates = Decaying(), []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    fit(module, batches(5, bad=[2]), NaNCapture(tmp_path, on_capture="skip", confirm=confirm), callbacks=[Looks()])
    assert rates == [0.1, 0.05, 0.025, 0.025, 0.0125]


def test_a_rate_that_a_callback_sets_is_state(tmp_path: Any) -> None:
    """A replay runs no callback, so what one has set between the instant and the update is in the bundle."""

    class Plain(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

    meddler = Meddler({3: float("inf")})
    bundle = capture_one(Plain(), batches(bad=[]), tmp_path, optimizer_history=True, callbacks=[meddler])
    assert rate_in(bundle) == {"float": "inf"}
    assert replay(bundle, module=Plain()).verdict == "nonfinite"


def test_a_rate_kept_as_a_tensor(tmp_path: Any) -> None:
    """It is written in place, and is put back in place."""

    class Kept(Rated):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
            optimizer.param_groups[0]["lr"].copy_(self.rate(norm))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))

    class Mended(Kept, Bounded):
        pass

    with pytest.raises(NonFiniteError):
        fit(Kept(), batches(bad=[3]), NaNCapture(tmp_path, optimizer_history=True))
    (path,) = tmp_path.iterdir()
    assert [replay(path, module=kind()).verdict for kind in (Kept, Mended)] == ["nonfinite", "finite"]
