"""Where a bundle goes, and how it gets there: whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import hidden_folder, sync_folder, write_text
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


@contextmanager
def workshop(folder: Path, name: str) -> Iterator[Path]:
    """A free path in a hidden folder of `folder`, to make a bundle in; gone on leaving, with `folder` if empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    hidden = hidden_folder(folder, name)
    try:
        yield hidden / name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def copy_bundle(bundle: Bundle, place: Path, manifest: Manifest) -> Bundle:
    """Into a hidden folder beside `place`, checked and flushed, then renamed.

    Args:
        manifest: the copy's; the file is copied as it is where it is the bundle's own.

    Raises:
        BundleDamagedError: the bundle changed meanwhile.
        OSError: it cannot be written; nothing is left behind.
    """
    hidden = hidden_folder(place.parent, place.name)
    try:
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
        hidden.chmod(0o755)
        sync_folder(hidden)
        hidden.rename(place)
        sync_folder(place.parent)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; it goes on its way
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return Bundle.open(place)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())
