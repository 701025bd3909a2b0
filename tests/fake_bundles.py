"""Bundles for tests that replay nothing: a true ``bundle.json`` beside small safetensors files, made without torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.manifest import (
    BATCH,
    MANIFEST_NAME,
    RNG,
    WEIGHTS,
    BatchRecord,
    CodeRecord,
    Fault,
    FileRecord,
    Gradients,
    Manifest,
    MicroBatch,
    ModuleRecord,
    Reproduced,
    RngRecord,
    TrainerRecord,
)

_BYTES = {"F32": 4, "I64": 8, "U8": 1}


def tensor_file(**shapes: tuple[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of zeros: ``tensor_file(x=("F32", (2, 3)))``."""
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def fake_manifest(files: dict[str, bytes] | None = None, **sections: Any) -> Manifest:
    """A manifest of a NaN in the loss at step 812; `sections` as in :func:`write_bundle`."""
    contents = _default_files() if files is None else files
    base = Manifest(
        fault=Fault(
            kind="nan",
            found_in=("loss", "gradients"),
            global_step=812,
            epoch=3,
            batch_idx=12,
            reproduced=Reproduced(runs=1, of=1),
            losses=("nan",),
            gradients=Gradients(total=2, nonfinite=("fc.bias", "fc.weight"), nonzero=("fc.bias", "fc.weight")),
        ),
        module=ModuleRecord(target="shop.model:Net", file="shop/model.py"),
        trainer=TrainerRecord(
            framework="lightning.pytorch",
            precision="32-true",
            accumulate_grad_batches=1,
            automatic_optimization=True,
            global_step=812,
            epoch=3,
            total_batch_idx=812,
            num_training_batches=200,
            last_batch=False,
            max_epochs=10,
            max_steps=-1,
            gradient_clip_val=None,
            gradient_clip_algorithm=None,
            logger=False,
            strategy="SingleDeviceStrategy",
            world_size=1,
            rank=0,
        ),
        numerics={"default_dtype": "float32"},
        rng=RngRecord(instants=({},)),
        batch=BatchRecord(window=(MicroBatch(batch_idx=12, tree={"list": [{"tensor": "x"}, {"tensor": "y"}]}),)),
        files={name: FileRecord(bytes=len(c), sha256=hashlib.sha256(c).hexdigest()) for name, c in contents.items()},
        code=CodeRecord(commit="0123456789abcdef0123456789abcdef01234567", dirty=False),
        environment={"device": "cpu", "torch": "2.13.0"},
    )
    changes = {}
    for name, value in sections.items():
        section = getattr(base, name)
        merge = isinstance(value, dict) and dataclasses.is_dataclass(section) and not isinstance(section, type)
        changes[name] = dataclasses.replace(section, **value) if merge else value
    return dataclasses.replace(base, **changes)


def write_bundle(folder: str | Path, *, files: dict[str, bytes] | None = None, **sections: Any) -> Path:
    """Write a sound bundle into `folder`.

    Args:
        folder: the bundle's own folder; made where missing.
        files: name -> content, instead of the three small safetensors files.
        sections: per section of the manifest, the fields to change, or the whole section:
            ``write_bundle(folder, fault={"kind": "inf"}, pin=PinRecord(known=True))``.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for name, content in (_default_files() if files is None else files).items():
        (path / name).write_bytes(content)
    (path / MANIFEST_NAME).write_text(fake_manifest(files, **sections).dumps(), encoding="utf-8")
    return path


def _default_files() -> dict[str, bytes]:
    return {
        WEIGHTS: tensor_file(**{"fc.weight": ("F32", (4, 8)), "fc.bias": ("F32", (4,))}),
        BATCH: tensor_file(x=("F32", (16, 8)), y=("I64", (16,))),
        RNG: tensor_file(cpu=("U8", (64,))),
    }
