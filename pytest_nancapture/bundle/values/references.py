"""Classes and functions by name: ``package.module:Name``, with the source file relative to the repository."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from pytest_nancapture.bundle.text import printable
from pytest_nancapture.errors import RebuildError

CODE_FOLDERS = "NANCAPTURE_CODE"
"""A variable of the environment: further folders to look for code in, as in ``PATH``."""


@dataclass(frozen=True)
class Reference:
    """Where an object is defined.

    Attributes:
        target: ``package.module:Qualified.Name``; the module of a script is ``__main__``.
        file: its source file, relative to the repository, with forward slashes; None for installed code.
    """

    target: str
    file: str | None = None


def refer(obj: Any) -> Reference:
    """The reference by which :class:`Resolver` finds `obj` again.

    Raises:
        ValueError: it has none: a lambda, a local class, a class made in a notebook ...
    """
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if isinstance(obj, types.BuiltinFunctionType):
        module, name = _home_of_builtin(obj)
    if not module or not name:
        raise ValueError(f"{obj!r:.80} has no name")
    if "<" in name:
        raise ValueError(f"{name} is defined inside of a function, so no import finds it")
    if _attribute(sys.modules.get(module), name) is not obj:
        raise ValueError(f"{module}:{name} does not name it: it was made, renamed or replaced at run time")
    file = _source_file(module)
    if is_typed_in(module):
        raise ValueError(f"{name} is defined in an interactive session, so no file holds it")
    if module == "__main__" and file is None:
        source = sys.modules[module].__file__
        raise ValueError(f"{name} is defined in {source}, whose name does not end with .py, so it cannot be imported")
    return Reference(f"{module}:{name}", file)


def is_typed_in(module: str) -> bool:
    """Whether it is a notebook or an interactive session, which no file holds."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" and (file is None or not Path(file).is_file())


def repository_root(path: Path) -> Path | None:
    """The nearest folder at or above `path` that holds ``.git``."""
    return next((folder for folder in (path, *path.parents) if (folder / ".git").exists()), None)


def folders_from(start: Path) -> list[Path]:
    """Where code is looked for from a folder: there and upward to the top of its repository, or else two folders up."""
    top, upward = repository_root(start), [start, *start.parents]
    return upward[: upward.index(top) + 1] if top is not None else upward[:3]


@dataclass
class Resolver:
    """Finds referenced objects again, in today's code.

    Attributes:
        places: folders to look for a reference's file in, best first.
        load_script: makes a module of a script that was run as ``__main__``.
        was_in: the folder of the code at capture, for messages alone.
    """

    places: Iterable[Path] = ()
    load_script: Callable[[Path], ModuleType] | None = None
    was_in: str = ""
    _scripts: dict[Path, ModuleType] = field(default_factory=dict)

    def resolve(self, target: str, file: str | None = None) -> Any:
        """The object that `target` names.

        Raises:
            RebuildError: it is not there any more, or the reference leads out of the repository.
        """
        name, colon, path = target.partition(":")
        if not colon or not all(part.isidentifier() for part in (*name.split("."), *path.split("."))):
            raise RebuildError(f"expected a target like 'package.module:Class', came {target!r:.120}")
        found: Any = self._script(target, file) if name == "__main__" else self._module(name, file)
        for part in path.split("."):
            if not hasattr(found, part):
                raise RebuildError(
                    f"{target}: {getattr(found, '__name__', name)} has no {part!r}; if it was renamed, say so in "
                    "bundle.json or build the module in the hook pytest_nancapture_module"
                )
            found = getattr(found, part)
        return found

    def locate(self, file: str) -> Path | None:
        """The source file that a reference names, below one of the places.

        Raises:
            RebuildError: the path is absolute or leads upward.
        """
        parts = PurePosixPath(file).parts
        if not parts or PurePosixPath(file).is_absolute() or ".." in parts or "\\" in file or ":" in file:
            raise RebuildError(f"expected a source file relative to the repository, came {file!r:.120}")
        for place in self.places:
            path = place.joinpath(*parts)
            if path.suffix == ".py" and path.is_file() and path.resolve().is_relative_to(place.resolve()):
                return path
        return None

    @property
    def _way(self) -> str:
        """To the code; empty where it is not known."""
        where = printable(self.was_in)
        way = f"it was in {where} when it was captured: run pytest there, or set {CODE_FOLDERS}={where}"
        return way if where else ""

    def _script(self, target: str, file: str | None) -> ModuleType:
        if file is None:
            name = target.partition(":")[2]
            raise RebuildError(
                f"{name} was typed into a notebook or an interactive session, so no file holds it: there, "
                f"replay(path, module={name}(...)) replays the bundle; here, write the class to a file and build it in "
                "the hook pytest_nancapture_module(bundle) of a conftest.py"
            )
        path = self.locate(file)
        if path is None or self.load_script is None:
            places = ", ".join(map(str, self.places)) or "no folder"
            raise RebuildError(
                f"{target} was defined in the script {file}, which was found below none of {places}; "
                f"{self._way or 'run from the repository that holds it'}"
            )
        if path not in self._scripts:
            self._scripts[path] = self.load_script(path)
        return self._scripts[path]

    def _module(self, name: str, file: str | None) -> ModuleType:
        path = self.locate(file) if file else None
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if path is None or not _is_part(error.name, name):
                missing = _missing_file(file, path)
                way = f"; {self._way}" if missing and self._way else ""
                raise RebuildError(f"cannot import {name}: {error}{missing}{way}") from error
        except (Exception, SystemExit) as error:
            raise RebuildError(f"importing {name} failed with {type(error).__name__}: {error}") from error
        # It stays there, for what the module imports later; a replay puts sys.path back when it is over.
        sys.path.insert(0, str(path.parents[name.count(".") + (path.name == "__init__.py")]))
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise RebuildError(f"importing {name} from {path} failed with {type(error).__name__}: {error}") from error


