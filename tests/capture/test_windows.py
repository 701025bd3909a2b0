"""Accumulation: every micro-batch since the last update is kept, and the guilty one is found."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from training import Net, NormNet, batches, bundles_in, capture_and_replay, fit

from pytest_nancapture import Bundle, NaNCapture, NonFiniteError, find_bundles, replay


def window(bundle: Any) -> list[int]:
    return [batch.batch_idx for batch in bundle.manifest.batch.window]


class GradientOnly(NormNet):
    """The loss is finite, and a gradient is not: the root at 0, where its slope is infinite and is multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        x, good = batch
        loss = super().training_step((x, torch.ones(())), batch_idx)
        return loss + (self.scale * good).abs().sqrt().mean() * 0.1


@pytest.mark.parametrize("make", [NormNet, GradientOnly])
@pytest.mark.parametrize(
    ("accumulate", "bad", "expected"),
    [
        (1, 4, [4]),
        (2, 4, [4, 5]),
        (2, 5, [4, 5]),
        (3, 3, [3, 4, 5]),
        (3, 4, [3, 4, 5]),
        (3, 6, [6]),
        (4, 2, [0, 1, 2, 3]),
        (4, 5, [4, 5, 6]),
    ],
)
def test_the_guilty_micro_batch_is_found(make, accumulate, bad, expected, tmp_path):
    """In its window, also in the last and incomplete one of an epoch; in the loss and in gradients alone."""
    bundle = capture_and_replay(make, batches(7, bad=[bad]), tmp_path, accumulate_grad_batches=accumulate)
    assert (window(bundle), bundle.fault.batch_idx, bundle.fault.global_step) == (expected, bad, bad // accumulate)
    assert bundle.fault.found_in == (("loss", "gradients", "buffers") if make is NormNet else ("gradients",))
    assert bundle.fault.reproduced.runs == 1


def test_without_a_confirmation_the_bad_loss_still_tells(tmp_path):
    """A fault in gradients alone is then blamed on the window's last micro-batch, which nothing contradicts."""
    kwargs = {"accumulate_grad_batches": 3, "confirm": 0}
    loss = capture_and_replay(NormNet, batches(bad=[3]), tmp_path / "loss", **kwargs)
    gradients = capture_and_replay(GradientOnly, batches(bad=[3]), tmp_path / "gradients", **kwargs)
    assert (loss.fault.batch_idx, gradients.fault.batch_idx) == (3, 5)


class Constant(Net):
    """A loss that can be read off."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return (self.layer(x) * 0).sum() * (good / good) + 12.0 * (1 + batch_idx)


def test_losses_are_normalised_as_in_training(tmp_path):
    """Each is a share of the window's mean."""
    bundle = capture_and_replay(Constant, batches(bad=[4]), tmp_path, accumulate_grad_batches=3)
    assert bundle.fault.losses == ("16", "nan", "24")


def test_the_schedule_of_accumulation_is_followed(tmp_path):
    """The window is as long as the scheduler has it in that epoch."""
    schedule = GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})
    data = [(x, torch.tensor(float(i))) for i, (x, _) in enumerate(batches(6, bad=[]))]
    bundle = capture_and_replay(InEpoch, data, tmp_path, callbacks=[schedule], max_epochs=4)
    assert (bundle.fault.epoch, window(bundle), bundle.fault.batch_idx) == (1, [3, 4, 5], 4)
    assert bundle.manifest.trainer.accumulate_grad_batches == 3


class InEpoch(Net):
    """Bad in the second epoch's fifth micro-batch."""

    def training_step(self, batch, batch_idx):
        x, number = batch
        bad = self.current_epoch == 1 and number == 4
        return self.layer(x).pow(2).mean() * (torch.zeros(()) / 0 if bad else 1)


