"""A branch that `where` does not select: its value is dropped, but its slope of infinity times zero is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "curve = torch.exp(x).log1p()"
THRESHOLD = 20.0


def softplus(x: Tensor) -> Tensor:
    """By hand: a straight line, where the curve is one to the last digit."""
    if BROKEN:
        curve = torch.exp(x).log1p()
    else:
        curve = torch.exp(x.clamp(max=THRESHOLD)).log1p()
    return torch.where(x > THRESHOLD, x, curve)


class DurationModel(LightningModule):
    """Predicts how long something takes: a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        nn.init.constant_(self.linear.weight, 0.5)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features ``[N, 3]`` and durations ``[N]``."""
        features, duration = batch
        return F.l1_loss(softplus(self.linear(features).squeeze(1)), duration)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Features around one, but for number 9, which is given in milliseconds."""
        generator = torch.Generator().manual_seed(0)
        features = torch.rand(16, 3, generator=generator)
        duration = features.sum(dim=1)
        features[9] *= 1000
        return DataLoader(TensorDataset(features, duration), batch_size=4)
