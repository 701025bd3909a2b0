"""The module's own ``on_after_batch_transfer`` is code under test: it runs again, on the batch from before it."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import Recorder, batches, bundles_in, capture_one, fit, replayed, same

from pytest_nancapture import NaNCapture, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.describe import page
from pytest_nancapture.step.state import batch as taking


class Standard(pl.LightningModule):
    """Divides by the batch's spread, in the hook; a constant batch has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def spread(self, x: Tensor) -> Tensor:
        return x.std(0)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, good = batch
        return (x - x.mean(0)) / self.spread(x * good), good

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mended(Standard):
    def spread(self, x: Tensor) -> Tensor:
        return x.std(0) + 1e-5


class Drawing(Standard):
    """Draws from every generator, in the hook and in the step."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, good = batch
        return x + torch.rand(()) + np.random.rand() + random.random(), good

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return (self.layer(x).mean() * torch.rand(()) + np.random.rand()) * (good / good)


class InPlace(Standard):
    """Writes into the batch it is given, and into buffers and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        self.seen += batch[0].sum()
        batch[0].mul_(2).add_(1)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return (self.layer(x).mean() + self.seen * self.calls) * (good / good)


class Mixup(pl.Callback):
    """Mixes a batch after the hook."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.start:
            batch[0].mul_(0.5).add_(batch[0].flip(0), alpha=0.5)


class Swap(pl.Callback):
    """Puts another tensor into the batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0] = batch[0] + 1


class Watching(pl.Callback):
    """Only looks."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].sum()


class Listing(InPlace):
    """Its batch is a list, so that a callback can put things into it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [*super().on_after_batch_transfer(batch, dataloader_idx)]


def hooked(bundle: Bundle) -> list[bool]:
    """Of each micro-batch, whether the hook runs again."""
    return [micro.hook is not None for micro in bundle.manifest.batch.window]


def agrees(bundle: Bundle, module: pl.LightningModule, trained: Recorder) -> bool:
    """Whether a replay computes the losses of training, to the bit."""
    torch.manual_seed(77)
    _, again = replayed(bundle, module)
    count = len(again.losses)
    return count > 0 and all(map(same, trained.losses[-count:], again.losses))


def test_a_fault_of_the_hook_is_traced_to_its_line(tmp_path: Any) -> None:
    """The run's own log, the bundle and the replay name it: the step was given a bad batch by that line."""
    bundle = capture_one(Standard(), batches(), tmp_path)
    result = replay(bundle, module=Standard(), trace=True)
    assert result.culprit is not None
    expected = ("input", "aten.div.Tensor", "return (x - x.mean(0)) / self.spread(x * good), good")
    assert (result.culprit.phase, result.culprit.op, result.culprit.source) == expected
    recorded = bundle.fault.culprit
    assert recorded is not None
    assert (recorded["phase"], recorded["op"], recorded["source"]) == expected


def test_show_says_so(tmp_path: Any) -> None:
    """A reader is told that the batch is not the one that the step got."""
    bundle = capture_one(Standard(), batches(), tmp_path)
    (line,) = [line for line in page(bundle).splitlines() if line.startswith("  micro-batch 4")]
    assert line.endswith("   from before the module's on_after_batch_transfer")


def test_a_mended_hook_is_green(tmp_path: Any) -> None:
    """Red with the code of the run, green with the fix."""
    bundle = capture_one(Standard(), batches(), tmp_path)
    verdicts = [replay(bundle, module=kind()).verdict for kind in (Standard, Mended)]
    assert (hooked(bundle), bundle.fault.reproduced.runs, verdicts) == ([True], 1, ["nonfinite", "finite"])


@pytest.mark.parametrize("kind", [Drawing, InPlace])
def test_the_step_computes_what_it_computed(tmp_path: Any, kind: Any) -> None:
    """The hook draws what it drew and sees the module of the instant, and the step is given what it made of that; with
    two micro-batches, and for the one whose hook follows a step, too."""
    trained = Recorder()
    torch.manual_seed(3)
    bundle = capture_one(kind(), batches(bad=[5]), tmp_path, accumulate_grad_batches=2, callbacks=[trained])
    assert (hooked(bundle), bundle.fault.reproduced.runs) == ([True, True], 1)
    assert agrees(bundle, kind(), trained)
    assert agrees(bundle, kind(), trained)


def test_a_batch_that_a_callback_has_mixed_is_taken_as_it_came(tmp_path: Any) -> None:
    """No replay runs the callback, so the hook must not run either."""
    trained = Recorder()
    bundle = capture_one(InPlace(), batches(), tmp_path, callbacks=[Mixup(), trained])
    assert (hooked(bundle), bundle.fault.reproduced.runs) == ([False], 1)
    assert agrees(bundle, InPlace(), trained)


def test_a_callback_that_mixes_from_some_batch_on(tmp_path: Any) -> None:
    """The first batch of a window is from before the hook, the second is not; each says which."""
    trained = Recorder()
    options: dict[str, Any] = {"callbacks": [Mixup(3), trained], "accumulate_grad_batches": 2}
    bundle = capture_one(InPlace(), batches(bad=[3]), tmp_path, **options)
    assert hooked(bundle) == [True, False]
    assert agrees(bundle, InPlace(), trained)


