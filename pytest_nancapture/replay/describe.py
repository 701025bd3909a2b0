"""What a replay found, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_nancapture.bundle.text import printable

if TYPE_CHECKING:
    from pytest_nancapture.replay.result import ReplayResult


def result_page(result: ReplayResult, *, traced: bool, repeat: str) -> str:
    """The verdict and its reason on the first line, then what led to it.

    Args:
        result: of the replay.
        traced: whether the culprit was looked for.
        repeat: the command that repeats it.
    """
    hint = "" if traced else "   (add --trace to find the operation and its line)"
    return "\n".join(map(printable, result.lines(untraced=hint, more=[("repeat", repeat)])))
