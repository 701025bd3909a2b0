"""Tiny modules with a fault each, for the tests of replays; at the top of a module, so that a bundle can name them."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.capture.proof import prove

prove.FRESH = False  # what starts processes is tested in test_proofs.py

Batch = tuple[Tensor, Tensor]
SEEN: list[Any] = []
"""What a step noted while it ran, in training or in a replay."""


class Net(pl.LightningModule):
    """Its loss is divided by a number of the batch, which may be 0."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(3, width)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        return self.divided(self.linear(x).pow(2).sum(), count)

    def divided(self, total: Tensor, count: Tensor) -> Tensor:
        """The total, and NaN where the count is 0."""
        return total + (total - total) / self.divisor(count)

    @staticmethod
    def divisor(count: Tensor) -> Tensor:
        return count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def at_least_one(count: Tensor) -> Tensor:
    """The divisor, mended."""
    return count.clamp(min=1)


class Required(Net):
    """Its argument is not among its hparams, so that only a factory or a hook can build it."""

    def __init__(self, width: int) -> None:
        pl.LightningModule.__init__(self)
        self.linear = nn.Linear(3, width)


def make_required() -> Required:
    """A factory."""
    return Required(4)


class Noting(Net):
    """Notes what user code can read of where the training is, and draws a random number."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loop = self.trainer.fit_loop
        SEEN.append(
            {
                "batch_idx": batch_idx,
                "global_step": self.global_step,
                "trainer's": self.trainer.global_step,
                "epoch": self.current_epoch,
                "batches": self.trainer.num_training_batches,
                "last": self.trainer.is_last_batch,
                "total": loop.total_batch_idx,
                "in epoch": loop.batch_idx,
                "accumulates": self.trainer.accumulate_grad_batches,
                "max_epochs": self.trainer.max_epochs,
                "training": self.training,
                "random": torch.rand(()).item(),
            }
        )
        return super().training_step(batch, batch_idx)


class Late(Noting):
    """Divides by 0 in its second epoch only, at the batch whose number is an argument."""

    def __init__(self, bad: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        is_bad = self.current_epoch == 1 and batch_idx == self.hparams["bad"]
        return super().training_step((x, count * (not is_bad)), batch_idx)


class Manual(Noting):
    """Optimises by hand, twice a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Hooked(Net):
    """Has every hook that a replay must not run again, and some that it must."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("starts", torch.zeros(()))

    def prepare_data(self) -> None:
        SEEN.append("prepare_data")

    def configure_callbacks(self) -> list[pl.Callback]:
        SEEN.append("configure_callbacks")
        return []

    def train_dataloader(self) -> Any:
        SEEN.append("train_dataloader")

    def val_dataloader(self) -> Any:
        SEEN.append("val_dataloader")
        return []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        SEEN.append("validation_step")

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch[0] + 1, batch[1]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch[0] * 10, batch[1]

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch[0] + 5, batch[1]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.starts += 1

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        SEEN.append(("step", batch[0].flatten()[0].item(), self.starts.item()))
        return super().training_step(batch, batch_idx)


class Logging(Net):
    """Logs in every way there is."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"a": 1.0, "b": loss.detach()}, batch_size=2)
        self.logger.experiment.add_image("image", batch[0])
        self.logger.experiment.config["lr"].update(anything=1)
        self.logger.log_metrics({"a": 1.0}, step=self.global_step)
        self.logger.log_image("image", [batch[0]])
        for folder in (self.trainer.default_root_dir, self.trainer.log_dir, self.logger.log_dir):
            Path(folder, "notes.txt").write_text("x")
        self.print("logged")
        return loss


class Dropping(Net):
    """Dropout, normalisation and a batch that the step spoils: nothing of it may differ in a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.calm = nn.Dropout(0.5).eval()
        self.temperature = 1.0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        hidden = self.drop(self.norm(x.clone())) + self.calm(self.frozen(x.clone()))
        x.zero_()
        loss = self.linear(hidden / self.temperature).pow(2).sum()
        SEEN.append((loss.item(), self.calm.training, self.drop.training, self.temperature))
        return self.divided(loss, count)


class Tied(Net):
    """Two layers with one weight, and a buffer that only code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        if len(self.cache) < 6 + batch_idx:
            self.cache = torch.arange(6.0 + batch_idx)
        return super().training_step((self.second(self.first(x)), count), batch_idx)


