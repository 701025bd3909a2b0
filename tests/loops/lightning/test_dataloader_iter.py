"""A step that takes its batches itself is captured, rerun and replayed with those that ``next`` gave it."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from training import Recorder, batches, capture_one, fit, replayed, same

from pytest_nancapture import NaNCapture, replay
from pytest_nancapture.bundle.bundle import Bundle

Iter = Iterator[tuple[Any, int, int]]


class Takes(pl.LightningModule):
    """Its loss is NaN on a batch whose second part is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.seen: list[Any] = []

    def quotient(self, good: Tensor) -> Tensor:
        return good / good

    def training_step(self, dataloader_iter: Iter) -> Any:
        (x, good), batch_idx, dataloader_idx = next(dataloader_iter)
        self.seen.append((batch_idx, dataloader_idx, float(x.sum())))
        return self.layer(x).square().mean() * self.quotient(good)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mended(Takes):
    def quotient(self, good: Tensor) -> Tensor:
        return (good + 1) / (good + 1)


class Spoils(Takes):
    """Writes into the batch, and draws after it came."""

    def training_step(self, dataloader_iter: Iter) -> Any:
        before = torch.rand(())
        (x, good), _, _ = next(dataloader_iter)
        x.mul_(torch.rand(()) + np.random.rand() + random.random())
        return self.layer(x).square().mean() * self.quotient(good) + before


class Twice(Takes):
    """Takes two batches a step, and draws between them."""

    def training_step(self, dataloader_iter: Iter) -> Any:
        (x, one), _, _ = next(dataloader_iter)
        noise = torch.rand(())
        (y, two), batch_idx, _ = next(dataloader_iter)
        self.seen.append(batch_idx)
        return (self.layer(x) * noise + self.layer(y) * torch.rand(())).square().mean() * self.quotient(one * two)


class ToTheEnd(Takes):
    """Takes all that is left."""

    def training_step(self, dataloader_iter: Iter) -> Any:
        losses = [self.layer(x).square().mean() * self.quotient(good) for (x, good), _, _ in dataloader_iter]
        return torch.stack(losses).mean()


