"""The pytest plugin: each bundle asked for becomes one test that replays its step with today's code.

This module is loaded in every pytest run of the environment. It registers options, hooks, marker and fixtures; the rest
is imported only where bundles are asked for.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_nancapture.plugin.fixtures import nan_bundle, nan_replay

if TYPE_CHECKING:
    from pytest_nancapture.plugin.collect import BundleCollection

__all__ = ["nan_bundle", "nan_replay"]

_BUNDLES = "folders to search for bundles, or single bundles; each becomes a test that replays the captured step"
_DEVICE = "device to replay on: auto (the kind captured on; the default), cpu, cuda, cuda:1, mps ..."
_REQUIRE_GPU = "fail a bundle that needs an accelerator this machine lacks, instead of skipping it"
_ALLOW_UNREPRODUCED = "replay bundles whose fault never came back at capture, instead of failing them"
_TRACE = "find the culprit operation: auto (of a replay that is not finite; the default), always or never"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nancapture", "regression tests from captured NaN steps (pytest-nancapture)")
    group.addoption("--nan-bundles", dest="nan_bundles", action="append", metavar="PATH", help=_BUNDLES)
    parser.addini("nan_bundles", _BUNDLES, type="paths")
    group.addoption("--nan-device", dest="nan_device", metavar="DEVICE", help=_DEVICE)
    parser.addini("nan_device", _DEVICE, default="auto")
    group.addoption("--nan-require-gpu", dest="nan_require_gpu", action="store_true", default=None, help=_REQUIRE_GPU)
    parser.addini("nan_require_gpu", _REQUIRE_GPU, type="bool", default=False)
    group.addoption(
        "--nan-allow-unreproduced",
        dest="nan_allow_unreproduced",
        action="store_true",
        default=None,
        help=_ALLOW_UNREPRODUCED,
    )
    parser.addini("nan_allow_unreproduced", _ALLOW_UNREPRODUCED, type="bool", default=False)
    group.addoption("--nan-trace", dest="nan_trace", metavar="WHEN", help=_TRACE)
    parser.addini("nan_trace", _TRACE, default="auto")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_nancapture.plugin import hookspecs

    pluginmanager.add_hookspecs(hookspecs)
    if not pluginmanager.has_plugin("nancapture"):
        # Loaded by its module's name: with the entry point's name taken, pytest does not stumble over loading it twice.
        pluginmanager.register(object(), "nancapture")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Refuse a ``conftest.py`` inside a bundle that is named on the command line: a bundle brings no code.

    pytest would import it before anything else, to look for hooks.
    """
    for argument in early_config.known_args_namespace.file_or_dir:
        folder = argument.partition("::")[0].removesuffix("bundle.json")
        if all(os.path.isfile(os.path.join(folder, name)) for name in ("bundle.json", "conftest.py")):  # noqa: PTH113, PTH118
            from pytest_nancapture.plugin.selection import refuse_code

            refuse_code(folder)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "nan_bundle(path): the bundle that the fixtures nan_bundle and nan_replay open; on each bundle's own test",
    )
    option = config.option
    if getattr(option, "help", False):
        return
    if any(value is not None for value in (option.nan_device, option.nan_trace)):
        from pytest_nancapture.plugin.options import read_settings

        read_settings(config)
    if option.nan_bundles or config.getini("nan_bundles") or any("bundle.json" in argument for argument in config.args):
        config.pluginmanager.register(_collection(config), "nancapture-collection")


def _collection(config: pytest.Config) -> BundleCollection:
    from pytest_nancapture.plugin.collect import BundleCollection
    from pytest_nancapture.plugin.selection import select

    return BundleCollection(config, select(config))
