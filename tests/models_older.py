"""As :mod:`models`, from the package that Lightning was before."""

from __future__ import annotations

from typing import Any

import models
import pytorch_lightning as pl
import torch
from torch import nn


class OlderNet(pl.LightningModule):
    """Divides 0 by 0, and notes the Trainer's package."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def training_step(self, batch: models.Batch, batch_idx: int) -> Any:
        x, count = batch
        models.SEEN.append(
            (type(self.trainer).__module__, batch_idx, self.global_step, type(self.logger).__mro__[1].__module__)
        )
        self.log("x", 1.0)
        total = self.linear(x).pow(2).sum()
        return total + (total - total) / models.Net.divisor(count)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
