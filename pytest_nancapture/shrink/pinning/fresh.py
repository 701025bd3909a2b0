"""A replay in a process of its own, as pinning needs it: with a verdict, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.manifest import Healed
from pytest_nancapture.bundle.schema import read
from pytest_nancapture.capture.proof.fresh import replay_afresh as replay
from pytest_nancapture.errors import DeviceUnavailableError, PinError
from pytest_nancapture.shrink.candidate.pool import Pool

_PATIENT = 600.0
"""Seconds for a few replays of a step."""


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
    answer = replay(bundle, device, trace=trace)
    if answer.result:
        return dict(answer.result)
    if answer.error.get("type") == DeviceUnavailableError.__name__:
        raise DeviceUnavailableError(answer.error["message"])
    if trace:
        return replay_afresh(bundle, device)
    problem, _, words = answer.words.partition("\n")
    raise PinError(f"{bundle}: not pinned: {problem}\n{answer.error.get('message') or words}".rstrip())


def heal_afresh(bundle: Path, device: str) -> Healed | None:
    """What the bundle's step would learn with its fault healed; None where that cannot be told."""
    with Pool(bundle, device) as pool:
        (answer,) = pool.ask([{"do": "heal"}], _PATIENT)
    healed = answer.get("healed")
    return read(Healed, healed, "healed") if healed is not None else None
