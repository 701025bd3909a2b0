"""The fixtures for tests that people write themselves; loaded in every run, so all else is imported in the bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from os import PathLike

    from lightning.pytorch import LightningModule

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.replay.result import ReplayResult


class NanReplay(Protocol):
    """The fixture `nan_replay`: :func:`pytest_nancapture.replay` with the run's options and hooks as defaults."""

    def __call__(
        self,
        bundle: str | PathLike[str] | Bundle | None = None,
        *,
        module: LightningModule | None = None,
        device: str | None = None,
        trace: bool | None = None,
    ) -> ReplayResult:
        """Replay `bundle`, or where it is None the one that the test's marker names.

        The test is skipped where the bundle needs an accelerator that this machine lacks, and fails under
        ``--nan-require-gpu``.
        """


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
