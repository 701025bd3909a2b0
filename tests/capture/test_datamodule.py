"""A datamodule that the module's code reads: what of it is in the bundle, and what a replay shows of it."""

import dataclasses
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import Net as Plain
from training import batches, capture_one

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.replay.hooks import ReplayHooks

ROWS = torch.tensor([1.0] * 8 + [0.0] * 4)


class Data(pl.LightningDataModule):
    """The last batch of four is of zeros."""

    may_prepare = True

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.small = 0.0
        self.stats: Any = None
        self.rows: Any = None
        self.seen = 0

    def prepare_data(self) -> None:
        assert self.may_prepare

    def setup(self, stage: str) -> None:
        assert self.may_prepare
        self.rows = TensorDataset(ROWS)
        self.stats = {("x", True): (ROWS.mean(), [ROWS.std()])}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 3

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=4)


class Net(pl.LightningModule):
    """Divides by the batch and what is read of the datamodule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def divisor(self, data: Any) -> Any:
        return data.small

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[:, None]) / (batch[:, None] + self.divisor(self.trainer.datamodule))).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InSetup(Net):
    def setup(self, stage: str) -> None:
        mean, (deviation,) = self.trainer.datamodule.stats[("x", True)]
        self.constant = float(mean - deviation) * 0

    def divisor(self, data: Any) -> Any:
        return self.constant + data.small


class Hparams(Net):
    def divisor(self, data: Any) -> Any:
        return (data.hparams.factor - 2) + data.small


class Counting(Net):
    """The third step divides by 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.datamodule.seen += 1
        return self.layer(batch[:, None]).mean() / (self.trainer.datamodule.seen - 3 + self.trainer.datamodule.small)


class Rows(Net):
    """Reads the data set itself."""

    def divisor(self, data: Any) -> Any:
        return len(data.rows) * 0.0


class Careful(Rows):
    """Catches whatever is raised."""

    def divisor(self, data: Any) -> Any:
        try:
            return super().divisor(data)
        except Exception:
            return 1.0


def captured(module: Any, data: Any, folder: Any) -> Bundle:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[NaNCapture(folder)],
    )
    with pytest.raises(NonFiniteError):
        trainer.fit(module, datamodule=data)
    (path,) = find_bundles(folder)
    return Bundle.open(path)


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Called before a replay: from then on a datamodule fetches nothing."""
    return lambda: monkeypatch.setattr(Data, "may_prepare", False)


@pytest.mark.parametrize("kind", [Net, InSetup, Hparams, Counting])
def test_what_is_read_is_there(kind: Any, tmp_path: Any, unprepared: Any) -> None:
    """Constants, hyperparameters and counters are as they were, and nothing is prepared or set up again."""
    bundle = captured(kind(), Data(), tmp_path)
    assert (bundle.fault.reproduced.runs, bundle.fault.global_step) == (1, 2)
    unprepared()
    assert replay(bundle).verdict == "nonfinite"


def test_what_its_constructor_makes_is_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that equals the constructor's is not in the bundle, so that a fix of it counts."""
    bundle = captured(Net(), Data(), tmp_path)
    original = Data.__init__

    def mended(self: Any, factor: float = 2.0) -> None:
        original(self, factor)
        self.small = 0.1

    monkeypatch.setattr(Data, "__init__", mended)
    assert replay(bundle).verdict == "finite"


def test_what_it_was_given_is_kept(tmp_path: Any) -> None:
    """Hyperparameters are the run's, and not the defaults."""
    bundle = captured(Net(), Data(factor=5.0), tmp_path)
    assert bundle.manifest.datamodule is not None
    assert bundle.manifest.datamodule.arguments == {"factor": 5.0}


def test_only_what_differs_is_written(tmp_path: Any) -> None:
    """Data sets are left out, constants and counters are in."""
    bundle = captured(Counting(), Data(), tmp_path)
    record = bundle.manifest.datamodule
    assert record is not None
    assert sorted({state.path[0][1] for state in record.state}) == ["seen", "stats"]
    assert [missing.where for missing in record.missing] == ["rows"]
    assert {state.path[0][1]: state.value for state in record.state}["seen"] == 2


@pytest.mark.parametrize("kind", [Rows, Careful])
def test_reading_what_is_left_out_is_an_error(kind: Any, tmp_path: Any) -> None:
    """It says which attribute, and which hook helps, even where the code catches the exception."""
    result = replay(captured(kind(), Data(), tmp_path))
    assert result.verdict == "error"
    assert result.reason.startswith("the code reads rows of the datamodule, which the bundle does not hold: it holds")
    assert "pytest_nancapture_trainer_kwargs(bundle) may return {'datamodule': ...}" in result.reason


def test_the_hook_gives_one(tmp_path: Any) -> None:
    """The one that a hook returns is read instead, set up as the hook has left it."""
    bundle = captured(Rows(), Data(), tmp_path)
    data = Data()
    data.setup("fit")
    hooks = ReplayHooks(trainer_kwargs=lambda _: {"datamodule": data})
    assert replay(bundle, hooks=hooks).verdict == "nonfinite"
    assert "teardown" not in vars(data)


class Demanding(Data):
    """Cannot be built again: nobody has kept its argument."""

    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.size = len(connection)


class Sized(Net):
    def divisor(self, data: Any) -> Any:
        return data.small + (data.size - 2)


def test_without_its_arguments_all_attributes_are_state(tmp_path: Any, unprepared: Any) -> None:
    """Where the constructor cannot be called, the object is made empty and filled."""
    bundle = captured(Sized(), Demanding([1, 2]), tmp_path)
    assert bundle.fault.reproduced.runs == 1
    unprepared()
    assert replay(bundle).verdict == "nonfinite"


def test_one_that_is_not_read_is_in_nobodys_way(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A datamodule whose class is gone matters only to code that reads it."""
    bundle = captured(Net(), Data(), tmp_path)
    assert bundle.manifest.datamodule is not None
    gone = dataclasses.replace(bundle.manifest.datamodule, target="nowhere:Data", file=None)
    bundle = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, datamodule=gone))
    assert "the code reads small of the datamodule, which cannot be built: " in replay(bundle).reason
    monkeypatch.setattr(Net, "divisor", lambda *_: 0.0)
    assert replay(bundle).verdict == "nonfinite"


def test_a_run_without_one_has_none(tmp_path: Any) -> None:
    """Loaders alone leave no trace in the bundle."""
    assert capture_one(Plain(), batches(), tmp_path).manifest.datamodule is None
