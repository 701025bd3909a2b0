"""Small things said the same way everywhere: sizes, lists of names, text from a bundle made safe to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def human_size(count: int) -> str:
    """Bytes as people say them, in powers of 1000.

    Example:
        >>> human_size(95_000_000), human_size(6_230), human_size(999_999)
        ('95 MB', '6.2 kB', '1 MB')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while round(value) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    digits = f"{value:.1f}".removesuffix(".0") if value < 9.95 and units[0] != "B" else f"{value:.0f}"
    return f"{digits} {units[0]}"


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first few of many names.

    Example:
        >>> some(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    left = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {left} more" if left > 0 else "")


def printable(text: str) -> str:
    r"""`text` on one line, with what could steer a terminal escaped: a bundle is data from elsewhere.

    Example:
        >>> printable("red \x1b[31m")
        'red \\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
