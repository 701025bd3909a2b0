"""Put a bundle on disk: whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from pytest_nancapture.bundle.folder import half_written, publish, write_text
from pytest_nancapture.bundle.manifest import (
    BATCH,
    MANIFEST_NAME,
    OPTIMIZER,
    RNG,
    WEIGHTS,
    Layouts,
    Manifest,
)
from pytest_nancapture.bundle.tensors.file import write_plain
from pytest_nancapture.bundle.tensors.layouts import pack


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
    with half_written(dirpath, name) as hidden:
        contents = {WEIGHTS: weights, BATCH: batch, RNG: rng, OPTIMIZER: optimizer}
        packed = {file: pack(tensors) for file, tensors in contents.items() if tensors is not None}
        layouts = {file: layout for file, (_, layout) in packed.items()}
        fill_folder(hidden, with_layouts(manifest, layouts), {file: plain for file, (plain, _) in packed.items()})
        return publish(hidden, dirpath, name)


def with_layouts(manifest: Manifest, layouts: Mapping[str, Layouts]) -> Manifest:
    """The manifest of tensors that are stored in this way, by file."""
    replace = dataclasses.replace
    return replace(
        manifest,
        module=replace(manifest.module, layouts=layouts[WEIGHTS]),
        batch=replace(manifest.batch, layouts=layouts[BATCH]),
        optimizer=manifest.optimizer and replace(manifest.optimizer, layouts=layouts[OPTIMIZER]),
    )


def fill_folder(hidden: Path, manifest: Manifest, plain: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the files of a bundle, and flush them to the device.

    Args:
        hidden: an empty folder.
        manifest: everything but `files`.
        plain: of each file, the tensors as they are stored.
    """
    files = {file: write_plain(hidden / file, tensors) for file, tensors in plain.items()}
    write_text(hidden / MANIFEST_NAME, dataclasses.replace(manifest, files=files).dumps())