class Ahead(Takes):
    """Takes each batch in the step before the one that uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def training_step(self, dataloader_iter: Iter) -> Any:
        (x, good) = self.kept if self.kept is not None else next(dataloader_iter)[0]
        self.kept = next(dataloader_iter)[0]
        return self.layer(x).square().mean() * self.quotient(good)


class Past(Takes):
    """Takes its batches from the loader behind the iterator."""

    def training_step(self, dataloader_iter: Any) -> Any:
        (x, good), _, _ = next(dataloader_iter._iterator if hasattr(dataloader_iter, "_iterator") else dataloader_iter)
        return self.layer(x).square().mean() * self.quotient(good)


class ByHand(Takes):
    """Optimises by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, dataloader_iter: Iter) -> None:
        loss = super().training_step(dataloader_iter)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Noisy(IterableDataset):  # type: ignore[type-arg]
    """Draws as it loads, and does not know its length."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        for i in range(6):
            yield torch.rand(4, 3) + np.random.rand(), torch.tensor(float(i != self.bad))


def taken(bundle: Bundle) -> list[list[tuple[int, int]]]:
    """Of each micro-batch, the numbers of the batches that the step took."""
    window = bundle.manifest.batch.window
    return [[(fetch.batch_idx, fetch.dataloader_idx) for fetch in micro.fetches or ()] for micro in window]


def agrees(bundle: Bundle, module: pl.LightningModule, trained: Recorder) -> bool:
    """Whether a replay computes the losses of training, to the bit."""
    torch.manual_seed(77)
    _, again = replayed(bundle, module)
    count = len(again.losses)
    return count > 0 and all(map(same, trained.losses[-count:], again.losses))


def test_the_batch_is_the_one_that_next_gave(tmp_path: Any) -> None:
    """Not that of the step before; and with the same numbers."""
    module = Takes()
    bundle = capture_one(module, batches(), tmp_path)
    again = Takes()
    assert replay(bundle, module=again).verdict == "nonfinite"
    assert (taken(bundle), bundle.fault.batch_idx) == ([[(4, 0)]], 4)
    assert (again.seen[:-1], again.seen[-1][0]) == (module.seen, 4)  # what was seen before is state
    assert bundle.fault.reproduced.runs == 1


def test_a_mended_step_is_green(tmp_path: Any) -> None:
    """It gets the same batch, and what it does with it now is finite."""
    bundle = capture_one(Takes(), batches(), tmp_path)
    assert replay(bundle, module=Mended()).verdict == "finite"


def test_the_culprit_is_named(tmp_path: Any) -> None:
    """Operations are followed from the batch that was taken."""
    bundle = capture_one(Takes(), batches(), tmp_path)
    culprit = replay(bundle, module=Takes(), trace=True).culprit
    assert culprit is not None
    assert (culprit.op, culprit.source) == ("aten.div.Tensor", "return good / good")
    recorded = bundle.fault.culprit
    assert recorded is not None
    assert recorded["source"] == "return good / good"


@pytest.mark.parametrize("kind", [Spoils, Twice, ByHand])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_step_computes_what_it_computed(tmp_path: Any, kind: Any, accumulate: int) -> None:
    """With the batch as it came, though the step writes into it, and with every random draw."""
    if kind is ByHand and accumulate > 1:
        pytest.skip("Lightning accumulates nothing there")
    trained = Recorder()
    torch.manual_seed(3)
    options: dict[str, Any] = {"callbacks": [trained], "accumulate_grad_batches": accumulate}
    bundle = capture_one(kind(), batches(8, bad=[7]), tmp_path, **options)
    assert bundle.fault.reproduced.runs == 1
    assert agrees(bundle, kind(), trained)
    assert agrees(bundle, kind(), trained)


def test_several_batches_of_one_step(tmp_path: Any) -> None:
    """All are kept, in their order; the loop counts steps."""
    bundle = capture_one(Twice(), batches(8, bad=[5]), tmp_path)
    (micro,) = bundle.manifest.batch.window
    assert (taken(bundle), micro.batch_idx, micro.number) == ([[(4, 0), (5, 0)]], 4, 2)


def test_a_loader_that_draws(tmp_path: Any) -> None:
    """The step goes on with the random states from right after the batch came."""
    trained = Recorder()
    torch.manual_seed(3)
    bundle = capture_one(Spoils(), DataLoader(Noisy(3), batch_size=None), tmp_path, callbacks=[trained])
    assert bundle.fault.reproduced.runs == 1
    assert agrees(bundle, Spoils(), trained)


def test_several_loaders(tmp_path: Any) -> None:
    """The batch of a combined loader is whatever it puts together."""

    class Both(Takes):
        def training_step(self, dataloader_iter: Iter) -> Any:
            parts, batch_idx, dataloader_idx = next(dataloader_iter)
            (x, good), (y, _) = parts["a"], parts["b"]
            self.seen.append((batch_idx, dataloader_idx))
            return self.layer(x + y).square().mean() * self.quotient(good)

    loaders = {"a": DataLoader(batches(bad=[5]), batch_size=None), "b": DataLoader(batches(3, bad=[]), batch_size=None)}
    trained = Recorder()

    class Loads(Both):
        def train_dataloader(self) -> Any:
            return CombinedLoader(loaders, "max_size_cycle")

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accumulate_grad_batches=2,
        callbacks=[NaNCapture(tmp_path, on_capture="skip"), trained],
    )
    trainer.fit(Loads())
    (path,) = tmp_path.iterdir()
    bundle, again = Bundle.open(path), Both()
    assert taken(bundle) == [[(4, 0)], [(5, 0)]]
    torch.manual_seed(77)
    _, replays = replayed(bundle, again)
    assert again.seen == [(4, 0), (5, 0)]
    assert list(map(same, trained.losses[4:6], replays.losses)) == [True, True]


def test_a_step_that_takes_all_there_is(tmp_path: Any) -> None:
    """It finds the end where it found it."""
    trained = Recorder()
    bundle = capture_one(ToTheEnd(), batches(), tmp_path, callbacks=[trained])
    assert taken(bundle) == [[(i, 0) for i in range(6)]]
    assert bundle.manifest.batch.window[0].exhausted
    assert agrees(bundle, ToTheEnd(), trained)


def test_a_step_that_takes_more_than_it_did(tmp_path: Any) -> None:
    """There is nothing to give it: an error that says so."""
    result = replay(capture_one(Takes(), batches(), tmp_path), module=Twice())
    assert (result.verdict, result.reason) == (
        "error",
        "the step takes more batches from dataloader_iter than it took at capture",
    )


def test_a_step_that_is_given_its_batch_now(tmp_path: Any) -> None:
    """Today's code may have another signature: the batch is the same."""

    class Given(Takes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return Takes.training_step(self, iter([(batch, batch_idx, 0)]))

    class GivenMended(Given, Mended):
        pass

    bundle = capture_one(Takes(), batches(), tmp_path)
    assert [replay(bundle, module=kind()).verdict for kind in (Given, GivenMended)] == ["nonfinite", "finite"]


def test_a_step_that_takes_its_batch_now(tmp_path: Any) -> None:
    """And the other way round."""

    class Given(Takes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return Takes.training_step(self, iter([(batch, batch_idx, 0)]))

    bundle = capture_one(Given(), batches(), tmp_path)
    assert [replay(bundle, module=kind()).verdict for kind in (Takes, Mended)] == ["nonfinite", "finite"]


def test_the_end_of_the_loader_within_a_step(tmp_path: Any) -> None:
    """A step that was left for want of a batch is no part of the next window."""
    bundle = capture_one(Twice(), batches(5, bad=[]), tmp_path, max_epochs=2, limit_train_batches=4, callbacks=[_Bad()])
    assert taken(bundle) == [[(2, 0), (3, 0)]]


class _Bad(pl.Callback):
    """Makes the weights of the second epoch's second step bad in its forward."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.batch_idx >= 1:
            pl_module.quotient = lambda good: good * float("nan")


def test_what_lightning_drops_is_no_fault(tmp_path: Any) -> None:
    """With accumulation it takes the number of the batch before, and drops the first gradients of each window."""
    fit(Takes(), batches(), NaNCapture(tmp_path), accumulate_grad_batches=2)
    assert not list(tmp_path.iterdir())


def test_skip_goes_on_with_the_next_batch(tmp_path: Any) -> None:
    """A rerun takes none from the loader; what the dropped step noted in the module is gone with it."""
    module = Takes()
    fit(module, batches(), NaNCapture(tmp_path, on_capture="skip", confirm=2))
    assert [number for number, _, _ in module.seen] == [0, 1, 2, 3, 5]


def test_batches_taken_ahead_are_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once, from the first step on that uses what an earlier one took."""
    with caplog.at_level(logging.WARNING, logger="pytest_nancapture"):
        fit(Ahead(), batches(bad=[]), NaNCapture(tmp_path))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("nancapture: the step takes batches from dataloader_iter ahead of the step that uses them")


def test_batches_taken_past_the_iterator_are_told(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With the first one, and no bundle claims to have them."""
    with caplog.at_level(logging.WARNING, logger="pytest_nancapture"):
        fit(Past(), batches(), NaNCapture(tmp_path, on_capture="skip"))
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == (
        "nancapture: bundles of this run cannot be replayed: the step took a batch past the iterator that it is given"
    )
    assert not list(tmp_path.iterdir())
