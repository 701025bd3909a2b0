"""Where today's code is looked for."""

from __future__ import annotations

from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.values.references import Resolver, repository_root
from pytest_nancapture.replay.script import load_script


def resolver_for(bundle: Bundle) -> Resolver:
    """Looks for source files from here upward and from above the bundle upward, each to the top of its repository.

    The bundle's own folder is left out: what comes in it is never run.
    """
    places: list[Path] = []
    for start in (Path.cwd(), bundle.path.parent):
        top = repository_root(start)
        upward = [start, *start.parents]
        places += upward[: upward.index(top) + 1] if top is not None else upward[:3]
    return Resolver(tuple(dict.fromkeys(places)), load_script)
