"""Several devices of a kind that Lightning does not know: which one's random states a replay draws from, and where."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SECONDS = 300
"""The first run on a machine builds the stand-in, half a minute's work."""
ANY = ["auto", "fake:0", "fake:1", "cpu"]
TRAININGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "first": ({"device": "fake:0"}, ANY),
    "second": ({"device": "fake:1"}, ANY),
    "current": ({"device": "fake", "current": 1}, ANY),
    "draws from the second": ({"device": "fake:0", "source": "fake:1"}, ["fake:0"]),
    "draws from the first": ({"device": "fake:1", "source": "fake:0"}, ["fake:1"]),
    "autocast": ({"device": "fake:1", "autocast": "fake"}, ["auto", "cpu"]),
    "idle autocast": ({"device": "fake:1", "autocast": "cuda"}, ["auto", "cpu"]),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of all trainings, which one process went through: a process can have the stand-in but once."""
    for tool in ("g++", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"the stand-in accelerator cannot be built: there is no {tool}")
    command = [sys.executable, str(HERE / "run.py"), str(tmp_path_factory.mktemp("devices"))]
    command.append(json.dumps(list(TRAININGS.values())))
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if "Error building extension" in run.stderr:
        pytest.skip("the stand-in accelerator cannot be built with this torch")
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("[{"))
    return dict(zip(TRAININGS, json.loads(line), strict=True))


def verdicts(row: dict[str, Any]) -> dict[str, str]:
    return {asked: verdict for asked, (verdict, *_) in row["replays"].items()}


@pytest.mark.parametrize(
    ("training", "device"), [("first", "fake:0"), ("second", "fake:1"), ("current", "fake:1")], ids=str
)
def test_the_captured_devices_state_goes_to_the_replays(seen: dict[str, Any], training: str, device: str) -> None:
    """The fault comes back on either device, whichever it was captured on; the CPU draws other numbers."""
    row = seen[training]
    assert (row["captured_on"], row["runs"]) == (device, 1)
    assert verdicts(row) == {"auto": "nonfinite", "fake:0": "nonfinite", "fake:1": "nonfinite", "cpu": "finite"}
    assert [device for _, device, *_ in row["replays"].values()] == ["fake:0", "fake:0", "fake:1", "cpu"]


@pytest.mark.parametrize("training", ["draws from the first", "draws from the second"])
def test_another_devices_state_stays_its_own(seen: dict[str, Any], training: str) -> None:
    """A step that draws from a device that it is not on does so in the replay too."""
    assert set(verdicts(seen[training]).values()) == {"nonfinite"}


@pytest.mark.parametrize("training", TRAININGS)
def test_a_replay_leaves_the_devices_as_they_were(seen: dict[str, Any], training: str) -> None:
    """Their random states, and which of them is the current one."""
    assert all(left_alone for _, _, left_alone, _ in seen[training]["replays"].values())


@pytest.mark.parametrize(("training", "expected"), [("autocast", True), ("idle autocast", False)])
def test_autocast_is_on_where_it_was(seen: dict[str, Any], training: str, expected: bool) -> None:
    """For a kind that Lightning does not know, it switches on that of CUDA, if it is not told otherwise."""
    row = seen[training]
    _, _, _, as_in_training = row["replays"]["auto"]
    assert (row["autocast"], as_in_training, verdicts(row)["auto"]) == (expected, True, "nonfinite")
