"""Look over a captured bundle: what is in it that can be made smaller."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import BATCH, OPTIMIZER, WEIGHTS, InitialRecord
from pytest_nancapture.bundle.tensors.generated import is_simple
from pytest_nancapture.bundle.tensors.kinds import stored_values
from pytest_nancapture.errors import NancaptureError
from pytest_nancapture.replay.observe import initial_tensors
from pytest_nancapture.shrink.candidate.make import Original, make_candidate
from pytest_nancapture.shrink.candidate.plan import Part, Plan, Survey
from pytest_nancapture.shrink.candidate.tree import list_path, lists_in, tensor_names


def survey(original: Original, device: torch.device) -> Survey:
    """What there is; the module is built twice, to see whether its initialisation hangs on the seed alone."""
    bundle = original.bundle
    manifest, window = bundle.manifest, bundle.manifest.batch.window
    indices = [micro.batch_idx for micro in window]
    made = _initial(original, device)
    parts = [
        dataclasses.replace(_part(name, "weights", tensor), initial=_is_like(made.get(name), tensor))
        for name, tensor in original.tensors[WEIGHTS].items()
    ]
    for position, micro in enumerate(window):
        for name in dict.fromkeys(tensor_names(micro.tree)):
            part = _part(name, "batch", original.tensors[BATCH][name])
            parts.append(dataclasses.replace(part, micro=position))
        for path, length in lists_in(micro.tree, list_path(position)):
            parts.append(Part(name=path, group="list", shape=(length,), micro=position))
    parts += [_part(name, "optimizer", tensor) for name, tensor in original.tensors.get(OPTIMIZER, {}).items()]
    guilty = bundle.fault.batch_idx
    return Survey(
        size=bundle.size,
        window=len(window),
        guilty=indices.index(guilty) if guilty in indices else len(window) - 1,
        attributes=len(manifest.module.state),
        optimizer=manifest.optimizer is not None,
        parts=tuple(parts),
    )


def _part(name: str, group: str, tensor: Tensor) -> Part:
    values = stored_values(tensor)
    return Part(
        name=name,
        group=group,  # type: ignore[arg-type]  # one of the literals at every call
        shape=tuple(tensor.shape) if tensor.layout is torch.strided else (),
        bytes=values.numel() * values.element_size(),
        simple=is_simple(tensor),
    )


def _initial(original: Original, device: torch.device) -> dict[str, Tensor]:
    """What the code makes, where it makes the same twice."""
    plan = Plan(window=tuple(range(len(original.bundle.manifest.batch.window))))
    candidate = make_candidate(plan, original)
    before = candidate.manifest.module.initial
    seed = before.seed if before is not None else plan.initial_seed
    record = dataclasses.replace(candidate.manifest.module, initial=InitialRecord(seed=seed))
    bundle = Bundle(original.bundle.path, dataclasses.replace(candidate.manifest, module=record))
    try:
        first, second = (initial_tensors(bundle, candidate.source, device) for _ in range(2))
    except NancaptureError:
        return {}
    return {name: tensor for name, tensor in first.items() if name in second and _same(tensor, second[name])}


def _is_like(made: Tensor | None, tensor: Tensor) -> bool:
    return made is not None and made.shape == tensor.shape and made.dtype == tensor.dtype


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or not is_simple(left):
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
