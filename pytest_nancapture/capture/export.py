"""From a window that went wrong to a bundle on disk."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pytest_nancapture.bundle.environment import code_of, distributions_of, environment
from pytest_nancapture.bundle.manifest import (
    BatchRecord,
    BuiltRecord,
    CodeRecord,
    Fault,
    FetchRecord,
    Healed,
    Manifest,
    MicroBatch,
    MissingRecord,
    ModuleRecord,
    OptimizerRecord,
    RngRecord,
    StateRecord,
)
from pytest_nancapture.bundle.numerics import numeric_settings
from pytest_nancapture.bundle.paths import started_in
from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.tensors.kinds import bare, unwritable
from pytest_nancapture.bundle.tensors.names import buffers, parameters, submodules, volatile_buffers
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import code_root, folders_from
from pytest_nancapture.bundle.write import write_bundle
from pytest_nancapture.capture.datamodule.record import record_of
from pytest_nancapture.capture.recipe import Recipe
from pytest_nancapture.capture.state import State, find_state, with_arguments
from pytest_nancapture.errors import UnwritableValueError
from pytest_nancapture.step.finding import Finding
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.state.batch import TakenBatch
from pytest_nancapture.step.state.keeper import constant_hyperparameters
from pytest_nancapture.step.state.window import Window
from pytest_nancapture.step.suspects import BufferWatch

if TYPE_CHECKING:
    from pytest_nancapture.diagnose.culprit import Culprit


log = logging.getLogger("pytest_nancapture")


@dataclass(kw_only=True)
class Capture:
    """All that a bundle is made of.

    Attributes:
        guilty: position of the guilty micro-batch in the window.
        target: which optimizer step of the window is the guilty one.
        came_back: whether the fault did when the run's own step was rerun; None where it was not.
        buffers: what they were when fit began.
        changed: plain attributes that changed since fit began, for a module that cannot be built.
        ignored: names of attributes that are no state.
        changed_before_copy: weights that the step had written before they could be copied.
        optimizer_states: before the update; None where a replay does not need them.
        opaque: places that nobody can look into, once it is written.
        hyperparameters: of each optimizer's parameter groups, when fit began.
    """

    run: Run
    window: Window
    recipe: Recipe
    finding: Finding
    guilty: int
    target: int
    came_back: bool | None
    culprit: Culprit | None = None
    changed: Mapping[tuple[str, str], Any]
    ignored: Collection[str]
    healed: Healed | None = None
    buffers: BufferWatch
    changed_before_copy: tuple[str, ...] = ()
    optimizer_states: list[Any] | None = None
    hyperparameters: Sequence[list[dict[str, Any]]] = ()
    opaque: tuple[str, ...] = ()

    def write(self, dirpath: Path, fault: Fault) -> Path:
        """Write the bundle and return its folder.

        Raises:
            UnwritableValueError: a micro-batch, or a tensor of the module, has no form on disk.
            OSError: the folder cannot be written.
        """
        for name, tensor in (*parameters(self.run.module), *buffers(self.run.module)):
            problem = unwritable(tensor)
            if problem:
                raise UnwritableValueError(name, problem, "keep it outside of the module's parameters and buffers")
        for batch in self.window.batches:
            if batch.problem is not None:
                raise batch.problem
        states = Encoder(prefix="optimizer/", device=self.run.device)
        optimizer = None
        if self.optimizer_states is not None:
            trees = [states.encode(state, str(i)) for i, state in enumerate(self.optimizer_states)]
            pairs = zip(self.hyperparameters, self.optimizer_states, strict=True)
            constant = tuple(constant_hyperparameters(first, state["param_groups"]) for first, state in pairs)
            optimizer = OptimizerRecord(states=tuple(trees), constant=constant)
        rng = RngWriter()
        instants = tuple(rng.encode(batch.rng, str(batch.number)) for batch in self.window.batches)
        manifest = Manifest(
            fault=fault,
            module=self._module_record(),
            trainer=self.run.describe(self.window, self.target),
            numerics={**numeric_settings(), **self.window.numerics},
            rng=RngRecord(instants=instants),
            batch=BatchRecord(window=tuple(_micro_batch(batch, rng) for batch in self.window.batches)),
            files={},
            code=self._code(dirpath),
            environment=environment(self.run.device, (*self.run.distributions, *distributions_of(self.run.module))),
            optimizer=optimizer,
        )
        data, values = self._data()
        manifest = dataclasses.replace(manifest, datamodule=data)
        state = self._state(manifest, values)
        self.opaque = state.opaque
        added = tuple(sorted(state.added))
        manifest = with_arguments(manifest, state.given)
        record = dataclasses.replace(manifest.module, state=state.records, missing=state.missing, added=added)
        manifest = dataclasses.replace(manifest, module=record)
        return write_bundle(
            dirpath,
            f"step-{fault.global_step:06d}-rank-{self.run.rank}",
            manifest,
            weights={**self._weights(state.buffers), **self.recipe.tensors, **state.tensors, **values},
            batch={name: tensor for batch in self.window.batches for name, tensor in batch.tensors.items()},
            rng=rng.tensors,
            optimizer=states.tensors if optimizer is not None else None,
        )

    def _data(self) -> tuple[BuiltRecord | None, dict[str, Tensor]]:
        """What the module's code may read beside itself."""
        if self.run.data is None or self.recipe.of_data is None:
            return None, {}
        try:
            return record_of(self.run, self.recipe.of_data)
        except Exception as error:  # of a class of the user's: most modules read nothing of it
            log.debug("nancapture: where writing the datamodule was raised", exc_info=True)
            kind = type(self.run.data)
            why = f"looking at it raised {type(error).__name__}: {error}"
            return BuiltRecord(target=f"{kind.__module__}:{kind.__qualname__}", unwritten=(why,)), {}

    def _code(self, dirpath: Path) -> CodeRecord:
        folder = code_root(type(self.run.module).__module__)
        is_near = folder is None or folder in (*folders_from(started_in()), *folders_from(dirpath))
        return dataclasses.replace(code_of(self.run.module), folder="" if is_near else str(folder))

    def _state(self, draft: Manifest, values: dict[str, Tensor]) -> State:
        missing: tuple[MissingRecord, ...] = ()
        try:
            with tempfile.TemporaryDirectory(prefix="nancapture-", ignore_cleanup_errors=True) as folder:
                tensors = {**self.recipe.tensors, **values}
                found = find_state(self.run, draft, tensors, self.ignored, folder, self.recipe.optional)
        except Exception as error:  # of a class of the user's: the bundle is worth more than the comparison
            log.debug("nancapture: where the comparison was raised", exc_info=True)
            why = f"comparing it with one built from the bundle raised {type(error).__name__}: {error}"
            found, missing = None, (MissingRecord(where="the module's attributes", why=why),)
        if found is not None:
            return found
        return State(
            given=self.recipe.optional,
            missing=missing,
            records=tuple(
                StateRecord(module=path, path=(["attribute", name],), value=Encoder().encode(value, name))
                for (path, name), value in sorted(self.changed.items())
            ),
        )

    def _weights(self, others: Collection[str]) -> dict[str, Tensor]:
        """As of the instant: copies where the step changes them, else the live ones.

        Args:
            others: buffers that code would make otherwise.
        """
        code_made = volatile_buffers(self.run.module)
        live = {name: bare(tensor) for name, tensor in parameters(self.run.module)}
        live.update(
            (name, buffer)
            for name, buffer in buffers(self.run.module)
            if name in self.window.tensors  # else the step has made it
            and (name not in code_made or name in others or self._has_changed(name, buffer))
        )
        kept = {name: tensor for name, tensor in self.window.tensors.items() if name in live}
        return {**live, **kept}

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        """Whether a buffer was written or replaced since fit began."""
        return self.buffers.first.get(name) != (id(buffer), buffer._version)

    def fault(self) -> Fault:
        """What the bundle says of the fault."""
        counters, finding = self.window.counters, self.finding
        return Fault(
            kind=finding.kind,
            found_in=finding.found_in,
            global_step=counters["global_step"],
            epoch=counters["epoch"],
            batch_idx=self.window.batches[self.guilty].batch_idx,
            culprit=asdict(self.culprit) if self.culprit is not None else None,
            losses=finding.losses,
            gradients=finding.gradients,
            buffers=finding.buffers,
            weights=finding.weights,
            healed=self.healed,
            raised=finding.raised,
        )

    def _module_record(self) -> ModuleRecord:
        recipe, modules = self.recipe, list(submodules(self.run.module))
        return ModuleRecord(
            target=recipe.target.target,
            file=recipe.target.file,
            factory=recipe.factory.target if recipe.factory else None,
            factory_file=recipe.factory.file if recipe.factory else None,
            arguments=recipe.arguments,
            unwritten=tuple(recipe.problems),
            instantiator=recipe.instantiator,
            eval_mode=tuple(sorted(self.window.eval_mode)),
            frozen=self.window.frozen,
            synchronized=tuple(sorted({name for name, submodule in modules if self._is_synchronized(submodule)})),
            changed_before_copy=self.changed_before_copy,
            resized=self._resized(),
            compiled=tuple(sorted({name for name, submodule in modules if _is_compiled(submodule)})),
        )

    def _resized(self) -> tuple[str, ...]:
        names = (name for name, _ in buffers(self.run.module) if name in self.window.tensors)
        return tuple(sorted(n for n in names if self.window.tensors[n].shape != self.buffers.shapes.get(n)))

    def _is_synchronized(self, module: torch.nn.Module) -> bool:
        return self.run.world_size > 1 and isinstance(module, torch.nn.SyncBatchNorm)


