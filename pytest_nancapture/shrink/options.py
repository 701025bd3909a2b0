"""How to shrink: what people may choose, the same wherever it is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_nancapture.shrink.search import Progress


@dataclass(frozen=True, kw_only=True)
class ShrinkOptions:
    """The options of :func:`pytest_nancapture.shrink.shrinker.shrink`, which says what they mean."""

    max_seconds: float = 300.0
    jobs: int = 1
    progress: Callable[[Progress], None] | None = None

    def as_arguments(self) -> dict[str, Any]:
        """By keyword."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


DEFAULTS = ShrinkOptions()
