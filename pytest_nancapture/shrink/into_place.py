"""``nancapture shrink``: where the small bundle goes, and how a second run goes on from the first."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import workshop
from pytest_nancapture.errors import BundleError, ShrinkError
from pytest_nancapture.shrink.options import ShrinkOptions
from pytest_nancapture.shrink.resume import resume_path

if TYPE_CHECKING:
    from pytest_nancapture.shrink.shrinker import Shrunk


def small_sibling(bundle: Bundle) -> Path:
    """Where a shrunk bundle goes unless said otherwise: ``step-000812-rank-0-small`` beside ``step-000812-rank-0``."""
    return bundle.path.with_name(f"{bundle.name}-small")


def shrink_into(bundle: Bundle, place: Path, options: ShrinkOptions, *, device: str = "auto") -> tuple[Shrunk, int]:
    """Shrink a bundle into `place`; where a smaller one of the same step is there already, go on from that one.

    What is at `place` is only ever replaced by a smaller one.

    Returns:
        What shrinking came to, and the bytes of the earlier one that it went on from; 0 where there was none.

    Raises:
        BundleError: the bundle is damaged.
        DeviceUnavailableError: this machine lacks the device.
        ShrinkError: it is not red with today's code, or something else is at `place`.
        OSError: it cannot be written.
    """
    from pytest_nancapture.shrink.shrinker import shrink

    place = place.absolute()
    if not os.path.lexists(place):
        return shrink(bundle, place, device=device, **options.as_arguments()), 0
    earlier = _earlier(bundle, place)
    with workshop(place.parent, place.name) as new:
        source = bundle if _move(resume_path(place), resume_path(new)) else earlier
        try:
            shrunk = shrink(source, new, device=device, **options.as_arguments())
        finally:
            _move(resume_path(new), resume_path(place))
        if shrunk.after < earlier.size:
            place.rename(new.with_name(f"{place.name}.old"))
            new.rename(place)
    small = Bundle.open(place)
    return dataclasses.replace(shrunk, bundle=small, after=small.size), earlier.size


def _move(source: Path, target: Path) -> bool:
    if source.exists():
        source.replace(target)
        return True
    return False


def _earlier(bundle: Bundle, place: Path) -> Bundle:
    try:
        found = Bundle.open(place)
    except BundleError:
        found = None
    if found is None or found.path == bundle.path or _step(found) != _step(bundle):
        raise ShrinkError(
            f"{place}: not shrunk: something else of that name exists already; give another OUT, or remove it first"
        )
    return found


def _step(bundle: Bundle) -> tuple[object, ...]:
    """What shrinking leaves as it is."""
    fault, manifest = bundle.fault, bundle.manifest
    return fault.global_step, fault.epoch, fault.kind, manifest.module.target, manifest.code.commit
