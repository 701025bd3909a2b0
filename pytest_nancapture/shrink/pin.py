"""Put a bundle among the fixtures for good, once it has been seen to fail with today's code."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import MANIFEST_NAME, Manifest, PinRecord, Reproduced
from pytest_nancapture.errors import BundleDamagedError, DeviceUnavailableError, PinError

if TYPE_CHECKING:
    from os import PathLike

_LAST_WORDS = 12
"""Lines of a dead replay's stderr that go into the error."""


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A bundle in its place.

    Attributes:
        bundle: the copy.
        result: the replay that showed it red, as ``ReplayResult.as_dict`` gives it; None where it was forced.
    """

    bundle: Bundle
    result: dict[str, Any] | None


def pin(
    source: str | PathLike[str],
    folder: str | PathLike[str] = "fixtures",
    *,
    name: str | None = None,
    device: str = "auto",
    force: bool = False,
    known: bool = False,
) -> Pinned:
    """Copy a bundle into `folder` if a replay in a fresh process, with today's code, is not finite.

    Args:
        source: the bundle's folder; it is left as it is.
        folder: made if it is not there.
        name: the copy's name, instead of the bundle's own.
        device: as for :func:`pytest_nancapture.replay`.
        force: copy without any replay.
        known: the fault stays open for now; the plugin then expects the test to fail, strictly.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
        DeviceUnavailableError: this machine lacks the device.
        PinError: the bundle is not red, or its place is taken.
        OSError: the copy cannot be written; nothing is left behind.
    """
    bundle = Bundle.open(source)
    place = _free_place(bundle, Path(folder).absolute(), bundle.name if name is None else name)
    bundle.verify()
    result = None
    if not force:
        result = replay_afresh(bundle.path, device)
        if result["verdict"] != "nonfinite":
            raise PinError(_not_red(bundle, result))
    return Pinned(
        bundle=_copy(bundle, place, _pinned_manifest(bundle.manifest, red=result is not None, known=known)),
        result=result,
    )


def replay_afresh(bundle: Path, device: str) -> dict[str, Any]:
    """Replay a bundle in a process of its own, where nothing was imported or patched before.

    Raises:
        DeviceUnavailableError: this machine lacks the device.
        PinError: the process gave no verdict.
    """
    command = [sys.executable, "-m", "pytest_nancapture.cli", "replay", "--json", f"--device={device}", str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)  # noqa: S603, our own
    answer = _answer(done.stdout)
    if "verdict" in answer:
        return answer
    error = answer.get("error", {})
    if error.get("type") == DeviceUnavailableError.__name__:
        raise DeviceUnavailableError(error["message"])
    words = error.get("message") or "\n".join(done.stderr.splitlines()[-_LAST_WORDS:])
    problem = f"the replay ended with exit code {done.returncode} and no verdict"
    raise PinError(f"{bundle}: not pinned: {problem}\n{words}".rstrip())


def _answer(text: str) -> dict[str, Any]:
    """The last line that is a replay's answer: code under test may have printed around it."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                data: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if "verdict" in data or "error" in data:
                return data
    return {}


def _not_red(bundle: Bundle, result: dict[str, Any]) -> str:
    advice = {
        "finite": "If the fault is fixed already, check out the code that still has it and pin it there.",
        "error": "If only your pytest hooks can build the module, see it fail with pytest --nan-bundles=... first.",
    }.get(result["verdict"], "Bring back the code that it was captured with, or capture it anew.")
    return (
        f"{bundle.path}: not pinned, since it is not red: expected a replay that is nonfinite, came "
        f"{result['verdict']} ({result['reason']})\n"
        f"  A test that was never red proves nothing. {advice}\n"
        "  --force pins it all the same; --known is for a red bundle whose fault stays open for now (a strict xfail)."
    )


def _free_place(bundle: Bundle, folder: Path, name: str) -> Path:
    if not name or Path(name).name != name or name.startswith("."):
        raise PinError(f"expected a plain folder name that does not start with a dot, came {name!r}")
    if folder.exists() and not folder.is_dir():
        raise PinError(f"{folder}: expected a folder to pin into, came a file")
    place = folder / name
    if os.path.lexists(place):
        what = "it is pinned there already" if place == bundle.path else "something of that name exists already"
        raise PinError(f"{place}: not pinned: {what}; give another name with --name=NAME, or remove that folder first")
    return place


def _pinned_manifest(manifest: Manifest, *, red: bool, known: bool) -> Manifest:
    """The copy's manifest; the very same object where nothing is to be noted."""
    if known != (manifest.pin is not None and manifest.pin.known):
        manifest = dataclasses.replace(manifest, pin=PinRecord(known=known))
    seen = manifest.fault.reproduced
    if red and not seen.runs:
        # Capture never saw the fault come back, this replay did: one more rerun, and the test can gate.
        fault = dataclasses.replace(manifest.fault, reproduced=Reproduced(runs=1, of=seen.of + 1))
        manifest = dataclasses.replace(manifest, fault=fault)
    return manifest


def _copy(bundle: Bundle, place: Path, manifest: Manifest) -> Bundle:
    """Into a hidden folder beside `place`, checked and flushed, then renamed: a bundle is there whole or not at all."""
    from pytest_nancapture.bundle.write import sync_folder, write_text

    place.parent.mkdir(parents=True, exist_ok=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent))
    try:
        for file in bundle.manifest.files:
            _copy_file(bundle.path / file, hidden / file)
        if manifest is bundle.manifest:
            _copy_file(bundle.path / MANIFEST_NAME, hidden / MANIFEST_NAME)
        else:
            write_text(hidden / MANIFEST_NAME, manifest.dumps())
        try:
            Bundle.open(hidden).verify()
        except BundleDamagedError as error:
            raise BundleDamagedError(bundle.path, f"it changed while it was copied: {error.problem}") from error
        hidden.chmod(0o755)
        sync_folder(hidden)
        hidden.rename(place)
        sync_folder(place.parent)
    except BaseException:  # Ctrl-C, too, must leave nothing behind; it goes on its way
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return Bundle.open(place)


def _copy_file(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as stream:
        os.fsync(stream.fileno())
