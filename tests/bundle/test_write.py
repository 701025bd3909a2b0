"""A bundle is on disk whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_bundles import fake_manifest

from pytest_nancapture.bundle import folder as module
from pytest_nancapture.bundle.bundle import Bundle, find_bundles
from pytest_nancapture.bundle.folder import publish, write_text
from pytest_nancapture.bundle.manifest import BATCH, MANIFEST_NAME, OPTIMIZER, RNG, WEIGHTS, OptimizerRecord
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.bundle.write import write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "step-000812-rank-0"
TENSORS: dict[str, Any] = {
    "weights": {"fc.weight": torch.arange(6.0).view(2, 3).t(), "fc.bias": torch.zeros(3)},
    "batch": {"12/batch[0]": torch.tensor([1j])},
    "rng": {"12/numpy": torch.arange(4)},
}
MANIFEST = dataclasses.replace(fake_manifest(), files={})


def write(folder: Path, **changes: Any) -> Path:
    return write_bundle(folder, NAME, MANIFEST, **{**TENSORS, **changes})


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_bundle(tmp_path: Path) -> None:
    """The folder, its files with their sizes and hashes, the layouts of the tensors, and nothing else."""
    path = write(tmp_path)
    assert tmp_path / NAME == path
    assert sorted([NAME, *(f"{NAME}/{name}" for name in (MANIFEST_NAME, WEIGHTS, BATCH, RNG))]) == everything(tmp_path)
    bundle = Bundle.open(path)
    bundle.verify()
    assert {BATCH, RNG, WEIGHTS} == set(bundle.manifest.files)
    for file, layouts, tensors in (
        (WEIGHTS, bundle.manifest.module.layouts, TENSORS["weights"]),
        (BATCH, bundle.manifest.batch.layouts, TENSORS["batch"]),
        (RNG, {}, TENSORS["rng"]),
    ):
        loaded = read_tensors(path / file, layouts)
        assert tensors.keys() == loaded.keys()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors.items())


def test_the_manifest_is_otherwise_what_was_given(tmp_path: Path) -> None:
    """Only files and layouts are filled in."""
    read = Bundle.open(write(tmp_path)).manifest
    emptied = dataclasses.replace(
        read,
        files={},
        module=dataclasses.replace(read.module, layouts={}),
        batch=dataclasses.replace(read.batch, layouts={}),
    )
    assert emptied == MANIFEST


def test_an_optimizers_state(tmp_path: Path) -> None:
    """A fourth file, where there is one."""
    manifest = dataclasses.replace(MANIFEST, optimizer=OptimizerRecord(states=({"tensor": "optimizer/0"},)))
    state = {"optimizer/0": torch.arange(4.0).view(2, 2).t()}
    path = write_bundle(tmp_path, NAME, manifest, **TENSORS, optimizer=state)
    record = Bundle.open(path).manifest.optimizer
    assert record is not None
    assert torch.equal(state["optimizer/0"], read_tensors(path / OPTIMIZER, record.layouts)["optimizer/0"])


def test_the_folder_is_made(tmp_path: Path) -> None:
    """With all that is above it."""
    assert write(tmp_path / "a" / "b").is_dir()


def test_others_may_read_it(tmp_path: Path) -> None:
    """The folder it is written in is private at first; a finished bundle is not."""
    assert write(tmp_path).stat().st_mode & 0o777 == 0o755


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """By another bundle, by an empty folder or by a file: the next free one is used, and nothing is replaced."""
    first = write(tmp_path)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    (tmp_path / f"{NAME}-2").write_text("a file")
    (tmp_path / f"{NAME}-3").mkdir()
    (tmp_path / f"{NAME}-3" / "notes").touch()
    assert [tmp_path / f"{NAME}-4", tmp_path / f"{NAME}-5"] == [write(tmp_path), write(tmp_path)]
    assert before == {path.name: path.read_bytes() for path in first.iterdir()}
    assert (tmp_path / f"{NAME}-2").read_text() == "a file"


def test_every_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and nothing is left behind."""
    monkeypatch.setattr(module, "_TRIES", 3)
    write(tmp_path)
    write(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(FileExistsError) as caught:
        write(tmp_path)
    assert f"{tmp_path / NAME}: taken, and so are the 2 names after it" == str(caught.value)
    assert before == everything(tmp_path)


class FullDisk:
    """Lets some bytes be written and then is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        original = Path.open

        def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
            stream = original(path, *args, **kwargs)
            return Stream(stream, self) if "w" in str(args[:1]) else stream

        monkeypatch.setattr(Path, "open", opened)


class Stream:
    def __init__(self, stream: Any, disk: FullDisk) -> None:
        self.stream = stream
        self.disk = disk

    def write(self, data: Any) -> int:
        self.disk.room -= len(data)
        if self.disk.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self.stream.write(data))

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@pytest.mark.parametrize("room", [0, 100, 500, 900, 1500])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Wherever it is full, what was written before is gone and the system's error comes out."""
    size = Bundle.open(write(tmp_path / "whole")).size
    assert room < size
    with monkeypatch.context() as patch:
        FullDisk(patch, room)
        with pytest.raises(OSError, match="No space left on device"):
            write(tmp_path / "bundles")
    assert everything(tmp_path / "bundles") == []


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.rename", "pathlib.Path.chmod", "pathlib.Path.open"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), MemoryError()])
def test_any_other_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: BaseException
) -> None:
    """Also an interrupt from the keyboard leaves nothing half-written behind."""
    with monkeypatch.context() as patch:
        patch.setattr(function, failing(error))
        with pytest.raises(type(error)):
            write(tmp_path)
    assert everything(tmp_path) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    """The system's own error, which names the folder."""
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        write(tmp_path)


