"""One step: its micro-batches as they came, and the module as it was when the first one's step was entered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from pytest_nancapture.bundle.tensors.kinds import is_expanded
from pytest_nancapture.bundle.tensors.names import buffers, parameters, replace_buffer, submodules, unique_parameters
from pytest_nancapture.step.state.batch import TakenBatch
from pytest_nancapture.step.state.inventory import Structure, can_be_kept
from pytest_nancapture.step.state.objects import Objects
from pytest_nancapture.step.state.optimizers import OptimizerState, restore_hyperparameters
from pytest_nancapture.step.state.tensors import copy_of


class Counters(TypedDict):
    """Where training is, as user code reads it."""

    global_step: int
    epoch: int
    total_batch_idx: int


class Weights(NamedTuple):
    """Parameters under every name they have, and their version counters."""

    names: list[str]
    parameters: list[nn.Parameter]
    versions: list[int]


@dataclass
class Window:
    """The micro-batches since the last optimizer step, and the module's state at the first one's instant.

    Attributes:
        number: of the window since fit began, from 1 up.
        tensors: buffers, and weights that steps change outside of their update, as they were.
        objects: what attributes held.
        structure: which submodule and which parameter stood where.
        eval_mode: submodules in eval mode.
        frozen: parameters that required no gradient.
        counters: of the run.
        last_batch: whether its last micro-batch is the epoch's last.
        weights: parameters with their names, and how often each was written to, at the instant.
        hyperparameters: of each optimizer's parameter groups, from before the step's own code sets any.
        held: whether somebody still has to know whether its step was good.
        states: optimizer states from before the first update of the window, by the optimizer's position, where taken.
        before_update: names of the weights that were taken with them.
        optimizer_steps: how many times an optimizer was about to step, or asked for another evaluation.
        last_optimizer: the last one of these.
        stepped: whether the window is closed: the next micro-batch opens another.
        dropped: whether a fault was found and acted upon: none of the window's later updates is made.
        bad_numbers: hyperparameters that were not finite when an update was made, a text each.
        written: weights that the step itself was seen to have written, and that were not taken before.
        numerics: settings that are others once an exception has left the run.
        began: when its last micro-batch did, by the monotonic clock.
    """

    number: int
    tensors: dict[str, Tensor]
    objects: Objects
    structure: Structure
    eval_mode: tuple[str, ...]
    frozen: tuple[str, ...]
    counters: Counters
    last_batch: bool = False
    weights: Weights = field(default_factory=lambda: Weights([], [], []))
    hyperparameters: list[list[dict[str, Any]]] = field(default_factory=list)
    held: bool = False
    batches: list[TakenBatch] = field(default_factory=list)
    states: dict[int, OptimizerState] = field(default_factory=dict)
    before_update: dict[int, tuple[str, ...]] = field(default_factory=dict)
    optimizer_steps: int = 0
    last_optimizer: Any = None
    stepped: bool = False
    dropped: bool = False
    bad_numbers: tuple[str, ...] = ()
    written: frozenset[str] = frozenset()
    numerics: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0

    def restore_tensors(self, module: nn.Module) -> None:
        """Put buffers and taken weights back as they were; autograd is not told: no graph of this window lives on."""
        now = {**dict(parameters(module)), **dict(buffers(module))}
        with torch.no_grad():
            for name, taken in self.tensors.items():
                if name not in now:
                    continue
                if now[name].shape == taken.shape and not is_expanded(now[name]):
                    now[name].data.copy_(taken)
                elif now[name].shape != taken.shape or not torch.equal(now[name], taken):
                    replace_buffer(module, name, copy_of(taken))
            made = [name for name, buffer in buffers(module) if name not in self.tensors and can_be_kept(buffer)]
            for name in made:
                replace_buffer(module, name, None)

    def restore(self, module: nn.Module) -> None:
        """Put back everything that was taken but random states and optimizers."""
        self.structure.restore()
        self.restore_tensors(module)
        self.restore_flags(module)

    def restore_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Put back what optimizers held before the window's first update, and hyperparameters as at the instant."""
        for state in self.states.values():
            state.restore()
        restore_hyperparameters(optimizers, self.hyperparameters)

    def restore_flags(self, module: nn.Module) -> None:
        """Put attributes, modes and ``requires_grad`` back as they were."""
        self.objects.restore()
        for name, submodule in submodules(module):
            submodule.training = name not in self.eval_mode
        for name, parameter in unique_parameters(module):
            parameter.requires_grad_(name not in self.frozen)

    @property
    def losses(self) -> list[Tensor]:
        """All that were backpropagated."""
        return [loss for batch in self.batches for loss in batch.losses]
