"""Lightning as a loop that plays bundles: fills :class:`pytest_nancapture.loops.loop.Loop`."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pytest_nancapture.errors import RebuildError
from pytest_nancapture.loops.lightning.player import play as play
from pytest_nancapture.loops.loop import WouldTrain

_PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
_NOISY = (*_PACKAGES, *(f"{package}.utilities.rank_zero" for package in _PACKAGES))
"""Loggers that tell of hardware and more that is about training runs; importing Lightning sets the first ones."""


def check_class(kind: type, source: str) -> None:
    """Refuse what a Trainer cannot run."""
    if not any(base.__name__ == "LightningModule" for base in kind.__mro__):
        raise RebuildError(f"{source}: expected a LightningModule, came {kind.__qualname__}")


@contextmanager
def quiet() -> Iterator[None]:
    """What Lightning says about loaders, workers and loggers is about a training run, and this is none."""
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in _NOISY]
    for logger, _ in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(pytorch_)?lightning(_fabric)?\b")
        try:
            yield
        finally:
            for logger, level in loggers:
                logger.setLevel(level)


@contextmanager
def refusing_to_train(script: Path) -> Iterator[None]:
    """The Trainer's entries raise; of ``pytorch_lightning`` too, where the script may use that."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise WouldTrain

    trainers = [importlib.import_module("lightning.pytorch").Trainer]
    if "pytorch_lightning" in sys.modules or "pytorch_lightning" in script.read_text("utf-8", errors="replace"):
        trainers.append(importlib.import_module("pytorch_lightning").Trainer)
    entries = ("fit", "validate", "test", "predict")
    before = [(trainer, entry, getattr(trainer, entry)) for trainer in trainers for entry in entries]
    for trainer, entry, _ in before:
        setattr(trainer, entry, refuse)
    try:
        yield
    finally:
        for trainer, entry, original in before:
            setattr(trainer, entry, original)
