"""Which line of the user's own code is running."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {str(Path(path).resolve()) for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))}
    | {str(Path(path).resolve()) for path in (sysconfig.get_path("platlib"), Path(torch.__file__).parent)}
)
_PLUMBING = tuple(
    str(Path(torch.__file__).resolve().parent / part) for part in ("_dynamo", "_compile", "_ops", "utils/_p")
)
"""By which every operation reaches a trace, whoever called it."""
_ENGINE = str(Path(torch.autograd.graph.__file__).resolve())


@dataclass(frozen=True)
class Source:
    """A line of code.

    Attributes:
        file: absolute.
        line: counted from 1.
        columns: the first and last character, counted from 1, of the expression in it that runs; (0, 0) where unknown.
        library: the line that it has led to in a library, such as ``torch/nn/functional.py:6578``; empty where none.
    """

    file: str
    line: int
    columns: tuple[int, int] = field(default=(0, 0), compare=False)
    library: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """The line itself, without indentation."""
        return linecache.getline(self.file, self.line).strip()


def package_folder(module: object) -> str:
    """The folder of the installed package that defines the module's class; empty where it is the user's own file."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    parts = Path(file).parts
    if "site-packages" not in parts:
        return ""
    return str(Path(*parts[: parts.index("site-packages") + 2]).resolve())


def user_source(package: str = "") -> Source | None:
    """The innermost line of the user's own code on the stack; None where only libraries run.

    The search ends at the autograd engine, since who called ``backward`` has nothing to do with the operation, and at
    this package, which called the user's code.

    Args:
        package: the folder of an installed package that counts as the user's own, as it holds the module.
    """
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _kind(file, package)
        if kind == "user":
            return Source(file, frame.f_lineno, _columns(frame), library)
        if kind == "library" and not library:
            library = f"{_short(file)}:{frame.f_lineno}"
        if kind == "engine" or (kind == "ours" and "/diagnose/" not in file.replace("\\", "/")):
            return None
        frame = frame.f_back
    return None


def _short(file: str) -> str:
    """From the package's folder on."""
    parts = Path(file).parts
    here = max((i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), default=-1)
    return "/".join(parts[here + 1 :]) if here >= 0 else file


def _columns(frame: FrameType) -> tuple[int, int]:
    """Known from Python 3.11 on, and where the expression ends on its first line."""
    if not hasattr(frame.f_code, "co_positions"):
        return 0, 0
    first, last, start, end = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if start is None or end is None or not first == last == frame.f_lineno:
        return 0, 0
    return start + 1, end


@functools.lru_cache(8192)
def _kind(file: str, package: str) -> str:
    path = str(Path(file).resolve()) if not file.startswith("<") else file
    if path == _ENGINE:
        return "engine"
    if path.startswith(_OURS):
        return "ours"
    if path.startswith(_PLUMBING):
        return "plumbing"
    if package and path.startswith(package):
        return "user"
    is_library = file.startswith("<") or path.startswith(_LIBRARIES) or "site-packages" in path
    return "library" if is_library else "user"
