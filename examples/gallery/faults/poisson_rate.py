"""An exponential link and too large a learning rate: each step overshoots further, until exp overflows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "rate = score.exp()"


class ClickCounter(LightningModule):
    """Poisson regression: how many clicks an hour will bring."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.linear = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features ``[N, 3]`` and counts ``[N]``."""
        features, clicks = batch
        score = self.linear(features).squeeze(1)
        if BROKEN:
            rate = score.exp()
        else:
            rate = F.softplus(score)
        return F.poisson_nll_loss(rate, clicks, log_input=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, which takes the slope at its word."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Nothing is wrong with the data."""
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(64, 3, generator=generator)
        return DataLoader(TensorDataset(features, features[:, 0].exp().round()), batch_size=8)
