"""A loss for each object found, and a micro-batch without objects: one of four spoils the accumulated gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "box_loss = error.sum() / objects"
ACCUMULATE = 4


class Detector(LightningModule):
    """For each place in an image: whether there is an object, and its box."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(width, 6), nn.Tanh())
        self.objectness = nn.Linear(6, 1)
        self.box = nn.Linear(6, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features ``[N, places, width]``, objects ``[N, places]`` (1 or 0), boxes ``[N, places, 4]``."""
        features, is_object, boxes = batch
        hidden = self.backbone(features)
        error = (self.box(hidden) - boxes).abs().sum(dim=2) * is_object
        objects = is_object.sum()
        if BROKEN:
            box_loss = error.sum() / objects
        else:
            box_loss = error.sum() / objects.clamp(min=1)
        return box_loss + F.binary_cross_entropy_with_logits(self.objectness(hidden).squeeze(2), is_object)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Two images a micro-batch; on the images 12 and 13 there is nothing to see."""
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(16, 3, 5, generator=generator)
        is_object = ((torch.arange(16).unsqueeze(1) + torch.arange(3)) % 3 == 0).float()
        is_object[12:14] = 0
        return DataLoader(TensorDataset(features, is_object, torch.rand(16, 3, 4, generator=generator)), batch_size=2)
