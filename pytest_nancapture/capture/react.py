"""After a fault: end the run or let it go on, on all ranks together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_nancapture.bundle.paths import shown_from_start
from pytest_nancapture.bundle.text import some
from pytest_nancapture.errors import NonFiniteError
from pytest_nancapture.step.run import Run

log = logging.getLogger("pytest_nancapture")

OnCapture = Literal["raise", "stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A fault as one rank knows it.

    Attributes:
        blamed: the ranks at fault.
        summary: what is not finite on this rank; empty where nothing is.
        path: of this rank's bundle, if it wrote one.
        dropped: whether the update was not made, or undone; else only buffers were put back.
        lost: weights that the step itself had written before they were copied, and which are not as they were.
    """

    step: int
    blamed: tuple[int, ...]
    summary: str
    path: Path | None
    dropped: bool = True
    lost: tuple[str, ...] = ()

    @property
    def promise(self) -> str:
        """What is as it was before the step."""
        if self.lost:
            return f"the step had written {some(self.lost)} before a copy was made, which cannot be put back"
        return f"{'the weights' if self.dropped else 'buffers'} are as they were before the step"


class Reaction:
    """Does what the user asked for, once a fault was captured."""

    def __init__(self, run: Run, on_capture: OnCapture) -> None:
        self._run = run
        self._on_capture = on_capture
        self._owed: Captured | None = None
        self._raised: NonFiniteError | None = None

    def owe(self, captured: Captured) -> None:
        """Keep a fault that this rank found alone, until the ranks speak to each other again."""
        self._owed = captured

    @property
    def owes(self) -> bool:
        """Whether there is such a fault."""
        return self._owed is not None

    def settle(self) -> None:
        """Act upon faults that single ranks found alone; every rank has to come here.

        Raises:
            NonFiniteError: there is one, and the run is to end by it.
        """
        owed, self._owed = self._owed, None
        steps = self._run.gather(0 if owed is None else owed.step + 1)
        blamed = tuple(rank for rank, step in enumerate(steps) if step)
        if blamed:
            nothing = Captured(step=max(steps) - 1, blamed=blamed, summary="", path=None, dropped=False)
            self.act(owed or nothing)

    def insist(self) -> None:
        """Raise once more what the user's own code has caught: the run is not to go on.

        Raises:
            NonFiniteError: it was.
        """
        if self._raised is not None:
            raise self._raised

    def act(self, captured: Captured) -> None:
        """Raise, stop or go on.

        Raises:
            NonFiniteError: under ``raise``.
        """
        is_mine = self._run.rank in captured.blamed
        blamed = ", ".join(map(str, captured.blamed))
        if self._run.rank == 0 and not is_mine:
            log.warning("%snancapture: step %d: not finite on rank %s", self._run.line_start, captured.step, blamed)
        if self._on_capture == "raise":
            where = f"bundle {shown_from_start(captured.path)}" if captured.path else "no bundle was written"
            self._raised = NonFiniteError(
                f"step {captured.step}: {captured.summary or 'not finite'}; "
                f"{where if is_mine else f'the fault is that of rank {blamed}, and so is the bundle'}; "
                f"{captured.promise}",
                global_step=captured.step,
                bundle=str(captured.path) if captured.path else None,
            )
            raise self._raised
        if self._on_capture == "stop":
            self._run.stop()
        if self._run.rank == 0:
            skipped = "step dropped" if captured.dropped else "buffers put back"
            words = {"stop": "stopping the run", "skip": f"{skipped}, training goes on"}[self._on_capture]
            log.warning("nancapture: %s (on_capture=%r)", words, self._on_capture)
            if captured.lost:
                log.warning("nancapture: %s", captured.promise)
