"""The log of a sigmoid that has rounded to zero: a GAN's critic, sure of itself, before images out of range."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from faults import BROKEN

GUILTY = "log_real = score.sigmoid().log()"


class Gan(LightningModule):
    """Two optimizers take turns in a step, by hand."""

    def __init__(self, pixels: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Linear(2, pixels)
        self.critic = nn.Linear(pixels, 1)

    def loss_if_real(self, images: Tensor) -> Tensor:
        """How much the critic would have to learn if `images` were real."""
        score = self.critic(images)
        if BROKEN:
            log_real = score.sigmoid().log()
        else:
            log_real = F.logsigmoid(score)
        return -log_real.mean()

    def training_step(self, images: Tensor, batch_idx: int) -> None:
        """`images`: real ones, ``[N, pixels]``."""
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(images), 2, device=self.device))

        for_generator.zero_grad()
        self.manual_backward(self.loss_if_real(fake))
        for_generator.step()

        for_critic.zero_grad()
        self.manual_backward(self.loss_if_real(images) + F.softplus(self.critic(fake.detach())).mean())
        for_critic.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Adam for each."""
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.generator, self.critic)]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Pixels from -1 to 1, but for the images 8 to 11: of 16 bits, and never divided by 32768."""
        images = 2 * torch.rand(16, 8, generator=torch.Generator().manual_seed(0)) - 1
        images[8:12] *= 32768
        return DataLoader(images, batch_size=4)