class LiveResolver(Resolver):
    """Finds objects of this very process, where they are imported already."""

    def _script(self, target: str, file: str | None) -> ModuleType:
        return sys.modules["__main__"]

    def _module(self, name: str, file: str | None) -> ModuleType:
        return sys.modules.get(name) or super()._module(name, file)


def _is_part(missing: str | None, name: str) -> bool:
    """Whether the module that was not found is `name` or a package above it, and not something it imports."""
    return missing is not None and (name == missing or name.startswith(missing + "."))


def _missing_file(file: str | None, path: Path | None) -> str:
    return f"; its file {file} was found neither" if file and path is None else ""


def _home_of_builtin(obj: Any) -> tuple[str | None, str]:
    """Of a function in compiled code, which may not know its module: ``torch.tanh`` says None."""
    name = obj.__name__
    homes = [obj.__module__, "torch"]
    return next((home for home in homes if home and _attribute(sys.modules.get(home), name) is obj), None), name


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def _source_file(module: str) -> str | None:
    source = getattr(sys.modules.get(module), "__file__", None)
    if not source or module.partition(".")[0] in sys.stdlib_module_names:
        return None
    path = _plain(source)
    if "site-packages" in path.parts or path.suffix != ".py":
        return None
    return path.relative_to(_root(path, module)).as_posix()


def _plain(source: str) -> Path:
    """Absolute, without the ``..`` of a script that was run as ``../code/train.py``."""
    return Path(os.path.normpath(Path(source).absolute()))


def code_root(module: str) -> Path | None:
    """The folder that a script's own code is told relative to; None for what is imported from elsewhere."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    source = getattr(sys.modules.get(module), "__file__", None)
    if not script or not source or _source_file(module) is None:
        return None
    is_beside = _plain(source).is_relative_to(_plain(script).parent)
    return _root(_plain(source), module) if is_beside else None


def _root(path: Path, module: str) -> Path:
    """Of its repository; else the working directory, or where that is elsewhere the folder that it is imported from."""
    root = _root_of_code(path.parent) or Path.cwd()
    if path.is_relative_to(root):
        return root
    return path.parent if module == "__main__" else path.parents[module.count(".") + (path.name == "__init__.py")]


@functools.lru_cache(1024)
def _root_of_code(folder: Path) -> Path | None:
    """Remembered, since batches of a training run are encoded at every step."""
    return repository_root(folder)
