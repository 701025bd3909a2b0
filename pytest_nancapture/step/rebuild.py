"""Build the module again from what the bundle says, in today's code."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from pytest_nancapture.bundle.manifest import ModuleRecord, StateRecord
from pytest_nancapture.bundle.tensors.kinds import is_expanded
from pytest_nancapture.bundle.tensors.names import (
    buffers,
    has_buffer,
    parameters,
    replace_buffer,
    submodules,
    volatile_buffers,
)
from pytest_nancapture.bundle.text import some
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.references import Resolver
from pytest_nancapture.errors import MismatchError, RebuildError
from pytest_nancapture.step.configuration import instantiate
from pytest_nancapture.step.state.places import Step, Way, put

_HELP = (
    "build it in the hook pytest_nancapture_module(bundle) of a conftest.py, or capture with NaNCapture(factory=...)"
)


def build_module(
    record: ModuleRecord, decoder: Decoder, resolver: Resolver, check_class: Callable[[type, str], None]
) -> Any:
    """Call the factory if there is one, else the class with its captured arguments.

    Args:
        check_class: raises where the loop cannot run modules of a class; its second argument says what named it.

    Raises:
        RebuildError: neither can be found, is what it must be, or works.
    """
    if record.factory is not None:
        build = resolver.resolve(record.factory, record.factory_file)
        _check_factory(record.factory, build)
        arguments: Mapping[str, Any] = {}
    else:
        build = resolver.resolve(record.target, record.file)
        if not (isinstance(build, type) and issubclass(build, nn.Module)):
            raise RebuildError(f"target {record.target}: expected a subclass of torch.nn.Module, came {build!r:.80}")
        check_class(build, f"target {record.target}")
        arguments = {name: decoder.decode(value) for name, value in record.arguments.items()}
    try:
        if record.instantiator is None or record.factory is not None:
            module = build(**arguments)
        else:
            module = instantiate(build, arguments, record.instantiator, resolver)
    except Exception as error:  # the user's constructor may raise anything; it is told, with its cause
        what = f"{record.factory or record.target}({', '.join(arguments)}) failed with {type(error).__name__}: {error}"
        if record.factory is not None:
            raise RebuildError(f"{what}; {_HELP}") from error
        raise RebuildError(
            f"{what}; the hook pytest_nancapture_module in a conftest.py rescues this bundle: its test prints one",
            detail=_rescue(record, build, arguments),
        ) from error
    check_class(type(module), record.factory or record.target)
    return module


def _rescue(record: ModuleRecord, build: Any, arguments: Mapping[str, Any]) -> str:
    """The hook that builds what the bundle cannot, to be pasted; then what helps the next run."""
    module, _, name = record.target.partition(":")
    if module == "__main__":
        module = record.file.removesuffix(".py").replace("/", ".") if record.file else "your_script"
    wanted = [parameter for parameter in inspect.signature(build).parameters.values() if _is_wanted(parameter)]
    lines = [
        f"from {module} import {name.partition('.')[0]}",
        "",
        "",
        "def pytest_nancapture_module(bundle):",
        f"    if bundle.manifest.module.target == {record.target!r}:",
        f"        return {name}(",
        *(f"            {_as_given(parameter.name, record, arguments)}" for parameter in wanted),
        "        )",
    ]
    for_the_next = [f"for the next run: {problem}" for problem in record.unwritten]
    return "\n".join([*lines, "", *for_the_next]).rstrip()


def _is_wanted(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _as_given(name: str, record: ModuleRecord, arguments: Mapping[str, Any]) -> str:
    """One argument of a call; what is not known is to be filled in."""
    if isinstance(record.arguments.get(name), (bool, int, float, str)):
        return f"{name}={arguments[name]!r},"
    return f"{name}=...,  # as the run had it"


def _check_factory(name: str, factory: Any) -> None:
    """A factory is a function of somebody's own: a bundle may not have the standard library called."""
    module = name.partition(":")[0].partition(".")[0]
    is_ours = isinstance(factory, types.FunctionType) or (isinstance(factory, type) and issubclass(factory, nn.Module))
    if not is_ours or module in sys.stdlib_module_names:
        raise RebuildError(f"factory {name}: expected a function that builds a LightningModule, came {factory!r:.80}")


