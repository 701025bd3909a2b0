"""A fault, and what replays answer that see it or see it mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAME = "step-000812-rank-0"
PINNED = "shop-div-zero-count"
CULPRIT = {
    "phase": "forward",
    "op": "aten.div.Tensor",
    "file": "train.py",
    "line": 42,
    "source": "mean_loss = loss / count",
    "columns": [25, 36],
    "library": "",
    "module_path": "",
    "explanation": "division by zero: the divisor is 0 in its only place",
    "chain": [],
}
RED = {"verdict": "nonfinite", "reason": "the loss is nan", "culprit": CULPRIT}
GREEN = {"verdict": "finite", "reason": "loss and gradients are finite", "culprit": None}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
