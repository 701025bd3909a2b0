"""What a trace remembers: operations that put out what is not finite, and where their inputs came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pytest_nancapture.diagnose.source import Source


@dataclass(eq=False)
class Forward:
    """An operation of the forward, for the backward ones that belong to it."""

    op: str
    source: Source | None
    module_path: str


@dataclass(eq=False)
class Record:
    """An operation that put out NaN or Inf.

    Attributes:
        index: its place in the order of execution.
        op: such as ``aten.div.Tensor``.
        links: the operations, or givens, that its bad inputs came from.
        birth: ``computed`` where all inputs were finite, ``written`` where an Inf stood in the code, ``nan``
            where Inf became NaN; empty where it only passed bad values on.
        fresh: of a pointwise operation, the elements that are bad though its inputs are finite there; None for all.
        forward: in a backward pass, the forward operation whose gradient this is.
        is_early: it made the batch that the step was given.
        in_update: whether it was an optimizer's own, and none of the step's.
        is_learned: whether weights took part in it.
        is_literal: whether NaN or Inf stood in the code, as a mark that is put into a tensor.
    """

    index: int
    op: str
    source: Source | None
    module_path: str
    birth: str
    links: list[Link]
    is_backward: bool
    fresh: Tensor | None = None
    explanation: str = ""
    forward: Forward | None = None
    is_early: bool = False
    in_update: bool = False
    is_learned: bool = False
    is_literal: bool = False


@dataclass(frozen=True, kw_only=True)
class Birth:
    """An operation of the user's code, or its gradient, that made NaN or Inf of better values.

    Attributes:
        is_first: whether those were finite; else it made NaN of Inf.
    """

    op: str
    source: Source
    is_backward: bool
    is_first: bool


@dataclass(frozen=True)
class GivenValue:
    """Bad values that were there before the step: in the batch, in the weights, or in a constant of the code."""

    kind: Literal["input", "weights", "constant"]
    name: str = ""


Origin = Record | GivenValue


@dataclass(frozen=True, eq=False)
class Link:
    """Where an operation's bad input came from.

    Attributes:
        reach: of a pointwise operation, the elements of its output that the input made bad; None where not known.
        is_aligned: whether an element of the input is the element of the same place in what its origin put out.
    """

    origin: Origin
    reach: Tensor | None = None
    is_aligned: bool = False
