"""What a shrink knows so far, in a hidden file beside its place: a killed one goes on from there."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import MANIFEST_NAME
from pytest_nancapture.bundle.schema import SchemaError
from pytest_nancapture.shrink.candidate.plan import Plan

_PACKAGES = ("pytest-nancapture", "torch", "lightning")


class ResumeFile:
    """One such file; nothing that goes wrong with it stops a shrink."""

    def __init__(self, bundle: Bundle, place: Path, device: str) -> None:
        self._path = resume_path(place)
        text = (bundle.path / MANIFEST_NAME).read_bytes()
        versions = [f"{name} {_version(name)}" for name in _PACKAGES]
        self._key = {"bundle": hashlib.sha256(text).hexdigest(), "device": device, "versions": versions}

    def load(self) -> tuple[Plan, set[str]] | None:
        """The best plan and the keys of those rejected; None where there is nothing that fits."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if {name: data[name] for name in self._key} != self._key:
                return None
            return Plan.from_dict(data["best"]), {str(key) for key in data["rejected"]}
        except (OSError, ValueError, LookupError, TypeError, SchemaError):
            return None

    def save(self, best: Plan, rejected: set[str]) -> None:
        """Whole or not at all."""
        data = {**self._key, "best": best.as_dict(), "rejected": sorted(rejected)}
        hidden = self._path.with_suffix(".json.tmp")
        try:
            hidden.write_text(json.dumps(data), encoding="utf-8")
            hidden.replace(self._path)
        except OSError:
            hidden.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def resume_path(place: Path) -> Path:
    """Where it lies, for a shrink into `place`."""
    return place.with_name(f".{place.name}.shrink.json")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
