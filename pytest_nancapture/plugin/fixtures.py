"""The fixtures for tests that people write themselves; loaded in every run, so all else is imported in the bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.plugin.marked import NanReplay


@pytest.fixture
def nan_bundle(request: pytest.FixtureRequest) -> Bundle:
    """The bundle that the test's marker names: ``@pytest.mark.nan_bundle("fixtures/step-000812-rank-0")``."""
    from pytest_nancapture.plugin.marked import open_marked

    return open_marked(request.node)


@pytest.fixture
def nan_replay(request: pytest.FixtureRequest) -> NanReplay:
    """A function that replays a bundle, by default the marked one, under the run's ``--nan-*`` options and hooks."""
    from pytest_nancapture.plugin.marked import replay_for

    return replay_for(request.node)
