"""Say what was found in a window, and make a bundle of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.capture.export import Capture
from pytest_nancapture.capture.guilty import Decision
from pytest_nancapture.capture.react import Captured
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.retention import Retention
from pytest_nancapture.step.check import is_finite
from pytest_nancapture.step.finding import Finding
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.keeper import Health, Keeper, moved
from pytest_nancapture.step.state.optimizers import OptimizerState, bad_numbers
from pytest_nancapture.step.state.window import Window
from pytest_nancapture.step.suspects import BufferWatch

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit

log = logging.getLogger("pytest_nancapture")


class Recorder:
    """Records faults of one run."""

    def __init__(
        self, run: Run, recipe: Recipe, keeper: Keeper, buffers: BufferWatch, retention: Retention, *, proofs: int
    ) -> None:
        """`proofs`: how often each bundle is replayed, to see whether its fault comes back."""
        self._proofs = proofs
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
        bad_before = tuple(self.bad_weights(window))
        if bad_before and not finding.weights:
            finding = dataclasses.replace(finding, weights=bad_before)
        log.warning("%snancapture: step %d: %s", self._run.line_start, window.counters["global_step"], finding.summary)
        if decision.culprit is not None:
            log.warning("nancapture: culprit  %s", culprit_line(decision.culprit))
        if decision.no_culprit:
            log.warning("nancapture: no culprit: %s", decision.no_culprit)
        for words in self._blame(window, finding, bad_before):
            log.warning("nancapture: %s", words)
        in_update = finding.weights or (finding.raised is not None and finding.raised_in == "optimizer")
        states = self._states(window) if window.states and (target or in_update) else None
        capture = Capture(
            run=self._run,
            window=window,
            recipe=self._recipe,
            finding=finding,
            guilty=decision.guilty,
            target=target,
            came_back=bool(decision.reproduced.runs) if decision.reproduced.of else None,
            culprit=decision.culprit,
            changed=self._keeper.attributes.changed(),
            ignored=self._keeper.attributes.ignored,
            healed=decision.healed,
            buffers=self._buffers,
            changed_before_copy=tuple(sorted(moved(window))),
            optimizer_states=states,
            hyperparameters=self._keeper.hyperparameters,
        )
        return self._retention.put(capture, proofs=self._proofs, seconds=decision.seconds)

    def _blame(self, window: Window, finding: Finding, bad_before: tuple[str, ...]) -> Iterator[str]:
        """Who is to blame for weights that are not finite, as far as it is known; sentences."""
        if not finding.weights:
            return
        health, checkpoint = self._keeper.health, self._run.checkpoint
        numbers = window.bad_numbers or bad_numbers(self._run.optimizers)
        if bad_before:
            yield f"{whose_weights(window, health, bad_before, checkpoint)}"
        yield from (f"{number}; an update with it makes weights bad" for number in numbers)
        if health.bad_state and not health.bad_at_first:
            yield (
                f"{health.bad_state} of the optimizer's state was not finite when training began: the state came from "
                f"the checkpoint {checkpoint}"
            )

    def _states(self, window: Window) -> list[Any]:
        """Of the optimizers, as they were before the first update of the window."""
        optimizers = self._run.optimizers
        now = [OptimizerState(optimizer) for optimizer in optimizers]
        window.restore_optimizers(optimizers)
        taken = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        for state in now:
            state.restore()
        return taken

    def bad_weights(self, window: Window) -> dict[str, Tensor]:
        """Weights that were not finite at the instant; of one that the step itself has written it is not known."""
        known = ((name, value) for name, value in self.weights(window).items() if name not in window.written)
        return {name: value for name, value in known if not is_finite(value)}

    def weights(self, window: Window) -> dict[str, Tensor]:
        """Parameters as of the instant."""
        now = {name: bare(parameter) for name, parameter in unique_parameters(self._module)}
        return {name: window.tensors.get(name, value) for name, value in now.items()}


def whose_weights(window: Window, health: Health, bad: Iterable[str], checkpoint: str) -> str:
    """Who is to blame for weights that were not finite at the instant, a sentence."""
    if window.number == 1 or health.bad_at_first.intersection(bad):
        whose = f"the state came from the checkpoint {checkpoint}"
        if not checkpoint:
            whose = "the initialisation or the checkpoint is to blame"
        return f"the weights were not finite when training began: {whose}"
    last = window.counters["global_step"] - 1
    is_known = health.good_at == last
    which = f"the update of step {last}" if is_known else f"the update of some step up to {last}"
    seen = "" if is_known or health.good_at is None else f", as they were seen finite when step {health.good_at} began"
    return (
        f"the weights were not finite before the step began: {which} is to blame{seen}; capture that with "
        "NaNCapture(optimizer_history=True)"
    )


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
        lost=tuple(sorted(window.written)),
    )
