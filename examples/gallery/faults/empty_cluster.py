"""The mean of a cluster's members: one without members poisons a buffer, while loss and gradients are finite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from faults import BROKEN

GUILTY = "means = sums / counts"


class VectorQuantizer(LightningModule):
    """An autoencoder whose code is the nearest of four vectors; each follows the mean of what chose it."""

    codebook: Tensor

    def __init__(self, codes: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.decay = decay
        self.encoder = nn.Linear(codes, codes)
        self.decoder = nn.Linear(codes, codes)
        nn.init.eye_(self.encoder.weight)
        self.register_buffer("codebook", torch.eye(codes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """`batch`: ``[N, codes]``."""
        encoded = self.encoder(batch)
        chosen = torch.cdist(encoded.detach(), self.codebook).argmin(dim=1)
        quantized = self.codebook[chosen]
        self.update_codebook(encoded.detach(), F.one_hot(chosen, len(self.codebook)).to(encoded.dtype))
        decoded = self.decoder(encoded + (quantized - encoded).detach())
        return F.mse_loss(decoded, batch) + 0.25 * F.mse_loss(encoded, quantized)

    @torch.no_grad()
    def update_codebook(self, encoded: Tensor, members: Tensor) -> None:
        """Move each vector a little towards its members; `members` is ``[N, codes]``, of ones and zeros."""
        sums = members.T @ encoded
        counts = members.sum(dim=0).unsqueeze(1)
        if BROKEN:
            means = sums / counts
        else:
            means = torch.where(counts > 0, sums / counts.clamp(min=1), self.codebook)
        self.codebook.lerp_(means, 1 - self.decay)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Four clusters of points, each in every batch; from number 19 on the last one is lacking."""
        corner = torch.arange(24) % 4
        corner[19:] = corner[19:] % 3
        noise = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(torch.eye(4)[corner] + 0.05 * noise, batch_size=8)
