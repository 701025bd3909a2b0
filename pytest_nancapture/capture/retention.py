"""The folder of bundles, as one run fills it: what is written, what is only counted, what makes room."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.bundle import Bundle, hash_file
from pytest_nancapture.bundle.folder import share_file, write_text
from pytest_nancapture.bundle.manifest import MANIFEST_NAME, WEIGHTS, Fault, Reproduced
from pytest_nancapture.bundle.paths import shown_from_start, started_in
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.bundle.values.references import code_root, folders_from, is_typed_in
from pytest_nancapture.capture.export import Capture
from pytest_nancapture.capture.proof.prove import Proof, prove
from pytest_nancapture.capture.recipe import call_of
from pytest_nancapture.errors import NancaptureError
from pytest_nancapture.step.run import Run

log = logging.getLogger("pytest_nancapture")


class Retention:
    """Writes at most `limit` bundles a run: the newest faults that differ; one seen again is counted in its bundle."""

    def __init__(self, dirpath: Path, limit: int, run: Run) -> None:
        self._dirpath = dirpath
        self._limit = limit
        self._run = run
        self._written: dict[Any, Path] = {}

    def put(self, capture: Capture, *, proofs: int, seconds: float | None) -> Path | None:
        """Write the bundle and prove it, or count the fault in the one there is; say so.

        Args:
            proofs: how often to replay it.
            seconds: how long the step takes; None where not known.

        Returns:
            The folder that holds the fault; None where it could not be written. Nothing that goes wrong here may hide
            the fault itself, so it is told and no more.
        """
        try:
            return self._put(capture, proofs, seconds)
        except (NancaptureError, OSError) as error:
            log.warning("nancapture: no bundle: %s", error)
        except Exception as error:  # a user's class, met while writing, may raise anything
            log.warning("nancapture: no bundle: %s: %s", type(error).__name__, error)
        return None

    def _put(self, capture: Capture, proofs: int, seconds: float | None) -> Path | None:
        fault = capture.fault()
        signature = _signature(fault)
        before = self._written.get(signature)
        if before is not None and (before / MANIFEST_NAME).exists():
            seen = _count(before)
            log.warning("nancapture: the same fault as in %s, seen %d times", shown_from_start(before), seen)
            return before
        if self._limit == 0:
            log.warning("nancapture: no bundle: max_bundles=0")
            return None
        path = capture.write(self._dirpath, fault)
        self._share_weights(path)
        self._written[signature] = path
        self._announce(path, self._proof(path, capture, proofs, seconds), capture.came_back)
        while len(self._written) > self._limit:
            oldest = self._written.pop(next(iter(self._written)))
            shutil.rmtree(oldest, ignore_errors=True)
            log.warning(
                "nancapture: removed %s: max_bundles=%d keeps the newest", shown_from_start(oldest), self._limit
            )
        return path

    def _proof(self, path: Path, capture: Capture, proofs: int, seconds: float | None) -> Proof:
        """The proof of the bundle, which is told in its manifest; one that fails leaves the bundle as it is."""
        try:
            proof = prove(self._run, Bundle.open(path), times=proofs, seconds=seconds, opaque=capture.opaque)
            if proof.reproduced.of:
                _rewrite(path, reproduced=proof.reproduced)
        except Exception as error:  # a replay runs the user's code, and needs disk, memory and processes
            log.debug("nancapture: where the proof was raised", exc_info=True)
            return Proof(reproduced=Reproduced(), words=f"the proof failed with {type(error).__name__}: {error}")
        return proof

    def _share_weights(self, path: Path) -> None:
        """Weights that an earlier bundle of the run holds too, as those of skipped steps, are stored once."""
        record = Bundle.open(path).manifest.files[WEIGHTS]
        for other in self._written.values():
            source = other / WEIGHTS
            if source.is_file() and source.stat().st_size == record.bytes and hash_file(source) == record.sha256:
                share_file(source, path / WEIGHTS)
                return

    def _announce(self, path: Path, proof: Proof, came_back: bool | None) -> None:
        again = proof.reproduced
        where = " in this process" if again.how == "here" else ""
        confirmed = f", reproduced {again.runs} of {again.of}{where}" if again.of else ""
        log.warning(
            "nancapture: bundle   %s   %s%s", shown_from_start(path), human_size(Bundle.open(path).size), confirmed
        )
        if again.of and not again.runs and came_back is False:
            log.warning(
                "nancapture: transient: the fault did not come back when the step was rerun; it may hang on "
                "non-deterministic kernels, on hardware, or on state that no bundle holds, and cannot gate anything%s",
                f": {proof.words}" if "nobody can look into" in proof.words else "",
            )
        elif proof.words:
            log.warning("nancapture: unproven %s", proof.words)
        if is_typed_in(type(self._run.module).__module__):
            call = f"replay({shown_from_start(path)!r}, module={call_of(type(self._run.module))})"
            log.warning("nancapture: replay   %s   (from pytest_nancapture import replay)", call)
            return
        log.warning("nancapture: replay   %s", _command(self._dirpath, code_root(type(self._run.module).__module__)))


def _command(dirpath: Path, code: Path | None) -> str:
    """That replays all bundles, to be pasted where the run was started."""
    if code is None or code in folders_from(started_in()) or code in folders_from(dirpath):
        return f"pytest --nan-bundles={shown_from_start(dirpath)}"
    return f"cd {shlex.quote(str(code))} && pytest --nan-bundles={shlex.quote(str(dirpath))}"


def _signature(fault: Fault) -> Any:
    """What two faults have in common when they are taken for the same; where they come from has to be known."""
    if fault.culprit is None:
        return object()
    culprit = tuple((fault.culprit or {}).get(name) for name in ("op", "file", "line"))
    return (fault.kind, fault.found_in, fault.gradients.nonfinite, fault.buffers, fault.weights, culprit)


def _count(path: Path) -> int:
    """One more in the bundle's own count, its manifest replaced whole."""
    seen = Bundle.open(path).manifest.fault.seen + 1
    _rewrite(path, seen=seen)
    return seen


def _rewrite(path: Path, **changes: Any) -> None:
    """Change what the bundle says of its fault, its manifest replaced whole."""
    manifest = Bundle.open(path).manifest
    changed = dataclasses.replace(manifest, fault=dataclasses.replace(manifest.fault, **changes))
    hidden = path / f".{MANIFEST_NAME}"
    try:
        write_text(hidden, changed.dumps())
        os.replace(hidden, path / MANIFEST_NAME)  # noqa: PTH105, Path.replace says less
    except OSError:
        hidden.unlink(missing_ok=True)
        raise
