"""A replay in a process of its own, where nothing was imported or patched before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.manifest import Healed
from pytest_nancapture.bundle.schema import read
from pytest_nancapture.errors import DeviceUnavailableError, PinError
from pytest_nancapture.shrink.candidate.pool import Pool

_PATIENT = 600.0
"""Seconds for a few replays of a step."""
_LAST_WORDS = 12
"""Lines of a dead replay's stderr that go into the error."""


def replay_afresh(bundle: Path, device: str, *, trace: bool = False) -> dict[str, Any]:
    """Replay a bundle in a fresh process, with today's code.

    Args:
        bundle: its folder.
        device: as for :func:`pytest_nancapture.replay`.
        trace: name the culprit. Where a trace gives no verdict, as when memory runs out, a plain replay is made.

    Returns:
        What ``ReplayResult.as_dict`` gives.

    Raises:
        DeviceUnavailableError: this machine lacks the device.
        PinError: the process gave no verdict.
    """
    command = [sys.executable, "-m", "pytest_nancapture.cli", "replay", "--json", f"--device={device}", str(bundle)]
    options = ["--trace"] if trace else []
    done = subprocess.run(  # noqa: S603, our own
        [*command, *options], capture_output=True, text=True, errors="replace", check=False
    )
    answer = _answer(done.stdout)
    if "verdict" in answer:
        return answer
    error = answer.get("error", {})
    if error.get("type") == DeviceUnavailableError.__name__:
        raise DeviceUnavailableError(error["message"])
    if trace:
        return replay_afresh(bundle, device)
    words = error.get("message") or "\n".join(done.stderr.splitlines()[-_LAST_WORDS:])
    problem = f"the replay ended with exit code {done.returncode} and no verdict"
    raise PinError(f"{bundle}: not pinned: {problem}\n{words}".rstrip())


def heal_afresh(bundle: Path, device: str) -> Healed | None:
    """What the bundle's step would learn with its fault healed; None where that cannot be told."""
    with Pool(bundle, device) as pool:
        (answer,) = pool.ask([{"do": "heal"}], _PATIENT)
    healed = answer.get("healed")
    return read(Healed, healed, "healed") if healed is not None else None


def _answer(text: str) -> dict[str, Any]:
    """The last line that is a replay's answer: code under test may have printed around it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                data: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if "verdict" in data or "error" in data:
                return data
    return {}
