"""A target that was never measured: the data holds NaN, and no statement of the code is to blame for it."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from faults import BROKEN

GUILTY = ""  # it is the batch


class SensorForecast(LightningModule):
    """Forecasts three sensors from four readings."""

    def __init__(self) -> None:
        super().__init__()
        self.forecast = nn.Linear(4, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """`batch`: readings ``[N, 4]`` and what the sensors said next ``[N, 3]``."""
        readings, target = batch
        error = self.forecast(readings) - target
        if BROKEN:
            loss = error.square().mean()
        else:
            loss = error[target.isfinite()].square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """At time 9 the second sensor was off."""
        generator = torch.Generator().manual_seed(0)
        readings, target = torch.randn(16, 4, generator=generator), torch.randn(16, 3, generator=generator)
        target[9, 1] = float("nan")
        return DataLoader(TensorDataset(readings, target), batch_size=4)
