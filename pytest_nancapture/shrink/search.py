"""The order of a shrink, and what it remembers: ``consider`` a candidate, keep it where the fault is the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nancapture.bundle.schema import read
from pytest_nancapture.shrink.candidate.fault import SeenFault, difference
from pytest_nancapture.shrink.candidate.plan import Plan, Range, Survey, count, without
from pytest_nancapture.shrink.candidate.pool import Answer, Pool

_SLOWEST = 10.0
"""Seconds that a candidate may always take; and as many times what the captured step took:"""
_SLOWER = 5
_PATIENCE = 24
"""Failures in a row after which a deletion is given up; fewer where the step could not even be run:"""
_HOPELESS = 6


class OutOfTimeError(Exception):
    """The time is over; the best candidate so far stands."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a shrink is.

    Attributes:
        pass_name: such as ``samples``.
        size: bytes of the smallest bundle so far.
        tried: candidates that were replayed.
        kept: those among them that were kept.
        seconds: since the shrink began.
        what: is being tried, in a few words.
    """

    pass_name: str
    size: int
    tried: int
    kept: int
    seconds: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Of one candidate. `problem` is empty where the fault is the same; `is_runnable`, whether the step ran at all."""

    problem: str
    size: int
    is_runnable: bool = True


class Search:
    """Holds the smallest candidate so far.

    Attributes:
        fault: as the captured bundle has it.
        best: its plan.
        size: its bytes.
        tried: candidates replayed.
        kept: candidates kept.
        history: all that were best once, in order.
        rejected: keys of the plans that were tried in vain.
        pass_name: for the progress.
        on_kept: called whenever a candidate was kept.
    """

    def __init__(
        self, pool: Pool, survey: Survey, fault: SeenFault, deadline: float, report: Callable[[Progress], None]
    ) -> None:
        """`deadline` is of the monotonic clock."""
        self.survey = survey
        self.best = Plan(window=tuple(range(survey.window)))
        self.size = survey.size
        self.tried = self.kept = 0
        self.history: list[Plan] = []
        self.rejected: set[str] = set()
        self.pass_name = ""
        self.on_kept: Callable[[], None] = lambda: None
        self._pool = pool
        self.fault = fault
        self._deadline = deadline
        self._report = report
        self._began = time.monotonic()
        self._limit = max(_SLOWEST, _SLOWER * fault.seconds)
        self._memo: dict[Plan, Judgement] = {}

    def consider(self, plan: Plan, what: str, *, smaller: bool = False) -> bool:
        """Keep the candidate if its fault is the same; with `smaller`, only if it takes less room, too."""
        return self.keep_first([plan], what, smaller=smaller) is not None

    def keep_first(
        self, plans: Sequence[Plan], what: str, *, smaller: bool = False, patience: int | None = None
    ) -> int | None:
        """Keep the first candidate, in order, that can be kept; several are tried side by side.

        Args:
            plans: the candidates.
            what: they are, for the progress.
            smaller: whether they must take less room.
            patience: failures after which the rest is not tried.

        Returns:
            Its position; None where there is none.
        """
        for position, judgement in enumerate(self._judgements(plans, what)):
            if not judgement.problem and (not smaller or judgement.size < self.size) and plans[position] != self.best:
                self.best, self.size = plans[position], judgement.size
                self.kept += 1
                self.history.append(self.best)
                self.on_kept()
                self._tell(what)
                return position
            if patience is not None and position + 1 >= patience:
                return None
            if patience is not None and position + 1 >= _HOPELESS and not self.was_runnable(plans[: position + 1]):
                return None
        return None

    def holds(self, plan: Plan, what: str) -> bool:
        """Whether the candidate's fault is the same; it is not kept."""
        return not next(iter(self._judgements([plan], what))).problem

    def request(self, do: str, plan: Plan) -> dict[str, Any]:
        """What to ask a worker."""
        return {"do": do, "plan": plan.as_dict(), "fault": dataclasses.asdict(self.fault)}

    def was_runnable(self, plans: Sequence[Plan]) -> bool:
        """Whether the step ran at all in any of the candidates, for all that is remembered."""
        return any(self._memo[plan].is_runnable for plan in plans if plan in self._memo)

    def _judgements(self, plans: Sequence[Plan], what: str) -> Iterator[Judgement]:
        for start, plan in enumerate(plans):
            if plan not in self._memo:
                self._evaluate(plans[start:], what)
            yield self._memo[plan]

    def _evaluate(self, plans: Sequence[Plan], what: str) -> None:
        """The first of `plans`, and as many after it as there are workers."""
        ahead = [plan for plan in dict.fromkeys(plans[: 2 * self._pool.jobs]) if plan not in self._memo]
        known = [plan for plan in ahead if plan_key(plan) in self.rejected]
        self._memo.update((plan, Judgement(problem="tried before", size=0)) for plan in known)
        new = [plan for plan in ahead if plan not in self._memo][: self._pool.jobs]
        if not new or plans[0] in self._memo:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        self._tell(what)
        answers = self._pool.ask([self.request("try", plan) for plan in new], min(self._limit, left))
        for plan, answer in zip(new, answers, strict=True):
            if answer.get("error", {}).get("type") == "Hung" and time.monotonic() >= self._deadline:
                raise OutOfTimeError
            self.tried += 1
            judgement = self._memo[plan] = self._judge(answer)
            if judgement.problem:
                self.rejected.add(plan_key(plan))

    def _judge(self, answer: Answer) -> Judgement:
        if "seen" not in answer:
            return Judgement(problem=str(answer.get("error")), size=0, is_runnable=False)
        seen = read(SeenFault, answer["seen"], "seen")
        is_runnable = seen.result["verdict"] not in ("error", "mismatch")
        return Judgement(problem=difference(self.fault, seen), size=answer["size"], is_runnable=is_runnable)

    def _tell(self, what: str) -> None:
        seconds = time.monotonic() - self._began
        self._report(
            Progress(
                pass_name=self.pass_name, size=self.size, tried=self.tried, kept=self.kept, seconds=seconds, what=what
            )
        )


