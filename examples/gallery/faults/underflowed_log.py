"""The log of a softmax: at a low temperature a pair that does not match has a probability of exactly zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "log_match = logits.softmax(dim=1).diagonal().log()"


class ImageTextMatcher(LightningModule):
    """Contrastive learning: of all texts in the batch, the image's own shall be the nearest."""

    def __init__(self, width: int = 6, temperature: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.temperature = temperature
        self.encoder = nn.Linear(width, 4, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: features of images and of their texts, each ``[N, width]``."""
        images, texts = (F.normalize(self.encoder(features), dim=1) for features in batch)
        logits = images @ texts.T / self.temperature
        if BROKEN:
            log_match = logits.softmax(dim=1).diagonal().log()
        else:
            log_match = logits.log_softmax(dim=1).diagonal()
        return -log_match.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Pairs that match but for a little noise, and one, number 18, that says the opposite."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(32, 6, generator=generator)
        texts = images + 0.1 * torch.randn(32, 6, generator=generator)
        texts[18] = -images[18]
        return DataLoader(TensorDataset(images, texts), batch_size=8)
