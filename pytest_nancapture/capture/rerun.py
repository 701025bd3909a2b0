"""Run a window's step again in place, at loss scale 1, on this rank alone: does the fault come back, and of what?"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_nancapture.bundle.manifest import Gradients, Healed
from pytest_nancapture.diagnose.blame import culprit_of
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.healing import Healing, healed_step
from pytest_nancapture.diagnose.source import package_folder
from pytest_nancapture.diagnose.trace import Trace, traced
from pytest_nancapture.step.engine import Engine, parameters_of
from pytest_nancapture.step.finding import Finding
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.preserve import preserved
from pytest_nancapture.step.state.window import Window


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rerun saw.

    Attributes:
        finding: at the optimizer step that was guilty in training.
        guilty: position in the window of the first micro-batch after which something was not finite; None if none was.
        raw_bad: gradients were not finite right after backward, before any hook.
        seconds: how long it took.
        culprit: what is to blame, if the operations were followed.
    """

    finding: Finding
    guilty: int | None
    raw_bad: bool
    seconds: float
    culprit: Culprit | None = None

    @property
    def dropped(self) -> bool:
        """Whether the module's own hooks mended the gradients before the update."""
        return self.raw_bad and not self.finding.gradients.nonfinite and not self.finding.buffers

    @property
    def failed(self) -> bool:
        """Whether the fault came back."""
        return bool(self.finding.found_in) and not self.dropped


def rerun(
    run: Run,
    window: Window,
    optimizer: Any,
    target: int,
    *,
    begun: Callable[[Engine], None],
    trace: Trace | None = None,
) -> Outcome:
    """Run every micro-batch again from the instant, and put everything back.

    Args:
        optimizer: that was about to step in training.
        target: which optimizer step of the window that was, counted from 0.
        begun: is given the engine, to hand it every backward pass and optimizer step while it runs.
        trace: follows the operations, if a culprit is wanted.

    Raises:
        Exception: whatever the user's step raises.
    """
    start = time.perf_counter()

    def restore() -> None:
        window.restore_tensors(run.module)
        window.restore_flags(run.module)
        for position, state in window.states.items():
            # A copy: what is loaded becomes the optimizer's own, to write into.
            run.optimizers[position].load_state_dict(copy.deepcopy(state))

    engine = Engine(module=run.module, restore=restore, target=target, trace=trace)
    with preserved(run, updates=target > 0), run.quiet(window):
        begun(engine)
        with traced(trace):
            run.play(window, engine, optimizer)
            if engine.finding is None:
                engine.look(parameters_of(optimizer))
        finding = engine.finding
        assert finding is not None
        culprit = None
        if trace is not None and trace.heals is None:
            culprit = culprit_of(trace, run.module, finding, engine.losses)
    last = len(engine.losses) - 1 if finding.found_in else None
    return Outcome(
        finding=finding,
        guilty=last if engine.guilty is None else engine.guilty,
        raw_bad=engine.raw_bad,
        seconds=time.perf_counter() - start,
        culprit=culprit,
    )


def healed_in_place(
    run: Run,
    gradients: Gradients,
    guilty: int,
    rerun: Callable[[Trace], Outcome | None],
    *,
    seconds: float,
    began: float,
) -> Healed | None:
    """What the step would learn with its fault healed; all ranks come here.

    Args:
        gradients: those of the fault, on this rank.
        guilty: position of the guilty micro-batch in this rank's window.
        rerun: runs the window again in place; None where it could not be run.
        seconds: that this may take, counted from `began`, of the monotonic clock: the start of a traced rerun that is
            over now.
    """
    each = time.monotonic() - began

    def heal(healing: Healing) -> Finding | None:
        # All ranks or none: the user's step may speak to the others, who would wait for ever.
        if run.any(time.monotonic() - began + each > seconds):
            return None
        outcome = rerun(Trace(run.module, {}, package_folder(run.module), heals=healing))
        return outcome.finding if outcome is not None else None

    return healed_step(gradients, guilty, heal, run.any)
