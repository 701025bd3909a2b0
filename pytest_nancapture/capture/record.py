"""Say what was found in a window, and make a bundle of it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.capture.decide import Decision
from pytest_nancapture.capture.export import Capture
from pytest_nancapture.capture.react import Captured
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.retention import Retention
from pytest_nancapture.step.buffers import BufferWatch
from pytest_nancapture.step.check import is_finite
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.keeper import Keeper, moved
from pytest_nancapture.step.state.window import Window

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit

log = logging.getLogger("pytest_nancapture")


class Recorder:
    """Records faults of one run."""

    def __init__(self, run: Run, recipe: Recipe, keeper: Keeper, buffers: BufferWatch, retention: Retention) -> None:
        self._run = run
        self._module = run.module
        self._recipe = recipe
        self._keeper = keeper
        self._buffers = buffers
        self._retention = retention

    def write(self, window: Window, target: int, decision: Decision) -> Path | None:
        """Say what was found, and put the bundle among those of the run.

        Args:
            target: which optimizer step of the window is the guilty one.

        Returns:
            The bundle's folder; None where none was written.
        """
        finding = decision.finding
        bad_before = self.bad_before(window)
        if bad_before and not finding.weights:
            finding = dataclasses.replace(finding, weights=bad_before)
        log.warning("%snancapture: step %d: %s", self._run.line_start, window.counters["global_step"], finding.summary)
        if decision.culprit is not None:
            log.warning("nancapture: culprit  %s", culprit_line(decision.culprit))
        if bad_before and finding.weights == bad_before:
            log.warning("nancapture: %s", self._keeper.whose_weights(window))
        states: list[Any] | None = None
        if window.states and (target or window.reevaluates or finding.weights):
            # An optimizer that has not stepped in this window is still as it was.
            live = enumerate(self._run.optimizers)
            states = [window.states.get(position) or optimizer.state_dict() for position, optimizer in live]
        capture = Capture(
            run=self._run,
            window=window,
            recipe=self._recipe,
            finding=finding,
            guilty=decision.guilty,
            target=target,
            reproduced=decision.reproduced,
            culprit=decision.culprit,
            healed=decision.healed,
            attributes=self._keeper.attributes.changed(window.attributes),
            buffers=self._buffers,
            changed_before_copy=tuple(sorted(moved(window))),
            optimizer_states=states,
            hyperparameters=self._keeper.hyperparameters,
        )
        return self._retention.put(capture)

    def bad_before(self, window: Window) -> tuple[str, ...]:
        """Weights that were not finite at the instant."""
        return tuple(name for name, value in self.weights(window).items() if not is_finite(value))

    def weights(self, window: Window) -> dict[str, Tensor]:
        """Parameters as of the instant."""
        now = {name: parameter.detach() for name, parameter in unique_parameters(self._module)}
        return {name: window.tensors.get(name, value) for name, value in now.items()}


def culprit_line(culprit: Culprit) -> str:
    """As in the log: ``mean_loss = loss / count   train.py:42   aten.div (division by zero ...)``."""
    place = f"{culprit.file}:{culprit.line}" if culprit.file else ""
    op = ".".join(culprit.op.split(".")[:2])
    why = f"({culprit.explanation})" if op and culprit.explanation else culprit.explanation
    return "   ".join(part for part in (culprit.source, place, f"{op} {why}".strip()) if part)


def captured(window: Window, decision: Decision, path: Path | None, *, dropped: bool) -> Captured:
    """What the reaction has to know."""
    return Captured(
        step=window.counters["global_step"],
        blamed=decision.blamed,
        summary=decision.finding.summary,
        path=path,
        dropped=dropped,
    )
