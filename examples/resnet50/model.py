"""A ResNet-50 whose loss divides by the number of samples that each class has in the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

FIXED = False
"""The switch of the story: True keeps the loss from dividing by zero."""

Batch = tuple[Tensor, Tensor]
"""Images, float32 ``[N, 3, H, W]``, and labels, int64 ``[N]``."""


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut: narrow, look around, widen.

    Args:
        channels_in: channels of the input.
        width: channels inside; the output has four times as many.
        stride: of the middle convolution, and of the shortcut.
    """

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * width
        self.narrow = nn.Conv2d(channels_in, width, 1, bias=False)
        self.narrow_norm = nn.BatchNorm2d(width)
        self.look = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.look_norm = nn.BatchNorm2d(width)
        self.widen = nn.Conv2d(width, channels_out, 1, bias=False)
        self.widen_norm = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels_in, H, W]`` to ``[N, 4 * width, H / stride, W / stride]``."""
        y = F.relu(self.narrow_norm(self.narrow(x)))
        y = F.relu(self.look_norm(self.look(y)))
        return F.relu(self.widen_norm(self.widen(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """The 50-layer residual network: a stem, stages of 3, 4, 6 and 3 bottlenecks, a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate((3, 4, 6, 3)):
            width = 64 * 2**stage
            for place in range(depth):
                blocks.append(Bottleneck(channels, width, stride=2 if stage > 0 and place == 0 else 1))
                channels = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """``[N, 3, H, W]`` to logits ``[N, num_classes]``."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Classifier(LightningModule):
    """Trains a ResNet-50 with one binary cross-entropy for each class."""

    def __init__(self, num_classes: int = 20, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = num_classes
        self.lr = lr
        self.network = ResNet50(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """``[N, 3, H, W]`` to logits ``[N, num_classes]``."""
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean over the classes of each one's own loss."""
        images, labels = batch
        logits = self(images)
        losses = []
        for c in range(self.num_classes):
            target = (labels == c).to(logits.dtype)
            count = torch.count_nonzero(target)
            loss = F.binary_cross_entropy_with_logits(logits[:, c], target, reduction="sum")
            if FIXED:
                count = count.clamp(min=1)
            mean_loss = loss / count
            losses.append(mean_loss)
        return torch.stack(losses).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, as in the article."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
