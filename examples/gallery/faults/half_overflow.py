"""A sum of squares in half precision, which ends at 65504: the square of 256 is too much."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "energy = hidden.square().mean()"


class PenalizedEncoder(LightningModule):
    """An encoder that runs in half precision, and a penalty on how large its activations are."""

    def __init__(self, penalty: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.penalty = penalty
        self.encoder = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features ``[N, 4]`` and labels ``[N]``."""
        features, labels = batch
        with torch.autocast(self.device.type, dtype=torch.float16):
            hidden = self.encoder(features)
            logits = self.head(hidden.tanh())
        if BROKEN:
            energy = hidden.square().mean()
        else:
            energy = hidden.float().square().mean()
        return F.cross_entropy(logits.float(), labels) + self.penalty * energy

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Features of unit size, but for number 9, which nobody has scaled."""
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(16, 4, generator=generator)
        features[9] *= 1000
        return DataLoader(TensorDataset(features, torch.arange(16) % 3), batch_size=4)
