"""What an operation is given besides tensors, and what its tensors held before it wrote into them."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pytest_nancapture.bundle.tensors.kinds import bare

_SMALL = 10**6
"""Values of a tensor that an in-place operation overwrites are kept up to this number, to explain it."""


def is_written(values: tuple[Any, Any]) -> bool:
    """Whether Inf is among the operation's plain arguments, as in ``masked_fill(mask, float("-inf"))``."""
    return any(isinstance(value, float) and math.isinf(value) for value in tree_leaves(values))


def has_bad_number(values: tuple[Any, Any]) -> bool:
    """Whether NaN or Inf is among the operation's plain arguments."""
    return any(isinstance(value, float) and not math.isfinite(value) for value in tree_leaves(values))


def values_of(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, tensors copied where that is cheap: the operation is about to write into them."""

    def keep(value: Any) -> Any:
        return bare(value).clone() if isinstance(value, Tensor) and value.numel() <= _SMALL else value

    result: tuple[Any, Any] = tree_map(keep, (args, kwargs))
    return result
