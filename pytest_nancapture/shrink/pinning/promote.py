"""From a known fault to a test that gates, once the fault is gone."""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import sync_folder, write_text
from pytest_nancapture.bundle.manifest import MANIFEST_NAME
from pytest_nancapture.errors import PinError
from pytest_nancapture.shrink.pinning.fresh import replay_afresh

_KNOWN = re.compile(r'("known"\s*:\s*)true')


def promote(source: str | PathLike[str], *, device: str = "auto", force: bool = False) -> dict[str, Any] | None:
    """Take the mark of a known fault off a bundle if a replay in a fresh process, with today's code, is finite.

    Args:
        source: the bundle's folder; nothing but that mark is changed.
        device: as for :func:`pytest_nancapture.replay`.
        force: without any replay.

    Returns:
        The replay, as ``ReplayResult.as_dict`` gives it; None where it was forced or the bundle has no such mark.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
        DeviceUnavailableError: this machine lacks the device.
        PinError: the replay is not finite.
        OSError: the file cannot be written; it is as it was.
    """
    bundle = Bundle.open(source)
    if not bundle.known:
        return None
    result = None
    if not force:
        bundle.verify()
        result = replay_afresh(bundle.path, device)
        if not result["finite"]:
            raise PinError(_not_green(bundle, result))
    _take_mark_off(bundle.path / MANIFEST_NAME)
    return result


def _not_green(bundle: Bundle, result: dict[str, Any]) -> str:
    verdict, reason = result["verdict"], result["reason"]
    if verdict == "nonfinite":
        return (
            f"{bundle.path}: not promoted: the fault is still there ({reason})\n"
            "  As a known fault it lets the tests pass; --force promotes it all the same, and they fail until the fix."
        )
    return (
        f"{bundle.path}: not promoted: expected a replay that is finite, came {verdict} ({reason})\n"
        "  --force promotes it all the same."
    )


def _take_mark_off(path: Path) -> None:
    """Rewrite ``bundle.json`` in one go; all but one word of it stays as it is."""
    text = path.read_text(encoding="utf-8")
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        write_text(hidden, _unmarked(text))
        hidden.replace(path)
        sync_folder(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def _unmarked(text: str) -> str:
    wanted = json.loads(text)
    wanted["pin"]["known"] = False
    for found in _KNOWN.finditer(text):
        changed = f"{text[: found.start()]}{found[1]}false{text[found.end() :]}"
        if json.loads(changed) == wanted:
            return changed
    return json.dumps(wanted, indent=1, sort_keys=True) + "\n"
