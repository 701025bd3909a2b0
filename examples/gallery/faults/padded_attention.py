"""Attention to nothing but padding: the softmax of a row that is minus infinity throughout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = "weights = scores.softmax(dim=-1)"


class Reader(LightningModule):
    """Answers a question from the passages that were retrieved for it, by attending to them."""

    def __init__(self, width: int = 4, answers: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.answer = nn.Linear(width, answers)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: questions ``[N, width]``, passages ``[N, P, width]``, which of them exist, answers ``[N]``."""
        question, passages, exists, answer = batch
        scores = torch.einsum("nw,npw->np", self.query(question), self.key(passages))
        scores = scores.masked_fill(~exists, float("-inf"))
        if BROKEN:
            weights = scores.softmax(dim=-1)
        else:
            weights = scores.clamp(min=torch.finfo(scores.dtype).min).softmax(dim=-1)
        read = torch.einsum("np,npw->nw", weights, self.value(passages))
        return F.cross_entropy(self.answer(question + read), answer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """One to three passages a question; for number 11 none was found."""
        generator = torch.Generator().manual_seed(0)
        question = torch.randn(16, 4, generator=generator)
        passages = torch.randn(16, 3, 4, generator=generator)
        exists = torch.arange(3) <= torch.arange(16).unsqueeze(1) % 3
        exists[11] = False
        answer = torch.randint(3, (16,), generator=generator)
        return DataLoader(TensorDataset(question, passages, exists, answer), batch_size=4)
