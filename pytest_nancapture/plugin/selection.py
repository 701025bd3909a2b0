"""Which bundles a run asks for: by ``--nan-bundles``, by the ini file, or by naming a ``bundle.json``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nancapture.bundle.bundle import find_bundles
from pytest_nancapture.bundle.manifest import FORMAT, MANIFEST_NAME, WEIGHTS

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Bundles, each as the path of its ``bundle.json``.

    Attributes:
        added: those to add to what pytest collects by itself; sorted.
        named: those named as arguments of pytest, which come to them by itself.
        found: all that lie in the folders asked for, whether this run wants them or not.
        empty: folders that hold no bundle, as the ini file gives them, where the run should have had those.
    """

    added: tuple[Path, ...]
    named: frozenset[Path]
    found: frozenset[Path]
    empty: tuple[str, ...]


def select(config: pytest.Config) -> Selection:
    """Find the bundles that this run asks for.

    Those of ``--nan-bundles`` are added to whatever else is run, unless a bundle is named: then it runs alone.
    Those of the ini file behave like tests below ``testpaths``: positional arguments choose among them.

    Raises:
        pytest.UsageError: a path does not exist, or ``--nan-bundles`` leads to no bundle.
    """
    arguments = [_absolute(argument.partition("::")[0], config) for argument in config.args]
    whole = config.args_source is not config.ArgsSource.ARGS
    option, ini = _by_option(config), _by_ini(config)
    found = option.union(*ini.values())
    named = frozenset(p for p in arguments if p.name == MANIFEST_NAME and (p in found or looks_like_bundle(p.parent)))
    chosen = frozenset(p for paths in ini.values() for p in paths if whole or _below_any(p, arguments))
    added = chosen if named and not whole else chosen | option
    return Selection(
        added=tuple(sorted(added - named)),
        named=named,
        found=found,
        empty=tuple(folder for folder, paths in ini.items() if whole and not paths),
    )


def looks_like_bundle(folder: Path) -> bool:
    """Whether a ``bundle.json`` is ours, or was before it was damaged; other tools have files of that name."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return False
    return (folder / WEIGHTS).exists() or FORMAT.encode() in path.read_bytes()


def refuse_code(folder: str | PathLike[str]) -> None:
    """Raise where `folder` is a bundle; the caller has found a ``conftest.py`` in it.

    Raises:
        pytest.UsageError: it is.
    """
    if looks_like_bundle(Path(folder)):
        raise pytest.UsageError(
            f"{os.path.join(folder, 'conftest.py')} lies inside a bundle, and pytest would run it: expected a bundle "  # noqa: PTH118
            "that brings no code; remove it, or move it to the folder above if it is yours"
        )


def relative(path: Path, start: Path) -> str:
    """`path` as seen from `start`, with ``/``; absolute where no relative path leads there."""
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:  # another drive
        return path.as_posix()


def _by_option(config: pytest.Config) -> frozenset[Path]:
    found: set[Path] = set()
    for value in config.option.nan_bundles or ():
        if not value:
            raise pytest.UsageError(
                "--nan-bundles=: expected a folder to search for bundles, or a bundle; came nothing"
            )
        paths = _find(_absolute(value, config), f"--nan-bundles={value}")
        if not paths:
            raise pytest.UsageError(
                f"--nan-bundles={value}: expected at least one bundle (a folder that holds a {MANIFEST_NAME}) in it or "
                "below, came none: a run that replays nothing must not be green"
            )
        found.update(paths)
    return frozenset(found)


def _by_ini(config: pytest.Config) -> dict[str, list[Path]]:
    folders = [_absolute(path, config) for path in config.getini("nan_bundles")]
    return {
        relative(folder, config.rootpath): _find(folder, f"{config.inipath}: nan_bundles: {folder}")
        for folder in folders
    }


def _find(path: Path, said: str) -> list[Path]:
    if path.name == MANIFEST_NAME and path.is_file():
        return [path]
    if not path.is_dir():
        came = "a file" if path.exists() else "a path that does not exist"
        raise pytest.UsageError(f"{said}: expected a folder to search for bundles, or a bundle; came {came}")
    try:
        return [folder / MANIFEST_NAME for folder in find_bundles(path)]
    except OSError as error:
        raise pytest.UsageError(f"{said}: expected a folder that can be searched; came {error}") from error


def _absolute(path: str | PathLike[str], config: pytest.Config) -> Path:
    """As pytest does with its arguments: `..` taken away, links kept."""
    return Path(os.path.abspath(config.invocation_params.dir / path))  # noqa: PTH100


def _below_any(path: Path, places: list[Path]) -> bool:
    return any(path == place or place in path.parents for place in places)
