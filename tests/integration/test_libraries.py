"""Faults in models of other libraries: captured, red in a fresh process, green when mended."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers", reason="pip install -e '.[integration]' brings the libraries of these tests")

CAPTURE = """
import sys
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader
import library_models
from pytest_nancapture import NaNCapture, NonFiniteError

for model in library_models.MODELS:
    torch.manual_seed(0)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[NaNCapture(f"bundles/{model.__name__}")])
    try:
        trainer.fit(model(), DataLoader(list(model.batches()), batch_size=None))
    except NonFiniteError as error:
        print(model.__name__, error.global_step)
"""
NAMES = ("Encoder", "Decoder", "EncoderDecoder", "Diffusion", "Graphs", "Gaussian", "Speech", "Layers")


def run(work: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), **variables}
    return subprocess.run([sys.executable, *command], cwd=work, env=environment, capture_output=True, text=True)


def verdicts(work: Path, **variables: str) -> dict[str, str]:
    options = ("--nan-bundles=bundles", "--junitxml=out.xml", "-p", "no:cacheprovider")
    run(work, "-m", "pytest", "-q", *options, **variables)
    found = {}
    for case in ElementTree.parse(work / "out.xml").iter("testcase"):
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        name = next(name for name in NAMES if f"bundles.{name}." in f"{case.get('classname')}.")
        found[name] = properties["nan_verdict"]
    return found


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    work = tmp_path_factory.mktemp("libraries")
    return work, run(work, "-c", CAPTURE)


def test_each_fault_is_captured_at_its_step(captured):
    """One bundle for each model, at the batch where the fault lies."""
    work, finished = captured
    assert finished.stdout.split("\n")[:-1] == [f"{name} 2" for name in NAMES], finished.stderr[-3000:]
    assert sorted(path.name for path in work.glob("bundles/*/*")) == ["step-000002-rank-0"] * len(NAMES)


def test_each_is_red_in_a_fresh_process(captured):
    """With the code as it was."""
    assert verdicts(captured[0]) == dict.fromkeys(NAMES, "nonfinite")


def test_each_is_green_once_mended(captured):
    """With the mended code, the same weights and the same batch."""
    assert verdicts(captured[0], FIXED="1") == dict.fromkeys(NAMES, "finite")
