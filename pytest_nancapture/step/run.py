"""What a training run tells of itself, whatever loop makes it: the protocol that each loop fills."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pytest_nancapture.bundle.manifest import TrainerRecord
    from pytest_nancapture.step.engine import Engine
    from pytest_nancapture.step.scene import Scene
    from pytest_nancapture.step.state.window import Counters, Window


class Run(Protocol):
    """A run that is watched. What is read at every step (the properties) has to cost next to nothing.

    Attributes:
        module: the one that is trained.
        rank: of this process.
        world_size: how many processes train together.
        packages: top-level packages of the loop; objects of their classes are no state of the user's.
        restores: objects of the loop's whose state it puts back itself, after a rerun in place.
        distributions: whose versions a bundle is to name.
        attributes: names of the module's attributes that the loop itself changes.
        updates_once: whether each window ends with one update, which the loop makes.
        always_backward: whether a loss that the loop is given is certain to be backpropagated.
        changes_batches: whether code that is not the module's may change a batch between the module's own hook that
            makes it and the instant.
        starts_with_code: whether code of the user's runs between the instant and the forward; a replay runs it again.
        ends_with_code: whether code of the user's may write buffers between the look at a step and its end.
        checkpoint: from which the run was resumed, weights and optimizers' states; empty where it was not.
        data: an object that the module's code may read through the loop, such as a datamodule; None without one.
        mends_nothing: whether no code of the user's runs between backward and update, nor drops gradients.
    """

    module: nn.Module
    rank: int
    world_size: int
    packages: frozenset[str]
    restores: tuple[Any, ...]
    distributions: tuple[str, ...]
    attributes: frozenset[str]
    updates_once: bool
    always_backward: bool
    changes_batches: bool
    starts_with_code: bool
    ends_with_code: bool
    checkpoint: str
    data: Any
    mends_nothing: bool

    @property
    def optimizers(self) -> Sequence[Any]:
        """Torch's own, in the loop's order."""

    @property
    def device(self) -> torch.device:
        """That the module is on."""

    @property
    def scaler(self) -> Any:
        """The 16-bit gradient scaler, or None."""

    @property
    def counters(self) -> Counters:
        """As user code reads them in the step to come."""

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch to come is the epoch's last."""

    @property
    def line_start(self) -> str:
        """What begins a message: a newline where a progress bar has left the cursor in the middle of its line."""

    def starts_anew(self, batch_idx: int) -> bool:
        """Whether the loop drops the gradients that there are before this micro-batch."""

    def any(self, mine: bool) -> bool:
        """Whether it is so on any rank; all ranks come here."""

    def gather(self, mine: int) -> list[int]:
        """Every rank's small number, by rank; all ranks come here."""

    def stop(self) -> None:
        """End the run cleanly after this step, whatever minimum it was given."""

    def describe(self, window: Window, target: int) -> TrainerRecord:
        """The loop's settings and counters, for the bundle.

        Args:
            target: which optimizer step of the window is the guilty one, counted from 0.
        """

    def check_class(self, kind: type, source: str) -> None:
        """Refuse a class whose modules the loop cannot run; `source` is what named it.

        Raises:
            RebuildError: it is none of the loop's own.
        """

    def rehearse(self, scene: Scene) -> None:
        """Play a bundle's window with a module built for it, beside the run; :class:`Enough` ends it early."""

    def quiet(self, window: Window) -> AbstractContextManager[None]:
        """Around a rerun in place: counters as at the instant, nothing told, logged or scaled; all is put back."""

    def play(self, window: Window, engine: Engine, optimizer: Any) -> None:
        """Run the window's micro-batches again, on this rank alone, and hand the engine each moment of them.

        Args:
            optimizer: that was about to step in training.
        """


class OnItsOwn:
    """A run of which this rank is the only one that can be asked; all else is the run's."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def any(self, mine: bool) -> bool:
        """Whether it is so here."""
        return mine

    def gather(self, mine: int) -> list[int]:
        """This rank's number."""
        return [mine]
