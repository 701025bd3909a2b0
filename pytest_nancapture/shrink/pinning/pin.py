"""Put a bundle among the fixtures for good, small and named, once it has been seen to fail with today's code."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import workshop
from pytest_nancapture.bundle.manifest import Manifest, PinRecord, Reproduced
from pytest_nancapture.bundle.paths import shown
from pytest_nancapture.bundle.text import human_size, size_above
from pytest_nancapture.errors import NancaptureError, PinError
from pytest_nancapture.shrink.display import shrinking_line
from pytest_nancapture.shrink.options import DEFAULTS, ShrinkOptions
from pytest_nancapture.shrink.pinning.fresh import heal_afresh, replay_afresh
from pytest_nancapture.shrink.pinning.name import readable_name
from pytest_nancapture.shrink.pinning.place import check_name, copy_bundle, free_name
from pytest_nancapture.shrink.pinning.twin import is_traced, pinned_twin, same_culprit

if TYPE_CHECKING:
    from os import PathLike

    from pytest_nancapture.shrink.shrinker import Shrunk

log = logging.getLogger("pytest_nancapture")

MAX_SIZE = 1_000_000
"""Bytes that a fixture may have, unless said otherwise: it lives in git for ever."""


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A bundle in its place.

    Attributes:
        bundle: the one in the fixtures.
        result: the replay that showed it red, as ``ReplayResult.as_dict`` gives it; None where it was forced.
        shrunk: what shrinking came to; None where the bundle was copied as it is.
        notes: what else to know, a sentence each.
    """

    bundle: Bundle
    result: dict[str, Any] | None
    shrunk: Shrunk | None = None
    notes: tuple[str, ...] = ()


def pin(
    source: str | PathLike[str],
    folder: str | PathLike[str] = "fixtures",
    *,
    name: str | None = None,
    device: str = "auto",
    force: bool = False,
    known: bool = False,
    again: bool = False,
    max_size: int = MAX_SIZE,
    shrinking: ShrinkOptions | None = DEFAULTS,
    tell: Callable[[str], None] = lambda _: None,
) -> Pinned:
    """Shrink a bundle into `folder` if a replay in a fresh process, with today's code, is not finite.

    Args:
        source: the bundle's folder; it is left as it is.
        folder: made if it is not there.
        name: the pinned bundle's, instead of one made from module, operation and fault.
        device: as for :func:`pytest_nancapture.replay`.
        force: copy as it is, without any replay.
        known: the fault stays open for now; the plugin then expects the test to fail, strictly.
        again: also where the same fault is pinned there already.
        max_size: bytes.
        shrinking: None for a copy as it is.
        tell: called with what is about to be done.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
        DeviceUnavailableError: this machine lacks the device.
        PinError: the bundle is not red, too large or pinned already, or its place is taken.
        OSError: it cannot be written; nothing is left behind.
    """
    bundle, folder = Bundle.open(source), Path(folder).absolute()
    _check_place(bundle, folder, name, again=again)
    if (force or shrinking is None) and bundle.size > max_size:
        raise PinError(_too_large(bundle, max_size, "--force" if force else "--no-shrink"))
    bundle.verify()
    result = None
    if not force:
        tell(f"replaying {shown(bundle.path)} in a fresh process")
        result = replay_afresh(bundle.path, device, trace=True)
        if result["verdict"] != "nonfinite":
            raise PinError(_not_red(bundle, result))
    found: dict[str, Any] = (result or {}).get("culprit") or {}
    culprit = found if is_traced(found) else bundle.fault.culprit or {}
    if not again:
        _refuse_twin(bundle, culprit, folder)
    with _smaller(bundle, folder, result, device, shrinking, tell) as small:
        if small.bundle.size > max_size:
            raise PinError(_still_too_large(bundle, small, max_size))
        place = folder / name if name else free_name(folder, readable_name(bundle.manifest, culprit))
        manifest = _pinned_manifest(small.bundle.manifest, culprit, red=result is not None, known=known)
        if result is not None and small.shrunk is None and manifest.fault.healed is None:
            # Its capture did not find out what is left for a fix to learn.
            healed = heal_afresh(small.bundle.path, device)
            if healed is not None:
                manifest = dataclasses.replace(manifest, fault=dataclasses.replace(manifest.fault, healed=healed))
        return dataclasses.replace(small, bundle=copy_bundle(small.bundle, place, manifest))


@contextmanager
def _smaller(
    bundle: Bundle,
    folder: Path,
    result: dict[str, Any] | None,
    device: str,
    shrinking: ShrinkOptions | None,
    tell: Callable[[str], None],
) -> Iterator[Pinned]:
    """The shrunk bundle, proven red, in a hidden place for a while; or the bundle as it is, and why."""
    if result is None or shrinking is None:
        yield Pinned(bundle=bundle, result=result)
        return
    with workshop(folder, bundle.name) as hidden:
        yield _shrunk(bundle, hidden, result, device, shrinking, tell)


