"""The exponential of a log-variance that nothing bounds: above 88 it exceeds what float32 holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from faults import BROKEN

GUILTY = "std = (0.5 * log_variance).exp()"


class Autoencoder(LightningModule):
    """A variational one: an image becomes a normal distribution over two numbers, and a sample of it an image."""

    def __init__(self, pixels: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Linear(pixels, 4)
        self.decoder = nn.Linear(2, pixels)

    def training_step(self, images: Tensor, batch_idx: int) -> Tensor:
        """`images`: ``[N, pixels]``."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        if BROKEN:
            std = (0.5 * log_variance).exp()
        else:
            std = (0.5 * log_variance.clamp(-10, 10)).exp()
        latent = mean + std * torch.randn_like(std)
        divergence = 0.5 * (mean.square() + std.square() - 1 - log_variance).sum(dim=1).mean()
        return F.mse_loss(self.decoder(latent), images) + 0.1 * divergence

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Pixels around zero; in image 6 one is dead and reads its largest value."""
        images = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
        images[6, 3] = 65535.0
        return DataLoader(images, batch_size=4)
