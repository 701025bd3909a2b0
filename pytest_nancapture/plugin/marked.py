"""What the fixtures do: open the bundle that a test's marker names, replay it under the run's options."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.errors import BundleError
from pytest_nancapture.plugin.options import read_settings
from pytest_nancapture.plugin.replay import replay_for_node

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn

    from pytest_nancapture.replay.result import ReplayResult


class NanReplay(Protocol):
    """The fixture `nan_replay`: :func:`pytest_nancapture.replay` with the run's options and hooks as defaults."""

    def __call__(
        self,
        bundle: str | PathLike[str] | Bundle | None = None,
        *,
        module: nn.Module | None = None,
        device: str | None = None,
        trace: bool | None = None,
    ) -> ReplayResult:
        """Replay `bundle`, or where it is None the one that the test's marker names.

        The test is skipped where the bundle needs an accelerator that this machine lacks, and fails under
        ``--nan-require-gpu``.
        """


def open_marked(node: pytest.Item) -> Bundle:
    """The bundle of the test's marker ``nan_bundle``; fails the test where that cannot be opened."""
    marker = node.get_closest_marker("nan_bundle")
    path = (*marker.args, marker.kwargs.get("path"))[0] if marker else None
    if not isinstance(path, (str, os.PathLike)):
        came = "no marker" if marker is None else "one without a path"
        pytest.fail(
            f"{node.name}: expected a marker that names the bundle, such as "
            f'@pytest.mark.nan_bundle("fixtures/step-000812-rank-0"); came {came}',
            pytrace=False,
        )
    return open_near(node, path)


def open_near(node: pytest.Item, path: str | PathLike[str]) -> Bundle:
    """Open a bundle by its path, seen from the test file's folder or, if there is none, from rootdir."""
    places = [node.path.parent / path, node.config.rootpath / path]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        tried = " nor ".join(dict.fromkeys(map(str, places)))
        pytest.fail(f"{node.name}: no bundle {os.fspath(path)!r}: expected it at {tried}", pytrace=False)
    try:
        return Bundle.open(Path(os.path.normpath(place)))
    except BundleError as error:
        pytest.fail(str(error), pytrace=False)


def replay_for(node: pytest.Item) -> NanReplay:
    """The function that the fixture `nan_replay` gives to the test `node`."""
    settings = read_settings(node.config)

    def nan_replay(
        bundle: str | PathLike[str] | Bundle | None = None,
        *,
        module: nn.Module | None = None,
        device: str | None = None,
        trace: bool | None = None,
    ) -> ReplayResult:
        if not isinstance(bundle, Bundle):
            bundle = open_marked(node) if bundle is None else open_near(node, bundle)
        asked = settings if device is None else dataclasses.replace(settings, device=device)
        if trace is not None:
            asked = dataclasses.replace(asked, trace="always" if trace else "never")
        return replay_for_node(bundle, node, asked, module=module)

    return nan_replay
