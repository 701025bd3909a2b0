"""What a user may put in place of what the bundle says: the three hooks of a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from pytest_nancapture.bundle.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class ReplayHooks:
    """Functions that stand in for the manifest; each may return None to decline.

    Args:
        module: builds the module to replay.
        batch: changes one micro-batch, after it was read and before the step sees it.
        trainer_kwargs: arguments for the replay's Trainer, over those the bundle asks for.
    """

    module: Callable[[Bundle], nn.Module | None] | None = None
    batch: Callable[[Bundle, Any], Any | None] | None = None
    trainer_kwargs: Callable[[Bundle], dict[str, Any] | None] | None = None
