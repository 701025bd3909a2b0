"""A bundle that lies on disk: open it, verify it, find all below a folder."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from pytest_nancapture.bundle.load import load_manifest
from pytest_nancapture.bundle.manifest import MANIFEST_NAME, Fault, Manifest
from pytest_nancapture.errors import BundleDamagedError

_BLOCK = 2**20


@dataclass(frozen=True)
class Bundle:
    """One captured step on disk.

    Attributes:
        path: its folder, absolute.
        manifest: what ``bundle.json`` says.

    Example:
        >>> bundle = Bundle.open("nan-bundles/step-000812-rank-0")  # doctest: +SKIP
        >>> bundle.fault.found_in  # doctest: +SKIP
        ('loss', 'gradients')
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Bundle:
        """Read ``bundle.json`` and check that the files it lists are there with the sizes it gives.

        Args:
            path: the bundle's folder, or the ``bundle.json`` in it.

        Raises:
            BundleNotFoundError: there is no bundle.
            BundleVersionError: it was written in a newer version of the format.
            BundleDamagedError: it is not what it should be.
        """
        folder = Path(path).absolute()
        if folder.name == MANIFEST_NAME:
            folder = folder.parent
        bundle = cls(folder, load_manifest(folder))
        for name, record in bundle.manifest.files.items():
            _check_size(folder, name, record.bytes)
        return bundle

    def verify(self) -> None:
        """Compare every file's hash with ``bundle.json``; reads all of them.

        Raises:
            BundleDamagedError: a file was altered since it was written.
        """
        for name, record in self.manifest.files.items():
            _check_size(self.path, name, record.bytes)
            if hash_file(self.path / name) != record.sha256:
                raise BundleDamagedError(
                    self.path, f"{name} was altered: its hash is not the one in bundle.json", "copy the bundle anew"
                )

    @property
    def name(self) -> str:
        """The folder's name, such as ``step-000812-rank-0``."""
        return self.path.name

    @property
    def fault(self) -> Fault:
        """What went wrong at capture."""
        return self.manifest.fault

    @property
    def size(self) -> int:
        """Bytes of all its files together."""
        files = sum(record.bytes for record in self.manifest.files.values())
        return files + (self.path / MANIFEST_NAME).stat().st_size

    @property
    def known(self) -> bool:
        """Whether it was pinned as an open fault, which is expected to fail."""
        return self.manifest.pin is not None and self.manifest.pin.known


def find_bundles(folder: str | PathLike[str]) -> list[Path]:
    """All bundles at or below `folder`, sorted; hidden folders (half-written bundles, ``.git``) are left out.

    Only names are looked at: a damaged bundle is found too, and fails when it is opened.

    Returns:
        The bundles' folders, absolute.
    """
    return sorted(_walk(str(Path(folder).absolute())))


def _walk(folder: str) -> Iterator[Path]:
    below = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == MANIFEST_NAME:
                yield Path(folder)
                return
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                below.append(entry.path)
    for path in below:
        yield from _walk(path)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _check_size(folder: Path, name: str, expected: int) -> None:
    try:
        status = os.lstat(folder / name)
    except FileNotFoundError:
        raise BundleDamagedError(folder, f"{name} is missing", "copy the bundle anew") from None
    if not stat.S_ISREG(status.st_mode):
        raise BundleDamagedError(folder, f"{name} is not a plain file")
    if status.st_size != expected:
        raise BundleDamagedError(
            folder, f"{name}: expected {expected} bytes, came {status.st_size}", "copy the bundle anew"
        )
