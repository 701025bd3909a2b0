"""What is not pinned, and how it is said; whatever goes wrong, a bundle is pinned whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import write_bundle
from fake_shrinker import FakeShrinker
from one_fault import CULPRIT, NAME, PINNED, RED, content

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.errors import BundleDamagedError, PinError, ShrinkError
from pytest_nancapture.shrink.pinning.pin import pin

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shrinker")


@pytest.mark.parametrize(
    ("verdict", "advice"),
    [
        ("finite", "If the fault is fixed already, check out the code that still has it and pin it there."),
        ("vacuous", "Bring back the code that it was captured with, or capture it anew."),
        ("mismatch", "Bring back the code that it was captured with, or capture it anew."),
        (
            "error",
            "If only your pytest hooks can build the module, see it fail with pytest --nan-bundles=... first, "
            "then pin it as it is with --force: no hook is asked here, so it can be neither replayed nor shrunk.",
        ),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_red_is_refused(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], verdict: str, advice: str, known: bool
) -> None:
    """Every other verdict is refused, also for a known fault; the error gives the verdict and the ways out."""
    answers.append({"verdict": verdict, "reason": "as it were"})
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, known=known)
    expected = (
        f"{source}: not pinned, since it is not red: expected a replay that is nonfinite, came {verdict} (as it were)\n"
        f"  A test that was never red proves nothing. {advice}\n"
        "  --force pins it all the same; --known is for a red bundle whose fault stays open for now (a strict xfail)."
    )
    assert expected == str(caught.value)
    assert not fixtures.exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "../a"])
def test_a_name_that_leads_elsewhere(source: Path, fixtures: Path, name: str) -> None:
    """A name is one plain folder, and a hidden one would never be found again."""
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, name=name, force=True)
    assert f"expected a plain folder name that does not start with a dot, came {name!r}" == str(caught.value)
    assert not fixtures.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_place_that_is_taken(source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool) -> None:
    """A pinned bundle is never replaced, not even by force, and no replay is made for nothing."""
    pin(source, fixtures, force=True, name="mine")
    before = content(fixtures / "mine")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=force, name="mine", again=True)
    expected = (
        f"{fixtures / 'mine'}: not pinned: something of that name exists already; give another name with --name=NAME, "
        "or remove that folder first"
    )
    assert expected == str(caught.value)
    assert before == content(fixtures / "mine")


@pytest.mark.parametrize("force", [False, True])
def test_a_fault_that_is_pinned_already(
    tmp_path: Path, source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool
) -> None:
    """The same operation, line and phase, whatever the pinned one's name: it is named, and nothing is shrunk."""
    first = pin(source, fixtures / "below", name="mine", force=True).bundle.path
    other = write_bundle(tmp_path / "nan-bundles" / "step-000900-rank-0", fault={"culprit": {**CULPRIT, "line": 3}})
    write_bundle(fixtures / "damaged", files={})
    if not force:
        answers.append({**RED, "culprit": {**CULPRIT, "line": 50}})
    with pytest.raises(PinError) as caught:
        pin(other, fixtures, force=force, name="yours")
    line = 3 if force else 50
    expected = (
        f"{other}: not pinned: this fault is pinned already, as {first} "
        f"(mean_loss = loss / count, train.py:{line}, aten.div.Tensor)\n"
        "  --again pins it beside that one all the same."
    )
    assert expected == str(caught.value)
    assert pin(other, fixtures, force=True, again=True).bundle.path == fixtures / PINNED


def test_a_bad_batch_that_is_pinned_already(source: Path, fixtures: Path) -> None:
    """Of values that were bad from the beginning, the tensor tells; what they are is by chance."""

    def bundle(number: int, explanation: str, target: str = "shop.model:Net") -> Path:
        fault = {"culprit": {"phase": "input", "explanation": explanation}}
        return write_bundle(source.with_name(f"step-{number:06d}-rank-0"), fault=fault, module={"target": target})

    pin(bundle(1, "batch['x'] holds 1 NaN among 9 values"), fixtures, force=True)
    with pytest.raises(
        PinError, match=r"this fault is pinned already, as .*shop-input-nan-x \(batch\['x'\] holds 4 NaN"
    ):
        pin(bundle(2, "batch['x'] holds 4 NaN among 9 values, in samples 1, 2 of 3"), fixtures, force=True)
    pin(bundle(3, "batch['y'] holds 1 NaN among 9 values"), fixtures, force=True)
    pin(bundle(4, "batch['x'] holds 1 NaN among 9 values", "shop.model:Other"), fixtures, force=True)
    expected = ["other-input-nan-x", "shop-input-nan-x", "shop-input-nan-y"]
    assert expected == sorted(path.name for path in fixtures.iterdir())


