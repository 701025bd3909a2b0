"""A template as people start from: Hydra instantiates module, network, datamodule, and the optimizer as a partial."""

import hydra
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from omegaconf import OmegaConf
from quiet import MENDED, QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = """
data:
  _target_: with_hydra.Digits
  batch_size: 4
  faulty: false
model:
  _target_: with_hydra.LitClassifier
  net: {_target_: with_hydra.SimpleNet, sizes: [3, 8, 2]}
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01, weight_decay: 0.0}
  scheduler: {_target_: torch.optim.lr_scheduler.StepLR, _partial_: true, step_size: 2}
  compile: false
trainer:
  _target_: lightning.pytorch.Trainer
  max_epochs: 2
"""


class Digits(LightningDataModule):
    """Knows the mean that the module subtracts."""

    def __init__(self, batch_size: int, faulty: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.mean = None

    def setup(self, stage):
        values = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        if self.hparams.faulty:
            values[21] *= 1e4
        self.data = TensorDataset(values, torch.arange(24) % 2)
        self.mean = values[:20].mean(0)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)


class SimpleNet(nn.Module):
    def __init__(self, sizes) -> None:
        super().__init__()
        first, middle, last = sizes
        self.layers = nn.Sequential(nn.Linear(first, middle), nn.ReLU(), nn.Linear(middle, last))

    def forward(self, x):
        return self.layers(x)


class LitClassifier(LightningModule):
    """The logarithm of a probability that underflows to 0."""

    def __init__(self, net, optimizer, scheduler, compile) -> None:  # noqa: A002, the template's own name
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x - self.trainer.datamodule.mean)
        if MENDED:
            return nn.functional.cross_entropy(logits, y)
        return nn.functional.nll_loss(torch.log(logits.softmax(-1)), y)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.hparams.scheduler(optimizer=optimizer)}}


def template(callbacks, faulty):
    config = OmegaConf.create(CONFIG)
    config.data.faulty = faulty
    data, model = hydra.utils.instantiate(config.data), hydra.utils.instantiate(config.model)
    trainer: Trainer = hydra.utils.instantiate(config.trainer, callbacks=callbacks, **QUIET)
    trainer.fit(model=model, datamodule=data)
    return model


TRAININGS = [template]


def mend():
    """The script itself is mended."""