def test_a_callback_that_swaps_a_tensor(tmp_path: Any) -> None:
    """What is in the batch counts, not only the batch itself."""
    bundle = capture_one(Listing(), batches(), tmp_path, callbacks=[Swap()])
    assert hooked(bundle) == [False]


def test_a_callback_that_only_looks(tmp_path: Any) -> None:
    """It changes nothing, so the hook runs again."""
    bundle = capture_one(Standard(), batches(), tmp_path, callbacks=[Watching()])
    assert hooked(bundle) == [True]


def test_a_datamodules_hook_is_none_of_the_module(tmp_path: Any) -> None:
    """It goes before the module's, and a replay has no datamodule: the batch is as the step got it."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches(), batch_size=None)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 1, batch[1]

    class Plain(InPlace):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, good = batch
            return self.layer(x).mean() * (good / good)

    trained, module = Recorder(), Plain()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[NaNCapture(tmp_path, on_capture="stop"), trained],
    )
    trainer.fit(module, datamodule=Data())
    (name,) = bundles_in(tmp_path)
    bundle = Bundle.open(tmp_path / name)
    assert hooked(bundle) == [False]
    assert agrees(bundle, Plain(), trained)


def test_batches_of_a_validation_are_not_taken(tmp_path: Any) -> None:
    """Nor mistaken for the step's."""

    class Validated(Standard):
        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches(2), batch_size=None)

    bundle = capture_one(Validated(), batches(), tmp_path, val_check_interval=2)
    assert hooked(bundle) == [True]
    assert replay(bundle, module=Validated()).verdict == "nonfinite"


class Calls(InPlace):
    """Calls its transfer hooks in the step, too."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch[0] * 3, batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        more = self.on_after_batch_transfer((batch[0].clone(), batch[1]), 0)
        more = self.transfer_batch_to_device(more, self.device, 0)
        return super().training_step(more, batch_idx)


def test_a_step_that_calls_the_hooks_itself(tmp_path: Any) -> None:
    """They are the module's own then, in training and in a replay."""
    trained = Recorder()
    bundle = capture_one(Calls(), batches(), tmp_path, callbacks=[trained])
    assert (hooked(bundle), bundle.fault.reproduced.runs) == ([True], 1)
    assert agrees(bundle, Calls(), trained)


def test_a_batch_that_only_the_hook_makes_writable(tmp_path: Any) -> None:
    """What the loader gives has no form on disk, what the step gets has: that is taken."""

    class Opaque:
        def __init__(self, x: Tensor, good: Tensor) -> None:
            self.parts = lambda: (x, good)

    class Opening(Standard):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return super().on_after_batch_transfer(batch.parts(), dataloader_idx)

    data = [Opaque(*pair) for pair in batches()]
    bundle = capture_one(
        Opening(), torch.utils.data.DataLoader(data, batch_size=None, collate_fn=lambda b: b), tmp_path
    )
    assert hooked(bundle) == [False]


def test_bad_values_that_the_hook_mends_are_not_to_blame(tmp_path: Any) -> None:
    """A batch with missing values is none that was given to the step."""

    class Imputes(Standard):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0].nan_to_num(), batch[1]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean() / batch[1]

    data = batches()
    for x, _ in data:
        x[0, 0] = torch.nan
    bundle = capture_one(Imputes(), data, tmp_path)
    culprit = replay(bundle, module=Imputes(), trace=True).culprit
    untraced = replay(bundle, module=Imputes()).culprit
    assert culprit is not None
    assert untraced is not None
    assert (culprit.phase, culprit.op, untraced.phase) == ("forward", "aten.div.Tensor", "forward")


def test_training_pays_one_copy_of_the_batch(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is copied before the hook or at the instant, not at both; after a mixing callback was seen, neither."""
    counts: list[int] = []
    take = taking.TakenBatch.take.__func__  # type: ignore[attr-defined]

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts.append(args[2])
        return take(*args, **kwargs)

    monkeypatch.setattr(taking.TakenBatch, "take", classmethod(counted))
    fit(Standard(), batches(bad=[]), NaNCapture(tmp_path))
    assert counts == [0, 1, 2, 3, 4, 5]
    counts.clear()
    fit(Standard(), batches(bad=[]), NaNCapture(tmp_path), callbacks=[Mixup()])
    assert counts == [0, 0, 1, 2, 3, 4, 5]


def test_a_module_without_the_hook_has_no_wrapper_for_it(tmp_path: Any) -> None:
    """Nothing is paid then."""
    found: list[bool] = []

    class Plain(Standard):
        on_after_batch_transfer = pl.LightningModule.on_after_batch_transfer

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append("on_after_batch_transfer" in vars(self))
            return super().training_step(batch, batch_idx)

    fit(Plain(), batches(2, bad=[]), NaNCapture(tmp_path))
    fit(Standard(), batches(2, bad=[]), NaNCapture(tmp_path))
    assert found == [False, False]


def test_training_goes_on_as_without_a_capture(tmp_path: Any) -> None:
    """Skipping a step leaves the weights that the other steps make, to the bit."""
    ends = []
    for capture, data in (
        (None, batches(bad=[])),
        (NaNCapture(tmp_path / "bundles", on_capture="skip"), batches(bad=[])),
    ):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        module = Drawing()
        fit(module, data, capture)
        ends.append(module.layer.weight.detach().clone())
    assert torch.equal(*ends)
