"""What a bundle says of its own proof: replays of it, in fresh processes where that can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import Net, batches, capture_one, fault, fit

from pytest_nancapture import NaNCapture, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.capture.proof import fresh, prove

SCRIPT = """
import logging, pathlib, sys
import lightning.pytorch as pl
import torch
from pytest_nancapture import NaNCapture

logging.basicConfig(format="%(message)s")
SCALE = {"now": 1.0}


class Net(pl.LightningModule):
    factor = 1.0

    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean() * DIVIDED

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    net = Net()
    CHANGE
    loader = torch.utils.data.DataLoader([torch.ones(3)] * 3, batch_size=1)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False, callbacks=[NaNCapture("bundles")])
    try:
        trainer.fit(net, loader)
    except Exception as error:
        print(type(error).__name__)
"""


def run_script(folder: Path, divided: str, change: str) -> tuple[Bundle, str]:
    """A script of somebody's that was run as it is, and what it said."""
    (folder / "train.py").write_text(SCRIPT.replace("DIVIDED", divided).replace("CHANGE", change))
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("NonFiniteError\n"), done.stderr
    (path,) = (folder / "bundles").iterdir()
    return Bundle.open(path), done.stderr


@pytest.mark.parametrize(
    ("divided", "change", "expected", "said"),
    [
        ("(1 / torch.tensor(self.scale))", "net.scale = 0.0", (1, 1), "reproduced 1 of 1\n"),
        ("(1 / torch.tensor(SCALE['now']))", "SCALE['now'] = 0.0", (0, 1), "a global, an attribute of a class"),
        ("(1 / torch.tensor(self.factor))", "Net.factor = 0.0", (0, 1), "a global, an attribute of a class"),
    ],
    ids=["attribute", "global", "class"],
)
def test_a_fresh_process_tells_what_the_training_process_cannot(divided, change, expected, said, tmp_path):
    """An attribute that the script sets is state, and in the bundle; a global or one of the class is in none."""
    bundle, log = run_script(tmp_path, divided, change)
    proof = bundle.fault.reproduced
    assert (proof.runs, proof.of, proof.how) == (*expected, "fresh")
    assert said in log


class Fragile(Net):
    """Reads what no bundle holds: the place in an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.values = iter([1.0, 1.0, 1.0, 1.0, 0.0] + [1.0] * 9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean() * fault(next(self.values) * batch[1])


def test_a_place_that_nobody_can_look_into_is_pointed_to(tmp_path, caplog):
    """The live step cannot be rerun over it either, but what is opaque is named."""
    bundle = capture_one(Fragile(), batches(bad=[]), tmp_path)
    assert bundle.fault.reproduced.runs == 0


class Unwritable(Net):
    """A lambda that the script hands over decides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = torch_identity

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weigh(self.layer(batch[0]).pow(2).mean()) * fault(batch[1])


def torch_identity(value: Any) -> Any:
    return value


def test_state_that_cannot_be_written_is_named_and_nothing_is_claimed(tmp_path, caplog):
    """Neither in the log nor in the bundle; a replay that is finite is vacuous."""
    module = Unwritable()
    module.weigh = lambda value: value * 2
    bundle = capture_one(module, batches(), tmp_path)
    (missing,) = bundle.manifest.module.missing
    assert (missing.where, bundle.fault.reproduced) == ("weigh", Reproduced())
    assert "unproven the bundle lacks state of the run, so nothing is proven: weigh (" in caplog.text
    assert "reproduced" not in caplog.text


def test_a_mended_replay_without_that_state_is_vacuous(tmp_path, monkeypatch):
    """It says what would make it pass; a module that somebody builds for it can."""
    module = Unwritable()
    module.weigh = lambda value: value * 2
    bundle = capture_one(module, batches(), tmp_path)
    monkeypatch.setattr(Unwritable, "training_step", lambda self, batch, _: self.layer(batch[0]).pow(2).mean())
    result = replay(bundle)
    assert result.verdict == "vacuous"
    assert "the bundle lacks state of the run (weigh)" in result.reason
    assert "pytest_nancapture_module(bundle)" in result.reason
    assert replay(bundle, module=Unwritable()).verdict == "finite"


def test_a_proof_that_fails_leaves_the_bundle(tmp_path, monkeypatch, caplog):
    """As it is, and says so."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(prove, "FRESH", True)
    monkeypatch.setattr(prove, "replay_afresh", broken)
    bundle = capture_one(Net(), batches(), tmp_path)
    assert bundle.fault.reproduced == Reproduced()
    assert "the proof failed with OSError: no more processes" in caplog.text


def test_a_fresh_replay_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """The proof is then made in the training process, and says that it was."""

    def slow(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("replay", 60)

    monkeypatch.setattr(prove, "FRESH", True)
    monkeypatch.setattr(prove, "replay_afresh", slow)
    bundle = capture_one(Net(), batches(), tmp_path)
    assert bundle.fault.reproduced == Reproduced(runs=1, of=1, how="here")


def test_one_proof_a_fault_under_skip(tmp_path, monkeypatch):
    """Not one a step."""
    proofs = []
    before = prove.prove
    monkeypatch.setattr(
        "pytest_nancapture.capture.retention.prove", lambda *a, **k: proofs.append(1) or before(*a, **k)
    )

    fit(Net(), batches(8, bad=[2, 4, 6]), NaNCapture(tmp_path, on_capture="skip"))
    assert len(proofs) == 1


def test_a_fresh_process_is_no_rank_of_the_run(monkeypatch):
    """Nor does it belong to a test run."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "PYTEST_CURRENT_TEST")
    monkeypatch.setattr(fresh, "_at_start", lambda: {**dict.fromkeys(ours, "1"), "HOME_GROWN": "1"})
    assert fresh._environment(as_started=True) == {"HOME_GROWN": "1"}


@pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="the system does not tell what a process began with"
)
def test_a_fresh_process_begins_as_the_run_began(monkeypatch):
    """What a script has set in the environment since is in no other process."""
    monkeypatch.setenv("SET_BY_A_SCRIPT", "1")
    assert "SET_BY_A_SCRIPT" not in fresh._environment(as_started=True)
