"""A bundle's folder comes into being whole or not at all: hidden, flushed, renamed. No torch in here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIES = 1000
_HIDDEN = ".tmp"
_HOST = re.sub(r"[^A-Za-z0-9]", "_", platform.node())


def hidden_folder(dirpath: Path, name: str) -> Path:
    """A new, empty one below `dirpath`, which is made if it is not there; what dead writers left there is removed."""
    dirpath.mkdir(parents=True, exist_ok=True)
    sweep(dirpath)
    return Path(tempfile.mkdtemp(prefix=f".{name}.{_HOST}-{os.getpid()}.", suffix=_HIDDEN, dir=dirpath))


@contextmanager
def half_written(dirpath: Path, name: str) -> Iterator[Path]:
    """A hidden folder to write a bundle into; where that fails, be it by Ctrl-C, nothing is left behind."""
    hidden = hidden_folder(dirpath, name)
    try:
        yield hidden
    except BaseException:  # it goes on its way
        shutil.rmtree(hidden, ignore_errors=True)
        raise


@contextmanager
def workshop(folder: Path, name: str) -> Iterator[Path]:
    """A free path in a hidden folder of `folder`, to make a bundle in; gone on leaving, with `folder` if empty."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    hidden = hidden_folder(folder, name)
    try:
        yield hidden / name
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def sweep(dirpath: Path) -> None:
    """Remove what writers on this machine left behind that were killed; those still at work are let be."""
    for hidden in dirpath.glob(f".*.{_HOST}-*{_HIDDEN}"):
        process = hidden.name.rpartition(f".{_HOST}-")[2].partition(".")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(hidden, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write and flush to the device."""
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def share_file(source: Path, target: Path) -> None:
    """Let `target`, whose content is the same, lie where `source` does; not where the file system has no hard links."""
    hidden = target.with_name(f".{target.name}")
    try:
        os.link(source, hidden)
        os.replace(hidden, target)  # noqa: PTH105, Path.replace says less
    except OSError:
        hidden.unlink(missing_ok=True)


def put_in_place(hidden: Path, place: Path) -> None:
    """Rename a finished folder to `place`, on the same device.

    Raises:
        OSError: it cannot be renamed; it is still hidden then.
    """
    _finish(hidden)
    hidden.rename(place)
    sync_folder(place.parent)


def publish(hidden: Path, dirpath: Path, name: str) -> Path:
    """Put a finished folder in the first free place of `name`, `name`-2, `name`-3 ...

    Raises:
        OSError: it cannot be renamed.
    """
    _finish(hidden)
    for number in range(1, _TRIES):
        place = dirpath / (name if number == 1 else f"{name}-{number}")
        try:
            # Fails where the name is taken: a bundle's folder is never empty, so a rename cannot replace one.
            hidden.rename(place)
        except OSError:
            if not place.exists():
                raise
        else:
            sync_folder(dirpath)
            return place
    raise FileExistsError(f"{dirpath / name}: taken, and so are the {_TRIES - 1} names after it")


def _finish(hidden: Path) -> None:
    """Let others read it, and flush it."""
    hidden.chmod(0o755)
    sync_folder(hidden)


def sync_folder(folder: Path) -> None:
    """Flush the folder's own entries to the device, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
