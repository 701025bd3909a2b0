"""The hyperbolic distance from a point to itself: the slope of acosh at exactly 1 is infinite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "distance = torch.acosh(ratio)"


def distance_between(u: Tensor, v: Tensor) -> Tensor:
    """In the Poincare ball, over the last dimension."""
    room = (1 - u.square().sum(dim=-1)) * (1 - v.square().sum(dim=-1))
    ratio = 1 + 2 * (u - v).square().sum(dim=-1) / room
    if BROKEN:
        distance = torch.acosh(ratio)
    else:
        distance = torch.acosh(ratio.clamp(min=1 + 1e-6))
    return distance


class Taxonomy(LightningModule):
    """Embeds a tree: a word shall be nearer to its parent than to words drawn at random."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(words, 2)
        nn.init.uniform_(self.embedding.weight, -0.3, 0.3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: words ``[N]``, and for each its parent and then others, ``[N, 1 + others]``."""
        words, candidates = batch
        distance = distance_between(self.embedding(words).unsqueeze(1), self.embedding(candidates))
        return F.cross_entropy(-distance, torch.zeros_like(words))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Parents and others come after their word; but word 10 is listed as a parent of its own."""
        words = torch.arange(12)
        candidates = (words.unsqueeze(1) + torch.tensor([1, 4, 7])) % 12
        candidates[10, 0] = 10
        return DataLoader(TensorDataset(words, candidates), batch_size=3)
