"""Random images with random labels, the same ones in every run."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SEED = 13
"""Labels depend on it alone; the first batch of 128 that lacks one of 20 classes is number 13, counted from 0."""


class RandomImages(Dataset[tuple[Tensor, Tensor]]):
    """A fixed set of images of noise; image `i` is made when it is asked for, by any worker alike."""

    def __init__(self, length: int, image_size: int, num_classes: int) -> None:
        self.image_size = image_size
        self.labels = torch.randint(num_classes, (length,), generator=torch.Generator().manual_seed(SEED))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.image_size, self.image_size, generator=generator), self.labels[index]


class RandomImageData(LightningDataModule):
    """One epoch of `steps` batches.

    Args:
        steps: number of batches.
        batch_size: images in each.
        image_size: height and width, in pixels.
        num_classes: labels are drawn evenly from this many.
        workers: processes that load; 0 loads in the training process.
    """

    def __init__(
        self, *, steps: int, batch_size: int = 128, image_size: int = 32, num_classes: int = 20, workers: int = 0
    ) -> None:
        super().__init__()
        self.dataset = RandomImages(steps * batch_size, image_size, num_classes)
        self.batch_size = batch_size
        self.workers = workers

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Batches in the order of the data set, whose labels are random already."""
        return DataLoader(
            self.dataset, batch_size=self.batch_size, num_workers=self.workers, pin_memory=torch.cuda.is_available()
        )
