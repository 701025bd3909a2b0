"""The replay's Trainer: it shows user code what the training one showed it, and writes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
from fake_bundles import fake_manifest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision

from pytest_nancapture import replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.loops.lightning.silence import Nothing
from pytest_nancapture.loops.lightning.trainer import WindowLoader, build_trainer, framework_of, set_counters
from pytest_nancapture.replay.hooks import ReplayHooks

RECORD = fake_manifest().trainer


def build(overrides: dict[str, Any] | None = None, *, folder: Path | str = ".", **fields: Any) -> Any:
    record = dataclasses.replace(RECORD, **fields)
    return build_trainer(models.Net(), record, torch.device("cpu"), pl.Callback(), str(folder), overrides or {})


def test_the_captured_settings() -> None:
    """What user code reads from the Trainer, and what decides how a step is made."""
    trainer = build(
        max_epochs=7,
        max_steps=90,
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        precision="bf16-mixed",
    )
    assert (trainer.max_epochs, trainer.max_steps, trainer.accumulate_grad_batches) == (7, 90, 4)
    assert (
        trainer.gradient_clip_val,
        trainer.gradient_clip_algorithm.value,
        trainer.precision,
    ) == (0.5, "value", "bf16-mixed")


def test_nothing_that_writes(tmp_path: Path) -> None:
    """No checkpoint, no progress bar, no logger; where there was a logger, a silent one."""
    trainer = build(folder=tmp_path)
    assert (
        trainer.checkpoint_callback,
        trainer.progress_bar_callback,
        trainer.logger,
        trainer.checkpoint_callbacks,
    ) == (None, None, None, [])
    assert str(tmp_path) == trainer.default_root_dir
    silent = build(folder=tmp_path, logger=True)
    silent.logger.experiment.config["a"].update(b=1)
    silent.logger.log_metrics({"a": 1.0})
    assert str(tmp_path) == silent.logger.log_dir == silent.log_dir
    assert list(tmp_path.iterdir()) == []


def test_half_precision_at_scale_one() -> None:
    """What is not finite then is no overflow of the scaler's making."""
    trainer = build(precision="16-mixed")
    assert (trainer.precision, trainer.precision_plugin.scaler.get_scale()) == ("16-mixed", 1.0)


@pytest.mark.parametrize(
    "overrides",
    [
        {"precision": "64-true"},
        {"plugins": DoublePrecision()},
        {"plugins": [DoublePrecision()]},
    ],
    ids=["precision", "plugin", "plugins"],
)
@pytest.mark.parametrize("captured", ["32-true", "16-mixed", "bf16-mixed"])
def test_another_precision(captured: str, overrides: dict[str, Any]) -> None:
    """A user's hook may ask for one, in whichever way, whatever was captured."""
    assert build(overrides, precision=captured).precision == "64-true"


def test_overrides() -> None:
    """Arguments of the user's win, and their callbacks come after the replay's own."""
    first, second = pl.Callback(), pl.Callback()
    trainer = build({"max_epochs": 99, "callbacks": [first, second], "logger": False}, max_epochs=7, logger=True)
    assert (99, None, [first, second]) == (trainer.max_epochs, trainer.logger, trainer.callbacks[-2:])
    assert first is build({"callbacks": first}).callbacks[-1]


def test_the_package() -> None:
    """That of the module, also where a class in between has the same name."""

    class LightningModule(models.Net):
        pass

    assert framework_of(models.Net()) == framework_of(LightningModule()) == "lightning.pytorch"


def test_the_other_package() -> None:
    """Modules of the older package need its Trainer."""
    models_older = pytest.importorskip("models_older", reason="the older name of the package is another package")
    assert framework_of(models_older.OlderNet()) == "pytorch_lightning"


@pytest.mark.parametrize(
    ("batches", "last", "length", "expected"),
    [(None, False, None, 3), (None, True, None, 2), (None, False, 200, 200), (None, True, 200, 200)],
)
def test_the_loaders_length(batches: None, last: bool, length: int | None, expected: int) -> None:
    """As in training where that was known; else long enough that the window's end is the epoch's only if it was."""
    record = dataclasses.replace(RECORD, last_batch=last, num_training_batches=length)
    assert expected == len(WindowLoader([(3, "a"), (4, "b")], record))


def test_the_loader_sets_the_counters() -> None:
    """As it yields, since the epoch loop sets them back when the epoch starts."""
    trainer = build()
    loader = WindowLoader([(3, "a"), (4, "b")], dataclasses.replace(RECORD, total_batch_idx=203))
    loader.trainer = trainer
    progress = trainer.fit_loop.epoch_loop.batch_progress
    seen = [(batch, progress.current.ready, progress.total.ready) for batch in loader]
    assert seen == [("a", 3, 203), ("b", 4, 204)]


