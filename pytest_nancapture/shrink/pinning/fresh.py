"""A replay in a process of its own, as pinning needs it: with a verdict, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_nancapture.capture.fresh import replay_afresh as replay
from pytest_nancapture.errors import DeviceUnavailableError, PinError


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
