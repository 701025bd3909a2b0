"""``shrink``: the smallest bundle, in the time there is, that still has the same fault. No torch in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.folder import half_written, put_in_place
from pytest_nancapture.bundle.schema import read
from pytest_nancapture.errors import DeviceUnavailableError, ShrinkError
from pytest_nancapture.shrink.candidate.fault import SeenFault, difference
from pytest_nancapture.shrink.candidate.plan import Plan, Survey
from pytest_nancapture.shrink.candidate.pool import Answer, Pool
from pytest_nancapture.shrink.kept import kept_in_words
from pytest_nancapture.shrink.passes import PASSES
from pytest_nancapture.shrink.resume import ResumeFile
from pytest_nancapture.shrink.search import OutOfTimeError, Progress, Search

__all__ = ["Gain", "Progress", "Shrunk", "shrink"]

Stopped = Literal["", "time", "interrupted"]
"""Why a search ended before it was through; empty where it was."""

_PATIENT = 600.0
"""Seconds for what must be answered: starting up, looking at the captured step, writing."""
_FALLBACKS = 5
"""Candidates that are tried on disk, the smallest first."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What a pass did: the bundle's bytes before and after it, the candidates tried and those kept."""

    pass_name: str
    before: int
    after: int
    tried: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A smaller bundle.

    Attributes:
        bundle: in its place.
        before: bytes of the captured one.
        after: bytes of this one.
        gains: of each pass that tried anything.
        kept: what the fault still needs, a sentence each.
        stopped: why the search ended before it was through; empty where it was.
        result: of the last replay, in a process of its own, as ``ReplayResult.as_dict`` gives it.
    """

    bundle: Bundle
    before: int
    after: int
    gains: tuple[Gain, ...]
    kept: tuple[str, ...]
    stopped: Stopped
    result: dict[str, Any]


def shrink(
    bundle: Bundle,
    place: Path,
    *,
    device: str = "auto",
    max_seconds: float = 300.0,
    jobs: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Shrunk:
    """Write, at `place`, a smaller bundle with the same fault: same operation, line, phase and kind.

    Candidates are replayed in processes of their own, so that code under test may crash or hang. The captured bundle is
    left as it is. Ctrl-C ends the search, and the best that was found is written.

    Args:
        bundle: the captured one.
        place: the new folder; what is above it is made if missing.
        device: as for :func:`pytest_nancapture.replay`.
        max_seconds: for the search; looking at the captured step and at the result come on top.
        jobs: candidates replayed side by side; the result is the same with any number.
        progress: called before each candidate and when one is kept.

    Raises:
        BundleError: the bundle is damaged.
        DeviceUnavailableError: this machine lacks the device.
        ShrinkError: the bundle is not red with today's code, or `place` is taken.
        OSError: the result cannot be written; nothing is left behind.
    """
    place = Path(place).absolute()
    if os.path.lexists(place):
        raise ShrinkError(f"{place}: not shrunk: something of that name exists already; remove it, or give another")
    bundle.verify()
    report = progress or (lambda _: None)
    with Pool(bundle.path, device, jobs) as pool:
        first = _look(pool, bundle)
        (answer,) = pool.ask([{"do": "survey"}], _PATIENT)
        survey = read(Survey, _expect(answer, "survey", bundle), "survey")
        search = Search(pool, survey, first, time.monotonic() + max_seconds, report)
        resume = ResumeFile(bundle, place, device)
        gains, stopped = _search(search, resume, place)
        with half_written(place.parent, place.name) as hidden:
            plan, size, result = _written(search, pool, hidden, bundle, device, place)
            _put_in_place(hidden, place)
    if not stopped:
        resume.forget()
    return Shrunk(
        bundle=Bundle.open(place),
        before=bundle.size,
        after=size,
        gains=gains,
        kept=kept_in_words(plan, survey, is_through=not stopped),
        stopped=stopped,
        result=result,
    )


def _search(search: Search, resume: ResumeFile, place: Path) -> tuple[tuple[Gain, ...], Stopped]:
    """Pass after pass until none gains anything."""
    gains: dict[str, Gain] = {}
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        search.pass_name = "start"  # noqa: S105
        known = resume.load()
        if known is not None and search.consider(known[0], "what an earlier shrink has found"):
            search.rejected |= known[1]
        search.on_kept = lambda: resume.save(search.best, search.rejected)
        while True:
            best = search.best
            for name, run in PASSES.items():
                search.pass_name = name
                before = (search.size, search.tried, search.kept)
                try:
                    run(search)
                finally:
                    gains[name] = _added(gains.get(name), name, before, search)
            if search.best == best:
                return _told(gains), ""
    except OutOfTimeError:
        return _told(gains), "time"
    except KeyboardInterrupt:
        return _told(gains), "interrupted"


def _added(gain: Gain | None, name: str, before: tuple[int, int, int], search: Search) -> Gain:
    size, tried, kept = before
    return Gain(
        pass_name=name,
        before=gain.before if gain and gain.kept else size,
        after=search.size if search.kept > kept or gain is None else gain.after,
        tried=search.tried - tried + (gain.tried if gain else 0),
        kept=search.kept - kept + (gain.kept if gain else 0),
    )


def _told(gains: dict[str, Gain]) -> tuple[Gain, ...]:
    return tuple(gain for gain in gains.values() if gain.tried)


def _look(pool: Pool, bundle: Bundle) -> SeenFault:
    """The fault, as the captured bundle has it with today's code."""
    (answer,) = pool.ask([{"do": "look"}], _PATIENT)
    seen = read(SeenFault, _expect(answer, "seen", bundle), "seen")
    if not seen.is_red:
        raise ShrinkError(
            f"{bundle.path}: not shrunk, since it is not red: expected a replay that is nonfinite, came "
            f"{seen.result['verdict']} ({seen.result['reason']})\n"
            "  Only a fault that can be seen can be kept. Check out the code that has it, and shrink it there."
        )
    return seen


