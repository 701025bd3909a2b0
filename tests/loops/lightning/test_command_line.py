"""A module that LightningCLI made of a configuration is built from it again, as the command line had it."""

import subprocess
import sys

import pytest

from pytest_nancapture import find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import ModuleRecord
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import RebuildError
from pytest_nancapture.step.rebuild import build_module

pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse: it comes with the extra 'integration'")

SCRIPT = """
from collections.abc import Callable

import torch
from torch import nn
import {package} as pl
from {package}.cli import LightningCLI
from pytest_nancapture import NaNCapture


class Body(nn.Module):
    def __init__(self, width: int = 3, act: nn.Module | None = None):
        super().__init__()
        self.layer, self.act = nn.Linear(width, 1), act

    def forward(self, x):
        return self.act(self.layer(x))


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        batches = [(torch.ones(4, 3), torch.tensor(float(i != 2))) for i in range(4)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


class Model(pl.LightningModule):
    def __init__(
        self,
        body: nn.Module,
        optimizer: Callable[[list], torch.optim.Optimizer] = torch.optim.Adam,
        scale: float = 1.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.body, self.optimizer, self.scale = body, optimizer, scale

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.body(x).pow(2).mean() * self.scale * (good / good)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    defaults = dict(quiet, max_epochs=1, accelerator="cpu", callbacks=[NaNCapture()])
    LightningCLI(Model, Data, trainer_defaults=defaults, save_config_callback=None)
"""
ARGUMENTS = [
    *("--model.body=main.Body", "--model.body.act=torch.nn.Tanh", "--model.scale=2.5"),
    *("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.25"),
]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_module_made_of_a_configuration(tmp_path, monkeypatch, package):
    """Also classes that the script itself defines, and what was said on the command line."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "main.py").write_text(SCRIPT.replace("{package}", package), "utf-8")
    command = [sys.executable, "main.py", "fit", *ARGUMENTS]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    (path,) = find_bundles(tmp_path / "nan-bundles")
    bundle = Bundle.open(path)
    assert (bundle.fault.reproduced.runs, bundle.manifest.module.missing) == (1, ())
    monkeypatch.chdir(tmp_path)
    result = replay(path)
    assert (result.verdict, bundle.manifest.module.arguments["scale"]) == ("nonfinite", 2.5)


@pytest.mark.parametrize(
    ("instantiator", "path", "problem"),
    [
        ("os.system", {"reference": "torch.nn:Tanh"}, "expected an instantiator of"),
        ("lightning.pytorch.cli.instantiate_module", "os.system", "class_path: expected a class"),
        ("lightning.pytorch.cli.instantiate_module", {"reference": "os:system"}, "a bundle may not name"),
    ],
)
def test_data_names_no_code_of_its_own(instantiator, path, problem):
    """Neither another function to make the module, nor a class that no bundle may name."""
    arguments = {"body": {"dict": [["class_path", path]]}}
    record = ModuleRecord(target="torch.nn:Linear", arguments=arguments, instantiator=instantiator)
    with pytest.raises(RebuildError, match=problem):
        build_module(record, Decoder({}, LiveResolver()), LiveResolver(), lambda *_: None)
