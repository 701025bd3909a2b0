"""A class that was typed in: into a notebook's cell, or after a prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_nancapture import find_bundles, replay

FIRST = """
import torch, lightning.pytorch as pl
from pytest_nancapture import NaNCapture, replay
"""
NET = """
import torch
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(3, width)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean() * (batch[1] / batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

"""
FIT = """
batches = [(torch.ones(2, 3), torch.tensor(float(i != 2))) for i in range(4)]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[NaNCapture("b")], **quiet)
try: trainer.fit(Net(2), torch.utils.data.DataLoader(batches, batch_size=None))
except Exception as error: path = error.bundle

"""


def session(text: str, folder: Path) -> Any:
    """What is typed into a fresh interpreter."""
    return subprocess.run([sys.executable], input=text, text=True, cwd=folder, capture_output=True)


def test_a_class_that_was_typed_in(tmp_path: Path) -> None:
    """What works is said at the start, printed after the fault, and works; pytest says what it takes."""
    done = session(f"{FIRST}{NET}{FIT}print(replay(path, module=Net(2)).verdict)\n", tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("nancapture: ")]
    assert said[0].endswith(
        "Net is defined in an interactive session, so no file holds it; replay(path, module=Net(...)) replays one "
        "here; for pytest, put the class into a file (begin its cell with %%writefile net.py) and write from net "
        "import Net"
    )
    assert said[-1] == (
        "nancapture: replay   replay('b/step-000002-rank-0', module=Net(...))   (from pytest_nancapture import replay)"
    )
    assert done.stdout == "nonfinite\n"
    result = replay(tmp_path / "b" / "step-000002-rank-0")
    assert result.reason.startswith("Net was typed into a notebook or an interactive session, so no file holds it: ")


def test_a_class_of_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    """As ``%%writefile`` makes one: it needs no help."""
    (tmp_path / "net.py").write_text(NET, "utf-8")
    done = session(f"{FIRST}from net import Net\n{FIT}", tmp_path)
    assert "without help" not in done.stderr
    assert "reproduced 1 of 1\nnancapture: replay   pytest --nan-bundles=b\n" in done.stderr
    (path,) = find_bundles(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert replay(path).verdict == "nonfinite"
