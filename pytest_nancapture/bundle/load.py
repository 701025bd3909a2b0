"""Read ``bundle.json`` strictly, whatever version wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pytest_nancapture.bundle.manifest import (
    ALLOWED_FILES,
    FORMAT,
    MANIFEST_NAME,
    OPTIMIZER,
    REQUIRED_FILES,
    VERSION,
    Manifest,
    MicroBatch,
    state_hash,
)
from pytest_nancapture.bundle.schema import SchemaError, read
from pytest_nancapture.errors import BundleDamagedError, BundleNotFoundError, BundleVersionError

MANIFEST_LIMIT = 256 * 2**20
"""Bytes; a larger ``bundle.json`` is none of ours."""


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``bundle.json`` of a bundle; no other file is opened.

    Raises:
        BundleNotFoundError: no ``bundle.json`` there.
        BundleVersionError: its version is newer than this reader's.
        BundleDamagedError: anything else is not as it must be.
    """
    data = _load_json(folder)
    if data.get("format") != FORMAT:
        raise BundleDamagedError(folder, f"bundle.json: expected format {FORMAT!r}, came {data.get('format')!r:.60}")
    version = data.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleDamagedError(folder, f"bundle.json: expected a version number from 1 up, came {version!r:.60}")
    if version > VERSION:
        raise BundleVersionError(
            folder,
            f"written in version {version} of the bundle format, newer than version {VERSION}, which this "
            "pytest-nancapture reads",
            "upgrade it: pip install -U pytest-nancapture",
        )
    for step in range(version, VERSION):
        data = MIGRATIONS[step](data)
    if version == VERSION and data.get("state_sha256") != state_hash(data):
        raise BundleDamagedError(folder, "bundle.json: batch, rng, files or another section of the state was altered")
    try:
        manifest = read(Manifest, data, "")
    except SchemaError as error:
        raise BundleDamagedError(folder, f"bundle.json: {error}") from error
    _check_sense(folder, manifest)
    return manifest


def _state_by_path(data: dict[str, Any]) -> dict[str, Any]:
    """Version 1 held changed plain attributes by submodule and name, and proved the run's module, not the bundle's."""
    module = dict(data.get("module") or {})
    attributes = module.pop("attributes", None) or {}
    module["state"] = [
        {"module": path, "path": [["attribute", name]], "value": value}
        for path, values in attributes.items()
        for name, value in values.items()
    ]
    return {**data, "module": module}


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _state_by_path}
"""From version n to n + 1; one small named function each."""


def _load_json(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    if path.is_symlink():
        raise BundleDamagedError(folder, "bundle.json is not a plain file")
    if not path.is_file():
        raise BundleNotFoundError(folder, "no bundle here: expected a folder that holds a bundle.json")
    try:
        if path.stat().st_size > MANIFEST_LIMIT:
            raise BundleDamagedError(folder, f"bundle.json is larger than {MANIFEST_LIMIT} bytes")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except OSError as error:
        raise BundleDamagedError(folder, f"bundle.json cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BundleDamagedError(folder, f"bundle.json is not strict JSON: {error}") from error
    if not isinstance(data, dict):
        raise BundleDamagedError(folder, "bundle.json: expected an object")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    """JSON has no infinity, but ``1e999`` becomes one."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits:.20} is too large a number")
    return value


def _check_sense(folder: Path, manifest: Manifest) -> None:
    """What the field types alone do not say."""
    problem = ""
    if not manifest.batch.window:
        problem = "batch.window: expected at least one micro-batch"
    elif len(manifest.rng.instants) != len(manifest.batch.window):
        problem = "rng.instants: expected one per micro-batch"
    elif not all(map(_has_its_fetches, manifest.batch.window)):
        problem = "batch.window: expected a tuple with a batch for each of fetches"
    elif manifest.optimizer is not None and OPTIMIZER not in manifest.files:
        problem = f"files: {OPTIMIZER} is missing"
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            problem = f"files: {name} is missing"
    for name in manifest.files:
        if name not in ALLOWED_FILES:
            problem = f"files: {name!r:.80} is no file of a bundle; expected {', '.join(ALLOWED_FILES)}"
    if problem:
        raise BundleDamagedError(folder, f"bundle.json: {problem}")


def _has_its_fetches(micro: MicroBatch) -> bool:
    if micro.fetches is None:
        return True
    items = micro.tree.get("tuple") if isinstance(micro.tree, dict) else None
    return isinstance(items, list) and len(items) == len(micro.fetches)
