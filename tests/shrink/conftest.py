"""Shrinks in this process, for tests of what a shrink finds; those of processes start real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import nets
import pytest
from inline import Inline

from pytest_nancapture import Bundle, ReplayResult, replay
from pytest_nancapture.shrink import shrinker
from pytest_nancapture.shrink.shrinker import Shrunk, shrink

Capture = Callable[..., Bundle]
Shrink = Callable[[Bundle], Shrunk]


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """Trains a module on batches until its fault."""

    def run(module: Any, data: Any = None, **options: Any) -> Bundle:
        return Bundle.open(models.capture(module, tmp_path / "captured", data or [nets.batch()], **options))

    return run


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shrink:
    """Shrinks in this process; the result must still be red."""

    def run(bundle: Bundle) -> Shrunk:
        with monkeypatch.context() as patch:
            patch.setattr(shrinker, "Pool", Inline)
            result = shrink(bundle, tmp_path / "small" / bundle.name)
        assert result.stopped == ""
        before, after = replay(bundle, trace=True), replay(result.bundle, trace=True)
        assert place(after) == place(before)
        assert result.after == result.bundle.size < bundle.size
        return result

    return run


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bundle], str]:
    """The verdict of a replay with the fault fixed."""

    def run(bundle: Bundle) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(nets, "FIXED", True)
            return replay(bundle).verdict

    return run


def place(result: ReplayResult) -> tuple[Any, ...]:
    """What makes a fault the same one."""
    culprit = result.culprit
    assert culprit is not None
    return result.verdict, culprit.phase, culprit.op, culprit.file, culprit.line
