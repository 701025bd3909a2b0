"""Make a candidate: the captured bundle, changed as a plan says, in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import (
    BATCH,
    OPTIMIZER,
    RNG,
    WEIGHTS,
    FileRecord,
    InitialRecord,
    Layouts,
    Manifest,
    MicroBatch,
    RngRecord,
)
from pytest_nancapture.bundle.tensors.file import plain_size
from pytest_nancapture.bundle.tensors.generated import fill, noise
from pytest_nancapture.bundle.tensors.layouts import pack, unpack
from pytest_nancapture.bundle.write import with_layouts
from pytest_nancapture.shrink.candidate.plan import Plan, Range, Way
from pytest_nancapture.shrink.candidate.tree import LIST, cut_lists, list_path, tensor_names
from pytest_nancapture.step.scene import stored_in

_LEVELS = 15
"""Steps between the smallest and the largest value of what is rounded."""
_HASH = "0" * 64


@dataclass(frozen=True)
class Original:
    """The captured bundle with its tensors, by file."""

    bundle: Bundle
    tensors: Mapping[str, Mapping[str, Tensor]]

    @classmethod
    def read(cls, bundle: Bundle) -> Original:
        """All of it, into memory.

        Raises:
            ValueError: a file does not fit its layouts.
        """
        manifest, source = bundle.manifest, stored_in(bundle.path)
        tensors = {
            WEIGHTS: source(WEIGHTS, manifest.module.layouts, "cpu"),
            BATCH: source(BATCH, manifest.batch.layouts, "cpu"),
            RNG: source(RNG, {}, "cpu"),
        }
        if manifest.optimizer is not None:
            tensors[OPTIMIZER] = source(OPTIMIZER, manifest.optimizer.layouts, "cpu")
        return cls(bundle, tensors)


@dataclass(frozen=True)
class Candidate:
    """A smaller bundle.

    Attributes:
        manifest: with layouts, without files.
        plain: of each file, the tensors as they would be stored.
    """

    manifest: Manifest
    plain: Mapping[str, Mapping[str, Tensor]]

    def source(self, name: str, layouts: Layouts, device: torch.device | str) -> dict[str, Tensor]:
        """The tensors of a file, for one replay."""
        plain = {key: tensor.to(device, copy=True) for key, tensor in self.plain[name].items()}
        return unpack(plain, layouts, device)

    def size(self, manifest: Manifest) -> int:
        """Bytes that the bundle would take on disk with this manifest."""
        files = {name: FileRecord(bytes=plain_size(plain), sha256=_HASH) for name, plain in self.plain.items()}
        text = dataclasses.replace(manifest, files=files).dumps()
        return sum(record.bytes for record in files.values()) + len(text.encode())


def make_candidate(plan: Plan, original: Original) -> Candidate:
    """The candidate of a plan.

    Raises:
        ValueError: the plan does not fit the bundle.
    """
    manifest = _smaller_manifest(plan, original.bundle.manifest)
    wanted = {
        WEIGHTS: set(original.tensors[WEIGHTS]),
        BATCH: {name for micro in manifest.batch.window for name in tensor_names(micro.tree)},
        RNG: set() if plan.seed is not None else _random_names(manifest, original),
    }
    if not plan.attributes:
        wanted[WEIGHTS] -= {name for name in wanted[WEIGHTS] if name.startswith("attribute/")}
    if manifest.optimizer is not None:
        wanted[OPTIMIZER] = set(original.tensors[OPTIMIZER])
    ways = plan.ways
    wanted[WEIGHTS] -= {name for name, way in ways.items() if way == "initial"}
    choices = {(axis.name, axis.dim): cut.kept for cut in plan.cuts for axis in cut.axes}
    plain: dict[str, Mapping[str, Tensor]] = {}
    layouts: dict[str, Layouts] = {}
    for file, names in wanted.items():
        tensors: dict[str, Tensor] = {}
        made: Layouts = {}
        for seed, name in enumerate(sorted(names)):
            tensor = cut(name, original.tensors[file][name], choices)
            layout = recipe(tensor, ways[name], seed) if name in ways else None
            if layout is not None:
                made[name] = layout
            else:
                tensors[name] = rounded(tensor) if ways.get(name) == "rounded" else tensor
        plain[file], found = pack(tensors, compact=file != RNG)
        layouts[file] = {**found, **made}
    return Candidate(with_layouts(manifest, layouts), plain)


def _smaller_manifest(plan: Plan, manifest: Manifest) -> Manifest:
    replace = dataclasses.replace
    lists = {(axis.name, 0): cut.kept for cut in plan.cuts for axis in cut.axes if axis.name.startswith(LIST)}
    window = tuple(
        replace(micro, tree=cut_lists(micro.tree, list_path(position), lists)) if lists else micro
        for position, micro in enumerate(manifest.batch.window)
        if position in plan.window
    )
    instants = [manifest.rng.instants[position] for position in plan.window]
    if plan.seed is not None:
        instants = [_seeded(instant, plan.seed) for instant in instants]
        window = tuple(_with_seeds(micro, plan.seed) for micro in window)
    before = manifest.module.initial
    names = [name for name, way in plan.ways.items() if way == "initial"]
    initial_seed = plan.initial_seed
    if before is not None:
        names, initial_seed = [*before.all_names(), *names], before.seed
    trainer = manifest.trainer
    if plan.window[0]:
        trainer = replace(trainer, total_batch_idx=trainer.total_batch_idx + plan.window[0])
    if plan.alone:
        trainer = replace(trainer, accumulate_grad_batches=1)
    return replace(
        manifest,
        batch=replace(manifest.batch, window=window),
        rng=RngRecord(instants=tuple(instants)),
        trainer=trainer,
        optimizer=manifest.optimizer if plan.optimizer else None,
        module=replace(
            manifest.module,
            initial=InitialRecord.of(names, initial_seed) if names else None,
            state=manifest.module.state if plan.attributes else (),
        ),
        files={},
    )


def _seeded(states: Mapping[str, Any], seed: int) -> dict[str, Any]:
    return {"seed": seed, "torch": states.get("torch", ["cpu"])}


def _with_seeds(micro: MicroBatch, seed: int) -> MicroBatch:
    """The random states of its hook and of the batches that the step takes itself, seeded."""
    fetches = micro.fetches and tuple(dataclasses.replace(f, rng=_seeded(f.rng, seed)) for f in micro.fetches)
    return dataclasses.replace(micro, hook=micro.hook and _seeded(micro.hook, seed), fetches=fetches)


def _random_names(manifest: Manifest, original: Original) -> set[str]:
    begins = tuple(f"{instant['name']}/" for instant in manifest.rng.instants if "name" in instant)
    return {name for name in original.tensors[RNG] if name.startswith(begins)}


def cut(name: str, tensor: Tensor, choices: Mapping[tuple[str, int], tuple[Range, ...]]) -> Tensor:
    """What the choices leave of a tensor."""
    result = tensor
    for dim in range(tensor.dim()):
        kept = choices.get((name, dim))
        if kept is not None:
            result = torch.cat([result.narrow(dim, part.start, part.stop - part.start) for part in kept], dim)
    return result


def recipe(tensor: Tensor, way: Way, seed: int) -> dict[str, Any] | None:
    """The layout that takes a tensor's place; None where the way leads to none."""
    if way == "noise":
        return noise(tensor, seed)
    if way in ("zeros", "constant"):
        value = tensor.reshape(-1)[0].item() if way == "constant" and tensor.numel() else 0
        return fill(tensor.dtype, tensor.shape, value)
    return None


def rounded(tensor: Tensor) -> Tensor:
    """To a few values; zeros and what is not finite stay as they are."""
    value = tensor.double()
    finite = value[value.isfinite()]
    if not tensor.dtype.is_floating_point or not finite.numel():
        return tensor
    step = (finite.max() - finite.min()) / _LEVELS
    return ((value / step).round() * step).to(tensor.dtype) if step > 0 else tensor
