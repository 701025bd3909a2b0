"""The folder of bundles, as one run fills it: what is written, what is only counted, what makes room."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.bundle import Bundle, hash_file
from pytest_nancapture.bundle.folder import share_file, write_text
from pytest_nancapture.bundle.manifest import MANIFEST_NAME, WEIGHTS, Fault
from pytest_nancapture.bundle.paths import shown
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.capture.export import Capture
from pytest_nancapture.errors import NancaptureError

log = logging.getLogger("pytest_nancapture")


class Retention:
    """Writes at most `limit` bundles a run: the newest faults that differ; one seen again is counted in its bundle."""

    def __init__(self, dirpath: Path, limit: int) -> None:
        self._dirpath = dirpath
        self._limit = limit
        self._written: dict[Any, Path] = {}

    def put(self, capture: Capture) -> Path | None:
        """Write the bundle, or count the fault in the one there is; say so.

        Returns:
            The folder that holds the fault; None where it could not be written. Nothing that goes wrong here may hide
            the fault itself, so it is told and no more.
        """
        try:
            return self._put(capture)
        except (NancaptureError, OSError) as error:
            log.warning("nancapture: no bundle: %s", error)
        except Exception as error:  # a user's class, met while writing, may raise anything
            log.warning("nancapture: no bundle: %s: %s", type(error).__name__, error)
        return None

    def _put(self, capture: Capture) -> Path | None:
        fault = capture.fault()
        signature = _signature(fault)
        before = self._written.get(signature)
        if before is not None and (before / MANIFEST_NAME).exists():
            seen = _count(before)
            log.warning("nancapture: the same fault as in %s, seen %d times", shown(before), seen)
            return before
        if self._limit == 0:
            log.warning("nancapture: no bundle: max_bundles=0")
            return None
        path = capture.write(self._dirpath, fault)
        self._share_weights(path)
        self._written[signature] = path
        self._announce(path, fault)
        while len(self._written) > self._limit:
            oldest = self._written.pop(next(iter(self._written)))
            shutil.rmtree(oldest, ignore_errors=True)
            log.warning("nancapture: removed %s: max_bundles=%d keeps the newest", shown(oldest), self._limit)
        return path

    def _share_weights(self, path: Path) -> None:
        """Weights that an earlier bundle of the run holds too, as those of skipped steps, are stored once."""
        record = Bundle.open(path).manifest.files[WEIGHTS]
        for other in self._written.values():
            source = other / WEIGHTS
            if source.is_file() and source.stat().st_size == record.bytes and hash_file(source) == record.sha256:
                share_file(source, path / WEIGHTS)
                return

    def _announce(self, path: Path, fault: Fault) -> None:
        again = fault.reproduced
        confirmed = f", reproduced {again.runs} of {again.of}" if again.of else ""
        log.warning("nancapture: bundle   %s   %s%s", shown(path), human_size(Bundle.open(path).size), confirmed)
        if again.of and not again.runs:
            log.warning(
                "nancapture: transient: the fault did not come back when the step was rerun; it may hang on "
                "non-deterministic kernels, on hardware, or on state that no bundle holds, and cannot gate anything"
            )
        log.warning("nancapture: replay   pytest --nan-bundles=%s", shown(self._dirpath))


def _signature(fault: Fault) -> Any:
    """What two faults have in common when they are taken for the same; where they come from has to be known."""
    if fault.culprit is None:
        return object()
    culprit = tuple((fault.culprit or {}).get(name) for name in ("op", "file", "line"))
    return (fault.kind, fault.found_in, fault.gradients.nonfinite, fault.buffers, fault.weights, culprit)


def _count(path: Path) -> int:
    """One more in the bundle's own count, its manifest replaced whole."""
    manifest = Bundle.open(path).manifest
    seen = manifest.fault.seen + 1
    counted = dataclasses.replace(manifest, fault=dataclasses.replace(manifest.fault, seen=seen))
    hidden = path / f".{MANIFEST_NAME}"
    try:
        write_text(hidden, counted.dumps())
        os.replace(hidden, path / MANIFEST_NAME)  # noqa: PTH105, Path.replace says less
    except OSError:
        hidden.unlink(missing_ok=True)
        raise
    return seen
