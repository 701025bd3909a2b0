"""Does the fault come back from the bundle alone? Replays tell, in fresh processes where that is affordable."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_nancapture.bundle import numerics, rng
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.bundle.values.references import LiveResolver, code_root
from pytest_nancapture.capture.proof.fresh import replay_afresh
from pytest_nancapture.diagnose.raised import judge_raise
from pytest_nancapture.diagnose.source import package_folder
from pytest_nancapture.diagnose.trace import Trace, traced
from pytest_nancapture.errors import DeviceUnavailableError, NancaptureError
from pytest_nancapture.step.rebuild import build_module, materialize
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.scene import read_content, set_scene, stored_in
from pytest_nancapture.step.sent import refused

log = logging.getLogger("pytest_nancapture")

FRESH = True
"""Whether fresh processes may be started at all; the tests of other things do without."""
_SECONDS = 60.0
"""A run is not held up for longer by its proofs; beyond that they are made in the training process."""
_START = 10.0
"""Seconds that a fresh process is taken to need until it comes to the step."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What replays of a bundle found.

    Attributes:
        words: what a person should know, a sentence; empty where all is well.
        is_final: whether a replay in the training process could tell no more.
    """

    reproduced: Reproduced
    words: str = ""
    is_final: bool = False


def prove(run: Run, bundle: Bundle, *, times: int, seconds: float | None, opaque: tuple[str, ...]) -> Proof:
    """Replay a bundle `times` times, and count how often its fault came back.

    Args:
        seconds: how long the step takes; None where not known.
        opaque: places of the module that nobody can look into, to be named where the fault does not come back.
    """
    record = bundle.manifest.module
    if record.missing:
        return Proof(reproduced=Reproduced(), words=_missing(bundle))
    if not times:
        return Proof(reproduced=Reproduced())
    code = code_root(type(run.module).__module__)
    fresh = _prove_afresh(bundle, times, code) if _can_be_fresh(run, bundle, times, seconds) else None
    if fresh is not None and (fresh.reproduced.runs or fresh.is_final):
        return fresh
    here = _prove_here(run, bundle, times)
    if fresh is None:
        return (
            here if here.reproduced.runs or here.words else Proof(reproduced=here.reproduced, words=_points_to(opaque))
        )
    if not fresh.reproduced.of:
        return here
    if here.reproduced.runs:
        words = (
            "the fault came back from the bundle in this process, but not in a fresh one: it hangs on something "
            "outside of the module, such as a global, an attribute of a class, an environment variable or a file"
        )
        return Proof(reproduced=fresh.reproduced, words=words)
    return Proof(reproduced=fresh.reproduced, words=_points_to(opaque))


def _can_be_fresh(run: Run, bundle: Bundle, times: int, seconds: float | None) -> bool:
    record = bundle.manifest.module
    target, file = (record.factory, record.factory_file) if record.factory else (record.target, record.file)
    is_findable = not target.startswith("__main__:") or file is not None
    return FRESH and is_findable and times * (_START + 3 * (seconds or 0.0)) <= _SECONDS and _has_room(run.device)


def _has_room(device: torch.device) -> bool:
    """Whether a second copy of what training holds fits on the device."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return free > torch.cuda.max_memory_allocated(device)


def _prove_afresh(bundle: Bundle, times: int, code: Path | None) -> Proof:
    runs, done, end = 0, 0, time.monotonic() + _SECONDS
    for _ in range(times):
        try:
            left = max(end - time.monotonic(), 1.0)
            answer = replay_afresh(bundle.path, bundle.manifest.device, seconds=left, as_started=True, code=code)
        except subprocess.TimeoutExpired:
            log.debug("nancapture: a fresh replay took longer than %.0f s", _SECONDS)
            break
        if answer.error.get("type") == DeviceUnavailableError.__name__:
            break  # a device that only this process has made known
        verdict, reason = answer.result.get("verdict"), answer.result.get("reason", "")
        if verdict in ("error", "mismatch", None):
            why = reason or answer.error.get("message") or answer.words
            words = f"a fresh process cannot replay the bundle: {why}"
            return Proof(
                reproduced=Reproduced(runs=runs, of=done, how="fresh" if done else ""), words=words, is_final=True
            )
        done += 1
        runs += verdict == "nonfinite"
    words = "" if runs == done and done else "not every fresh replay brought the fault back"
    return Proof(reproduced=Reproduced(runs=runs, of=done, how="fresh" if done else ""), words=words)


def _prove_here(run: Run, bundle: Bundle, times: int) -> Proof:
    """In the training process, with a module built anew; the code is what was imported when the run began."""
    runs = 0
    for done in range(times):
        try:
            runs += _replay_here(run, bundle)
        except Exception as error:  # the user's code may raise anything; the bundle stays, unproven
            log.debug("nancapture: where the replay of the bundle was raised", exc_info=True)
            what = f"{type(error).__name__}: {error}" if not isinstance(error, NancaptureError) else str(error)
            words = f"the bundle could not be replayed in this process: {what}"
            return Proof(reproduced=Reproduced(runs=runs, of=done, how="here" if done else ""), words=words)
    return Proof(reproduced=Reproduced(runs=runs, of=times, how="here"))


def _replay_here(run: Run, bundle: Bundle) -> bool:
    """Whether the fault came back."""
    manifest, device = bundle.manifest, torch.device(bundle.manifest.device)
    with (
        rng.preserved(),
        numerics.preserved(),
        torch.enable_grad(),
        tempfile.TemporaryDirectory(prefix="nancapture-", ignore_cleanup_errors=True) as folder,
    ):
        content = read_content(bundle, device, stored_in(bundle.path))
        decoder = content.decoder(LiveResolver())
        module: Any = build_module(manifest.module, decoder, decoder.resolver, run.check_class)
        materialize(module, content.weights)
        trace = Trace(module, content.batch, package_folder(module)) if manifest.fault.raised is not None else None
        scene = set_scene(manifest, module, content, decoder, device=device, folder=folder, trace=trace)
        with refused(), traced(trace):
            try:
                run.rehearse(scene)
            except Exception as error:
                if trace is None:
                    raise
                judge_raise(scene.engine, trace, error, module.parameters())
    finding = scene.engine.finding
    return finding is not None and bool(finding.found_in)


def _missing(bundle: Bundle) -> str:
    places = bundle.manifest.module.missing
    told = "; ".join(f"{place.where} ({place.why})" for place in places[:3])
    more = f", and {len(places) - 3} more" if len(places) > 3 else ""
    return f"the bundle lacks state of the run, so nothing is proven: {told}{more}"


def _points_to(opaque: tuple[str, ...]) -> str:
    inside = f"; nobody can look into {', '.join(opaque[:5])}" if opaque else ""
    return (
        "the fault did not come back from the bundle: it hangs on state that is in no parameter, buffer, attribute or "
        f"random state of the module, be it the Trainer's, a callback's, the data's or outside of the process{inside}"
    )
