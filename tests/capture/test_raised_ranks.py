"""One rank's step raises: its exception goes on, and it asks no other rank, nor waits for any."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from in_time import run_in_time
from training import bundles_in

SCRIPT = Path(__file__).with_name("ddp_raise.py")
SECONDS = 180
"""Of which a test takes a few; ranks that wait for each other would take half an hour."""


def run(folder: Path, how: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank ended by, and what was said."""
    command = [sys.executable, str(SCRIPT), str(folder), how, "watched"]
    _, _, errors = run_in_time(command, SECONDS)
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in (0, 1)], errors


@pytest.mark.parametrize(("how", "bundles"), [("unrelated", []), ("nan", ["step-000003-rank-1"]), ("gathers", [])])
def test_the_exception_of_one_rank_goes_on_unchanged(tmp_path, how, bundles):
    """Where the step itself speaks to others, it cannot be run again alone, and the log says so."""
    (other, raised), said = run(tmp_path, how)
    assert (raised["type"], raised["args"]) == ("KeyError", ["width is nan"])
    assert (other["type"], other["notes"]) == ("RuntimeError", [])
    assert (bundles_in(tmp_path / "bundles"), len(raised["notes"])) == (bundles, len(bundles))
    assert ("since it speaks to others" in said) == (how == "gathers")
    assert raised["seconds"] < SECONDS / 3
