"""Dropout before a normalisation: once in a while it drops all of a sample, which leaves a vector without length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "unit = hidden / hidden.norm(dim=1, keepdim=True)"


class NormalizedFeatures(LightningModule):
    """A classifier of directions."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.Dropout(dropout))
        self.head = nn.Linear(5, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features ``[N, 4]`` and labels ``[N]``."""
        features, labels = batch
        hidden = self.encoder(features)
        if BROKEN:
            unit = hidden / hidden.norm(dim=1, keepdim=True)
        else:
            unit = F.normalize(hidden, dim=1)
        return F.cross_entropy(self.head(unit), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Nothing is wrong with the data; the dice decide."""
        features = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(features, torch.arange(64) % 3), batch_size=4)
