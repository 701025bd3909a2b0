"""A culprit's line among its neighbours, with a mark under the guilty expression."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit

_AROUND = 1
"""Lines before and after."""
_WIDTH, _LEAD = 60, 8
"""Characters of a line that are shown, and of those before the expression where the line is longer."""


def excerpt(culprit: Culprit) -> list[str]:
    """Three lines of the source with their numbers, and a line of carets; empty where the source cannot be read.

    The file is looked for from here upward, since its name is relative to the repository.
    """
    path = next((p for place in (Path.cwd(), *Path.cwd().parents) if (p := place / culprit.file).is_file()), None)
    if not culprit.line or path is None:
        return []
    numbers = range(max(culprit.line - _AROUND, 1), culprit.line + _AROUND + 1)
    lines = {n: linecache.getline(str(path), n).rstrip().expandtabs(4) for n in numbers}
    if lines[culprit.line].strip() != culprit.source.expandtabs(4).strip():
        return []
    guilty = lines[culprit.line]
    indent = min(len(line) - len(line.lstrip()) for line in lines.values() if line)
    start, end = culprit.columns if culprit.columns[1] else (len(guilty) - len(guilty.lstrip()) + 1, len(guilty))
    # A line that is too long is shown from shortly before the expression on.
    left = indent if end - indent <= _WIDTH else max(indent, start - 1 - _LEAD)
    width = len(str(max(lines)))
    shown = []
    for number, line in lines.items():
        if line or number == culprit.line:
            mark = ">" if number == culprit.line else " "
            shown.append(f"{mark} {number:{width}} | {line[left : left + _WIDTH]}".rstrip())
        if number == culprit.line:
            carets = " " * (start - 1 - left) + "^" * max(end - start + 1, 1)
            shown.append(f"  {'':{width}} | {carets[:_WIDTH]}")
    return shown
