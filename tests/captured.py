"""Real bundles of tiny modules, captured once a session, since no replay may change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import models
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a module that divides 0 by 0."""
    return models.capture(models.Net(), tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def accumulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two micro-batches, the second of them bad."""
    folder = tmp_path_factory.mktemp("accumulated")
    return models.capture(models.Net(), folder, models.batches(6, bad=3), accumulate_grad_batches=2)


@pytest.fixture(autouse=True, name="_seen")
def seen() -> None:
    """Nothing is noted yet."""
    models.SEEN.clear()


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's code does not divide by 0 any more."""
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
