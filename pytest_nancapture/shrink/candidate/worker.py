"""A process that replays candidates: ``python -m pytest_nancapture.shrink.candidate.worker BUNDLE DEVICE THREADS``.

Requests come as JSON lines on stdin, each gets one line on stdout. Code under test may print, read or exit: it sees
neither of the two pipes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import torch

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.bundle.manifest import Fault, Manifest
    from pytest_nancapture.replay.observe import Observed
    from pytest_nancapture.shrink.candidate.make import Candidate, Original


class Worker:
    """Holds the captured bundle, and answers."""

    def __init__(self, bundle: Bundle, device: str, threads: int) -> None:
        from pytest_nancapture.replay.device import choose_device

        self._bundle = bundle
        self._device: torch.device = choose_device(device, bundle.manifest)
        self._threads = threads
        self._held: Original | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """To one request: ``look`` at the bundle as it lies there, ``heal`` it, ``try`` or ``write`` a plan ..."""
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "load": self._load,
            "look": self._look,
            "heal": self._heal,
            "survey": self._survey,
            "try": self._try,
            "write": self._write,
        }
        return actions[request.pop("do")](**request)

    @property
    def _original(self) -> Original:
        from pytest_nancapture.shrink.candidate.make import Original

        if self._held is None:
            self._bundle.verify()
            self._held = Original.read(self._bundle)
        return self._held

    def _load(self) -> dict[str, Any]:
        importlib.import_module(
            "pytest_nancapture.shrink.candidate.survey"
        )  # now, so that no candidate's time pays for it
        return {"size": self._original.bundle.size}

    def _look(self) -> dict[str, Any]:
        from pytest_nancapture.replay.observe import gradients_when_healed, observe
        from pytest_nancapture.step.scene import stored_in

        self._bundle.verify()
        source = stored_in(self._bundle.path)
        seen = _seen(observe(self._bundle, source, self._device))
        if seen["result"]["verdict"] == "nonfinite":
            seen["healed"] = gradients_when_healed(self._bundle, source, self._device)
        return {"seen": seen, "size": self._bundle.size}

    def _heal(self) -> dict[str, Any]:
        from pytest_nancapture.replay.observe import learnt_when_healed
        from pytest_nancapture.step.scene import stored_in

        self._bundle.verify()
        healed = learnt_when_healed(self._bundle, stored_in(self._bundle.path), self._device)
        return {"healed": dataclasses.asdict(healed) if healed is not None else None}

    def _survey(self) -> dict[str, Any]:
        from pytest_nancapture.shrink.candidate.survey import survey

        return {"survey": dataclasses.asdict(survey(self._original, self._device))}

    def _try(self, plan: Any, fault: Any) -> dict[str, Any]:
        _, _, answer = self._evaluate(plan, fault)
        return answer

    def _write(self, plan: Any, fault: Any, folder: str) -> dict[str, Any]:
        from pytest_nancapture.bundle.write import fill_folder

        candidate, manifest, answer = self._evaluate(plan, fault)
        manifest = dataclasses.replace(manifest, fault=self._with_healed(manifest, candidate))
        fill_folder(Path(folder), manifest, candidate.plain)
        return {**answer, "size": candidate.size(manifest)}

    def _with_healed(self, manifest: Manifest, candidate: Candidate) -> Fault:
        """What is left to learn of the smaller step may be less than of the captured one."""
        from pytest_nancapture.bundle.bundle import Bundle
        from pytest_nancapture.replay.observe import learnt_when_healed

        bundle = Bundle(self._bundle.path, manifest)
        healed = learnt_when_healed(bundle, candidate.source, self._device)
        return dataclasses.replace(manifest.fault, healed=healed)

    def _evaluate(self, data: Any, fault: Any) -> tuple[Candidate, Manifest, dict[str, Any]]:
        from pytest_nancapture.bundle.bundle import Bundle
        from pytest_nancapture.bundle.schema import read
        from pytest_nancapture.replay.observe import gradients_when_healed, observe
        from pytest_nancapture.shrink.candidate.fault import SeenFault, unlike
        from pytest_nancapture.shrink.candidate.make import make_candidate
        from pytest_nancapture.shrink.candidate.plan import Plan

        candidate = make_candidate(Plan.from_dict(data), self._original)
        manifest = candidate.manifest
        threads = min(manifest.numerics.get("threads", self._threads), self._threads)
        limited = dataclasses.replace(manifest, numerics={**manifest.numerics, "threads": threads})
        bundle = Bundle(self._bundle.path, limited)
        observed = observe(bundle, candidate.source, self._device)
        seen = _seen(observed)
        # A second replay only where it decides.
        if not unlike(read(SeenFault, fault, "fault"), read(SeenFault, json.loads(json.dumps(seen)), "seen")):
            seen["healed"] = gradients_when_healed(bundle, candidate.source, self._device)
        module = manifest.module
        if module.initial is not None and observed.initial is not None:
            seen_with = observed.initial
            initial = dataclasses.replace(module.initial, sha256=seen_with.sha256, sketch=seen_with.sketch)
            module = dataclasses.replace(module, initial=initial)
        full = dataclasses.replace(manifest, module=module, fault=_fault(manifest.fault, observed, candidate))
        return candidate, full, {"seen": seen, "size": candidate.size(full)}


def _seen(observed: Observed) -> dict[str, Any]:
    """As JSON-ready values."""
    result, finding = observed.result.as_dict(), observed.finding
    culprit = result["culprit"] or {}
    place = (culprit.get("op", ""), culprit.get("file", ""), culprit.get("line", 0))
    seen: dict[str, Any] = {
        "result": result,
        "births": sorted(observed.first),
        "spares": observed.spares,
        "born": sorted(observed.births.get(place, ())),
        "seconds": result["seconds"],
    }
    if finding is not None:
        gradients = finding.gradients
        seen.update(kind=finding.kind if finding.found_in else "", found_in=finding.found_in)
        seen.update(nonfinite=gradients.nonfinite, nonzero=gradients.nonzero)
    return seen


def _fault(fault: Fault, observed: Observed, candidate: Candidate) -> Fault:
    """The record of the fault as the candidate has it."""
    from pytest_nancapture.bundle.manifest import WEIGHTS

    finding, culprit = observed.finding, observed.result.culprit
    if finding is None or not finding.found_in:
        return fault
    held = {*candidate.plain[WEIGHTS], *candidate.manifest.module.layouts}
    given = tuple(name for name in fault.weights if name in held)
    weights = finding.weights or (given if culprit is not None and culprit.phase == "weights" else ())
    gradients = finding.gradients
    if gradients.nonfinite:
        # A replay asks for the others only where all were finite.
        gradients = dataclasses.replace(gradients, nonzero=())
    places = (*finding.found_in, *(["weights"] if weights and not finding.weights else []))
    return dataclasses.replace(
        fault,
        kind=finding.kind,
        found_in=places,
        losses=finding.losses,
        gradients=gradients,
        buffers=finding.buffers,
        weights=weights,
        culprit=dataclasses.asdict(culprit) if culprit is not None else None,
    )


def _read(pipe: TextIO, requests: queue.Queue[str]) -> None:
    """Where the pipe ends, the parent is gone: so are we, even in the middle of a step that never ends."""
    for line in pipe:
        requests.put(line)
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Answer requests; the process ends when stdin does."""
    # Ctrl-C is for the parent, which ends us by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    from pytest_nancapture.bundle.bundle import Bundle

    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    path, device, threads = arguments
    worker: Worker | None = None
    while True:
        line = requests.get()
        try:
            if worker is None:
                worker = Worker(Bundle.open(path), device, int(threads))
            answer = worker.answer(json.loads(line))
        except BaseException as error:  # code under test may raise anything, SystemExit too; the parent is told
            answer = {"error": {"type": type(error).__name__, "message": str(error)}}
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
