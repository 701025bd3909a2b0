"""Where today's code is looked for."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.values.references import CODE_FOLDERS, Resolver, folders_from
from pytest_nancapture.replay.script import load_script


def resolver_for(bundle: Bundle) -> Resolver:
    """Looks for source files from here upward and from above the bundle upward, each to the top of its repository.

    Then in the folders that the environment names in ``NANCAPTURE_CODE``. The bundle's own folder is left out: what
    comes in it is never run.
    """
    named = filter(None, os.environ.get(CODE_FOLDERS, "").split(os.pathsep))
    places = [*folders_from(Path.cwd()), *folders_from(bundle.path.parent), *map(Path, named)]
    return Resolver(tuple(dict.fromkeys(places)), load_script)
