"""Guards that take turns within one training run, a block of steps each, so that the machine's moods fall on all alike.

The turns change between two steps, as the loader is asked for the next batch. A guard that has its turn is among the
Trainer's callbacks; the others are not.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from networks import Net
from torch import Tensor

from pytest_nancapture import NaNCapture

CONTROL = "nothing again"
"""A second turn without any guard: how much two turns of the same differ."""
ALL = ("nothing", "floor", "this", "article", "flag per parameter", "anomaly mode", CONTROL)
_FIRST_STEPS = 4
_FEWEST_STEPS = 4
_LARGE = 2**16


class Floor(pl.Callback):
    """The least that a bundle of the step can be made from: copies into memory that is kept, and one read.

    Large gradients are added up, small ones go to the one kernel that takes them all: the fastest ways there are.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        moving = [batch, *pl_module.buffers()]
        if self.kept:
            torch._foreach_copy_(self.kept, moving)
        else:
            self.kept = [tensor.clone() for tensor in moving]
            self.one = torch.ones((), device=batch.device)
        self.state = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        is_cpu = pl_module.device.type == "cpu"
        self.sums = [gradient.sum() for gradient in gradients if is_cpu and gradient.numel() >= _LARGE]
        small = [gradient for gradient in gradients if not is_cpu or gradient.numel() < _LARGE]
        flag = torch.zeros((), device=pl_module.device)
        torch._amp_foreach_non_finite_check_and_unscale_(small, flag, self.one)


class Article(pl.Callback):
    """What the article does: copies the batch, takes four random states, concatenates all gradients, looks for NaN."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = copy.deepcopy(batch)
        accelerator = torch.cuda.get_rng_state_all()
        self.states = (torch.get_rng_state(), accelerator, np.random.get_state(), random.getstate())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = torch.cat([p.grad.view(-1) for p in pl_module.parameters() if p.grad is not None])
        if torch.isnan(gradients).any().item():
            raise RuntimeError("nan")


class FlagPerParameter(pl.Callback):
    """What lightly-train's monitor does: copies the batch to the host, reads one flag for each parameter."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch.detach().to("cpu", copy=True)
        self.states = torch.get_rng_state()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all().item():
                raise RuntimeError("nan")


class Guards:
    """Puts one guard in place at a time.

    Attributes:
        inside: seconds that guards have spent in code of their own.
    """

    def __init__(self, capture: NaNCapture) -> None:
        self._capture = capture
        self._others = {"floor": Floor, "article": Article, "flag per parameter": FlagPerParameter}
        self._now: pl.Callback | None = None
        self.trainer: Any = None
        self.inside = 0.0

    def rest(self) -> None:
        """Take off what there is."""
        torch.autograd.set_detect_anomaly(False)
        if self._now is not None:
            self.trainer.callbacks.remove(self._now)
        if self._now is self._capture:
            self._watch.end()
        self._now = None

    def set(self, name: str) -> None:
        """Give a guard its turn. This one's watch lives on from turn to turn, as in a long run."""
        torch.autograd.set_detect_anomaly(name == "anomaly mode")
        if name == "this":
            self._now = self._capture
            self._watch.begin()
            for wrapper in self._watch._wraps._wrappers:
                wrapper.around = self._timed_around(wrapper.around)
        elif name in self._others:
            self._now = self._others[name]()
            for hook in ("on_train_batch_start", "on_before_optimizer_step"):
                setattr(self._now, hook, self._timed(getattr(self._now, hook)))
        if self._now is not None:
            self.trainer.callbacks.append(self._now)

    def begin(self) -> None:
        """The run has begun, with this among its callbacks."""
        self._now = self._capture
        self.rest()

    def _timed(self, call: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        """The same call, its time added to `inside`, or taken off."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside += sign * (time.perf_counter() - began)

        return timed

    def _timed_around(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """The same for what is put around a call that is not the guard's own."""
        return self._timed(lambda original, *args, **kwargs: around(self._timed(original, -1), *args, **kwargs))

    @property
    def _watch(self) -> Any:
        assert self._capture._watch is not None
        return self._capture._watch


@dataclass
class Turns:
    """The loader: yields the same batch, measures the steps between, and changes the guard after each turn.

    Attributes:
        names: of the guards, in the order of their turns; every second round goes backwards.
        rounds: turns of each.
        seconds: that a turn without a guard shall take; slower steps than a quarter of it take four steps a turn.
        warm_up: steps at the start of each turn that do not count.
        means: for each guard, the mean seconds of a step in each of its turns, between two waits for the device.
        medians: the same of the median step, where the device does not run ahead of the host.
        inside: for each guard, the mean seconds that a step of each turn spends in the guard's own code.
        steps: in a turn.
    """

    batch: Tensor
    guards: Guards
    names: Sequence[str]
    rounds: int
    seconds: float
    warm_up: int = 2
    means: dict[str, list[float]] = field(default_factory=dict)
    medians: dict[str, list[float]] = field(default_factory=dict)
    inside: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0

    def __iter__(self) -> Iterator[Tensor]:
        yield from [self.batch] * _FIRST_STEPS  # Lightning asks for the first one before the run has begun
        self.guards.begin()
        began = self._now()
        yield from [self.batch] * _FIRST_STEPS
        step = (self._now() - began) / _FIRST_STEPS
        self.steps = max(_FEWEST_STEPS, round(self.seconds / step))
        for number in range(-1, self.rounds):
            for name in self.names if number % 2 == 0 else reversed(self.names):
                self.guards.set(name)
                yield from [self.batch] * self.warm_up
                times = [self._now()]
                self.guards.inside = 0.0
                for _ in range(self.steps):
                    yield self.batch
                    times.append(time.perf_counter())
                times[-1] = self._now()
                self.guards.rest()
                if number >= 0:
                    self.inside.setdefault(name, []).append(self.guards.inside / self.steps)
                    single = sorted(after - before for before, after in itertools.pairwise(times))
                    self.means.setdefault(name, []).append((times[-1] - times[0]) / self.steps)
                    self.medians.setdefault(name, []).append(single[self.steps // 2])

    def _now(self) -> float:
        if self.batch.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    @property
    def turns(self) -> dict[str, list[float]]:
        """Seconds of a step, per guard and turn: means where the device runs ahead, else the steadier medians."""
        return self.medians if self.batch.device.type == "cpu" else self.means


def take_turns(
    module: Net, names: Sequence[str], *, rounds: int, seconds: float, device: str = "cpu", precision: str = "32"
) -> Turns:
    """Train `module` under each guard in turn."""
    quiet()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        capture = NaNCapture(folder)
        guards = Guards(capture)
        # The batch is on the device already: a step has no transfer to hide a guard's cost behind.
        turns = Turns(torch.randn(module.shape, device=device), guards, names, rounds, seconds)
        guards.trainer = pl.Trainer(
            max_epochs=1,
            accelerator=device.partition(":")[0],
            devices=1,
            precision=precision,
            callbacks=[capture],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        guards.trainer.fit(module, turns)
    return turns


def shares(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Per guard, what it adds to a step, as a share of the step without any, round by round."""
    again = times.get(CONTROL, times["nothing"])
    base = [(first + second) / 2 for first, second in zip(times["nothing"], again, strict=True)]
    costs = {
        name: [(mine - none) / none for mine, none in zip(values, base, strict=True)]
        for name, values in times.items()
        if name not in ("nothing", CONTROL)
    }
    costs[CONTROL] = [(b - a) / n for a, b, n in zip(times["nothing"], again, base, strict=True)]
    return costs


def quiet() -> None:
    """Nothing but the tables is printed."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
