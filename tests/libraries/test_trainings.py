"""Published libraries, unchanged: a fault is captured, red in a fresh process, green when mended, without any help."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_nancapture.bundle.bundle import Bundle

HERE = Path(__file__).parent
ENDS = {
    "chemprop.overflow": "NonFiniteError",
    "chemprop.unmeasured": "NonFiniteError",
    "command_line.command_line": "NonFiniteError",
    "darts.default_loss": "NonFiniteError",
    "darts.own_loss": "NonFiniteError",
    "gluonts.deepar": "ValueError",
    "hydra.template": "NonFiniteError",
    "neuralforecast.feature": "Exception",
    "pytorch_forecasting.transformer": "RuntimeError",
    "pytorch_forecasting.recurrent": "ValueError",
    "pytorch_forecasting.own_loss": "RuntimeError",
    "pytorch_tabular.embedding": "NonFiniteError",
    "scvi.plain": "NonFiniteError",
    "scvi.raising": "ValueError",
}
"""Each training, and what ends it: the callback, or the library over its own NaN."""
NEEDS = {"command_line": "jsonargparse"}
THERE = [name for name in dict.fromkeys(t.partition(".")[0] for t in ENDS) if find_spec(NEEDS.get(name, name))]
pytestmark = [
    pytest.mark.skipif(
        set(THERE) <= {"command_line", "hydra"},
        reason="pip install -e '.[libraries]' brings the libraries of these tests",
    ),
    pytest.mark.xdist_group("libraries"),
]
EACH = pytest.mark.parametrize("training", ENDS)
CONFTEST = """
import importlib, os

if "MENDED" in os.environ:
    for name in os.environ["LIBRARIES"].split():
        importlib.import_module(f"with_{name}").mend()
"""


def run(work: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment |= {"LIBRARIES": " ".join(THERE), **variables}
    return subprocess.run([sys.executable, *command], cwd=work, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The folder with all bundles, and what each training told of itself and said in its log."""
    work = tmp_path_factory.mktemp("libraries")
    with ThreadPoolExecutor(2) as pool:
        done = dict(
            zip(THERE, pool.map(lambda name: run(work, str(HERE / "one_library.py"), name), THERE), strict=True)
        )
    told = {}
    for name, finished in done.items():
        lines = [line for line in finished.stdout.splitlines() if line.startswith("TOLD ")]
        assert finished.returncode == 0, f"{name}: {finished.stderr[-3000:]}"
        for line in lines:
            of_one = json.loads(line.removeprefix("TOLD "))
            told[of_one.pop("training")] = of_one
    return work, told, {name: finished.stderr for name, finished in done.items()}


@pytest.fixture(scope="module")
def verdicts(captured):
    """Of every training with the code as it was, and once mended; each in a process of its own for all libraries."""
    work = captured[0]
    (work / "conftest.py").write_text(CONFTEST)

    def replayed(name: str) -> dict[str, str]:
        options = ("--nan-bundles=bundles", f"--junitxml={name}.xml", "-p", "no:cacheprovider", "-W", "ignore")
        run(work, "-m", "pytest", "-q", *options, **({"MENDED": "1"} if name == "mended" else {}))
        found = {}
        for case in ElementTree.parse(work / f"{name}.xml").iter("testcase"):
            _, library, training, *_ = str(case.get("classname")).split(".")
            found[f"{library}.{training}"] = {p.get("name"): p.get("value") for p in case.iter("property")}
        return {training: properties["nan_verdict"] for training, properties in found.items()}

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("broken", "mended"), pool.map(replayed, ("broken", "mended")), strict=True))


def skip_if_missing(training: str) -> None:
    library = training.partition(".")[0]
    if library not in THERE:
        pytest.skip(f"{NEEDS.get(library, library)} is not installed")


@EACH
def test_the_callback_leaves_no_trace_in_the_weights(training, captured):
    """They are the same to the bit with and without it, and a healthy run leaves no bundle."""
    skip_if_missing(training)
    told = captured[1][training]
    assert (told["is_finite"], told["is_same"], told["was_quiet"]) == (True, True, True)


@EACH
def test_the_fault_is_captured_and_proven(training, captured):
    """What ends the run is what would have ended it, and the bundle's fault came back in a fresh process."""
    skip_if_missing(training)
    work, told, _ = captured
    (bundle,) = (work / "bundles" / training.replace(".", "/")).iterdir()
    reproduced = Bundle.open(bundle).fault.reproduced
    assert (ENDS[training], 1, 1, "fresh") == (told[training]["ended"], reproduced.runs, reproduced.of, reproduced.how)


@pytest.mark.parametrize("library", dict.fromkeys(training.partition(".")[0] for training in ENDS))
def test_nobody_is_asked_for_help(library, captured):
    """No line says that bundles need a factory, a hook or another argument."""
    skip_if_missing(f"{library}.")
    lines = captured[2][library].splitlines()
    assert [line for line in lines if "without help" in line or "no bundle" in line or "unproven" in line] == []


@EACH
def test_it_is_red_in_a_fresh_process(training, verdicts):
    """With the library as it is."""
    skip_if_missing(training)
    assert verdicts["broken"].get(training) == "nonfinite"


@EACH
def test_it_is_green_once_mended(training, verdicts):
    """With the faulty function mended, the same weights and the same batch."""
    skip_if_missing(training)
    assert verdicts["mended"].get(training) == "finite"
