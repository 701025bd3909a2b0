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

Copies = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass
class TakenBatch:
    """One micro-batch as the step received it, its tensors copied, with the random states of that instant.

    Attributes:
        batch_idx: its number in the epoch.
        losses: what the step backpropagated, not yet looked at.
        problem: why the batch cannot be written, if it cannot.
        hook: the random states as the module's own hook was entered that makes the step's batch of this one; None
            where the step received it as it is here.
        number: the loop's own, which differs from `batch_idx` where a step takes several batches, or none.
        fetches: of a step that takes its batches from an iterator itself, each of them; `tree` is then a tuple of
            theirs. None where the step is given its batch.
        exhausted: whether such a step then found the iterator at its end.
        dataloader_idx: what came with a batch that was taken so.
    """

    batch_idx: int
    rng: RandomStates
    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    problem: UnwritableValueError | None = None
    hook: RandomStates | None = None
    number: int = -1
    fetches: list[TakenBatch] | None = None
    exhausted: bool = False
    dataloader_idx: int = 0

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.batch_idx

    @classmethod
    def take(cls, batch: Any, batch_idx: int, device: torch.device, copies: Copies, *, prefix: str = "") -> TakenBatch:
        """Copy a batch; one that has no form on disk is noted, and training goes on.

        Args:
            prefix: begins the names of its tensors; by default its number.
        """
        rng = RandomStates.take()
        encoder = Encoder(prefix=f"{prefix or batch_idx}/", device=device)
        try:
            tree = encoder.encode(batch, "batch")
            tensors = copies(encoder.tensors)
        except UnwritableValueError as problem:
            return cls(batch_idx, rng, problem=problem)
        except Exception as error:  # of a class of the user's, which training may never trip over
            what = f"looking at it raised {type(error).__name__}: {error}"
            return cls(batch_idx, rng, problem=UnwritableValueError("batch", what, REMEDY))
        return cls(batch_idx, rng, tree, tensors)

    @classmethod
    def awaited(cls, number: int) -> TakenBatch:
        """The instant of a step that takes its batches itself."""
        return cls(number, RandomStates.take(), {"tuple": []}, fetches=[])

    def fetch(self, batch: Any, batch_idx: int, dataloader_idx: int, device: torch.device, copies: Copies) -> None:
        """The step took this batch from its iterator just now."""
        assert self.fetches is not None
        count = len(self.fetches)
        prefix = f"{self.number}.{count}" if count else f"{self.number}"
        taken = TakenBatch.take(batch, batch_idx, device, copies, prefix=prefix)
        taken.dataloader_idx = dataloader_idx
        if not count:
            self.batch_idx = batch_idx
        self.fetches.append(taken)
        self.tree["tuple"].append(taken.tree)
        self.tensors.update(taken.tensors)
        self.problem = self.problem or taken.problem

    def copies(self) -> dict[str, Tensor]:
        """Its tensors, by name, that nobody else holds."""
        return {name: copy_of(tensor) for name, tensor in self.tensors.items()}

    def batch_of(self, tensors: Mapping[str, Tensor]) -> Any:
        """The batch again, made of `tensors`."""
        return Decoder(tensors, LiveResolver()).decode(self.tree)


class Early:
    """A micro-batch from before the module's own hook, which makes the step's batch of it and runs again in a replay.

    It counts if the step is given what the hook made: where a callback changes that, which no replay runs, the batch
    has to be taken as the step receives it.
    """

    def __init__(self, taken: TakenBatch, device: torch.device) -> None:
        self._taken = taken
        self._device = device
        self._made: Any = None
        self._contents: tuple[Any, list[Tensor], list[int]] | None = None

    def note(self, made: Any, *, may_change: bool) -> None:
        """The hook made this.

        Args:
            may_change: code of the user's may change it before the step.
        """
        self._made = made
        self._contents = _contents(made, self._device) if may_change else None

    def taken_for(self, batch: Any) -> TakenBatch | None:
        """The micro-batch whose step is about to be given `batch`; None where that is not what the hook made."""
        taken, known = self._taken, self._contents
        if taken.problem is not None or batch is not self._made:
            return None
        if known is not None and not _is_same(known, _contents(batch, self._device)):
            return None
        taken.hook, taken.rng = taken.rng, RandomStates.take()
        return taken

    def unmade(self) -> TakenBatch:
        """The micro-batch of which the hook has made nothing, since it raised."""
        taken = self._taken
        taken.hook, taken.rng = taken.rng, RandomStates.take()
        return taken


def _contents(batch: Any, device: torch.device) -> tuple[Any, list[Tensor], list[int]] | None:
    """The plain values of a batch, its tensors, and how often each was written to; None where it has no such form."""
    encoder = Encoder(device=device)
    try:
        tree = encoder.encode(batch, "batch")
        tensors = list(encoder.tensors.values())
        return tree, tensors, [tensor._version for tensor in tensors]
    except Exception:  # of a class of the user's, which training may never trip over
        return None


def _is_same(left: tuple[Any, list[Tensor], list[int]], right: tuple[Any, list[Tensor], list[int]] | None) -> bool:
    if right is None or left[0] != right[0] or left[2] != right[2]:
        return False
    return all(a is b for a, b in zip(left[1], right[1], strict=True))
