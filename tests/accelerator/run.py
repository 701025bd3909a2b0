"""Captures and replays on the stand-in accelerator, in a process of its own; prints a JSON list of what came of it.

Usage: ``run.py FOLDER TRAININGS``, the latter a JSON list of pairs: the fields of a :class:`Training`, and devices.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from backend import register
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from pytest_nancapture import NaNCapture, NonFiniteError, replay


class Host(CPUAccelerator):
    """As a user brings it for a device that Lightning does not know."""

    def setup_device(self, device: torch.device) -> None:
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)


class DrawingNet(pl.LightningModule):
    """Goes bad where it draws exactly the number that its batch names, from a device of its choice."""

    def __init__(self, source: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, bad = batch
        SEEN["autocast"] = torch.is_autocast_enabled("fake")
        drawn = torch.rand((), device=self.hparams.source or self.device).to(self.device)
        good = (drawn != bad).float()
        return self.layer(x).pow(2).mean() * (good / good)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


SEEN: dict[str, bool] = {}


@dataclasses.dataclass(frozen=True)
class Training:
    """On which device, `current` being the current one; `source` is drawn from, if not that device."""

    device: str = "fake:0"
    current: int = 0
    source: str | None = None
    autocast: str | None = None


def capture(folder: Path, training: Training) -> tuple[Path, bool]:
    """Train until the third draw, each generator seeded in its own way; the bundle, and whether autocast was on."""
    torch.accelerator.set_device_index(training.current)
    torch.manual_seed(0)
    for index in range(2):
        torch.fake.set_rng_state(torch.Generator().manual_seed(index).get_state(), index)
    drawing = torch.device(training.source or training.device).index
    generator = torch.Generator().manual_seed(training.current if drawing is None else drawing)
    bad = torch.rand(3, generator=generator)[-1]
    plugins = [MixedPrecision("bf16-mixed", training.autocast)] if training.autocast else None
    trainer = pl.Trainer(
        max_epochs=1,
        strategy=SingleDeviceStrategy(torch.device(training.device), accelerator=Host()),
        plugins=plugins,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[NaNCapture(folder)],
    )
    data = torch.utils.data.DataLoader([(torch.ones(2, 3), bad) for _ in range(5)], batch_size=None)
    try:
        trainer.fit(DrawingNet(training.source), data)
    except NonFiniteError as error:
        return Path(str(error.bundle)), SEEN["autocast"]
    finally:
        torch.accelerator.set_device_index(0)
    raise AssertionError(f"nothing was captured: {training}")


def states() -> list[bytes]:
    """What a replay must leave as it was."""
    return [torch.fake.get_rng_state(index).numpy().tobytes() for index in range(2)] + [
        bytes([torch.accelerator.current_device_index()])
    ]


def main() -> None:
    """Each training of the list that was given, replayed on each of its devices."""
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    register()
    told = []
    for number, (fields, devices) in enumerate(asked):
        path, autocast = capture(folder / str(number), Training(**fields))
        manifest = json.loads((path / "bundle.json").read_text())
        row = {"captured_on": manifest["environment"]["device"], "runs": manifest["fault"]["reproduced"]["runs"]}
        replays = {}
        for device in devices:
            before = states()
            result = replay(path, device=device)
            replays[device] = [result.verdict, result.device, states() == before, autocast == SEEN["autocast"]]
            if result.verdict == "error":
                sys.stderr.write(result.reason + result.detail + "\n")
        told.append({**row, "autocast": autocast, "replays": replays})
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