def test_a_file_in_the_folders_place(tmp_path: Path) -> None:
    """Likewise."""
    (tmp_path / "bundles").touch()
    with pytest.raises(FileExistsError):
        write(tmp_path / "bundles")


def test_everything_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure a bundle that has its name has its content: files, then their folder, then the name."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"-> {target.name}")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write(tmp_path)
    hidden = events[4]
    assert (hidden.startswith(f".{NAME}."), hidden.endswith(".tmp")) == (True, True)
    assert [WEIGHTS, BATCH, RNG, MANIFEST_NAME, hidden, f"-> {NAME}", tmp_path.name] == events


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from pytest_nancapture.bundle import write
from pytest_nancapture.bundle.tensors import file as tensors
from test_write import write as write_one

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "tensors":
    fsync, count = os.fsync, iter(range(9))
    os.fsync = lambda descriptor: kill() if next(count) == 1 else fsync(descriptor)
elif sys.argv[1] == "rename":
    Path.rename = kill
write_one(Path(sys.argv[2]))
print("survived")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_writer(tmp_path: Path) -> None:
    """Killed half-way or just before the end it leaves a hidden folder: no search finds it, the next one sweeps it."""
    for moment in ("tensors", "rename"):
        folder = tmp_path / moment
        run = subprocess.run(
            [sys.executable, "-c", KILLED, moment, str(folder), str(Path(__file__).parent)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            check=False,
        )
        assert (run.returncode, run.stdout) == (-signal.SIGKILL, b"")
        left = [path.name for path in folder.iterdir()]
        assert [name.startswith(f".{NAME}.") and name.endswith(".tmp") for name in left] == [True]
        assert find_bundles(folder) == []
        assert [write(folder)] == find_bundles(folder) == list(folder.iterdir())


@pytest.mark.parametrize(
    "owner",
    [f"{module._HOST}-{os.getpid()}", "another_machine-1", "nobody", f"{module._HOST}-x"],
    ids=["alive", "elsewhere", "unknown", "no-number"],
)
def test_folders_of_writers_that_may_be_at_work(tmp_path: Path, owner: str) -> None:
    """Other ranks write beside this one, maybe on other machines: only what a dead process left here is swept."""
    other = tmp_path / f".{NAME}.{owner}.abc.tmp"
    other.mkdir()
    path = write(tmp_path)
    assert [other, path] == sorted(tmp_path.iterdir())


def test_a_number_that_no_process_can_have(tmp_path: Path) -> None:
    """Is nobody's, and keeps no bundle from being written."""
    (tmp_path / f".{NAME}.{module._HOST}-{'9' * 30}.abc.tmp").mkdir()
    assert [write(tmp_path)] == list(tmp_path.iterdir())


def test_write_text(tmp_path: Path) -> None:
    """Lines end alike on every system, so that hashes and diffs do."""
    write_text(tmp_path / "x", "ü\n")
    assert "ü\n".encode() == (tmp_path / "x").read_bytes()


def test_publish_a_folder_that_is_gone(tmp_path: Path) -> None:
    """An error that has nothing to do with the name is not taken for a name that is taken."""
    (tmp_path / "hidden").mkdir()
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "hidden", tmp_path / "gone", NAME)
