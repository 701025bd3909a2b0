"""What a guard costs a training step: nothing / this / the article's / a flag per parameter / anomaly mode.

usage: python tests/benchmarks/overhead.py [--models=mlp,cnn,deep] [--rounds=9] [--threads=2]

The guards take turns within one run, a block of steps each, so that the machine's moods fall on all alike. A guard's
cost is the median over the rounds of (its median step - the median step without any guard in the same round).
"""

from __future__ import annotations

import argparse
import copy
import logging
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from pytest_nancapture import NaNCapture

WARM_UP = 4
MODELS = ("mlp", "cnn", "deep", "transformer")
GUARDS = ("nothing", "this", "article", "flag per parameter", "anomaly mode")


class Net(pl.LightningModule):
    """One of the models; its loss is the mean square of its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = getattr(self, f"_{kind}")()

    def _mlp(self) -> nn.Module:
        """10 million parameters."""
        self.shape: tuple[int, ...] = (128, 1024)
        wide = (nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU())
        return nn.Sequential(*wide, nn.Linear(1024, 1000))

    def _cnn(self) -> nn.Module:
        """Small, with batch norm."""
        self.shape = (64, 3, 32, 32)
        first = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        second = (nn.Conv2d(32, 64, 3, 2), nn.BatchNorm2d(64), nn.ReLU())
        return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def _deep(self) -> nn.Module:
        """A thousand tiny layers: 2,000 parameters to look at, and nearly nothing in them."""
        self.shape = (32, 16)
        return nn.Sequential(*(layer for _ in range(1000) for layer in (nn.Linear(16, 16), nn.Tanh())))

    def _transformer(self) -> nn.Module:
        """Many layers, with dropout."""
        self.shape = (8, 32, 64)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 24)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Article(pl.Callback):
    """What the article does: copies the batch, takes four random states, concatenates all gradients."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = copy.deepcopy(batch)
        self.states = (torch.get_rng_state(), np.random.get_state(), random.getstate())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = torch.cat([p.grad.view(-1) for p in pl_module.parameters() if p.grad is not None])
        if torch.isnan(gradients).any().item():
            raise RuntimeError("nan")


class FlagPerParameter(pl.Callback):
    """A monitor that copies the batch to the host and reads one flag for each parameter."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch.detach().cpu().clone()
        self.states = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all().item():
                raise RuntimeError("nan")


class Switch(pl.Callback):
    """Lets the guards take turns, a block of steps each, within one run; keeps the time of every step."""

    def __init__(self, folder: str, block: int) -> None:
        self.times: dict[str, list[float]] = {guard: [] for guard in GUARDS}
        self._block = block
        self._guards: dict[str, pl.Callback] = {"article": Article(), "flag per parameter": FlagPerParameter()}
        self._folder = folder
        self._step = 0
        self._began = 0.0
        self._steps: list[float] = []

    @property
    def _name(self) -> str:
        turn, round_ = self._step // self._block % len(GUARDS), self._step // self._block // len(GUARDS)
        return GUARDS[turn if round_ % 2 == 0 else -1 - turn]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._step % self._block == 0:
            self._steps = []
            torch.autograd.set_detect_anomaly(self._name == "anomaly mode")
            if self._name == "this":
                self._guards["this"] = NaNCapture(self._folder)
                self._guards["this"].on_train_start(trainer, pl_module)
        self._began = time.perf_counter()
        if self._name in ("article", "flag per parameter"):
            self._guards[self._name].on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._name in ("article", "flag per parameter"):
            self._guards[self._name].on_before_optimizer_step(trainer, pl_module, optimizer)

    def after_step(self, trainer: Any, pl_module: Any) -> None:
        """Called after all hooks of the micro-batch."""
        self._steps.append(time.perf_counter() - self._began)
        self._step += 1
        if self._step % self._block == 0:
            self._step -= 1
            self.times[self._name].append(statistics.median(self._steps[WARM_UP:]))
            if self._name == "this":
                self._guards["this"].teardown(trainer, pl_module, "fit")
            self._step += 1


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same batch, again and again."""

    def __init__(self, batch: torch.Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.batch] * self.steps)


def step_times(kind: str, rounds: int, block: int) -> dict[str, list[float]]:
    """For each guard, the median seconds of a step in each of its blocks."""
    torch.manual_seed(0)
    module = Net(kind)
    with tempfile.TemporaryDirectory() as folder:
        switch = Switch(folder, block)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=[switch], **quiet)
        original = trainer._logger_connector.on_batch_end
        trainer._logger_connector.on_batch_end = lambda: (original(), switch.after_step(trainer, module))
        steps = rounds * len(GUARDS) * block
        loader = torch.utils.data.DataLoader(Batches(torch.randn(module.shape), steps), batch_size=None)
        trainer.fit(module, loader)
    return switch.times


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS[:3]), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=16, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    machine = f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    print(f"{machine}, medians of {options.rounds} rounds\n")
    print(f"| model | {' | '.join(GUARDS[1:])} | this / article |\n|---|{'---|' * len(GUARDS)}")
    for kind in options.models.split(","):
        found = step_times(kind, options.rounds, options.block)
        base = statistics.median(found["nothing"])
        cost = {
            guard: statistics.median(t - n for t, n in zip(times, found["nothing"], strict=True)) / base
            for guard, times in found.items()
        }
        cells = " | ".join(f"{cost[guard]:+.1%}" for guard in GUARDS[1:])
        print(f"| {kind} | {cells} | {cost['this'] / cost['article']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
