"""A micro-batch as it came: whether its tensors are copied is decided here, and into which memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import REMEDY, Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import UnwritableValueError
from pytest_nancapture.step.state.tensors import copy_of


@dataclass
class TakenBatch:
    """One micro-batch as the step received it, its tensors copied, with the random states of that instant.

    Attributes:
        losses: what the step backpropagated, not yet looked at.
        problem: why the batch cannot be written, if it cannot.
    """

    batch_idx: int
    rng: RandomStates
    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    problem: UnwritableValueError | None = None

    @classmethod
    def take(
        cls,
        batch: Any,
        batch_idx: int,
        device: torch.device,
        copies: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    ) -> TakenBatch:
        """Copy a batch; one that has no form on disk is noted, and training goes on."""
        rng = RandomStates.take()
        encoder = Encoder(prefix=f"{batch_idx}/", device=device)
        try:
            tree = encoder.encode(batch, "batch")
            tensors = copies(encoder.tensors)
        except UnwritableValueError as problem:
            return cls(batch_idx, rng, problem=problem)
        except Exception as error:  # of a class of the user's, which training may never trip over
            what = f"looking at it raised {type(error).__name__}: {error}"
            return cls(batch_idx, rng, problem=UnwritableValueError("batch", what, REMEDY))
        return cls(batch_idx, rng, tree, tensors)

    def copies(self) -> dict[str, Tensor]:
        """Its tensors, by name, that nobody else holds."""
        return {name: copy_of(tensor) for name, tensor in self.tensors.items()}

    def batch_of(self, tensors: Mapping[str, Tensor]) -> Any:
        """The batch again, made of `tensors`."""
        return Decoder(tensors, LiveResolver()).decode(self.tree)