class RngWriter:
    """Encodes random states, and puts their tensors aside."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, states: RandomStates, name: str) -> dict[str, Any]:
        """As JSON; `name` begins the names of its tensors."""
        record, tensors = states.encode(name)
        self.tensors.update(tensors)
        return record


def _micro_batch(batch: TakenBatch, rng: RngWriter) -> MicroBatch:
    fetches = None
    if batch.fetches is not None:
        fetches = tuple(
            FetchRecord(
                batch_idx=taken.batch_idx,
                dataloader_idx=taken.dataloader_idx,
                rng=rng.encode(taken.rng, f"{batch.number}/fetch-{i}"),
            )
            for i, taken in enumerate(batch.fetches)
        )
    return MicroBatch(
        batch_idx=batch.batch_idx,
        tree=batch.tree,
        hook=rng.encode(batch.hook, f"{batch.number}/hook") if batch.hook is not None else None,
        fetches=fetches,
        exhausted=batch.exhausted,
        number=batch.number if batch.number != batch.batch_idx else None,
    )


def _is_compiled(module: torch.nn.Module) -> bool:
    """By ``torch.compile(module)``, ``module.compile()`` or ``trainer.fit(torch.compile(module))``."""
    marks = ("_orig_mod", "_compiled_call_impl", "_compiler_ctx")
    return any(getattr(module, mark, None) is not None for mark in marks)
