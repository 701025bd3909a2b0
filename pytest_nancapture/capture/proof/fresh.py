"""A replay in a process of its own, where nothing was imported, set or patched before. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.paths import started_in
from pytest_nancapture.bundle.values.references import CODE_FOLDERS

_LAST_WORDS = 12
"""Lines of a dead replay's stderr that are told."""
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "LSB_", "PL_", "PYTEST_")
_OF_RANKS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
}
"""Of the environment: with these a replay would take itself for one rank of the run that started it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a fresh process said.

    Attributes:
        result: what ``ReplayResult.as_dict`` gives; empty where there was no verdict.
        error: type and message of what it ended by instead, such as ``DeviceUnavailableError``.
        words: its last ones, where it said neither; empty otherwise.
    """

    result: Mapping[str, Any]
    error: Mapping[str, str]
    words: str = ""


def replay_afresh(
    bundle: Path,
    device: str,
    *,
    trace: bool = False,
    seconds: float | None = None,
    as_started: bool = False,
    code: Path | None = None,
) -> Answer:
    """Replay a bundle in a fresh process, with today's code.

    Args:
        bundle: its folder.
        device: as for :func:`pytest_nancapture.replay`.
        trace: name the culprit.
        seconds: how long it may take; None for as long as it wants.
        as_started: with the environment and the folder that this process began with, whatever a script has made of
            them since.
        code: a folder to look for code in, besides those above the folder and the bundle.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was ended.
    """
    command = [sys.executable, "-m", "pytest_nancapture.cli", "replay", "--json", f"--device={device}", str(bundle)]
    done = subprocess.run(  # noqa: S603, our own
        [*command, "--trace"] if trace else command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
        env={**_environment(as_started=as_started), **({CODE_FOLDERS: str(code)} if code is not None else {})},
        cwd=started_in() if as_started and started_in().is_dir() else None,
        timeout=seconds,
    )
    answer = _answer(done.stdout)
    if "verdict" in answer:
        return Answer(result=answer, error={})
    last = "\n".join(done.stderr.splitlines()[-_LAST_WORDS:])
    words = f"the replay ended with exit code {done.returncode} and no verdict"
    return Answer(result={}, error=answer.get("error", {}), words=f"{words}\n{last}".rstrip())


def _environment(*, as_started: bool) -> dict[str, str]:
    """Without what makes a process one rank of several."""
    return {
        name: value
        for name, value in (_at_start() if as_started else os.environ).items()
        if name not in _OF_RANKS and not name.startswith(_OF_LAUNCHERS)
    }


def _at_start() -> dict[str, str]:
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not told by this system
        return dict(os.environ)
    return dict(os.fsdecode(pair).partition("=")[::2] for pair in pairs if b"=" in pair)


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