class Mean(Net):
    """A buffer goes bad in a step whose loss and gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        self.mean.copy_(self.divided(x.sum(), count))
        return self.linear(x).pow(2).sum()


class Root(Net):
    """The loss is finite, its gradient is not: the slope of a square root at 0."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        hidden = self.linear(x)
        return hidden.sum() + (hidden * count).pow(2).sum().add(self.epsilon()).sqrt()

    @staticmethod
    def epsilon() -> float:
        return 0.0


class Careful(Net):
    """Catches every error, around every part of the step that it can get at."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        try:
            optimizer.step(closure=optimizer_closure)
        except Exception:
            SEEN.append("caught")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        SEEN.append("before the update")

    def on_after_backward(self) -> None:
        SEEN.append("after backward")


class Adversarial(pl.LightningModule):
    """Two optimizers take turns in a step; the second one's loss goes bad."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(3, 1), nn.Linear(3, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        x, count = batch
        first, second = self.optimizers()
        for optimizer, layer in ((first, self.one), (second, self.two)):
            self.toggle_optimizer(optimizer)
            total = (self.one(x) * layer(x)).pow(2).sum()
            SEEN.append(total.item())
            if layer is self.two:
                total = Net.divided(self, total, count)
            optimizer.zero_grad()
            self.manual_backward(total)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    @staticmethod
    def divisor(count: Tensor) -> Tensor:
        return Net.divisor(count)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.one, self.two)]


class Half(Net):
    """Exceeds what half precision can hold; counts how often it was cast."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        hidden = self.linear(x)
        SEEN.append(str(hidden.dtype))
        return self.divided(hidden.float().pow(2).sum(), count)


class Configured(pl.LightningModule):
    """Arguments of many kinds; a class attribute is code and not state."""

    scale: ClassVar[float] = 1.0

    def __init__(self, sizes: list[int], activation: Any, weight: Tensor, name: str = "x", options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(*sizes)
        self.activation = activation
        self.register_buffer("weight", weight)
        self.options = options

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, count = batch
        SEEN.append((self.hparams["sizes"], self.activation, self.weight.tolist(), self.hparams["name"], self.options))
        total = (self.activation(self.linear(x)) * self.weight).sum() * self.scale
        return total + (total - total) / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(count: int = 3, bad: int | None = 1) -> list[Batch]:
    """Of two samples each; that at `bad` divides by 0."""
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(2, 3, generator=generator), torch.tensor(float(i != bad))) for i in range(count)]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Endless:
    """A loader that does not tell its length."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def capture(
    module: Any,
    folder: Path,
    data: Iterable[Any] | None = None,
    *,
    trainer: Callable[..., Any] = pl.Trainer,
    settings: dict[str, Any] | None = None,
    endless: bool = False,
    **options: Any,
) -> Path:
    """Train until the fault, and return the one bundle that must be there.

    Args:
        module: to train.
        folder: for the bundle.
        data: batches; those of :func:`batches` if there are none.
        trainer: the Trainer's class.
        settings: of NaNCapture.
        endless: whether the loader does not tell its length.
        options: of the Trainer.
    """
    callbacks = [*options.pop("callbacks", []), NaNCapture(folder, **(settings or {}))]
    batched = list(batches() if data is None else data)
    loader = Endless(batched) if endless else DataLoader(batched, batch_size=None)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.suppress(NonFiniteError):
        warnings.simplefilter("ignore")
        trainer(
            **{**QUIET, "max_epochs": 2, "default_root_dir": os.fspath(folder), **options, "callbacks": callbacks}
        ).fit(module, loader)
    (path,) = find_bundles(folder)
    return path