def _expect(answer: Answer, name: str, bundle: Bundle) -> Any:
    if name in answer:
        return answer[name]
    error = answer.get("error", {})
    if error.get("type") == DeviceUnavailableError.__name__:
        raise DeviceUnavailableError(error["message"])
    raise ShrinkError(f"{bundle.path}: not shrunk: the replay gave no verdict: {error.get('message')}")


def _written(
    search: Search, pool: Pool, hidden: Path, bundle: Bundle, device: str, place: Path
) -> tuple[Plan, int, dict[str, Any]]:
    """Write the best candidate that, on disk and in a fresh process, has the same fault; usually the very best."""
    first = search.fault
    whole = Plan(window=tuple(range(search.survey.window)))
    problem = ""
    for plan in [*reversed(search.history[-_FALLBACKS:]), whole]:
        for file in hidden.iterdir():
            file.unlink()
        (answer,) = pool.ask([{**search.request("write", plan), "folder": str(hidden)}], _PATIENT)
        if "seen" not in answer:
            problem = str(answer.get("error", {}).get("message"))
            continue
        with Pool(hidden, device) as afresh:
            (answer,) = afresh.ask([{"do": "look"}], _PATIENT)
        if "seen" not in answer:
            problem = str(answer.get("error", {}).get("message"))
            continue
        seen = read(SeenFault, answer["seen"], "seen")
        problem = difference(first, seen)
        if not problem:
            return plan, answer["size"], seen.result
    raise ShrinkError(
        f"{bundle.path}: not shrunk to {place}: what was written does not fail in the same way in a fresh process: "
        f"{problem}; the fault may hang on chance, or on what the code keeps between steps"
    )


def _put_in_place(hidden: Path, place: Path) -> None:
    try:
        put_in_place(hidden, place)
    except OSError as error:
        if hidden.exists() and os.path.lexists(place):
            raise ShrinkError(f"{place}: not shrunk: something of that name was made meanwhile") from error
        raise
