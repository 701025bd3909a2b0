"""Make a module of a script that was run as ``__main__``, without letting it train again."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from pytest_nancapture.errors import RebuildError
from pytest_nancapture.loops.loop import WouldTrain, refusing_to_train

_PREFIX = "_nancapture_script_"


def load_script(path: Path) -> ModuleType:
    """Run the script under another name than ``__main__``, up to its end or to where it would train.

    A script whose training is not behind ``if __name__ == "__main__":`` is thus usable too.

    Raises:
        RebuildError: the script fails or exits.
    """
    package = _package_above(path)
    name = ".".join([*package, f"{_PREFIX}{path.stem}_{abs(hash(path))}"])
    sys.path[:0] = [str(path.parent), str(path.parents[len(package)])]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with refusing_to_train(path), _arguments(path):
            spec.loader.exec_module(module)
    except WouldTrain:
        pass
    except SystemExit as error:
        del sys.modules[name]
        raise RebuildError(
            f"{path} exits when it is imported; put its work under if __name__ == '__main__':"
        ) from error
    except Exception as error:  # the user's script may raise anything; it is told, with its cause
        del sys.modules[name]
        raise RebuildError(f"importing {path} failed with {type(error).__name__}: {error}") from error
    return module


def _package_above(path: Path) -> list[str]:
    """Of a script that was run with ``python -m``: its relative imports start from here."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return names


@contextmanager
def _arguments(path: Path) -> Iterator[None]:
    """The script sees no arguments of pytest's."""
    before, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = before
