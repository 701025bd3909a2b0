"""A bundle to pin, the folder to pin it into, and stand-ins for what takes long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import write_bundle
from fake_shrinker import FakeShrinker, install
from one_fault import CULPRIT, NAME

from pytest_nancapture.shrink.pinning import pin as module

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "nan-bundles" / NAME, fault={"culprit": CULPRIT})


@pytest.fixture
def shrinker(monkeypatch: pytest.MonkeyPatch) -> FakeShrinker:
    return install(monkeypatch)


@pytest.fixture
def fixtures(tmp_path: Path) -> Path:
    return tmp_path / "fixtures"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the replays answer, in order; one that was not expected fails the test."""
    queue: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "replay_afresh", lambda bundle, device, trace: queue.pop(0))
    monkeypatch.setattr(module, "heal_afresh", lambda bundle, device: None)
    return queue
