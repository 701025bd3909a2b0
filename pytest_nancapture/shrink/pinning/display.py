"""What people read of a bundle that was pinned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_nancapture.bundle.paths import shown
from pytest_nancapture.bundle.text import human_size, printable
from pytest_nancapture.shrink.display import held_lines, size_change, stopped_line

if TYPE_CHECKING:
    from pytest_nancapture.shrink.pinning.pin import Pinned


def pinned_lines(pinned: Pinned, seconds: float) -> Iterator[str]:
    """What was pinned, and all that is to be known about it."""
    size, why = human_size(pinned.bundle.size), "forced, not replayed"
    if pinned.shrunk is not None:
        size = size_change(pinned.shrunk.before, pinned.bundle.size)
    if pinned.result is not None:
        why = f"red: {pinned.result['reason']}"
    yield printable(f"pinned  {shown(pinned.bundle.path)}   {size}   {why}")
    if pinned.shrunk is not None:
        yield from map(printable, held_lines(pinned.shrunk))
    notes = [*(pinned.result or {}).get("notes", ()), *pinned.notes]
    if pinned.shrunk is not None and (stopped := stopped_line(pinned.shrunk, seconds)):
        notes.append(f"shrinking was {stopped}: this is the smallest that was found by then")
    for note in notes:
        yield from (f"note    {printable(line)}" for line in note.splitlines())
