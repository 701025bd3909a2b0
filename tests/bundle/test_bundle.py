"""Bundles on disk: opened, verified, found; and each way in which one of their files can be wrong."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import pytest
from fake_bundles import fake_manifest, tensor_file, write_bundle

from pytest_nancapture.bundle import bundle as module
from pytest_nancapture.bundle.bundle import Bundle, find_bundles, hash_file
from pytest_nancapture.bundle.manifest import ALLOWED_FILES, OptimizerRecord, PinRecord
from pytest_nancapture.errors import BundleDamagedError, BundleNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = {name: tensor_file(x=("F32", (4, size))) for size, name in enumerate(ALLOWED_FILES, 2)}
ANEW = " (copy the bundle anew)"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with all four files."""
    return write_bundle(tmp_path / "step-000812-rank-0", files=FILES, optimizer=OptimizerRecord(states=({"dict": []},)))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_open_by_folder_and_by_manifest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is named by its folder or by the bundle.json in it, from anywhere; its path is absolute."""
    monkeypatch.chdir(bundle.parent)
    opened = Bundle.open(bundle)
    assert (bundle, "step-000812-rank-0") == (opened.path, opened.name)
    assert opened == Bundle.open(str(bundle)) == Bundle.open(bundle / "bundle.json") == Bundle.open(bundle.name)


def test_what_a_bundle_says(bundle: Path) -> None:
    """The fault is the manifest's, the size that of all files."""
    opened = Bundle.open(bundle)
    assert fake_manifest().fault == opened.fault
    assert sum(path.stat().st_size for path in bundle.iterdir()) == opened.size


@pytest.mark.parametrize(("pin", "known"), [(None, False), (PinRecord(), False), (PinRecord(known=True), True)])
def test_known(tmp_path: Path, pin: PinRecord | None, known: bool) -> None:
    """A bundle is known where it was pinned as an open fault."""
    assert known == Bundle.open(write_bundle(tmp_path / "b", pin=pin)).known


def test_a_sound_bundle_verifies(bundle: Path) -> None:
    """Nothing is raised, and other files in the folder don't matter."""
    (bundle / "notes.txt").write_text("seen on Monday")
    Bundle.open(bundle).verify()


def test_no_bundle(tmp_path: Path) -> None:
    """The error names the place as it was given, and what was expected there."""
    with pytest.raises(BundleNotFoundError) as caught:
        Bundle.open(tmp_path / "b")
    assert f"{tmp_path / 'b'}: no bundle here: expected a folder that holds a bundle.json" == str(caught.value)


def truncate(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"{path.name}: expected {size} bytes, came {size - 1}{ANEW}"


def empty(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, 0)
    return f"{path.name}: expected {size} bytes, came 0{ANEW}"


def lengthen(path: Path) -> str:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"!")
    return f"{path.name}: expected {size} bytes, came {size + 1}{ANEW}"


def remove(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing{ANEW}"


def link(path: Path) -> str:
    target = path.rename(path.with_suffix(".bak"))
    path.symlink_to(target)
    return f"{path.name} is not a plain file"


def folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return f"{path.name} is not a plain file"


def pipe(path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return f"{path.name} is not a plain file"


@pytest.mark.parametrize("name", ALLOWED_FILES)
@pytest.mark.parametrize("damage", [truncate, empty, lengthen, remove, link, folder, pipe])
def test_damage_that_opening_sees(
    bundle: Path, name: str, damage: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and kinds of files are checked at once, and no content is read for it."""
    monkeypatch.setattr(module, "hash_file", lambda path: pytest.fail(f"{path} was read"))
    expected = damage(bundle / name)
    with pytest.raises(BundleDamagedError) as caught:
        Bundle.open(bundle)
    assert f"{bundle}: {expected}" == str(caught.value)
    assert str(bundle) == caught.value.path


def swap(path: Path) -> None:
    """With the same file of another bundle, of the same size."""
    path.write_bytes(bytes([*path.read_bytes()[:-4], 0, 0, 128, 63]))


@pytest.mark.parametrize("name", ALLOWED_FILES)
@pytest.mark.parametrize("damage", [flip_bit, swap])
def test_damage_that_only_verifying_sees(bundle: Path, name: str, damage: Callable[[Path], None]) -> None:
    """A file of the right size and the wrong content opens, and does not verify."""
    damage(bundle / name)
    opened = Bundle.open(bundle)
    with pytest.raises(BundleDamagedError) as caught:
        opened.verify()
    expected = f"{bundle}: {name} was altered: its hash is not the one in bundle.json{ANEW}"
    assert expected == str(caught.value)


def test_damage_after_opening(bundle: Path) -> None:
    """Verifying looks at the files anew: what was cut since is seen."""
    opened = Bundle.open(bundle)
    expected = truncate(bundle / "weights.safetensors")
    with pytest.raises(BundleDamagedError) as caught:
        opened.verify()
    assert f"{bundle}: {expected}" == str(caught.value)


def test_a_link_in_place_of_a_file_after_opening(bundle: Path) -> None:
    """And so is a link to the very same content."""
    opened = Bundle.open(bundle)
    expected = link(bundle / "weights.safetensors")
    with pytest.raises(BundleDamagedError) as caught:
        opened.verify()
    assert f"{bundle}: {expected}" == str(caught.value)


def test_a_manifest_swapped_with_another_bundles(bundle: Path, tmp_path: Path) -> None:
    """The files are then not those that it lists."""
    other = write_bundle(tmp_path / "other")
    sizes = [(folder / "batch.safetensors").stat().st_size for folder in (other, bundle)]
    (other / "bundle.json").replace(bundle / "bundle.json")
    with pytest.raises(BundleDamagedError) as caught:
        Bundle.open(bundle)
    assert f"{bundle}: batch.safetensors: expected {sizes[0]} bytes, came {sizes[1]}{ANEW}" == str(caught.value)


def test_hash_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of several blocks has the hash of its whole content."""
    monkeypatch.setattr(module, "_BLOCK", 1000)
    content = os.urandom(2500)
    (tmp_path / "x").write_bytes(content)
    assert hashlib.sha256(content).hexdigest() == hash_file(tmp_path / "x")


def test_find_bundles(tmp_path: Path) -> None:
    """All bundles below a folder, sorted and absolute: nested ones and damaged ones too, hidden ones not."""
    for name in ("b/step-2", "b/step-1", "a/deep/er/step-3", ".step-4.tmp", "b/.git/step-5"):
        write_bundle(tmp_path / name)
    (tmp_path / "b" / "damaged").mkdir()
    (tmp_path / "b" / "damaged" / "bundle.json").write_text("{")
    (tmp_path / "b" / "notes").mkdir()
    expected = [tmp_path / name for name in ("a/deep/er/step-3", "b/damaged", "b/step-1", "b/step-2")]
    assert expected == find_bundles(tmp_path)


def test_find_bundles_at_a_bundle(bundle: Path) -> None:
    """A bundle finds itself, and nothing inside of it is searched."""
    write_bundle(bundle / "inner")
    assert [bundle] == find_bundles(bundle)


def test_find_bundles_does_not_follow_links(tmp_path: Path) -> None:
    """A link could lead in a circle."""
    (tmp_path / "loop").symlink_to(tmp_path)
    write_bundle(tmp_path / "step-1")
    assert [tmp_path / "step-1"] == find_bundles(tmp_path)


def test_find_bundles_where_there_are_none(tmp_path: Path) -> None:
    """An empty folder holds none."""
    assert not find_bundles(tmp_path)
