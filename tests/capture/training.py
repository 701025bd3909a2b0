"""Small training runs for the tests of capture."""

import logging
import warnings
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.bundle.bundle import Bundle

for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


def fit(module: pl.LightningModule, batches: Iterable[Any], capture: NaNCapture | None, **kwargs: Any) -> pl.Trainer:
    """Train quietly on the CPU, the batches as they are."""
    callbacks = [*kwargs.pop("callbacks", []), *([capture] if capture is not None else [])]
    trainer = pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        },
        callbacks=callbacks,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(list(batches), batch_size=None))
    return trainer


def capture_one(module: pl.LightningModule, batches: Iterable[Any], folder: Any, **kwargs: Any) -> Bundle:
    """Train until the fault is raised, and open the one bundle that must be there."""
    options = {name: kwargs.pop(name) for name in ("confirm", "optimizer_history", "factory") if name in kwargs}
    try:
        fit(module, batches, NaNCapture(folder, **options), **kwargs)
    except NonFiniteError:
        pass
    else:
        raise AssertionError("nothing was captured")
    (path,) = find_bundles(folder)
    return Bundle.open(path)
