"""What was bad before: values of the batch or weights, before the step; an optimizer's numbers, before its update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import bare, stored_values
from pytest_nancapture.bundle.text import some
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.step.check import is_finite


def given_fault(weights: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Culprit | None:
    """The culprit where weights or batch were bad already; to be asked before the step, which may change them.

    Buffers that are meant to hold Inf, such as the bounds of a constraint, are not among the weights to give.

    Args:
        weights: captured parameters and buffers.
        batch: captured tensors, named like ``6/batch['x']``.
    """
    for phase, tensors in (("weights", weights), ("input", batch)):
        bad = {name: tensor for name, tensor in tensors.items() if not is_finite(tensor)}
        if bad:
            name, tensor = next(iter(bad.items()))
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            return _culprit("weights" if phase == "weights" else "input", name, tensor, more)
    return None


def given_number(culprit: Culprit, numbers: Sequence[str]) -> Culprit:
    """The culprit of an update, where the optimizer made it with numbers that are not finite: they are what is wrong.

    Args:
        numbers: sentences of :func:`pytest_nancapture.step.state.optimizers.bad_numbers`.
    """
    if not numbers or culprit.phase != "optimizer":
        return culprit
    said = "; ".join(numbers)
    if not culprit.line:
        return Culprit(phase="optimizer", explanation=said)
    return dataclasses.replace(culprit, explanation="; ".join(filter(None, (said, culprit.explanation))))


def _culprit(phase: Literal["weights", "input"], name: str, tensor: Tensor, more: str) -> Culprit:
    if phase == "weights":
        what = f"{name} held {_count(tensor)} before the step began{more}"
        return Culprit(phase="weights", module_path=name.rpartition(".")[0], explanation=what)
    leaf = name.partition("/")[2] or name
    return Culprit(phase="input", explanation=f"{leaf} holds {_count(tensor)}{_samples(tensor)}{more}")


def _count(tensor: Tensor) -> str:
    values = _values(tensor)
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    parts = [f"{count} {name}" for count, name in ((nan, "NaN"), (inf, "Inf")) if count]
    return f"{' and '.join(parts)} among {values.numel()} values"


def _samples(tensor: Tensor) -> str:
    """Which entries of the first dimension, which is the batch's in most batches."""
    values = _values(tensor)
    if values.dim() == 0 or tensor.layout is not torch.strided:
        return ""
    bad = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero().flatten().tolist()
    return f", in {'samples' if len(bad) > 1 else 'sample'} {some([str(i) for i in bad])} of {len(values)}"


def _values(tensor: Tensor) -> Tensor:
    values = stored_values(bare(tensor))
    return values.float() if values.dtype.itemsize == 1 else values
