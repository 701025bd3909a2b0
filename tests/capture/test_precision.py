"""Precisions: a scaler's overflow is routine and no fault; a fault that scaling only hides is one."""

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from training import (
    Net,
    NormNet,
    batches,
    bundles_in,
    capture_and_replay,
    capture_one,
    differing,
    fault,
    fit,
    replayed,
    state_of,
)

from pytest_nancapture import NaNCapture


def half_mixed(init_scale: float = 2.0**8, **kwargs: Any) -> dict[str, Any]:
    """16-mixed on the CPU, which Lightning does not offer by name."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **kwargs)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


class Big(Net):
    """Its gradients overflow half precision once they are scaled by more than about 2**12."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).float().mul(4).pow(2).mean() * fault(good)


class Scales(pl.Callback):
    """The scaler's state after each step, and the module's."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        scaler = trainer.precision_plugin.scaler
        self.seen.append((scaler.state_dict(), state_of(pl_module)))


class ManualBig(Big):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("make", [Big, ManualBig])
def test_an_overflow_captures_nothing_and_changes_nothing(make, tmp_path):
    """The scale goes down and up, and the weights move, bit for bit as without the callback."""
    runs = []
    for capture in (None, NaNCapture(tmp_path)):
        torch.manual_seed(0)
        scales = Scales()
        fit(make(), batches(12, bad=[]), capture, callbacks=[scales], **half_mixed(2.0**20, growth_interval=2))
        runs.append(scales.seen)
    values = [state["scale"] for state, _ in runs[0]]
    assert min(values) < values[0]
    assert any(later > before for before, later in itertools.pairwise(values))
    for (left, tensors), (right, others) in zip(*runs, strict=True):
        assert (left, differing(tensors, others)) == (right, [])
    assert bundles_in(tmp_path) == []


class Square(Net):
    """A root at 0: its gradient is not finite whatever the scale, and its loss is."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).pow(2).mean() + (self.layer.bias * good).abs().sqrt().sum()


@pytest.mark.parametrize("make", [Net, Square])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fault_that_survives_scale_1_is_captured(make, accumulate, tmp_path):
    """The scaler alone would skip such a step without a word, again and again."""
    options = {**half_mixed(), "accumulate_grad_batches": accumulate}
    bundle = capture_one(make(), batches(), tmp_path, **options)
    found_in = ("loss", "gradients") if make is Net else ("gradients",)
    assert (bundle.fault.found_in, bundle.fault.batch_idx, bundle.fault.reproduced.runs) == (found_in, 4, 1)
    assert bundle.manifest.trainer.precision == "16-mixed"
    assert replayed(bundle)[0].verdict == "nonfinite"


def test_a_dropped_step_leaves_the_scaler_as_it_was(tmp_path):
    """The next step is made at the same scale, and the growth begins anew."""
    scales = Scales()
    fit(
        Net(), batches(), NaNCapture(tmp_path, on_capture="skip"), callbacks=[scales], **half_mixed(growth_interval=100)
    )
    assert [state["scale"] for state, _ in scales.seen] == [256.0] * 6
    assert differing(scales.seen[3][1], scales.seen[4][1]) == []
    assert differing(scales.seen[4][1], scales.seen[5][1]) != []


def test_a_fault_is_told_from_an_overflow_without_a_confirmation_too(tmp_path):
    """One rerun is made where only that can decide."""
    fit(Big(), batches(6, bad=[]), NaNCapture(tmp_path / "overflow", confirm=0), **half_mixed(2.0**20))
    bundle = capture_one(Square(), batches(), tmp_path / "fault", confirm=0, **half_mixed())
    assert bundles_in(tmp_path / "overflow") == []
    assert (bundle.fault.found_in, bundle.fault.reproduced.of) == (("gradients",), 0)


class Unscales(torch.optim.SGD):
    """Handles unscaling in its own step, as fused optimizers may; it gets gradients that are scaled still."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        scale, found = self.grad_scale, self.found_inf
        if not found.item():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.1 * parameter.grad / scale)


class OwnUnscaling(Big):
    def configure_optimizers(self):
        return Unscales(self.parameters(), lr=0.1)


class OwnUnscalingSquare(Square):
    def configure_optimizers(self):
        return Unscales(self.parameters(), lr=0.1)


def test_optimizers_that_unscale_themselves_are_no_exception(tmp_path):
    """Their overflow is none either, and their fault is one."""
    scales = Scales()
    capture = NaNCapture(tmp_path / "overflow")
    fit(OwnUnscaling(), batches(12, bad=[]), capture, callbacks=[scales], **half_mixed(2.0**20))
    assert scales.seen[-1][0]["scale"] < 2.0**20
    assert bundles_in(tmp_path / "overflow") == []
    bundle = capture_one(OwnUnscalingSquare(), batches(), tmp_path / "fault", **half_mixed())
    assert (bundle.fault.found_in, bundle.fault.batch_idx) == (("gradients",), 4)


class Casting(NormNet):
    """Batches come as float32, whatever the precision."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x.to(self.layer.weight.dtype), good.to(self.layer.weight.dtype)), batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"])
def test_every_precision_is_replayed(precision, tmp_path):
    """To the bit."""
    bundle = capture_and_replay(Casting, batches(), tmp_path, precision=precision)
    assert (bundle.manifest.trainer.precision, bundle.fault.batch_idx) == (precision, 4)


class HalfOverflow(Net):
    """Its squares fit float32 and not float16."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        scaled = x.to(self.layer.weight.dtype) * (1.0 if good else 1000.0)
        return self.layer(scaled).pow(2).mean()


def test_a_fault_of_half_precision_is_red_in_half_precision(tmp_path):
    """And there is none in 32 bits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bundle = capture_and_replay(HalfOverflow, batches(), tmp_path / "half", precision="16-true")
    assert (bundle.fault.kind, bundle.fault.batch_idx) == ("inf", 4)
    fit(HalfOverflow(), batches(), NaNCapture(tmp_path / "full"))
    assert bundles_in(tmp_path / "full") == []


class Complex(Net):
    """Complex weights, with an imaginary part that goes bad."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).pow(2).mean() + (self.phase.imag * good).abs().sqrt().sum() + self.phase.abs().sum()


def test_complex_gradients_are_looked_at(tmp_path):
    """Real and imaginary part."""
    bundle = capture_and_replay(Complex, [(x, torch.tensor(0.0)) for x, _ in batches()], tmp_path)
    assert bundle.fault.gradients.nonfinite == ("phase",)
