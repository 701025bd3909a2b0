"""The standard deviation of a single number: an episode of one step divides by its length less one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from faults import BROKEN

GUILTY = "spread = advantage.std()"


class ActorCritic(LightningModule):
    """Policy gradient with a learned baseline and an entropy bonus; advantages have mean 0 and deviation 1."""

    def __init__(self, actions: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.actor = nn.Linear(3, actions)
        self.critic = nn.Linear(3, 1)

    def training_step(self, episode: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """`episode`: states ``[T, 3]``, the actions taken ``[T]`` and the returns ``[T]``."""
        states, actions, returns = episode
        values = self.critic(states).squeeze(1)
        advantage = returns - values.detach()
        if BROKEN:
            spread = advantage.std()
        else:
            spread = advantage.std(correction=0)
        advantage = (advantage - advantage.mean()) / (spread + 1e-8)
        log_policy = self.actor(states).log_softmax(dim=1)
        taken = log_policy.gather(1, actions.unsqueeze(1)).squeeze(1)
        entropy = -(log_policy.exp() * log_policy).sum(dim=1).mean()
        return F.mse_loss(values, returns) - (taken * advantage).mean() - 0.01 * entropy

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor, Tensor]]:
        """Four episodes; the third ends at once."""
        generator = torch.Generator().manual_seed(0)
        episodes = [
            (
                torch.randn(length, 3, generator=generator),
                torch.randint(2, (length,), generator=generator),
                torch.randn(length, generator=generator),
            )
            for length in (5, 7, 1, 4)
        ]
        return DataLoader(episodes, batch_size=None)
