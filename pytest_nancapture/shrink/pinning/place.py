"""Where a bundle goes, and how it gets there: whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import half_written, put_in_place, write_text
from pytest_nancapture.bundle.manifest import MANIFEST_NAME, Manifest
from pytest_nancapture.errors import BundleDamagedError, PinError


def check_name(name: str) -> None:
    """A name is one plain folder, and a hidden one would never be found again.

    Raises:
        PinError: it is none.
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise PinError(f"expected a plain folder name that does not start with a dot, came {name!r}")


def free_name(folder: Path, name: str) -> Path:
    """`name` in `folder`, with the first suffix ``-2``, ``-3`` ... that is free where it is taken."""
    place, number = folder / name, 1
    while os.path.lexists(place):
        number += 1
        place = folder / f"{name}-{number}"
    return place


def copy_bundle(bundle: Bundle, place: Path, manifest: Manifest) -> Bundle:
    """Into a hidden folder beside `place`, checked and flushed, then renamed.

    Args:
        manifest: the copy's; the file is copied as it is where it is the bundle's own.

    Raises:
        BundleDamagedError: the bundle changed meanwhile.
        OSError: it cannot be written; nothing is left behind.
    """
    with half_written(place.parent, place.name) as hidden:
        for file in bundle.manifest.files:
            _copy_file(bundle.path / file, hidden / file)
        if manifest is bundle.manifest:
            _copy_file(bundle.path / MANIFEST_NAME, hidden / MANIFEST_NAME)
        else:
            write_text(hidden / MANIFEST_NAME, manifest.dumps())
        try:
            Bundle.open(hidden).verify()
        except BundleDamagedError as error:
            raise BundleDamagedError(bundle.path, f"it changed while it was copied: {error.problem}") from error
        put_in_place(hidden, place)
    return Bundle.open(place)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())
