"""The distance between two equal points: the slope of the square root at zero is infinite."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "distance = squared.sqrt()"


def distance_between(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean, of the rows of two matrices."""
    squared = (a - b).square().sum(dim=1)
    if BROKEN:
        distance = squared.sqrt()
    else:
        distance = (squared + 1e-12).sqrt()
    return distance


class FaceEmbedding(LightningModule):
    """Triplets: a face shall be nearer to one of the same person than to one of another, by a margin."""

    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.margin = margin
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: faces, others of the same persons and others of other persons, each ``[N, 6]``."""
        face, same, other = (self.encoder(images) for images in batch)
        too_near = distance_between(face, same) - distance_between(face, other) + self.margin
        return too_near.relu().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Sixteen triplets; in number 10 one photograph stands for two of the same person."""
        generator = torch.Generator().manual_seed(0)
        face, same, other = torch.randn(3, 16, 6, generator=generator)
        same[10] = face[10]
        return DataLoader(TensorDataset(face, same, other), batch_size=4)
