"""The mean cross entropy of no targets: in one batch no word was masked, and all labels say "ignore"."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "word_loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)"
IGNORE = -100


class WordMasking(LightningModule):
    """Two tasks: guess the masked words, and whether the sentence is the right way round."""

    def __init__(self, vocabulary: int = 12, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.word = nn.Linear(width, vocabulary)
        self.order = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: words ``[N, length]``, labels ``[N, length]`` of the masked ones, right way round ``[N]``."""
        words, labels, forward = batch
        hidden, last = self.mix(self.embedding(words))
        logits, labels = self.word(hidden).flatten(0, 1), labels.flatten()
        if BROKEN:
            word_loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)
        else:
            masked = (labels != IGNORE).sum().clamp(min=1)
            word_loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / masked
        return word_loss + F.binary_cross_entropy_with_logits(self.order(last[0]).squeeze(1), forward)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """One word in four is masked, by a dice that spares the sentences 8 to 11."""
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(1, 12, (16, 5), generator=generator)
        masked = torch.rand(16, 5, generator=generator) < 0.25
        masked[8:12] = False
        labels = words.where(masked, IGNORE)
        forward = torch.arange(16.0) % 2
        return DataLoader(TensorDataset(words.masked_fill(masked, 0), labels, forward), batch_size=4)
