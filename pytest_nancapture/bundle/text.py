"""Small things said the same way everywhere: sizes, lists of names, text from a bundle made safe to print."""

from __future__ import annotations

import math
import re
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


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes from what people write: ``1MB``, ``500kB``, ``2M``, ``1.5 MiB`` or a plain number.

    Raises:
        ValueError: it is no size.

    Example:
        >>> parse_size("1MB"), parse_size("500 kB"), parse_size("2000")
        (1000000, 500000, 2000)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"expected a size such as 1MB, 500kB, 2M or 2000000 (bytes), came {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


def size_above(count: int) -> str:
    """A short size, as :func:`parse_size` reads it, that is not below `count`.

    Example:
        >>> size_above(3_210_000), size_above(95_400_000), size_above(940)
        ('3.3MB', '96MB', '940')
    """
    power = next((power for power in (3, 2, 1) if count >= 1000**power), 0)
    value = count / 1000**power
    rounded = math.ceil(value) if power == 0 or value > 9.9 else math.ceil(value * 10) / 10
    return f"{rounded:g}{('', 'kB', 'MB', 'GB')[power]}"


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
