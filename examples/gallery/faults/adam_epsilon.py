"""Adam in half precision: its epsilon of 1e-8 rounds to zero, and a weight without gradient becomes 0 / 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = ""  # it is the optimizer's, after a step that was finite
OPTIMIZER_HISTORY = True


class HalfTagger(LightningModule):
    """Tags words; all its weights are of half precision."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(words, 4, dtype=torch.float16)
        self.tag = nn.Linear(4, 3, dtype=torch.float16)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: words ``[N]`` and tags ``[N]``."""
        words, tags = batch
        return F.cross_entropy(self.tag(self.embedding(words)).float(), tags)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose default epsilon is meant for float32."""
        if BROKEN:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-4)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Not every word is in every batch."""
        words = torch.arange(12)
        return DataLoader(TensorDataset(words, words % 3), batch_size=4)
