"""The mean over a sentence's words: a sentence without words divides zero by zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "mean = total / count"
PADDING = 0


class SentenceScorer(LightningModule):
    """A score for each sentence, from the mean of its words' embeddings."""

    def __init__(self, vocabulary: int = 20, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.score = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: word numbers ``[N, length]``, padded with zeros, and scores ``[N]``."""
        words, target = batch
        mask = words != PADDING
        total = (self.embedding(words) * mask.unsqueeze(-1)).sum(dim=1)
        count = mask.sum(dim=1, keepdim=True)
        if BROKEN:
            mean = total / count
        else:
            mean = total / count.clamp(min=1)
        return F.mse_loss(self.score(mean).squeeze(1), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Sixteen sentences of one to five words; of number 13 the tokenizer left nothing."""
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(1, 20, (16, 5), generator=generator)
        words[torch.arange(5) > torch.arange(16).unsqueeze(1) % 5] = PADDING
        words[13] = PADDING
        return DataLoader(TensorDataset(words, torch.randn(16, generator=generator)), batch_size=4)
