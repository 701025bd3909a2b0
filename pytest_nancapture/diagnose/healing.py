"""What a step would learn with its fault healed: by it a replay knows honest zeros from a fault that is masked.

A bad value is healed where it is born, in forward and backward alike: another number takes its place. What is left are
the gradients that a fix may leave. That they are 0 for 0 says little: a 0 may stand in for a gradient that a right fix
would have, and weights may happen to silence a branch (a softmax that has saturated, a layer that begins as zeros). So
whatever has no gradient yet is tried again with other numbers in place of the bad ones, then with other weights, then
with small weights and a batch of no large values. What has none in any of these learns nothing from this batch: an
empty mask, a weight of 0 for every sample. There zeros are honest; and where 0 in place of bad ones leaves zeros, they
are so for a weight whose own layer goes on learning: what comes into the layer is 0, what leaves it counts.

NaN that the step is given, in its batch or weights, stays where the step comes to a finite end with it: there it marks
what is missing, and code that reads the mark must find it. Where it does not, it is healed too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pytest_nancapture.bundle.manifest import Gradients, Healed
from pytest_nancapture.bundle.tensors.kinds import bare, is_expanded, stored_values
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.step.finding import Finding

_PERIOD = 997
"""Of the numbers that take the place of bad ones: a prime, so that no row of a tensor is like the next."""
_SIZE = 0.1
"""Of the numbers in place of weights that are all 0."""


@dataclass(frozen=True, kw_only=True)
class Healing:
    """One way to heal.

    Attributes:
        fill: what takes a bad value's place: 0, or numbers from 1/2 to 3/2, no two neighbours alike.
        weights: the spread of random weights in place of the captured ones, or ``own`` for their own; None keeps them.
        tames: whether the batch is scaled down to values of at most 1; zeros, signs and masks stay.
        given: whether NaN in batch and weights is healed as well.
    """

    fill: Literal["zero", "spread"] = "zero"
    weights: float | Literal["own"] | None = None
    tames: bool = False
    given: bool = False

    def mend(self, values: Tensor, bad: Tensor) -> None:
        """Put another number in the place of each bad one."""
        with torch.no_grad():
            if self.fill == "zero":
                values.masked_fill_(bad, 0)
            else:
                order = torch.arange(values.numel(), device=values.device).reshape(values.shape)
                values.copy_(torch.where(bad, (order % _PERIOD / _PERIOD + 0.5).to(values.dtype), values))

    def prepare_weights(self, module: nn.Module) -> None:
        """At the instant."""
        if self.weights is None:
            return
        for seed, (_, parameter) in enumerate(unique_parameters(module)):
            if not _is_plain(parameter):
                continue
            values = stored_values(parameter.data)  # whose version stays: nothing has happened to it once it is back
            noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
            finite = values[values.isfinite()]
            own = finite.abs().float().mean().item() if finite.numel() else 0.0
            size = self.weights if self.weights != "own" else own or _SIZE
            with torch.no_grad():
                values.copy_(noise * size)

    def prepare_batch(self, batch: Mapping[str, Tensor]) -> None:
        """Before the step sees it; a second time changes nothing."""
        for tensor in batch.values() if self.tames else ():
            if not _is_plain(tensor) or is_expanded(tensor):
                continue
            values = stored_values(bare(tensor))
            finite = values[values.isfinite()]
            largest = finite.abs().max().item() if finite.numel() else 0.0
            if largest > 1:
                with torch.no_grad():
                    values.div_(largest)


HEALINGS = (
    Healing(),
    Healing(fill="spread"),
    Healing(fill="spread", weights="own"),
    Healing(fill="spread", weights=0.05, tames=True),
    Healing(fill="spread", weights=0.001, tames=True),
)
"""In this order, as long as there are parameters without a gradient."""


def taught_by(finding: Finding, guilty: int) -> set[str]:
    """Parameters that the update learns something of, and that micro-batch taught them."""
    taught = finding.taught[guilty] if guilty < len(finding.taught) else frozenset()
    return {name for name in finding.gradients.nonzero if name in taught}


def watched(gradients: Gradients) -> tuple[str, ...]:
    """Parameters whose gradients a replay asks for."""
    return gradients.nonfinite or gradients.nonzero


def healed_step(
    gradients: Gradients,
    guilty: int,
    run: Callable[[Healing], Finding | None],
    any_rank: Callable[[bool], bool] = bool,
) -> Healed | None:
    """What the step would learn, tried in one way after another until every parameter in question has a gradient.

    Args:
        gradients: those of the fault.
        guilty: position of the guilty micro-batch; what others teach does not count.
        run: runs the step healed; None where that cannot be done.
        any_rank: whether it is so on any rank; all ranks then come by the same number of times.

    Returns:
        None where it cannot be told: a run was not to be had, or was not finite even so.
    """
    asked, learnt, silent, is_known, given = set(watched(gradients)), set[str](), set[str](), True, False
    for healing in HEALINGS:
        is_open = not asked <= learnt if asked else not learnt
        if not any_rank(is_known and is_open):
            break
        finding = run(replace(healing, given=given))
        if not given and any_rank(not _is_healed(finding)):
            given = True
            finding = run(replace(healing, given=True))
        if not _is_healed(finding):
            is_known = is_known and not is_open
        else:
            taught = taught_by(finding, guilty)
            learnt |= taught
            silent = asked - taught if healing == HEALINGS[0] else silent
    if not is_known:
        return None
    return Healed(
        learns=bool(learnt),
        idle=tuple(name for name in watched(gradients) if name not in learnt),
        silent=tuple(name for name in watched(gradients) if name in learnt & silent),
    )


def _is_healed(finding: Finding | None) -> TypeGuard[Finding]:
    return finding is not None and not finding.found_in


def _is_plain(tensor: Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.dtype.itemsize > 1 and not isinstance(tensor, UninitializedTensorMixin)
