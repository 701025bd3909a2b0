"""Tiny modules whose faults need one thing each; `FIXED` mends them all."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

FIXED = False


class Net(pl.LightningModule):
    """Its `loss` is called with what the batch holds."""

    loss: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class OneSample(Net):
    """A division by 0 where a sample's length is 0; its weights are worth more than what it takes to make them anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 64)

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        eps = 1e-6 if FIXED else 0.0
        return (self.layer(x).sum(1) / (length + eps)).abs().mean()


class TwoSamples(Net):
    """The distance of a sample to another that is the same."""

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        hidden = self.layer(x)
        square = (hidden[1:] - hidden[:-1]).pow(2).sum(1)
        return (square + (1e-6 if FIXED else 0.0)).sqrt().sum()


class Weighty(Net):
    """Overflows where a weight is large."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(4, 4)
        self.other = nn.Linear(4, 64)

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        logits = self.big(x)
        if FIXED:
            logits = logits / 1000
        return logits.exp().sum() + self.other(x).pow(2).mean() + self.layer(x).pow(2).mean()


class Masked(Net):
    """A mean over a mask, which may be empty."""

    def loss(self, x: Tensor, mask: Tensor) -> Tensor:
        total = mask.sum()
        return (self.layer(x).pow(2).sum(1) * mask).sum() / (total.clamp(min=1) if FIXED else total)


class Drawn(Net):
    """Bad where a number that is drawn is a rare one."""

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        divisor = torch.rand(()).lt(0.99).float()
        return self.layer(x).pow(2).sum() / (divisor.clamp(min=1) if FIXED else divisor)


class Wide(Net):
    """Large tensors: an image and its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def loss(self, image: Tensor, mask: Tensor) -> Tensor:
        hidden = self.norm(self.conv(image)).mean(1)
        total = mask.flatten(1).sum(1)
        share = (hidden * mask).flatten(1).sum(1) / (total.clamp(min=1) if FIXED else total)
        return share.pow(2).mean() + self.layer.weight.pow(2).sum() + self.layer.bias.sum()


class Graph(Net):
    """Nodes with edges between them: a mean over the neighbours of a node that has none."""

    def loss(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.layer(x)
        source, target = edges
        total = torch.zeros_like(hidden).index_add(0, target, hidden[source])
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(edges.shape[1]))
        return (total / (degree.clamp(min=1) if FIXED else degree)[:, None]).pow(2).sum()


class Lists(Net):
    """Samples of different sizes, in lists."""

    def loss(self, images: list[Tensor], names: list[str]) -> Tensor:
        assert len(images) == len(names)
        return torch.stack([(self.layer(x).pow(2).sum(1) + (1e-6 if FIXED else 0)).mean() for x in images]).mean()


class Rude(OneSample):
    """Prints, ends the process on a batch of 3, hangs on one of 2."""

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        sys.stdout.write('{"seen": "not an answer"}\n')
        sys.stdout.flush()
        if len(x) == 4:
            raise SystemExit(3)
        if len(x) == 3:
            os._exit(3)
        if len(x) == 2:
            time.sleep(600)
        return super().loss(x, length)


class Slow(OneSample):
    """Takes its time."""

    def loss(self, x: Tensor, length: Tensor) -> Tensor:
        time.sleep(0.3)
        return super().loss(x, length)


class NanData(Net):
    """Passes on what it is given."""

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        if FIXED:
            x, target = x[target.isfinite()], target[target.isfinite()]
        return (self.layer(x)[:, 0] - target).pow(2).mean()


def batch(size: int = 16, bad: int = 5) -> tuple[Tensor, Tensor]:
    """Samples with their lengths, one of them 0."""
    generator = torch.Generator().manual_seed(3)
    length = torch.ones(size)
    length[bad] = 0
    return torch.randn(size, 4, generator=generator), length
