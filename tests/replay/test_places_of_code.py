"""Where a replay looks for the code of a script that was run from another folder."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_nancapture import find_bundles, replay

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import torch
import lightning.pytorch as pl
from pytest_nancapture import NaNCapture


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean() * (batch[1] / batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    batches = [(torch.ones(2, 3), torch.tensor(float(i != 2))) for i in range(4)]
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[NaNCapture()], **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(batches, batch_size=None))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the code, and that in which it was run as ``../../code/train.py``."""
    top = tmp_path_factory.mktemp("places")
    code, here = top / "deep" / "down" / "code", top / "runs" / "one"
    code.mkdir(parents=True)
    here.mkdir(parents=True)
    (code / "train.py").write_text(SCRIPT, "utf-8")
    command = [sys.executable, "../../deep/down/code/train.py"]
    done = subprocess.run(command, cwd=here, text=True, capture_output=True)
    assert f"reproduced 1 of 1\nnancapture: replay   cd {code} && pytest --nan-bundles={here}" in done.stderr
    return code, here


def test_from_the_folder_of_the_run(run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason says where the code was, and what to do."""
    code, here = run
    monkeypatch.chdir(here)
    (path,) = find_bundles(here)
    result = replay(path)
    assert result.verdict == "error"
    assert result.reason.endswith(
        f"it was in {code} when it was captured: run pytest there, or set NANCAPTURE_CODE={code}"
    )


@pytest.mark.parametrize("how", ["cd", "NANCAPTURE_CODE", "sys.path"])
def test_with_the_code_in_sight(how: str, run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pytest is run, where the variable says, or where Python imports from, as pytest's ``pythonpath``."""
    code, here = run
    monkeypatch.chdir(code if how == "cd" else here)
    if how == "sys.path":
        monkeypatch.syspath_prepend(code)
    elif how != "cd":
        monkeypatch.setenv(how, str(code))
    (path,) = find_bundles(here)
    assert replay(path).verdict == "nonfinite"
