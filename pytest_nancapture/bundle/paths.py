"""Bundles as people name them on a command line: by a folder, by the file in it, or by a folder that holds several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nancapture.bundle.bundle import Bundle, find_bundles
from pytest_nancapture.bundle.manifest import MANIFEST_NAME
from pytest_nancapture.bundle.text import printable, some
from pytest_nancapture.errors import BundleNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence


_STARTED_IN = Path.cwd()


def started_in() -> Path:
    """The folder in which this package was imported, before a script's own code might go elsewhere."""
    return _STARTED_IN


def shown(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the current folder."""
    whole, here = path.absolute(), Path.cwd()
    return printable(str(whole.relative_to(here) if whole.is_relative_to(here) else whole))


def shown_from_start(path: Path) -> str:
    """The same for the folder that the process was started in, wherever its code has gone since."""
    whole = path.absolute()
    return printable(str(whole.relative_to(started_in()) if whole.is_relative_to(started_in()) else whole))


def is_bundle(path: Path) -> bool:
    """Whether the path names a bundle, be it a damaged one, rather than a folder to put some into."""
    return path.name == MANIFEST_NAME or (path / MANIFEST_NAME).exists()


def bundles_below(paths: Sequence[Path]) -> list[Path]:
    """The bundles at or below each path, each once, in the order given.

    Raises:
        BundleNotFoundError: a path is no folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        folder = path.parent if path.name == MANIFEST_NAME else path
        if not folder.is_dir():
            raise BundleNotFoundError(path, "expected a bundle or a folder with bundles, found " + _what(folder))
        found |= dict.fromkeys(find_bundles(folder))
    return list(found)


def open_named(path: Path) -> Bundle:
    """Open one bundle; where there is none, the error tells what is there instead.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
    """
    try:
        return Bundle.open(path)
    except BundleNotFoundError:
        if not path.is_dir():
            raise BundleNotFoundError(path, "expected a bundle's folder, found " + _what(path)) from None
        inside = [shown(found) for found in find_bundles(path)]
        if not inside:
            raise
        problem = f"expected one bundle, found a folder with {len(inside)}: {some(inside, 3)}"
        raise BundleNotFoundError(path, problem, "name one of them") from None


def _what(path: Path) -> str:
    return "a file" if path.exists() else "nothing"
