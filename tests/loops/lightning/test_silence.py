"""The logger of steps that are run again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lightning.pytorch.loggers import Logger

from pytest_nancapture.loops.lightning.silence import Nothing, silent_logger

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing() -> None:
    """Whatever user code does with an experiment works, and leads nowhere."""
    nothing = Nothing()
    nothing.summary["best"] = 1
    with nothing.run(name="x") as run:
        run.config["lr"].update(a=1)
    assert nothing is nothing.add_image("x", step=1).more[0]
    assert list(nothing.history) == []
    assert not hasattr(nothing, "__array__")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_silent_logger(tmp_path: Path, package: str) -> None:
    """A logger of the Lightning in use, with the methods of all loggers, and a folder for what is written there."""
    pytest.importorskip(package, reason="the older name of the package is another package")
    logger = silent_logger(package, str(tmp_path))
    assert (package == "lightning.pytorch") == isinstance(logger, Logger)
    logger.log_metrics({"a": 1.0}, step=1)
    logger.log_hyperparams({"a": 1})
    logger.log_image("key", images=[1])
    logger.experiment.anything(1)
    logger.finalize("failed")
    assert str(tmp_path) == logger.log_dir == logger.save_dir
    assert list(tmp_path.iterdir()) == []
