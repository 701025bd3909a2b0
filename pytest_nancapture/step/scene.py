"""A bundle's window, ready to be played: its tensors, and everything that a loop needs to run its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import (
    BATCH,
    OPTIMIZER,
    RNG,
    WEIGHTS,
    BatchRecord,
    Layouts,
    Manifest,
    MicroBatch,
    own_number,
)
from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.references import Resolver
from pytest_nancapture.errors import BundleDamagedError
from pytest_nancapture.step.engine import Engine, Tracer
from pytest_nancapture.step.rebuild import bring_to_the_instant

_ARGUMENTS = ("argument/", "attribute/", "datamodule/")
"""What begins the names of tensors in ``weights.safetensors`` that are no weights."""


@dataclass(frozen=True)
class Content:
    """A bundle's tensors, on the replay's device."""

    weights: dict[str, Tensor]
    others: dict[str, Tensor]
    batch: dict[str, Tensor]
    rng: list[RandomStates]
    hooks: list[RandomStates | None]
    fetches: list[list[RandomStates]]
    optimizer: dict[str, Tensor]

    def decoder(self, resolver: Resolver) -> Decoder:
        """Of the values that are made of them."""
        return Decoder({**self.others, **self.optimizer, **self.batch}, resolver)

    def given(self, record: BatchRecord) -> dict[str, Tensor]:
        """Tensors of the batches that the step gets as they are."""
        early = tuple(f"{own_number(micro)}/" for micro in record.window if micro.hook is not None)
        return {name: tensor for name, tensor in self.batch.items() if not name.startswith(early)}


Source = Callable[[str, Layouts, "torch.device | str"], dict[str, Tensor]]
"""Gives the tensors of a file, made anew at every call, since the step may change them."""


def stored_in(path: Path) -> Source:
    """From a bundle's folder."""
    # Weights are only copied from, into the module's own; all else the step computes with.
    return lambda name, layouts, device: read_tensors(path / name, layouts, device, aligned=name != WEIGHTS)


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
        decoder: a new one at each call, of tensors that nobody has changed, for values that are not the module's.
        overrides: what the user's hook ``trainer_kwargs`` gave.
    """

    manifest: Manifest
    module: Any
    fitted: Any
    batches: Sequence[tuple[int, Any]]
    rng: Sequence[RandomStates]
    hooks: Sequence[RandomStates | None]
    fetches: Sequence[Sequence[RandomStates]]
    tensors: Mapping[str, Tensor]
    states: Sequence[Any] | None
    engine: Engine
    device: torch.device
    folder: str
    decoder: Callable[[], Decoder]
    overrides: dict[str, Any] = field(default_factory=dict)


def read_content(bundle: Bundle, device: torch.device, source: Source) -> Content:
    """All of a bundle's tensors.

    Raises:
        BundleDamagedError: a file is not what it must be.
    """
    manifest, path = bundle.manifest, bundle.path
    try:
        stored = source(WEIGHTS, manifest.module.layouts, device)
        states = source(RNG, {}, "cpu")
        optimizer = source(OPTIMIZER, manifest.optimizer.layouts, device) if manifest.optimizer else {}

        def made(record: Mapping[str, Any]) -> RandomStates:
            return RandomStates.decode(record, states).moved(manifest.device, device)

        return Content(
            weights={name: tensor for name, tensor in stored.items() if not name.startswith(_ARGUMENTS)},
            others={name: tensor.cpu().clone() for name, tensor in stored.items() if name.startswith(_ARGUMENTS)},
            batch=source(BATCH, manifest.batch.layouts, device),
            rng=[made(record) for record in manifest.rng.instants],
            hooks=[made(micro.hook) if micro.hook is not None else None for micro in manifest.batch.window],
            fetches=[[made(fetch.rng) for fetch in micro.fetches or ()] for micro in manifest.batch.window],
            optimizer=optimizer,
        )
    except (ValueError, OSError) as error:
        raise BundleDamagedError(path, str(error)) from error
    except Exception as error:  # safetensors' own has no name that every supported release shares
        if type(error).__name__ != "SafetensorError":
            raise
        raise BundleDamagedError(path, f"not a safetensors file: {error}") from error


def set_scene(
    manifest: Manifest,
    module: Any,
    content: Content,
    decoder: Decoder,
    *,
    device: torch.device,
    folder: str,
    batch: Callable[[Any], Any] | None = None,
    restored: Callable[[], None] | None = None,
    trace: Tracer | None = None,
    fitted: Any = None,
    overrides: dict[str, Any] | None = None,
) -> Scene:
    """The scene of a bundle's window, with an engine that brings `module` to its instant.

    Args:
        batch: makes a micro-batch of its tree; None for just that.
        restored: called whenever the module was brought to the instant.
    """
    states, fresh = None, partial(_fresh, content, decoder.resolver)
    if manifest.optimizer is not None:
        states = [decoder.decode(state) for state in manifest.optimizer.states]
    engine = Engine(
        module=module,
        restore=partial(_restore, module, manifest, content, fresh, restored),
        target=manifest.trainer.guilty_step,
        judges_all=True,
        # The fault showed only after the update, in buffers that hooks write or in the weights.
        goes_on=states is not None or not {"loss", "gradients", "raised"} & set(manifest.fault.found_in),
        trace=trace,
    )
    make = batch or decoder.decode
    return Scene(
        manifest=manifest,
        module=module,
        fitted=module if fitted is None else fitted,
        batches=[(own_number(micro), _given(micro, make)) for micro in manifest.batch.window],
        rng=content.rng,
        hooks=content.hooks,
        fetches=content.fetches,
        tensors=content.batch,
        states=states,
        engine=engine,
        device=device,
        folder=folder,
        decoder=fresh,
        overrides=overrides or {},
    )


def _fresh(content: Content, resolver: Resolver) -> Decoder:
    """Of copies: a hook that runs before the instant may change them, and then they are needed again."""
    return Decoder({name: tensor.clone() for name, tensor in content.others.items()}, resolver)


def _restore(
    module: Any,
    manifest: Manifest,
    content: Content,
    decoder: Callable[[], Decoder],
    restored: Callable[[], None] | None,
) -> None:
    bring_to_the_instant(module, manifest.module, content.weights, decoder())
    if restored is not None:
        restored()


def _given(micro: MicroBatch, make: Callable[[Any], Any]) -> Any:
    """The batch, or the list of those that the step takes itself."""
    return make(micro.tree) if micro.fetches is None else [make(tree) for tree in micro.tree["tuple"]]
