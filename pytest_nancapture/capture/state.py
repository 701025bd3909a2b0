"""Which of the module's state a bundle has to hold: what a module built from it would have otherwise."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_nancapture.bundle import numerics, rng
from pytest_nancapture.bundle.manifest import Manifest, MissingRecord, StateRecord
from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.bundle.tensors.names import buffers, has_buffer, parameters, submodules, volatile_buffers
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.capture.kept import kept_under
from pytest_nancapture.errors import RebuildError, UnwritableValueError
from pytest_nancapture.step.engine import Engine, Enough
from pytest_nancapture.step.rebuild import build_module, materialize
from pytest_nancapture.step.run import Run
from pytest_nancapture.step.scene import Scene
from pytest_nancapture.step.state.compare import Comparison, Difference, same_tensor
from pytest_nancapture.step.state.places import Step, in_words

log = logging.getLogger("pytest_nancapture")

_REMEDY = (
    "make it of tensors, numbers, strings or containers of them, or build the module in the hook "
    "pytest_nancapture_module(bundle) of a conftest.py"
)


@dataclass(frozen=True, kw_only=True)
class State:
    """What has to go into a bundle besides parameters and buffers that are always there.

    Attributes:
        records: places and their values.
        missing: what cannot be written.
        tensors: of the values, by name.
        buffers: those that the code makes otherwise, among the ones that are usually left to it.
        added: buffers for which a built module has no place.
        opaque: places whose insides nobody can look into.
        given: the optional arguments of the constructor that a bundle has to hold.
    """

    records: tuple[StateRecord, ...] = ()
    missing: tuple[MissingRecord, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    opaque: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)


def find_state(
    run: Run,
    draft: Manifest,
    arguments: dict[str, Tensor],
    ignored: Collection[str],
    folder: str,
    optional: Mapping[str, Any],
) -> State | None:
    """Build a module from what the bundle will hold, with the run's own code, and compare the live one with it.

    The live module has to be at the instant. Random states and numeric settings are put back.

    Args:
        draft: the manifest without the state.
        arguments: tensors of the constructors' arguments, and of what else is no state of the module's.
        ignored: names of attributes that are no state.
        folder: an empty one, for what user code writes.
        optional: arguments, encoded, that are only given where the code by itself makes another module.

    Returns:
        None where no module can be built.
    """
    found: list[Comparison] = []
    differences: list[Difference] = []
    volatile: set[str] = set()
    added: set[str] = set()

    def compare(built: nn.Module) -> None:
        comparison = Comparison(run.module, built, ignored, run.packages)
        differences[:] = comparison.differences()
        volatile.update(_other_buffers(run.module, built))
        paths = dict(submodules(built))
        added.update(n for n, _ in buffers(run.module) if n.rpartition(".")[0] in paths and not has_buffer(built, n))
        found.append(comparison)

    with rng.preserved(), numerics.preserved():
        try:
            given, built = _build_with(run, draft, arguments, optional)
        except RebuildError as error:
            log.debug("nancapture: no module can be built to compare with: %s", error)
            return None
        draft = with_arguments(draft, given)
        try:
            _bring_up(run, draft, built, arguments, lambda: compare(built), folder)
        except Exception as error:  # the user's hooks may need what only a run has
            log.debug("nancapture: compared before setup: it raised %s: %s", type(error).__name__, error)
        if not found:
            compare(_build(run, draft, arguments))
    state = _written(run, differences, volatile, found[0].opaque)
    return dataclasses.replace(state, added=frozenset(added), given=given)


def with_arguments(draft: Manifest, given: Mapping[str, Any]) -> Manifest:
    """The manifest with more arguments of the constructor."""
    arguments = {**draft.module.arguments, **given}
    return dataclasses.replace(draft, module=dataclasses.replace(draft.module, arguments=arguments))


def _build_with(
    run: Run, draft: Manifest, arguments: dict[str, Tensor], optional: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Any]:
    """A module, and the optional arguments without which it would be another one.

    Raises:
        RebuildError: it cannot be built.
    """
    if not optional:
        return {}, _build(run, draft, arguments)
    try:
        built = _build(run, draft, arguments)
    except RebuildError:
        return optional, _build(run, with_arguments(draft, optional), arguments)
    given = {name: node for name, node in optional.items() if not _makes(built, name, node, arguments)}
    if not given:
        return given, built
    try:
        return given, _build(run, with_arguments(draft, given), arguments)
    except RebuildError as error:  # what was found in the module is not what the constructor takes
        log.debug("nancapture: not built with %s: %s", ", ".join(given), error)
        return {}, built


def _makes(built: nn.Module, name: str, node: Any, arguments: dict[str, Tensor]) -> bool:
    """Whether the code by itself makes what an argument would be, the values of weights aside."""
    encoder = Encoder(prefix="argument/")
    held = kept_under(built, [name])
    try:
        made = encoder.encode(held[name], name) if held else None
    except UnwritableValueError:
        return False
    own = {id(tensor) for tensor in (*built.parameters(), *built.buffers())}
    return made == node and all(
        name in arguments and _is_alike(tensor, arguments[name], is_own=id(tensor) in own)
        for name, tensor in encoder.tensors.items()
    )


def _is_alike(made: Tensor, given: Tensor, *, is_own: bool) -> bool:
    return (made.shape, made.dtype) == (given.shape, given.dtype) if is_own else same_tensor(made, given)


def _build(run: Run, draft: Manifest, arguments: dict[str, Tensor]) -> Any:
    decoder = _decoder(arguments)
    built = build_module(draft.module, decoder, decoder.resolver, run.check_class)
    live = {**dict(parameters(run.module)), **dict(buffers(run.module))}
    materialize(built, live)
    return built


def _decoder(tensors: dict[str, Tensor]) -> Decoder:
    return Decoder({name: bare(tensor).cpu().clone() for name, tensor in tensors.items()}, LiveResolver())


def _bring_up(
    run: Run, draft: Manifest, built: Any, values: dict[str, Tensor], then: Callable[[], None], folder: str
) -> None:
    """Take it through its loop to the instant: hooks such as ``setup`` are code that a replay runs, too."""

    def restore() -> None:
        then()
        raise Enough

    device = torch.device("cpu")
    window, probe = draft.batch.window, torch.zeros(())  # which nobody looks at
    run.rehearse(
        Scene(
            manifest=dataclasses.replace(draft, optimizer=None),
            module=built,
            fitted=built,
            batches=[(batch.batch_idx, probe if batch.fetches is None else [probe]) for batch in window],
            rng=[rng.RandomStates.take() for _ in window],
            hooks=[None for _ in window],
            fetches=[() for _ in window],
            tensors={},
            states=None,
            engine=Engine(module=built, restore=restore),
            device=device,
            folder=folder,
            decoder=lambda: _decoder(values),
        )
    )


def _other_buffers(live: nn.Module, built: nn.Module) -> set[str]:
    """Buffers that no checkpoint holds, and that the built module has otherwise."""
    code_made, theirs = volatile_buffers(live), dict(buffers(built))
    return {
        name
        for name, buffer in buffers(live)
        if name in code_made and not (name in theirs and same_tensor(buffer, theirs[name]))
    }


def _written(run: Run, differences: list[Difference], volatile: set[str], opaque: list[str]) -> State:
    encoder = Encoder(prefix="attribute/", device=run.device, remedy=_REMEDY, own=_own_parts(run.module))
    records: list[StateRecord] = []
    missing: list[MissingRecord] = []
    for difference in differences:
        where = in_words(difference.module, difference.way) or "the module itself"
        if difference.problem:
            missing.append(MissingRecord(where=where, why=difference.problem))
            continue
        try:
            path = tuple([step.kind, _name(encoder, step, where)] for step in difference.way)
            value = encoder.encode(difference.value, where)
        except UnwritableValueError as error:
            if isinstance(difference.value, type) and "<locals>" in difference.value.__qualname__:
                opaque.append(where)  # code that runs makes such a class when it is first needed
                continue
            why = error.problem if error.where == where else f"{error.where}: {error.problem}"
            missing.append(MissingRecord(where=where, why=f"{why}; {error.remedy}"))
        except Exception as error:  # of a class of the user's
            what = f"looking at it raised {type(error).__name__}: {error}"
            missing.append(MissingRecord(where=where, why=f"{what}; {_REMEDY}"))
        else:
            records.append(StateRecord(module=difference.module, path=path, value=value))
    return State(
        records=tuple(records),
        missing=tuple(missing),
        tensors=encoder.tensors,
        buffers=frozenset(volatile),
        opaque=tuple(dict.fromkeys(opaque)),
    )


def _name(encoder: Encoder, step: Step, where: str) -> Any:
    return encoder.encode(step.name, where)


def _own_parts(module: nn.Module) -> dict[int, str]:
    """The module's own, as a tree names them."""
    parts: dict[int, str] = {}
    for name, tensor in (*parameters(module), *buffers(module)):
        parts.setdefault(id(tensor), name)
    for path, submodule in submodules(module):
        parts.setdefault(id(submodule), f"module {path}")
    return parts