class EndsEpoch(Net):
    """Its own hook ends the first epoch in the midst of a window."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x, good if self.current_epoch else torch.ones(())), batch_idx)


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [0]), (2, [0, 1])])
def test_a_window_that_an_epochs_early_end_cut_off_is_forgotten(accumulate, expected, tmp_path):
    """Lightning drops its gradients, and the batch that was never trained on is in no window."""
    kwargs = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    bundle = capture_and_replay(EndsEpoch, batches(bad=[0]), tmp_path, **kwargs)
    assert (bundle.fault.epoch, window(bundle), bundle.fault.batch_idx) == (1, expected, 0)


class Gate(nn.Module):
    def __init__(self, level: float) -> None:
        super().__init__()
        self.level = level


class Counting(Net):
    """Puts another submodule in the place of one at every step; the third divides by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"gate": Gate(3.0)})

    def training_step(self, batch, batch_idx):
        self.parts["gate"] = Gate(self.parts["gate"].level - 1)
        return super().training_step(batch, batch_idx) / self.parts["gate"].level


def test_a_submodule_that_the_step_replaces_is_the_one_of_the_instant(tmp_path):
    """In the bundle, and after a step that was dropped."""
    module = Counting()
    fit(module, batches(bad=[]), NaNCapture(tmp_path, on_capture="stop"))
    assert module.parts["gate"].level == 1.0
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert bundle.fault.global_step == 2
    assert bundle.fault.reproduced.runs == 1
    result = replay(bundle, trace=True)
    assert result.culprit is not None
    assert (result.verdict, "/ self.parts" in result.culprit.source) == ("nonfinite", True)


class Weighted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / float(self.weight.requires_grad)


class Replaces(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            module.weight = nn.Parameter(torch.ones(1), requires_grad=False)


def test_a_parameter_that_somebody_replaces_is_the_one_of_the_instant(tmp_path):
    """With its own flags, at whichever step."""
    with pytest.raises(NonFiniteError):
        fit(Weighted(), batches(bad=[]), NaNCapture(tmp_path), callbacks=[Replaces()])
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert bundle.manifest.module.frozen == ("weight",)
    assert (bundle.fault.global_step, bundle.fault.reproduced.runs) == (2, 1)
    assert replay(bundle).verdict == "nonfinite"


class NoLoss(NormNet):
    """Returns None for some micro-batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


def test_micro_batches_without_a_loss_are_part_of_the_window(tmp_path):
    """They move running statistics and random states."""
    bundle = capture_and_replay(NoLoss, batches(bad=[5]), tmp_path, accumulate_grad_batches=3)
    assert (window(bundle), bundle.fault.batch_idx) == ([3, 4, 5], 5)
    assert [bool(text) for text in bundle.fault.losses] == [True, False, True]


class OwnAccumulation(pl.LightningModule):
    """Manual optimisation, with an update after every third micro-batch, whatever the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(3, 3)
        self.count = 0

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.manual_backward(self.layer(x).pow(2).mean() / 3 * (good / good))
        self.count += 1
        if self.count % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_manual_accumulation_across_epochs_is_one_window(tmp_path):
    """Its micro-batches have the indices that they had."""
    data = [(x, torch.tensor(1.0)) for x, _ in batches(5)]
    bundle = capture_and_replay(BadLater, data, tmp_path, max_epochs=2)
    assert (window(bundle), bundle.fault.batch_idx) == ([3, 4, 0], 4)


class BadLater(OwnAccumulation):
    def training_step(self, batch, batch_idx):
        x, good = batch
        super().training_step((x, good - 1 if self.count == 4 else good), batch_idx)


def test_a_window_without_an_update_holds_no_more_than_one_update_needs(tmp_path):
    """Lightning drops the gradients before each micro-batch here, so no earlier batch is kept either."""
    held = []

    class Now(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            held.append(len(capture._watch.watch._keeper.window.batches))

    capture = NaNCapture(tmp_path)
    fit(Now(), batches(bad=[]), capture)
    assert held == [1] * 6
    assert bundles_in(tmp_path) == []
