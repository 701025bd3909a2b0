"""What a guard costs a training step: nothing / this / the article's / a flag per parameter / anomaly mode.

usage: python tests/benchmarks/overhead.py [--models=mlp,cnn,deep] [--rounds=7] [--threads=2]

Rounds are interleaved: in each, every guard trains the same model on the same batches, so that the machine's moods fall
on all alike. A guard's cost is the median over the rounds of (its median step - the median step without any guard).
"""

from __future__ import annotations

import argparse
import copy
import itertools
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


class Clock(pl.Callback):
    """The time from one micro-batch to the next, first among the callbacks."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """The same batch, again and again."""

    def __init__(self, batch: torch.Tensor, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([self.batch] * self.steps)


def step_time(kind: str, guard: str, steps: int) -> float:
    """Median seconds of a step."""
    torch.manual_seed(0)
    module, clock = Net(kind), Clock()
    callbacks: list[pl.Callback] = [clock]
    with tempfile.TemporaryDirectory() as folder:
        if guard == "this":
            callbacks.append(NaNCapture(folder))
        elif guard == "article":
            callbacks.append(Article())
        elif guard == "flag per parameter":
            callbacks.append(FlagPerParameter())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            enable_model_summary=False,
            detect_anomaly=guard == "anomaly mode",
            callbacks=callbacks,
            **quiet,
        )
        loader = torch.utils.data.DataLoader(Batches(torch.randn(module.shape), steps), batch_size=None)
        trainer.fit(module, loader)
    times = clock.times[WARM_UP:]
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS[:3]), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
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
        found: dict[str, list[float]] = {guard: [] for guard in GUARDS}
        for number in range(options.rounds):
            order = GUARDS if number % 2 == 0 else GUARDS[::-1]
            for guard in order:
                found[guard].append(step_time(kind, guard, options.steps))
        base = statistics.median(found["nothing"])
        cost = {
            guard: statistics.median(t - n for t, n in zip(times, found["nothing"], strict=True)) / base
            for guard, times in found.items()
        }
        cells = " | ".join(f"{cost[guard]:+.1%}" for guard in GUARDS[1:])
        print(f"| {kind} | {cells} | {cost['this'] / cost['article']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
