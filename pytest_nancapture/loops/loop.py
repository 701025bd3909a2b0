"""What a training loop provides, and where it is registered: a folder here and a line in the registry are all it takes.

A loop comes by at three places. To be *watched*, its own door (a callback, a guard) fills
:class:`pytest_nancapture.step.run.Run` and calls :class:`pytest_nancapture.capture.watch.Watch`. To be *run again in
place* it fills ``Run.quiet`` and ``Run.play``. To be *played from a bundle* it has a module of functions that fill
:class:`Loop`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from pytest_nancapture.errors import RebuildError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from pytest_nancapture.bundle.manifest import Manifest
    from pytest_nancapture.bundle.rng import RandomStates
    from pytest_nancapture.step.engine import Engine

REGISTRY: Mapping[str, str] = MappingProxyType(
    {
        "lightning.pytorch": "pytest_nancapture.loops.lightning.loop",
        "pytorch_lightning": "pytest_nancapture.loops.lightning.loop",
    }
)
"""What a bundle calls its loop -> the module that plays it; imported when it is needed."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Everything that a loop needs to play a bundle's window.

    Attributes:
        manifest: of the bundle.
        module: built or given; the engine brings it to the instant.
        fitted: the same, or what ``torch.compile`` made of it: this one is trained.
        batches: the loop's own number and micro-batch, on the device; a list where the step takes its batches itself.
        rng: random states, one for each.
        hooks: random states as the module's own hook is entered that makes the step's batch of it; None where the step
            gets it as it is.
        fetches: random states right after each batch that the step takes itself.
        tensors: of each micro-batch, by name.
        states: of the optimizers, before the update; None where the update is not to be made.
        engine: to be handed each moment of the step.
        folder: an empty one, for what user code writes.
        overrides: what the user's hook ``trainer_kwargs`` gave.
    """

    manifest: Manifest
    module: Any
    fitted: Any
    batches: Sequence[tuple[int, Any]]
    rng: Sequence[RandomStates]
    hooks: Sequence[RandomStates | None]
    fetches: Sequence[Sequence[RandomStates]]
    tensors: Mapping[str, Any]
    states: Sequence[Any] | None
    engine: Engine
    device: torch.device
    folder: str
    overrides: dict[str, Any] = field(default_factory=dict)


class Loop(Protocol):
    """A loop that can play a bundle; filled by a module's functions."""

    def check_class(self, kind: type, source: str) -> None:
        """Refuse a class whose modules it cannot run.

        Args:
            source: what named the class, for the message.

        Raises:
            RebuildError: it is none of its own.
        """

    def quiet(self) -> AbstractContextManager[None]:
        """Around a replay: without what the loop says about training runs."""

    def refusing_to_train(self, script: Path) -> AbstractContextManager[None]:
        """Around the import of a user's script: whatever would train raises :class:`WouldTrain`."""

    def play(self, scene: Scene) -> None:
        """Run the window's step, and hand the engine each moment of it.

        Raises:
            Exception: whatever the user's code raises.
        """


class WouldTrain(BaseException):
    """A script reached its training: what a replay needs of it is defined by now."""


@contextmanager
def refusing_to_train(script: Path) -> Iterator[None]:
    """Around the import of a user's script: no loop trains, :class:`WouldTrain` is raised instead."""
    with ExitStack() as stack:
        for module in sorted(set(REGISTRY.values())):
            stack.enter_context(cast("Loop", import_module(module)).refusing_to_train(script))
        yield


def loop_named(name: str) -> Loop:
    """The loop that a bundle names.

    Raises:
        RebuildError: there is none of that name.
    """
    if name not in REGISTRY:
        raise RebuildError(f"expected a training loop out of {', '.join(REGISTRY)}, came {name!r:.80}")
    return cast("Loop", import_module(REGISTRY[name]))
