"""A traced replay of a bundle whose tensors need not lie on disk, and all that it saw: what a shrinker compares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.names import buffers, parameters
from pytest_nancapture.bundle.references import repository_root
from pytest_nancapture.replay.hooks import ReplayHooks
from pytest_nancapture.replay.result import ReplayResult
from pytest_nancapture.replay.run import Replay, Source, traceless

if TYPE_CHECKING:
    from pytest_nancapture.capture.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a replay found and saw.

    Attributes:
        finding: None where the step did not come to its end.
        healed: parameters whose gradients are not all zero once every bad value becomes 0 where it is born; None where
            the step is not finite even so, or where that was not looked at.
        births: ``(op, file, line)`` of the user's code -> kinds (``nan``, ``inf``) of the bad values born there, also
            of those that led to nothing.
    """

    result: ReplayResult
    finding: Finding | None
    births: Mapping[tuple[str, str, int], frozenset[str]]
    healed: tuple[str, ...] | None = None


def observe(bundle: Bundle, source: Source, device: torch.device) -> Observed:
    """Run the step, traced, and once more with its bad values healed; no torch.compile.

    Args:
        bundle: its manifest counts, its folder only tells where to look for code.
        source: of the tensors.
        device: to run on.
    """
    from pytest_nancapture.diagnose.blame import relative_file

    start = time.perf_counter()
    with traceless() as folder:
        run = Replay(bundle, device, ReplayHooks(), folder, source)
        fields = run.run(None, trace=True)
        healed = None
        if fields["verdict"] == "nonfinite":
            again = Replay(bundle, device, ReplayHooks(), folder, source)
            again.run(None, heals=True)
            if again.finding is not None and not again.finding.found_in:
                healed = again.finding.gradients.nonzero
    root = repository_root(Path.cwd()) or Path.cwd()
    births: dict[tuple[str, str, int], frozenset[str]] = {}
    for birth, kinds in run.trace.births.items() if run.trace is not None else ():
        place = (birth.op, relative_file(birth.source, root), birth.source.line)
        births[place] = births.get(place, frozenset()) | kinds
    result = ReplayResult(device=str(device), seconds=time.perf_counter() - start, **fields)
    return Observed(result=result, finding=run.finding, births=births, healed=healed)


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
