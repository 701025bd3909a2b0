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


INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


@pytest.mark.parametrize(
    ("instantiator", "path", "problem"),
    [
        ("os.system", {"reference": "torch.nn:Tanh"}, "expected an instantiator of"),
        ("lightning.pytorch.cli.instantiate_module", "os.system", "class_path: expected a class"),
        ("lightning.pytorch.cli.instantiate_module", {"reference": "os:system"}, "a bundle may not name"),
        ("lightning.pytorch.cli.instantiate_module", {"path": "os.system"}, "class_path: expected a class"),
    ],
)
def test_data_names_no_code_of_its_own(instantiator, path, problem):
    """Neither another function to make the module, nor a class that no bundle may name."""
    arguments = {"body": {"dict": [["class_path", path]]}}
    record = ModuleRecord(target="torch.nn:Linear", arguments=arguments, instantiator=instantiator)
    with pytest.raises(RebuildError, match=problem):
        build_module(record, Decoder({}, LiveResolver()), LiveResolver(), lambda *_: None)


@pytest.mark.parametrize(
    "text",
    [
        "os.system",
        "shutil.os.system",
        "[os.system]",
        '"os\\x2esystem"',
        "{class_path: os.system}",
        "{a: ['os.system']}",
    ],
)
def test_text_that_is_read_as_code(text):
    """jsonargparse imports what a text names, where the argument is a function, and reads text as YAML before."""
    record = ModuleRecord(target="torch.nn:Linear", arguments={"in_features": text}, instantiator=INSTANTIATOR)
    with pytest.raises(RebuildError, match="a bundle may not name <built-in function system>"):
        build_module(record, Decoder({}, LiveResolver()), LiveResolver(), lambda *_: None)


def test_a_configuration_in_an_object(monkeypatch):
    """It is of dicts and lists, into which one can look."""
    node = {"object": "argparse:Namespace", "state": [["class_path", "os.system"]]}
    record = ModuleRecord(target="torch.nn:Linear", arguments={"in_features": node}, instantiator=INSTANTIATOR)
    with pytest.raises(RebuildError, match="expected a configuration of dicts and lists, came a Namespace"):
        build_module(record, Decoder({}, LiveResolver()), LiveResolver(), lambda *_: None)


def test_text_that_only_looks_like_code(tmp_path, monkeypatch):
    """A file's name does not have a script of that name imported."""
    (tmp_path / "fitting.py").write_text("raise SystemExit('it would train')", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = {"in_features": 2, "out_features": 3, "bias": True, "dtype": None, "device": "fitting.csv"}
    record = ModuleRecord(target="torch.nn:Linear", arguments=arguments, instantiator=INSTANTIATOR)
    with pytest.raises(RebuildError, match="device"):
        build_module(record, Decoder({}, LiveResolver()), LiveResolver(), lambda *_: None)
    assert "fitting" not in sys.modules


ANY = """
import torch
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from main import Body, Data
from pytest_nancapture import NaNCapture


def double(x):
    return 2 * x


class Model(pl.LightningModule):
    def __init__(self, body: torch.nn.Module, call: "Callable" = torch.tanh, **more: float):
        super().__init__()
        self.save_hyperparameters()
        self.body, self.call, self.more = body, call, more

    def training_step(self, batch, batch_idx):
        return self.call(self.body(batch[0])).sum() * self.more["scale"] * (batch[1] / batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    defaults = dict(quiet, max_epochs=1, accelerator="cpu", callbacks=[NaNCapture()])
    LightningCLI(
        pl.LightningModule, Data, subclass_mode_model=True, trainer_defaults=defaults, save_config_callback=None
    )
""".replace('"Callable"', "Callable").replace("import torch\n", "from typing import Callable\n\nimport torch\n", 1)


def test_a_module_that_the_command_line_names(tmp_path, monkeypatch):
    """With keywords of any name, and a function of the script's own."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "main.py").write_text(SCRIPT.replace("{package}", "lightning.pytorch"), "utf-8")
    (tmp_path / "any.py").write_text(ANY, "utf-8")
    arguments = ["--model=__main__.Model", "--model.body=Body", "--model.body.act=torch.nn.Tanh"]
    arguments += ["--model.call=__main__.double", "--model.dict_kwargs.scale=3.0"]
    subprocess.run([sys.executable, "any.py", "fit", *arguments], cwd=tmp_path, check=False, capture_output=True)
    (path,) = find_bundles(tmp_path / "nan-bundles")
    bundle = Bundle.open(path)
    assert (bundle.fault.reproduced.runs, bundle.manifest.module.missing) == (1, ())
    monkeypatch.chdir(tmp_path)
    assert replay(path).verdict == "nonfinite"
