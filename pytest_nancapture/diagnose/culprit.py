"""Who is to blame, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer", "input", "weights"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The operation that gave birth to the first non-finite value that mattered.

    Attributes:
        phase: where the fault surfaces.
        op: the operation, such as ``aten.div.Tensor``; empty where no trace was made.
        file: the user's source file, relative to the repository where it lies inside; empty where unknown.
        line: the line in it, counted from 1; 0 where unknown.
        source: the text of that line.
        columns: the first and last character in the line, counted from 1, of the guilty expression; (0, 0) where
            unknown.
        library: the line in a library that it led to, such as ``torch/nn/functional.py:6578``; empty where none.
        module_path: the submodule it ran in, such as ``encoder.layers.3.attn``.
        explanation: one sentence from the values.
        chain: how the bad values travelled from there to where they showed, an operation and its line each.
    """

    phase: Phase
    op: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    columns: tuple[int, int] = (0, 0)
    library: str = ""
    module_path: str = ""
    explanation: str = ""
    chain: tuple[str, ...] = ()