def test_epoch_and_global_step() -> None:
    """Are set before fit."""
    trainer = build()
    set_counters(trainer, dataclasses.replace(RECORD, epoch=3, global_step=812))
    assert (trainer.current_epoch, trainer.global_step) == (3, 812)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (models.Noting, {}),
        (models.Noting, {"max_steps": 40, "max_epochs": 9}),
        (models.Late, {}),
        (models.Late, {"accumulate_grad_batches": 2}),
        (lambda: models.Late(2), {"accumulate_grad_batches": 2}),
        (lambda: models.Late(2), {}),
        (models.Late, {"endless": True}),
        (lambda: models.Late(2), {"endless": True, "accumulate_grad_batches": 2}),
        (lambda: models.Late(1), {"limit_train_batches": 2}),
        (lambda: models.Late(0), {"limit_train_batches": 2, "accumulate_grad_batches": 4}),
        (models.Manual, {}),
    ],
    ids=[
        *(
            "first-epoch",
            "max-steps",
            "second-epoch",
            "accumulated",
            "last-of-epoch-accumulated",
            "last-of-epoch",
            "endless",
        ),
        *("endless-last", "limited", "limited-accumulated", "manual"),
    ],
)
def test_counters(tmp_path: Path, module: Any, options: dict[str, Any]) -> None:
    """All that user code can read of where the training is, and what it draws, is as at capture."""
    made = module()
    bad = 1 if isinstance(made, (models.Late,)) is False else None
    bundle = models.capture(made, tmp_path, models.batches(3, bad=bad), settings={"confirm": 0}, **options)
    window = len(Bundle.open(bundle).manifest.batch.window)
    expected = models.SEEN[-window:]
    models.SEEN.clear()
    result = replay(bundle)
    assert ("nonfinite", expected) == (result.verdict, models.SEEN)


def test_the_older_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured by and replayed in the Trainer of the package that the module is from."""
    older = pytest.importorskip("pytorch_lightning", reason="the older name of the package is another package")
    import models_older

    logger = older.loggers.CSVLogger(tmp_path)
    bundle = models.capture(models_older.OlderNet(), tmp_path, trainer=older.Trainer, logger=logger)
    assert Bundle.open(bundle).manifest.trainer.framework == "pytorch_lightning"
    models.SEEN.clear()
    assert replay(bundle).verdict == "nonfinite"
    assert models.SEEN == [("pytorch_lightning.trainer.trainer", 1, 1, "pytorch_lightning.loggers.logger")]
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert replay(bundle).verdict == "finite"


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]}, "torch.float16"),
        ({"precision": "bf16-mixed"}, "torch.bfloat16"),
        ({"precision": "64-true"}, "torch.float64"),
        ({"precision": "bf16-true"}, "torch.bfloat16"),
    ],
    ids=["16-mixed", "bf16-mixed", "64-true", "bf16-true"],
)
def test_precision(tmp_path: Path, options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step computes in what it computed in, and a mended one is finite in it."""
    bundle = models.capture(models.Half(), tmp_path, **options)
    assert {dtype} == set(models.SEEN)
    models.SEEN.clear()
    assert replay(bundle).verdict == "nonfinite"
    assert [dtype] == models.SEEN
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert replay(bundle).verdict == "finite"


def test_logging(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that log, in whichever way, do so into nothing; files go where they are thrown away."""
    logger = CSVLogger(tmp_path / "logs")
    for folder in (tmp_path / "bundles", logger.log_dir):
        Path(folder).mkdir(parents=True)
    type(logger).log_image = lambda *_: None
    try:
        logger._experiment = Nothing()
        bundle = models.capture(models.Logging(), tmp_path / "bundles", logger=logger)
    finally:
        del type(logger).log_image
    before = sorted(tmp_path.rglob("*"))
    result = replay(bundle)
    assert (result.verdict, result.detail) == ("nonfinite", "")
    assert before == sorted(tmp_path.rglob("*"))


def test_hooks_of_the_module(tmp_path: Path) -> None:
    """The batch is as the step received it, so what moves and changes it does not run again, nor what fetches data.

    The module's own start of the batch runs again: it is code under test.
    """
    bundle = models.capture(models.Hooked(), tmp_path, settings={"confirm": 0})
    expected = models.SEEN[-1]
    models.SEEN.clear()
    assert replay(bundle).verdict == "nonfinite"
    assert [expected] == models.SEEN


def test_a_users_callback(net: Path) -> None:
    """What a hook of the plugin's brings runs in the replay."""
    seen: list[int] = []

    class Watching(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch_idx)

    hooks = ReplayHooks(trainer_kwargs=lambda _: {"callbacks": Watching()})
    assert replay(net, hooks=hooks).verdict == "nonfinite"
    assert seen == [1]


def test_a_kind_of_device_that_lightning_does_not_know(tmp_path: Path) -> None:
    """It would train on the CPU, or refuse; so the device is given with its strategy."""
    device = torch.device("privateuseone", 1)
    trainer = build_trainer(models.Net(), RECORD, device, pl.Callback(), str(tmp_path), {})
    assert (trainer.strategy.root_device, trainer.world_size) == (device, 1)
    mixed = dataclasses.replace(RECORD, precision="bf16-mixed")
    plugin = build_trainer(models.Net(), mixed, device, pl.Callback(), str(tmp_path), {}).precision_plugin
    assert (plugin.precision, plugin.device) == ("bf16-mixed", "privateuseone")


def test_a_strategy_of_the_users_for_such_a_device(tmp_path: Path) -> None:
    """Wins: they know their device."""
    mine = pl.strategies.SingleDeviceStrategy("cpu")
    overrides = {"strategy": mine, "accelerator": "cpu", "devices": 1}
    device = torch.device("privateuseone", 0)
    assert build_trainer(models.Net(), RECORD, device, pl.Callback(), str(tmp_path), overrides).strategy is mine


def test_mixed_precision_that_did_nothing() -> None:
    """Does nothing in the replay."""
    assert build(precision="bf16-mixed", autocasts=False).precision == "32-true"