def test_a_bundle_that_is_pinned_already(source: Path) -> None:
    """Pinning a bundle where it lies is said to be needless."""
    with pytest.raises(PinError, match="not pinned: it is pinned there already"):
        pin(source, source.parent, force=True)


@pytest.mark.parametrize(("force", "option"), [(True, "--force"), (False, "--no-shrink")])
def test_a_bundle_that_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool, option: str
) -> None:
    """A copy as it is would be larger than what may be: that is known without a replay."""
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=force, shrinking=None, max_size=1000)
    size = human_size(Bundle.open(source).size)
    expected = (
        f"{source}: not pinned: it is {size}, more than the 1 kB of --max-size\n"
        rf"  Without {option} it is made smaller; --max-size=\d(\.\d)?kB takes it as it is\."
    )
    assert re.fullmatch(re.escape(expected.splitlines()[0]) + "\n" + expected.splitlines()[1], str(caught.value))
    assert not fixtures.exists()


@pytest.mark.parametrize("stopped", ["", "time"])
def test_a_shrunk_bundle_that_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker, stopped: str
) -> None:
    """It is refused, but the work is kept beside the source; it is said what had to stay and how to go on."""
    shrinker.kept, shrinker.stopped = ("20 classes of the head",), stopped
    answers += [RED, RED]
    small = source.with_name(f"{NAME}-small")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, max_size=1000)
    lines = str(caught.value).removeprefix(f"{source}: ").splitlines()
    assert re.fullmatch(
        r"not pinned: it is \d(\.\d)? kB \(it was \d(\.\d)? kB\), more than the 1 kB of --max-size",
        lines.pop(0),
    )
    assert lines.pop(0) == "  What it holds: 20 classes of the head."
    if stopped:
        assert lines.pop(0) == f"  Shrinking was not finished: nancapture pin {small} goes on from there."
    assert re.fullmatch(
        r"; pin that one with --no-shrink --max-size=\d(\.\d)?kB to take it as it is\.",
        lines.pop(0).removeprefix(f"  It is kept as {small}"),
    )
    assert not lines
    Bundle.open(small).verify()
    assert not fixtures.exists()


def test_a_bundle_that_cannot_be_shrunk_and_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker
) -> None:
    """The limit holds for what is pinned as it is, too."""
    shrinker.raises = ShrinkError("for a reason")
    answers.append(RED)
    with pytest.raises(PinError, match=r"(?s)more than the 1 kB of --max-size\n  shrinking failed: for a reason\.\n"):
        pin(source, fixtures, max_size=1000)
    assert not fixtures.exists()


def test_a_file_in_place_of_the_folder(source: Path, fixtures: Path) -> None:
    """A mistyped folder is named."""
    fixtures.write_text("")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=True)
    assert f"{fixtures}: expected a folder to pin into, came a file" == str(caught.value)


def test_a_damaged_bundle_is_not_replayed(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """Hashes are checked first: a damaged bundle starts no process and leaves nothing behind."""
    path = source / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BundleDamagedError, match=r"weights\.safetensors was altered"):
        pin(source, fixtures)
    assert not fixtures.exists()


def test_a_full_disk_leaves_nothing_behind(source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be flushed to the device is taken away again, and the system's error is passed on."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        pin(source, fixtures, force=True)
    assert not list(fixtures.iterdir())


def test_a_bundle_that_changes_meanwhile(source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is verified before it takes its place."""
    copyfile = shutil.copyfile

    def alter(file: Path, target: Path) -> None:
        copyfile(file, target)
        if file.name == "batch.safetensors":
            target.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(shutil, "copyfile", alter)
    with pytest.raises(BundleDamagedError) as caught:
        pin(source, fixtures, force=True)
    problem = "batch.safetensors was altered: its hash is not the one in bundle.json"
    assert f"{source}: it changed while it was copied: {problem}" == str(caught.value)
    assert not list(fixtures.iterdir())
