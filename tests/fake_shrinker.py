"""In place of the shrinker, for tests of what is built around it: it writes a bundle with a smaller batch at once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_bundles import tensor_file, write_bundle

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import BATCH, RNG, WEIGHTS, Manifest

SMALL = {WEIGHTS: tensor_file(w=("F32", (1,))), BATCH: tensor_file(x=("F32", (1,))), RNG: tensor_file(cpu=("U8", (1,)))}


@dataclass(frozen=True)
class Progress:
    pass_name: str
    size: int
    tried: int
    kept: int
    seconds: float
    what: str


@dataclass(frozen=True)
class Gain:
    pass_name: str
    before: int
    after: int
    tried: int
    kept: int


@dataclass(frozen=True)
class Shrunk:
    bundle: Bundle
    before: int
    after: int
    gains: tuple[Gain, ...]
    kept: tuple[str, ...]
    stopped: str
    result: dict[str, Any]


@dataclass
class FakeShrinker:
    """What it is to do and to say, and what it was asked.

    Attributes:
        files: of the bundle that it writes; None for a copy.
        raises: in place of an answer; what it knew by then stays in a hidden file beside the place.
        remembers: whether that file stays when it was stopped, too.
        remembered: whether there was such a file when it was asked last.
    """

    files: dict[str, bytes] | None = field(default_factory=lambda: dict(SMALL))
    kept: tuple[str, ...] = ()
    stopped: str = ""
    raises: BaseException | None = None
    remembers: bool = True
    remembered: bool = False
    asked: list[tuple[Path, Path, dict[str, Any]]] = field(default_factory=list)

    def shrink(
        self, bundle: Bundle, place: Path, *, progress: Callable[[Progress], None] | None = None, **options: Any
    ) -> Shrunk:
        self.asked.append((bundle.path, place, options))
        memory = place.with_name(f".{place.name}.shrink.json")
        self.remembered = memory.exists()
        place.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text("{}")
        if progress is not None:
            progress(Progress("batch", bundle.size, 1, 0, 0.0, "dropping samples"))
        if self.raises is not None:
            raise self.raises
        if self.files is None:
            shutil.copytree(bundle.path, place)
        else:
            write_bundle(place, files=self.files, **_sections(bundle.manifest))
        small = Bundle.open(place)
        if progress is not None:
            progress(Progress("batch", small.size, 2, 1, 1.0, "dropping samples"))
        if not self.stopped or not self.remembers:
            memory.unlink()
        gains = (Gain("batch", bundle.size, small.size, 20, 3), Gain("weights", small.size, small.size, 4, 0))
        result = {"verdict": "nonfinite", "reason": "the loss is nan"}
        return Shrunk(small, bundle.size, small.size, gains, self.kept, self.stopped, result)


def _sections(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in ("fault", "module", "trainer", "code", "environment", "pin")}


def install(monkeypatch: pytest.MonkeyPatch) -> FakeShrinker:
    """Put one where the package looks for the real one."""
    fake = FakeShrinker()
    module = ModuleType("pytest_nancapture.shrink.shrinker")
    vars(module).update(shrink=fake.shrink, Progress=Progress, Gain=Gain, Shrunk=Shrunk)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake
