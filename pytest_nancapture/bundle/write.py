"""Put a bundle on disk: whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pytest_nancapture.bundle.manifest import (
    BATCH,
    MANIFEST_NAME,
    OPTIMIZER,
    RNG,
    WEIGHTS,
    FileRecord,
    Layouts,
    Manifest,
)
from pytest_nancapture.bundle.tensors import write_tensors

_TRIES = 1000
_HIDDEN = ".tmp"
_HOST = re.sub(r"[^A-Za-z0-9]", "_", platform.node())


def write_bundle(
    dirpath: Path,
    name: str,
    manifest: Manifest,
    *,
    weights: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    rng: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a bundle into a hidden folder beside its place, flush it to the device and rename it into place.

    Args:
        dirpath: the folder to hold the bundle; made if it is not there.
        name: the bundle's name; with a suffix ``-2``, ``-3`` ... where it is taken.
        manifest: everything but `files` and the tensors' layouts, which are filled in here.

    Returns:
        The bundle's folder.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    dirpath.mkdir(parents=True, exist_ok=True)
    _sweep(dirpath)
    hidden = Path(tempfile.mkdtemp(prefix=f".{name}.{_HOST}-{os.getpid()}.", suffix=_HIDDEN, dir=dirpath))
    try:
        files: dict[str, FileRecord] = {}
        layouts: dict[str, Layouts] = {}
        for file, tensors in {WEIGHTS: weights, BATCH: batch, RNG: rng, OPTIMIZER: optimizer}.items():
            if tensors is not None:
                files[file], layouts[file] = write_tensors(hidden / file, tensors)
        replace = dataclasses.replace
        full = replace(
            manifest,
            files=files,
            module=replace(manifest.module, layouts=layouts[WEIGHTS]),
            batch=replace(manifest.batch, layouts=layouts[BATCH]),
            optimizer=manifest.optimizer and replace(manifest.optimizer, layouts=layouts[OPTIMIZER]),
        )
        write_text(hidden / MANIFEST_NAME, full.dumps())
        hidden.chmod(0o755)
        return publish(hidden, dirpath, name)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; it goes on its way
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _sweep(dirpath: Path) -> None:
    """Remove what writers on this machine left behind that were killed; those still at work are let be."""
    for hidden in dirpath.glob(f".*.{_HOST}-*{_HIDDEN}"):
        process = hidden.name.rpartition(f".{_HOST}-")[2].partition(".")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(hidden, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write and flush to the device."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def publish(hidden: Path, dirpath: Path, name: str) -> Path:
    """Rename a finished folder to the first free name of `name`, `name`-2, `name`-3 ...

    Raises:
        OSError: it cannot be renamed.
    """
    sync_folder(hidden)
    for number in range(1, _TRIES):
        place = dirpath / (name if number == 1 else f"{name}-{number}")
        try:
            # Fails where the name is taken: a bundle's folder is never empty, so a rename cannot replace one.
            hidden.rename(place)
        except OSError:
            if not place.exists():
                raise
        else:
            sync_folder(dirpath)
            return place
    raise FileExistsError(f"{dirpath / name}: taken, and so are the {_TRIES - 1} names after it")


def sync_folder(folder: Path) -> None:
    """Flush the folder's own entries to the device, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
