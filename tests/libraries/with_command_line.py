"""LightningCLI with classes as arguments, as a command line names them, and a change of one of their arguments."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from quiet import MENDED, QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, size: int = 4, eps: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(3, size)
        self.eps = eps

    def forward(self, x):
        x = self.layer(x) * x.abs().amax(dim=1, keepdim=True)
        size = x.norm(dim=1, keepdim=True) + self.eps
        return x / (size.clamp(min=1e-3) if MENDED else size)


class Points(LightningDataModule):
    def __init__(self, faulty: bool = False, batch_size: int = 4) -> None:
        super().__init__()
        self.faulty = faulty
        self.batch_size = batch_size

    def train_dataloader(self):
        values = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        if self.faulty:
            values[17] = 0
        return DataLoader(TensorDataset(values), batch_size=self.batch_size)


class Model(LightningModule):
    """A vector of zeros has no direction."""

    def __init__(self, encoder: nn.Module, optimizer: OptimizerCallable = torch.optim.SGD) -> None:
        super().__init__()
        self.encoder = encoder
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return (self.encoder(batch[0]).mean(1) - 1).pow(2).mean() / self.trainer.datamodule.batch_size

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def command_line(callbacks, faulty):
    cli = LightningCLI(
        Model,
        Points,
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={"max_epochs": 2, "callbacks": callbacks, **QUIET},
        args=[
            "--model.encoder=with_command_line.Encoder",
            "--model.encoder.size=6",
            "--model.optimizer=torch.optim.Adam",
            "--model.optimizer.lr=0.02",
            f"--data.faulty={str(faulty).lower()}",
        ],
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    return cli.model


TRAININGS = [command_line]


def mend():
    """The script itself is mended."""
