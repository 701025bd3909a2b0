"""What is kept of each micro-batch, and of the module when a window begins, until its step is known to be good."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_nancapture.bundle.decode import Decoder
from pytest_nancapture.bundle.encode import Encoder
from pytest_nancapture.bundle.names import buffers, parameters, submodules
from pytest_nancapture.bundle.references import LiveResolver
from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.errors import UnwritableValueError

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class KeptBatch:
    """One micro-batch as the step received it, its tensors copied, with the random states of that instant.

    Attributes:
        losses: what the step backpropagated, not yet looked at.
        problem: why the batch cannot be written, if it cannot.
    """

    batch_idx: int
    rng: RandomStates
    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    problem: UnwritableValueError | None = None

    @classmethod
    def keep(cls, batch: Any, batch_idx: int, device: torch.device) -> KeptBatch:
        """Copy a batch; one that has no form on disk is noted, and training goes on."""
        rng = RandomStates.take()
        encoder = Encoder(prefix=f"{batch_idx}/", device=device)
        try:
            tree = encoder.encode(batch, "batch")
        except UnwritableValueError as problem:
            return cls(batch_idx, rng, problem=problem)
        return cls(batch_idx, rng, tree, {name: copy_of(tensor) for name, tensor in encoder.tensors.items()})

    def fresh(self) -> Any:
        """The batch again, of tensors that nobody else holds."""
        return Decoder({name: copy_of(tensor) for name, tensor in self.tensors.items()}, LiveResolver()).decode(
            self.tree
        )


@dataclass
class Window:
    """The micro-batches since the last optimizer step, and the module's state at the first one's instant.

    Attributes:
        tensors: buffers, and weights that steps change outside of their update, as they were.
        attributes: plain attributes of submodules that are known to change, as they were.
        frozen: parameters that required no gradient.
        counters: of the Trainer.
        states: optimizer states from before the first update of the window, by the optimizer's position, where kept.
        optimizer_steps: how many times an optimizer was about to step, or asked for another evaluation.
        stepped: whether the window is closed: the next micro-batch opens another.
        reevaluates: whether an optimizer evaluates its closure several times a step.
    """

    tensors: dict[str, Tensor]
    attributes: dict[tuple[str, str], Any]
    frozen: tuple[str, ...]
    counters: dict[str, int]
    batches: list[KeptBatch] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    optimizer_steps: int = 0
    stepped: bool = False
    reevaluates: bool = False

    def restore_tensors(self, module: nn.Module) -> None:
        """Put buffers and kept weights back as they were; autograd is not told: no graph of this window lives on."""
        now = {**dict(parameters(module)), **dict(buffers(module))}
        with torch.no_grad():
            for name, kept in self.tensors.items():
                if name in now and now[name].shape == kept.shape:
                    now[name].data.copy_(kept)

    def restore_attributes(self, module: nn.Module) -> None:
        """Put the plain attributes that are known to change back as they were."""
        modules = dict(submodules(module))
        for (path, name), value in self.attributes.items():
            if path in modules:
                vars(modules[path])[name] = value

    @property
    def losses(self) -> list[Tensor]:
        """All that were backpropagated."""
        return [loss for batch in self.batches for loss in batch.losses]


class CopyOnWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, copies a parameter just before an operation first writes into it.

    The module's own ``on_train_batch_start`` runs under it: it is the code's to run again in a replay, so the weights
    to keep are those from before it.
    """

    def __init__(self, module: nn.Module, kept: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._names: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in parameters(module):
            if parameter.layout is torch.strided and name not in kept:
                self._names.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(value if isinstance(value, (list, tuple)) else [value])
        return func(*args, **(kwargs or {}))

    def _keep(self, written: Iterable[Any]) -> None:
        for tensor in written:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                for name, parameter in self._names.pop(tensor.untyped_storage().data_ptr(), ()):
                    self._kept[name] = copy_of(parameter)


class AttributeWatch:
    """Finds the plain attributes that change during fit: a temperature that a callback anneals is state.

    Looking at every attribute of every submodule before every step would cost too much. All are looked at before the
    first steps and then ever more rarely; those seen to change are kept before each step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ignored = set(vars(nn.Module())) | _lightning_attributes(module)
        self._first = self._all()
        self._changing: set[tuple[str, str]] = set()
        self._looks = 0

    def keep(self) -> dict[tuple[str, str], Any]:
        """The changed attributes as they are now, by submodule and name."""
        self._looks += 1
        if math.log2(self._looks).is_integer():
            self._changing |= self.changed().keys()
        modules = dict(submodules(self._module)) if self._changing else {}
        return {key: vars(modules[key[0]]).get(key[1]) for key in self._changing if key[0] in modules}

    def changed(self) -> dict[tuple[str, str], Any]:
        """Every plain attribute that is not what it was when fit began, with its value."""
        return {key: value for key, value in self._all().items() if _differs(self._first.get(key, _ABSENT), value)}

    def _all(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): value
            for path, submodule in submodules(self._module)
            for name, value in vars(submodule).items()
            if type(value) in _PLAIN and name not in self._ignored
        }


_ABSENT = object()


def _differs(before: Any, now: Any) -> bool:
    return type(before) is not type(now) or not (before == now or (before != before and now != now))  # NaN is NaN


def _lightning_attributes(module: nn.Module) -> set[str]:
    """What every LightningModule has, and Lightning itself changes."""
    base = next((kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"), nn.Module)
    return set(vars(base()))


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that shares nothing, laid out in the same way, with the same class and flags."""
    with torch.no_grad():
        copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_() if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else copy
