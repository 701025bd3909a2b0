"""One training run under watch: keeps each window, looks at each step, and acts when one is not finite."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Reproduced
from pytest_nancapture.bundle.names import buffers, parameters, unique_parameters
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.capture.check import all_finite, is_finite
from pytest_nancapture.capture.export import Capture
from pytest_nancapture.capture.finding import Finding, look
from pytest_nancapture.capture.instant import AttributeWatch, CopyOnWrite, KeptBatch, Window, copy_of
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.rerun import Outcome, Rerun, parameters_of
from pytest_nancapture.capture.wraps import Wraps
from pytest_nancapture.errors import NancaptureError, NonFiniteError

log = logging.getLogger("pytest_nancapture")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked of :class:`NaNCapture`."""

    dirpath: Path
    on_capture: Literal["raise", "stop", "skip"]
    max_bundles: int
    confirm: int
    optimizer_history: bool


class DropStep(Exception):  # noqa: N818, no error: it leaves the optimizer's closure so that the update is not made
    """Ends an optimizer step before its update; never seen outside of this module."""


class Watch:
    """Watches one call of ``Trainer.fit``.

    Lightning calls back in this order: the instant (once a micro-batch), backward passes, the optimizer step's closure
    and in it ``on_before_optimizer_step``, the end of the micro-batch.
    """

    def __init__(self, trainer: Any, module: Any, recipe: Recipe, settings: Settings) -> None:
        self._trainer = trainer
        self._module = module
        self._recipe = recipe
        self._settings = settings
        self._wraps = Wraps()
        self._window: Window | None = None
        self._rerun: Rerun | None = None
        self._attributes = AttributeWatch(module)
        self._first_buffers = {name: (id(buffer), buffer._version) for name, buffer in buffers(module)}
        self._reevaluates = any(_reevaluates(optimizer) for optimizer in trainer.optimizers)
        self._own_start_hook = not _is_inherited(module, "on_train_batch_start")
        self._history: tuple[dict[str, Tensor], list[Any]] | None = None
        self._tolerated: set[str] = set()
        self._captured = 0

    def begin(self) -> None:
        """Put the wrappers in place."""
        put, strategy = self._wraps.put, self._trainer.strategy
        put(self._module, "on_train_batch_start", self._on_train_batch_start)
        put(self._module, "on_before_optimizer_step", self._on_before_optimizer_step)
        put(self._module, "on_train_batch_end", self._on_train_batch_end)
        put(strategy, "backward", self._backward)
        put(strategy, "optimizer_step", self._optimizer_step)

    def end(self) -> None:
        """Take the wrappers off and let go of everything kept."""
        self._wraps.take_off()
        self._window = None

    # The wrappers, in the order Lightning comes by.

    def _on_train_batch_start(self, original: Callable[..., Any], batch: Any, batch_idx: int, *rest: Any) -> Any:
        window = self._open_window()
        window.batches.append(KeptBatch.keep(batch, batch_idx, self._module.device))
        if not self._own_start_hook:
            return original(batch, batch_idx, *rest)
        with CopyOnWrite(self._module, window.tensors):
            return original(batch, batch_idx, *rest)

    def _backward(self, original: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._rerun is not None:
            self._rerun.losses[-1].append(loss)
        elif self._window is not None and self._window.batches:
            self._window.batches[-1].losses.append(loss.detach())
        return original(loss, *args, **kwargs)

    def _optimizer_step(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._rerun is not None and self._rerun.finding is not None:
            return None
        try:
            return original(optimizer, *args, **kwargs)
        except DropStep:
            self._forget_scaling()
            return None

    def _on_before_optimizer_step(self, original: Callable[..., Any], optimizer: Any) -> Any:
        result = original(optimizer)
        rerun, window = self._rerun, self._window
        if rerun is not None:
            rerun.steps += 1
            if rerun.steps == rerun.target + 1:
                rerun.judge()
                raise DropStep
        elif window is not None and window.batches:
            self._check(window, optimizer)
        return result

    def _on_train_batch_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._window is not None and self._window.batches:
            self._check_after(self._window)
        return result

    # Keeping.

    def _open_window(self) -> Window:
        if self._window is not None and not self._window.stepped:
            return self._window
        tensors = {name: copy_of(buffer) for name, buffer in buffers(self._module)}
        if self._reevaluates or not self._module.automatic_optimization:
            tensors.update((name, copy_of(parameter)) for name, parameter in parameters(self._module))
        loop = self._trainer.fit_loop.epoch_loop
        self._history = None
        self._window = Window(
            tensors=tensors,
            attributes=self._attributes.keep(),
            frozen=tuple(name for name, parameter in unique_parameters(self._module) if not parameter.requires_grad),
            counters={
                "global_step": self._trainer.global_step,
                "epoch": self._trainer.current_epoch,
                "total_batch_idx": loop.total_batch_idx,
            },
        )
        return self._window

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Those written since fit began, without those that are meant to hold Inf, such as a running minimum."""
        return {
            name: buffer
            for name, buffer in buffers(self._module)
            if (id(buffer), buffer._version) != self._first_buffers.get(name) and name not in self._tolerated
        }

    def _tolerate(self, window: Window, changed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out what was non-finite before the step, now and from here on: no later step is to blame for it."""
        known = {name for name in changed if name in window.tensors and not is_finite(window.tensors[name])}
        self._tolerated |= known
        return {name: buffer for name, buffer in changed.items() if name not in known}

    # Looking.

    def _check(self, window: Window, optimizer: Any) -> None:
        """Look at what the optimizer is about to use; on a fault, act before it does."""
        target = window.optimizer_steps
        window.optimizer_steps += 1
        window.stepped = True
        optimized = parameters_of(optimizer)
        changed = self._changed_buffers()
        gradients = [parameter.grad for parameter in optimized if parameter.grad is not None]
        if all_finite([*gradients, *window.losses, *changed.values()]):
            for batch in window.batches:
                batch.losses.clear()
            if self._settings.optimizer_history:
                self._keep_history()
            return
        losses = [batch.losses for batch in window.batches]
        finding = look(self._module, losses, optimized, self._tolerate(window, changed))
        outcomes = self._reruns(window, optimizer, target, finding) if finding.found_in else None
        if outcomes is None:
            return
        self._capture(window, optimizer, target, finding, outcomes)
        raise DropStep

    def _check_after(self, window: Window) -> None:
        """Look at what changed since the last look: weights after an update, buffers that hooks wrote."""
        changed = self._changed_buffers()
        bad = {} if all_finite(changed.values()) else self._tolerate(window, changed)
        bad = {name: buffer for name, buffer in bad.items() if not is_finite(buffer)}
        weights: list[str] = []
        if self._history is not None:
            weights = [name for name, parameter in unique_parameters(self._module) if not is_finite(parameter)]
        if not bad and not weights:
            return
        finding = look(self._module, [batch.losses for batch in window.batches], (), bad)
        finding = dataclasses.replace(finding, weights=tuple(weights))
        window.stepped = True
        states = None
        if self._history is not None:
            window.tensors.update(self._history[0])
            states = self._history[1]
        self._capture(window, None, max(window.optimizer_steps - 1, 0), finding, [], states)

    def _keep_history(self) -> None:
        weights = {name: copy_of(parameter) for name, parameter in parameters(self._module)}
        self._history = (weights, [copy.deepcopy(optimizer.state_dict()) for optimizer in self._trainer.optimizers])

    def _reruns(self, window: Window, optimizer: Any, target: int, finding: Finding) -> list[Outcome] | None:
        """Rerun as often as asked; None where a rerun shows that this was no fault.

        One rerun is made in any case where it has to decide: a scaler's overflow is routine, and so is a bad loss whose
        gradients the user's own hooks have mended.
        """
        scaled = getattr(self._trainer.precision_plugin, "scaler", None) is not None
        undecided = (scaled and not finding.bad_losses) or finding.found_in == ("loss",)
        outcomes = []
        for _ in range(max(self._settings.confirm, int(undecided))):
            outcome = self._rerun_once(window, optimizer, target)
            if outcome is None:
                break
            outcomes.append(outcome)
            if undecided and (outcome.dropped or (scaled and not outcome.failed)):
                return None
        return outcomes

    def _rerun_once(self, window: Window, optimizer: Any, target: int) -> Outcome | None:
        if any(batch.problem is not None for batch in window.batches):
            return None
        hook = vars(self._module)["on_before_optimizer_step"].__wrapped__
        self._rerun = Rerun(self._trainer, self._module, window, optimizer, target, hook)
        try:
            return self._rerun.run()
        except Exception as error:  # the user's step may raise anything; the capture goes on without its confirmation
            log.warning("nancapture: rerunning the step in place raised %s: %s", type(error).__name__, error)
            return None
        finally:
            self._rerun = None

    # Acting.

    def _capture(
        self,
        window: Window,
        optimizer: Any,
        target: int,
        finding: Finding,
        outcomes: list[Outcome],
        states: list[Any] | None = None,
    ) -> None:
        """Write the bundle, tell the user, clean up; then end the run if that is wanted."""
        seen = [outcome for outcome in outcomes if outcome.failed]
        if seen and not finding.bad_losses:
            # The scaler's factor is out of these: they are what a replay will see.
            finding = dataclasses.replace(finding, gradients=seen[0].finding.gradients, kind=seen[0].finding.kind)
        bad_before = tuple(name for name, value in self._weights_before(window) if not is_finite(value))
        if bad_before and not finding.weights:
            finding = dataclasses.replace(finding, weights=bad_before)
        positions = [outcome.guilty for outcome in seen if outcome.guilty is not None]
        guilty = next(iter([*finding.bad_losses, *positions, len(window.batches) - 1]))
        step = window.counters["global_step"]
        log.warning("nancapture: step %d: %s", step, finding.summary)
        capture = Capture(
            trainer=self._trainer,
            module=self._module,
            window=window,
            recipe=self._recipe,
            finding=finding,
            guilty=guilty,
            target=target,
            reproduced=Reproduced(runs=len(seen), of=len(outcomes)),
            attributes={**self._attributes.changed(), **window.attributes},
            first_buffers=self._first_buffers,
            optimizer_states=states,
        )
        path = self._write(capture)
        self._clean_up(window, states)
        self._act(step, finding, path)

    def _weights_before(self, window: Window) -> list[tuple[str, Tensor]]:
        tensors = {name: parameter.detach() for name, parameter in unique_parameters(self._module)}
        return list({**tensors, **window.tensors}.items())

    def _write(self, capture: Capture) -> Path | None:
        """The bundle's folder; None where none is written. Nothing that goes wrong here may hide the fault."""
        settings = self._settings
        if self._captured >= settings.max_bundles:
            log.warning("nancapture: no bundle: max_bundles=%d have been written", settings.max_bundles)
            return None
        try:
            path = capture.write(settings.dirpath)
        except (NancaptureError, OSError, RuntimeError, ValueError) as error:
            log.warning("nancapture: no bundle: %s", error)
            return None
        self._captured += 1
        reproduced = capture.reproduced
        again = f", reproduced {reproduced.runs} of {reproduced.of}" if reproduced.of else ""
        log.warning("nancapture: bundle   %s   %s%s", _shown(path), human_size(Bundle.open(path).size), again)
        if reproduced.of and not reproduced.runs:
            log.warning(
                "nancapture: the fault did not come back when the step was rerun: it may hang on non-deterministic "
                "kernels, on hardware, or on state that no bundle holds; this bundle cannot gate anything"
            )
        log.warning("nancapture: replay   pytest --nan-bundles=%s", _shown(settings.dirpath))
        return path

    def _clean_up(self, window: Window, states: list[Any] | None) -> None:
        """As if the window had never been: buffers as of its instant, no gradient, and the weights if they moved."""
        window.restore_tensors(self._module)
        if states is not None:
            for optimizer, state in zip(self._trainer.optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        for parameter in self._module.parameters():
            parameter.grad = None

    def _act(self, step: int, finding: Finding, path: Path | None) -> None:
        trainer, settings = self._trainer, self._settings
        if settings.on_capture == "raise":
            where = f"bundle {_shown(path)}" if path else "no bundle was written"
            raise NonFiniteError(
                f"step {step}: {finding.summary}; {where}; the weights are as they were before the step",
                global_step=step,
                bundle=str(path) if path else None,
            )
        if settings.on_capture == "stop":
            trainer.should_stop = True
            # Lightning goes on until these are met, and the run cannot get better by it.
            trainer.fit_loop.min_epochs = 0
            trainer.fit_loop.epoch_loop.min_steps = None
            log.warning("nancapture: stopping the run (on_capture='stop')")
        else:
            log.warning("nancapture: step dropped, training goes on (on_capture='skip')")

    def _forget_scaling(self) -> None:
        """Let the scaler begin the next step afresh, its scale as it is."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler._scale is not None:
            scaler.update(scaler.get_scale())


def _reevaluates(optimizer: Any) -> bool:
    """Whether the optimizer calls its closure several times a step, and so moves the weights before the last look."""
    return isinstance(optimizer, torch.optim.LBFGS)


def _is_inherited(module: Any, name: str) -> bool:
    """Whether the hook is Lightning's own, which does nothing."""
    return str(getattr(type(module), name).__module__).startswith(("lightning.", "pytorch_lightning."))


def _shown(path: Path) -> str:
    """Relative to where the user is, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