def delete(
    search: Search,
    kept: tuple[Range, ...],
    make: Callable[[tuple[Range, ...]], Plan],
    what: str,
    *,
    how: str = "without {} of {}",
    least: int = 1,
    smaller: bool = False,
) -> tuple[Range, ...]:
    """Leave out as many of a row of things as can be: large pieces first, then smaller ones, down to single things.

    Args:
        search: where candidates are considered.
        kept: the things that are there, as ranges of their indices.
        make: the candidate that keeps only these.
        what: they are, for the progress.
        how: many are tried at once, in words for the progress.
        least: how many must be left.
        smaller: as for :meth:`Search.consider`.

    Returns:
        What could not be left out.
    """
    size = max(count(kept) if not least else count(kept) // 2, 1)
    while True:
        start, has_moved = 0, False
        while start < count(kept):
            total = count(kept)
            pieces = [(at, min(size, total - at)) for at in range(start, total, size)]
            pieces = [piece for piece in pieces if total - piece[1] >= least]
            left = [without(kept, *piece) for piece in pieces]
            plans = [make(ranges) for ranges in left]
            found = search.keep_first(plans, f"{what}: {how.format(size, total)}", smaller=smaller, patience=_PATIENCE)
            if found is None:
                # Only what was looked at with any number of workers may decide.
                hopeless = len(plans) >= _HOPELESS and not search.was_runnable(plans[:_HOPELESS])
                if len(plans) >= _PATIENCE or hopeless:
                    return kept
                break
            kept, start, has_moved = left[found], pieces[found][0], True
        if size == 1 and not has_moved:
            return kept
        size = max(min(size, count(kept)) // 2, 1)


def plan_key(plan: Plan) -> str:
    """What stands for a plan in the file that outlives the process."""
    return hashlib.sha256(json.dumps(plan.as_dict(), sort_keys=True).encode()).hexdigest()[:16]