def _shrunk(
    bundle: Bundle,
    hidden: Path,
    result: dict[str, Any],
    device: str,
    shrinking: ShrinkOptions,
    tell: Callable[[str], None],
) -> Pinned:
    tell(shrinking_line("it", shrinking.max_seconds))
    try:
        from pytest_nancapture.shrink.shrinker import shrink

        shrunk = shrink(bundle, hidden, device=device, **shrinking.as_arguments())
        tell("replaying the shrunk one in a fresh process")
        proof = replay_afresh(shrunk.bundle.path, device, trace=True)
    except Exception as error:  # whatever keeps it from being smaller must not cost the pin
        log.debug("nancapture: why it could not be shrunk", exc_info=True)
        kind = "" if isinstance(error, NancaptureError) else f"{type(error).__name__}: "
        return Pinned(bundle=bundle, result=result, notes=(f"pinned as it is, since shrinking failed: {kind}{error}",))
    if proof["verdict"] != "nonfinite":
        why = f"came out {proof['verdict']} in a fresh process ({proof['reason']})"
    elif not same_culprit(result["culprit"], proof["culprit"]):
        why = "failed in another way in a fresh process"
    else:
        return Pinned(bundle=shrunk.bundle, result=proof, shrunk=shrunk)
    return Pinned(bundle=bundle, result=result, notes=(f"pinned as it is, since the shrunk one {why}",))


def _check_place(bundle: Bundle, folder: Path, name: str | None, *, again: bool) -> None:
    if name is not None:
        check_name(name)
    if folder.exists() and not folder.is_dir():
        raise PinError(f"{folder}: expected a folder to pin into, came a file")
    if name is not None and os.path.lexists(folder / name):
        raise PinError(
            f"{folder / name}: not pinned: something of that name exists already; give another name with --name=NAME, "
            "or remove that folder first"
        )
    if folder in bundle.path.parents and not again:
        raise PinError(f"{bundle.path}: not pinned: it is pinned there already")


def _refuse_twin(bundle: Bundle, culprit: dict[str, Any], folder: Path) -> None:
    twin = pinned_twin(bundle.manifest, culprit, folder)
    if twin is not None:
        place = f"{culprit.get('file')}:{culprit.get('line')}" if culprit.get("file") else ""
        parts = (str(culprit.get("source") or "").strip(), place, culprit.get("op"), culprit.get("explanation"))
        what = ", ".join(str(part) for part in parts[: 3 if any(parts[:3]) else 4] if part)
        raise PinError(
            f"{bundle.path}: not pinned: this fault is pinned already, as {shown(twin.path)} ({what})\n"
            "  --again pins it beside that one all the same."
        )


def _not_red(bundle: Bundle, result: dict[str, Any]) -> str:
    advice = {
        "finite": "If the fault is fixed already, check out the code that still has it and pin it there.",
        "error": "If only your pytest hooks can build the module, see it fail with pytest --nan-bundles=... first, "
        "then pin it as it is with --force: no hook is asked here, so it can be neither replayed nor shrunk.",
    }.get(result["verdict"], "Bring back the code that it was captured with, or capture it anew.")
    return (
        f"{bundle.path}: not pinned, since it is not red: expected a replay that is nonfinite, came "
        f"{result['verdict']} ({result['reason']})\n"
        f"  A test that was never red proves nothing. {advice}\n"
        "  --force pins it all the same; --known is for a red bundle whose fault stays open for now (a strict xfail)."
    )


def _too_large(bundle: Bundle, limit: int, option: str) -> str:
    size = bundle.size
    return (
        f"{bundle.path}: not pinned: it is {human_size(size)}, more than the {human_size(limit)} of --max-size\n"
        f"  Without {option} it is made smaller; --max-size={size_above(size)} takes it as it is."
    )


def _still_too_large(bundle: Bundle, small: Pinned, limit: int) -> str:
    """Says what to do about it; the work of shrinking is not lost."""
    size = small.bundle.size
    over = f"more than the {human_size(limit)} of --max-size"
    enough = f"--max-size={size_above(size)}"
    if small.shrunk is None:
        why = "".join(f"\n  {note}." for note in small.notes).replace("pinned as it is, since ", "")
        return f"{bundle.path}: not pinned: it is {human_size(size)}, {over}{why}\n  {enough} takes it as it is."
    kept = copy_bundle(small.bundle, free_name(bundle.path.parent, f"{bundle.name}-small"), small.bundle.manifest)
    lines = [f"{bundle.path}: not pinned: it is {human_size(size)} (it was {human_size(bundle.size)}), {over}"]
    if small.shrunk.kept:
        lines.append(f"  What it holds: {'; '.join(small.shrunk.kept)}.")
    if small.shrunk.stopped:
        lines.append(f"  Shrinking was not finished: nancapture pin {shown(kept.path)} goes on from there.")
    lines.append(f"  It is kept as {shown(kept.path)}; pin that one with --no-shrink {enough} to take it as it is.")
    return "\n".join(lines)


def _pinned_manifest(manifest: Manifest, culprit: dict[str, Any], *, red: bool, known: bool) -> Manifest:
    """The pinned one's manifest; the very same object where nothing is to be noted."""
    if known != (manifest.pin is not None and manifest.pin.known):
        manifest = dataclasses.replace(manifest, pin=PinRecord(known=known))
    fault = manifest.fault
    if is_traced(culprit) and not (is_traced(fault.culprit) and same_culprit(culprit, fault.culprit)):
        # By it the same fault is known again when it is to be pinned a second time.
        fault = dataclasses.replace(fault, culprit=culprit)
    if red and not fault.reproduced.runs:
        # Capture never saw the fault come back, this replay did: one more rerun, and the test can gate.
        fault = dataclasses.replace(fault, reproduced=Reproduced(runs=1, of=fault.reproduced.of + 1))
    return manifest if fault is manifest.fault else dataclasses.replace(manifest, fault=fault)
