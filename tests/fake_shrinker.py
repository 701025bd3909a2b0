"""In place of the shrinker, for tests of what is built around it: it writes a bundle with a smaller batch at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_bundles import tensor_file, write_bundle

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import BATCH, RNG, WEIGHTS, Manifest
from pytest_nancapture.shrink import shrinker
from pytest_nancapture.shrink.shrinker import Gain, Progress, Shrunk, Stopped

SMALL = {WEIGHTS: tensor_file(w=("F32", (1,))), BATCH: tensor_file(x=("F32", (1,))), RNG: tensor_file(cpu=("U8", (1,)))}


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
    stopped: Stopped = ""
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
            progress(_progress(bundle, tried=1, kept=0))
        if self.raises is not None:
            raise self.raises
        if self.files is None:
            shutil.copytree(bundle.path, place)
        else:
            write_bundle(place, files=self.files, **_sections(bundle.manifest))
        small = Bundle.open(place)
        if progress is not None:
            progress(_progress(small, tried=2, kept=1))
        if not self.stopped or not self.remembers:
            memory.unlink()
        return Shrunk(
            bundle=small,
            before=bundle.size,
            after=small.size,
            gains=(
                Gain(pass_name="batch", before=bundle.size, after=small.size, tried=20, kept=3),
                Gain(pass_name="weights", before=small.size, after=small.size, tried=4, kept=0),
            ),
            kept=self.kept,
            stopped=self.stopped,
            result={"verdict": "nonfinite", "reason": "the loss is nan"},
        )


def _progress(bundle: Bundle, *, tried: int, kept: int) -> Progress:
    what = "dropping samples"
    return Progress(pass_name="batch", size=bundle.size, tried=tried, kept=kept, seconds=float(kept), what=what)


def _sections(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in ("fault", "module", "trainer", "code", "environment", "pin")}


def install(monkeypatch: pytest.MonkeyPatch) -> FakeShrinker:
    """Put one in the real one's place."""
    fake = FakeShrinker()
    monkeypatch.setattr(shrinker, "shrink", fake.shrink)
    return fake