def materialize(module: nn.Module, captured: Mapping[str, Tensor]) -> None:
    """Give lazy modules the shapes they had found out at capture, so that an optimizer can take their parameters."""
    for name, tensor in (*parameters(module), *buffers(module)):
        if isinstance(tensor, UninitializedTensorMixin) and name in captured:
            tensor.materialize(captured[name].shape)


def load_tensors(
    module: nn.Module,
    captured: Mapping[str, Tensor],
    resized: Collection[str] = (),
    added: Collection[str] = (),
    initial: Collection[str] = (),
) -> None:
    """Copy captured parameters and buffers into the module.

    Args:
        initial: those that are to stay as the code made them; they must be there.
        resized: buffers that had another size than code makes them in, such as a queue that fills; so they get it.
        added: buffers for which code makes no place; so they get one.

    Raises:
        MismatchError: names or shapes are not those of today's module; nothing was copied.
    """
    now: dict[str, Tensor] = {**dict(parameters(module)), **dict(buffers(module))}
    volatile = volatile_buffers(module)
    paths = dict(submodules(module))
    homes = {name for name in resized if has_buffer(module, name)}
    homes |= {name for name in added if name.rpartition(".")[0] in paths}
    expected = {*captured, *initial}
    wrong = [f"{name} is gone" for name in sorted(expected - now.keys() - homes)]
    wrong += [f"{name} is new" for name in sorted(now.keys() - volatile - expected)]
    wrong += [
        f"{name} was {_shape(captured[name])}, is {_shape(now[name])}"
        for name in sorted(captured.keys() & now.keys() - volatile - homes)
        if captured[name].shape != now[name].shape
    ]
    if wrong:
        raise MismatchError(wrong)
    with torch.no_grad():
        for name, value in captured.items():
            if name in now and value.shape == now[name].shape and not is_expanded(now[name]):
                now[name].data.copy_(value)
            else:
                replace_buffer(module, name, value.clone())


def other_dtypes(module: nn.Module, captured: Mapping[str, Tensor]) -> str:
    """What to know where today's weights are of another dtype than the captured ones; empty where they are not."""
    now = dict(parameters(module))
    other = [name for name, value in captured.items() if name in now and now[name].dtype != value.dtype]
    if not other:
        return ""
    before, after = (str(tensors[other[0]].dtype).removeprefix("torch.") for tensors in (captured, now))
    return f"weights are of another dtype than at capture ({before}, now {after}): {some(other)}"


def bring_to_the_instant(
    module: nn.Module, record: ModuleRecord, captured: Mapping[str, Tensor], decoder: Decoder
) -> None:
    """Everything that the bundle holds of the module's state; no gradients yet.

    Raises:
        MismatchError: see :func:`load_tensors`.
        RebuildError: see :func:`set_state`.
    """
    initial = record.initial.all_names() if record.initial is not None else ()
    load_tensors(module, captured, record.resized, record.added, initial)
    decoder.owner = module
    set_state(module, record, decoder)
    for parameter in module.parameters():
        parameter.grad = None


def set_state(module: nn.Module, record: ModuleRecord, decoder: Decoder) -> None:
    """Modes, ``requires_grad`` and attributes that the constructor makes otherwise, as they were at the instant.

    Raises:
        RebuildError: a value cannot be made, or would take the place of code.
    """
    modules = dict(submodules(module))
    for name, submodule in modules.items():
        submodule.training = name not in record.eval_mode
    for name, parameter in parameters(module):
        parameter.requires_grad_(name not in record.frozen)
    for state in record.state:
        if state.module in modules:
            put(modules[state.module], way_of(state, decoder), decoder.decode(state.value))


def way_of(state: StateRecord, decoder: Decoder) -> Way:
    """The place of a piece of state.

    Raises:
        RebuildError: it is none that a capture writes.
    """
    way = []
    for step in state.path:
        if not (isinstance(step, list) and len(step) == 2 and step[0] in ("attribute", "key", "index")):
            raise RebuildError(f"expected a step of a path such as ['attribute', 'counts'], came {step!r:.60}")
        way.append(Step(step[0], decoder.decode(step[1])))
    if not way or way[0].kind != "attribute":
        raise RebuildError(f"expected a path that begins with an attribute, came {state.path!r:.60}")
    return tuple(way)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
