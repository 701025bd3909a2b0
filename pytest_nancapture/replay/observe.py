"""A traced replay of a bundle whose tensors need not lie on disk, and all that it saw: what a shrinker compares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import BATCH, Healed
from pytest_nancapture.bundle.tensors.kinds import stored_values
from pytest_nancapture.bundle.tensors.names import buffers, parameters, unique_parameters
from pytest_nancapture.bundle.values.references import repository_root
from pytest_nancapture.diagnose.blame import relative_file
from pytest_nancapture.diagnose.healing import Healing, healed_step
from pytest_nancapture.replay.hooks import ReplayHooks
from pytest_nancapture.replay.initial import Fingerprint
from pytest_nancapture.replay.result import ReplayResult
from pytest_nancapture.replay.run import Replay, guilty_position, traceless
from pytest_nancapture.step.check import is_finite
from pytest_nancapture.step.finding import Finding
from pytest_nancapture.step.scene import Source

_ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a replay found and saw.

    Attributes:
        finding: None where the step did not come to its end.
        births: ``(op, file, line)`` of the user's code -> kinds (``nan``, ``inf``) of the bad values born there, also
            of those that led to nothing.
        first: those places among them where they were born of finite ones, as ``file:line``.
        spares: whether every tensor of the batch that holds bad values has, along its first dimension, an entry that
            holds none.
        initial: of the weights that were left to the code's initialiser; None where there are none.
    """

    result: ReplayResult
    finding: Finding | None
    births: Mapping[tuple[str, str, int], frozenset[str]]
    first: frozenset[str]
    spares: bool
    initial: Fingerprint | None = None


def observe(bundle: Bundle, source: Source, device: torch.device) -> Observed:
    """Run the step once, traced; no torch.compile.

    Args:
        bundle: its manifest counts, its folder only tells where to look for code.
        source: of the tensors.
        device: to run on.
    """
    start = time.perf_counter()
    batch = source(BATCH, bundle.manifest.batch.layouts, "cpu")
    spares = all(_has_good_entry(tensor) for tensor in batch.values() if not is_finite(tensor))
    with traceless() as folder:
        run = Replay(bundle, device, ReplayHooks(), folder, source)
        fields = run.run(None, trace=True)
    root = repository_root(Path.cwd()) or Path.cwd()
    births: dict[tuple[str, str, int], frozenset[str]] = {}
    first = set()
    for birth, kinds in run.trace.births.items() if run.trace is not None else ():
        place = (birth.op, relative_file(birth.source, root), birth.source.line)
        births[place] = births.get(place, frozenset()) | kinds
        if birth.is_first:
            first.add(f"{place[1]}:{place[2]}")
    result = ReplayResult(device=str(device), seconds=time.perf_counter() - start, **fields)
    return Observed(
        result=result,
        finding=run.finding,
        births=births,
        first=frozenset(first),
        spares=spares,
        initial=run.initial,
    )


def _has_good_entry(tensor: Tensor) -> bool:
    return tensor.dim() == 0 or tensor.layout is not torch.strided or any(map(is_finite, tensor))


def gradients_when_healed(bundle: Bundle, source: Source, device: torch.device) -> tuple[str, ...] | None:
    """Names of the parameters that have a gradient once every bad value becomes 0 where it is born.

    One that is mere rounding, next to the largest, is none.

    That is roughly what a fix will leave of the step. None where the step is not finite even so.
    """
    for given in (False, True):
        with traceless() as folder:
            run = Replay(bundle, device, ReplayHooks(), folder, source)
            run.run(None, heals=Healing(given=given))
        finding = run.finding
        if finding is not None and not finding.found_in:
            break
    else:
        return None
    gradients = {name: p.grad for name, p in unique_parameters(run.stepped) if name in finding.gradients.nonzero}
    sizes = {name: stored_values(grad).abs().max().item() for name, grad in gradients.items() if grad is not None}
    largest = max(sizes.values(), default=0.0)
    return tuple(name for name, size in sizes.items() if size > _ROUNDING * largest)


def learnt_when_healed(bundle: Bundle, source: Source, device: torch.device) -> Healed | None:
    """What the step would learn with the fault of its manifest healed; None where that cannot be told."""

    def heal(healing: Healing) -> Finding | None:
        with traceless() as folder:
            run = Replay(bundle, device, ReplayHooks(), folder, source)
            run.run(None, heals=healing)
            return run.finding

    return healed_step(bundle.fault.gradients, guilty_position(bundle.manifest), heal)


def initial_tensors(bundle: Bundle, source: Source, device: torch.device) -> dict[str, Tensor]:
    """Parameters and buffers as the code makes them, under the seed that the manifest gives.

    Raises:
        RebuildError: the module cannot be built.
    """
    with traceless() as folder:
        module = Replay(bundle, device, ReplayHooks(), folder, source).module()
        return {
            name: tensor.detach().cpu()
            for name, tensor in (*parameters(module), *buffers(module))
            if not isinstance(tensor, UninitializedTensorMixin)
        }
