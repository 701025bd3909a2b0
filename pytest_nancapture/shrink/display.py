"""What people read of a shrink: a line while it runs, a page when it is done."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from pytest_nancapture.bundle.paths import shown
from pytest_nancapture.bundle.text import human_size, printable

if TYPE_CHECKING:
    from pytest_nancapture.shrink.shrinker import Progress, Shrunk

_PULSE, _BREATH = 10.0, 1.0
"""Seconds between lines where nothing is gained, and at least between two where much is."""
_STOPPED = {"time": "stopped after {seconds:g} s", "interrupted": "interrupted"}


class ProgressLine:
    """Shows how shrinking goes: one line rewritten in place on a terminal, else a line now and then.

    Example:
        >>> with contextlib.closing(ProgressLine()) as line:  # doctest: +SKIP
        ...     shrink(bundle, place, progress=line)
    """

    def __init__(self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._width = 0
        self._size: int | None = None
        self._last = -_PULSE
        self._left_out = ""

    def __call__(self, progress: Progress) -> None:
        """Show it, unless that would be too much."""
        text, now = _progress(progress), self._clock()
        gained = self._size is not None and progress.size < self._size
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r{text:{self._width}}")
            self._width = len(text)
        elif now - self._last >= (_BREATH if gained else _PULSE):
            self._stream.write(f"{text}\n")
        else:
            self._left_out = text
            return
        self._last, self._size, self._left_out = now, progress.size, ""
        self._stream.flush()

    def close(self) -> None:
        """Leave the last of it to be seen, and go to the next line."""
        if self._width or self._left_out:
            self._stream.write(f"{self._left_out}\n")
            self._width, self._left_out = 0, ""


def _progress(progress: Progress) -> str:
    counts = f"kept {progress.kept} of {progress.tried}"
    size = human_size(progress.size)
    what = progress.what.removeprefix(f"{progress.pass_name}: ")
    text = f"shrinking {size:>7}   {progress.seconds:4.0f} s   {counts:16} {progress.pass_name:12} {what}"
    return printable(text).rstrip()


def shrunk_page(shrunk: Shrunk, *, earlier: int, seconds: float, following: str) -> str:
    """What became of it, what each pass gained, what had to stay, and the command that follows.

    Args:
        shrunk: what shrinking came to.
        earlier: bytes of the one that it went on from; 0 where there was none.
        seconds: how long it was allowed to take.
        following: that command.
    """
    lines = [f"shrunk  {shown(shrunk.bundle.path)}   {size_change(shrunk.before, shrunk.after)}"]
    if earlier:
        came = "came no further than" if shrunk.after >= earlier else "went on from"
        lines.append(f"note    it {came} the {human_size(earlier)} of an earlier run")
    if reason := shrunk.result.get("reason"):
        lines.append(f"red     {reason}")
    lines += gains_table(shrunk)
    lines += held_lines(shrunk)
    if stopped := stopped_line(shrunk, seconds):
        lines.append(f"note    {stopped}; run the same command again to go on")
    lines.append(f"next    {following}")
    return "\n".join(printable(line).rstrip() for line in lines)


def shrunk_dict(shrunk: Shrunk) -> dict[str, Any]:
    """The same as JSON-ready values."""
    names = ("pass_name", "before", "after", "tried", "kept")
    return {
        "path": str(shrunk.bundle.path),
        "before": shrunk.before,
        "after": shrunk.after,
        "gains": [{name: getattr(gain, name) for name in names} for gain in shrunk.gains],
        "kept": list(shrunk.kept),
        "stopped": shrunk.stopped,
        "result": shrunk.result,
    }


def gains_table(shrunk: Shrunk) -> list[str]:
    """A line of headings and one for each pass; empty where there was none."""
    rows = [("pass", "gained", "left", "tried", "kept")]
    for gain in shrunk.gains:
        gained = human_size(gain.before - gain.after) if gain.after < gain.before else "-"
        rows.append((gain.pass_name, gained, human_size(gain.after), str(gain.tried), str(gain.kept)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]
        lines.append(f"        {'   '.join(cells)}")
    return lines if shrunk.gains else []


def stopped_line(shrunk: Shrunk, seconds: float) -> str:
    """Why it ended before there was nothing left to try; empty where it did not."""
    return _STOPPED.get(shrunk.stopped, shrunk.stopped).format(seconds=seconds)


def shrinking_line(what: str, seconds: float) -> str:
    """What is said before the first candidate, which may take a while to come."""
    return f"shrinking {what}, for {seconds:g} s at most; Ctrl-C ends that early"


def held_lines(shrunk: Shrunk) -> list[str]:
    """What is left in a small bundle, and why, a line each."""
    return [f"{'' if position else 'holds':7} {text}" for position, text in enumerate(shrunk.kept)]


def size_change(before: int, after: int) -> str:
    """From what to what, in bytes as people say them."""
    return f"{human_size(before)} -> {human_size(after)}" if after < before else f"{human_size(after)}, as it was"
