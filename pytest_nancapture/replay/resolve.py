"""Where today's code is looked for."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.values.references import CODE_FOLDERS, Resolver, folders_from
from pytest_nancapture.replay.script import load_script


def resolver_for(bundle: Bundle) -> Resolver:
    """Looks for source files from here upward and from above the bundle upward, each to the top of its repository.

    Then in the folders that the environment names in ``NANCAPTURE_CODE``, and in those that Python imports the user's
    own code from. The bundle's own folder is left out: what comes in it is never run.
    """
    named = filter(None, os.environ.get(CODE_FOLDERS, "").split(os.pathsep))
    places = [
        *folders_from(Path.cwd()),
        *folders_from(bundle.path.parent),
        *map(Path, named),
        *_imported_from(bundle.path),
    ]
    return Resolver(tuple(dict.fromkeys(places)), load_script, was_in=bundle.manifest.code.folder)


def _imported_from(bundle: Path) -> Iterator[Path]:
    """Folders of ``sys.path`` that hold neither Python's own nor installed code."""
    python = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "scripts")]
    for entry in sys.path:
        path = Path(entry)
        is_installed = {"site-packages", "dist-packages"} & set(path.parts) or any(map(path.is_relative_to, python))
        is_in_bundle = path.resolve().is_relative_to(bundle.resolve())
        if path.is_absolute() and path.is_dir() and not is_installed and not is_in_bundle:
            yield path
