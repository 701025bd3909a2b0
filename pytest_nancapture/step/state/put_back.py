"""Leave no trace: everything that rerunning a step may touch is saved before and put back after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pytest_nancapture.bundle import rng
from pytest_nancapture.bundle.tensors.kinds import bare, is_expanded
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.step.state.attributes import known_things
from pytest_nancapture.step.state.inventory import Structure, can_be_kept
from pytest_nancapture.step.state.objects import Objects
from pytest_nancapture.step.state.optimizers import OptimizerState

if TYPE_CHECKING:
    from pytest_nancapture.step.run import Run

_TENSOR_HOMES = ("_parameters", "_buffers", "_modules")


@contextmanager
def preserved(run: Run, *, updates: bool) -> Iterator[None]:
    """Put module, gradients, optimizers and random states back on leaving.

    Args:
        updates: whether optimizers will step, so that their states have to be saved too.
    """
    module = run.module
    with ExitStack() as stack:
        stack.enter_context(rng.preserved())
        for saved in (_parameters(module), _gradients(module)):
            stack.callback(saved)
        objects = Objects(known_things(run), run.packages)
        for submodule in module.modules():
            stack.callback(_attributes(submodule, objects))
            stack.callback(_buffers(submodule))
        stack.callback(Structure(module).restore)
        for tensor in (*module.parameters(), *module.buffers()):
            if vars(tensor):
                objects.take_marks(tensor)
        stack.callback(objects.restore)
        for optimizer in run.optimizers:
            stack.callback(OptimizerState(optimizer, moments=updates).restore)
        yield


def _parameters(module: nn.Module) -> Callable[[], None]:
    """Values go to the host meanwhile: a second copy of the weights may not fit on the device."""
    saved = [(p, p._version, p.requires_grad, bare(p).to("cpu", copy=True)) for _, p in unique_parameters(module)]

    def restore() -> None:
        for parameter, version, requires_grad, value in saved:
            parameter.requires_grad_(requires_grad)
            if parameter._version != version or not _same(parameter, value):
                parameter.data.copy_(value)

    return restore


def _same(parameter: Tensor, value: Tensor) -> bool:
    now = bare(parameter).cpu()
    if now.layout is not torch.strided:
        return False
    return torch.equal(now.contiguous().reshape(-1).view(torch.uint8), value.contiguous().reshape(-1).view(torch.uint8))


def _gradients(module: nn.Module) -> Callable[[], None]:
    saved = [(parameter, parameter.grad) for _, parameter in unique_parameters(module)]
    for parameter, _ in saved:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in saved:
            parameter.grad = gradient

    return restore


def _buffers(module: nn.Module) -> Callable[[], None]:
    # Into an expanded one nothing can have been written.
    saved = [
        (name, b, None if b is None or is_expanded(b) or not can_be_kept(b) else bare(b).clone())
        for name, b in module._buffers.items()
    ]

    def restore() -> None:
        for name in module._buffers.keys() - {name for name, _, _ in saved}:
            del module._buffers[name]
        for name, buffer, value in saved:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.data.copy_(value)

    return restore


def _attributes(module: nn.Module, objects: Objects) -> Callable[[], None]:
    saved = {name: value for name, value in vars(module).items() if name not in _TENSOR_HOMES}
    for value in saved.values():
        objects.take(value)

    def restore() -> None:
        for name in vars(module).keys() - saved.keys() - set(_TENSOR_HOMES):
            del vars(module)[name]
        vars(module).update(saved)

    return restore
