"""A culprit's line among its neighbours, with a mark under the guilty expression."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_nancapture.replay.result import Culprit

_AROUND = 1
"""Lines before and after."""


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
    indent = min(len(line) - len(line.lstrip()) for line in lines.values() if line)
    width = len(str(max(lines)))
    shown = []
    for number, line in lines.items():
        if line or number == culprit.line:
            mark = ">" if number == culprit.line else " "
            shown.append(f"{mark} {number:{width}} | {line[indent:]}")
        if number == culprit.line:
            shown.append(f"  {'':{width}} | {_carets(line, culprit.columns, indent)}")
    return shown


def _carets(line: str, columns: tuple[int, int], indent: int) -> str:
    start, end = columns if columns[1] else (len(line) - len(line.lstrip()) + 1, len(line))
    return " " * (start - 1 - indent) + "^" * max(end - start + 1, 1)
