"""What is kept of each micro-batch, and of the module when a window begins, until its step is known to be good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.bundle.tensors.file import is_expanded
from pytest_nancapture.bundle.tensors.names import buffers, parameters, replace_buffer, submodules, unique_parameters
from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import REMEDY, Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import UnwritableValueError
from pytest_nancapture.step.state.inventory import can_be_kept, is_rare

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
    def keep(
        cls,
        batch: Any,
        batch_idx: int,
        device: torch.device,
        copies: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    ) -> KeptBatch:
        """Copy a batch; one that has no form on disk is noted, and training goes on."""
        rng = RandomStates.take()
        encoder = Encoder(prefix=f"{batch_idx}/", device=device)
        try:
            tree = encoder.encode(batch, "batch")
            tensors = copies(encoder.tensors)
        except UnwritableValueError as problem:
            return cls(batch_idx, rng, problem=problem)
        except Exception as error:  # of a class of the user's, which training may never trip over
            what = f"looking at it raised {type(error).__name__}: {error}"
            return cls(batch_idx, rng, problem=UnwritableValueError("batch", what, REMEDY))
        return cls(batch_idx, rng, tree, tensors)

    def copies(self) -> dict[str, Tensor]:
        """Its tensors, by name, that nobody else holds."""
        return {name: copy_of(tensor) for name, tensor in self.tensors.items()}

    def batch_of(self, tensors: Mapping[str, Tensor]) -> Any:
        """The batch again, made of `tensors`."""
        return Decoder(tensors, LiveResolver()).decode(self.tree)


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
        attributes: plain attributes, as they were.
        eval_mode: submodules in eval mode.
        frozen: parameters that required no gradient.
        counters: of the Trainer.
        last_batch: whether its last micro-batch is the epoch's last.
        weights: parameters with their names, and how often each was written to, at the instant.
        held: whether somebody still has to know whether its step was good.
        states: optimizer states from before the first update of the window, by the optimizer's position, where kept.
        optimizer_steps: how many times an optimizer was about to step, or asked for another evaluation.
        stepped: whether the window is closed: the next micro-batch opens another.
        dropped: whether a fault was found and acted upon: none of the window's later updates is made.
        reevaluates: whether an optimizer evaluates its closure several times a step.
    """

    number: int
    tensors: dict[str, Tensor]
    attributes: dict[tuple[str, str], Any]
    eval_mode: tuple[str, ...]
    frozen: tuple[str, ...]
    counters: dict[str, int]
    last_batch: bool = False
    weights: Weights = field(default_factory=lambda: Weights([], [], []))
    held: bool = False
    batches: list[KeptBatch] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    optimizer_steps: int = 0
    stepped: bool = False
    dropped: bool = False
    reevaluates: bool = False

    def restore_tensors(self, module: nn.Module) -> None:
        """Put buffers and kept weights back as they were; autograd is not told: no graph of this window lives on."""
        now = {**dict(parameters(module)), **dict(buffers(module))}
        with torch.no_grad():
            for name, kept in self.tensors.items():
                if name not in now:
                    continue
                if now[name].shape == kept.shape and not is_expanded(now[name]):
                    now[name].data.copy_(kept)
                elif now[name].shape != kept.shape or not torch.equal(now[name], kept):
                    replace_buffer(module, name, copy_of(kept))
            made = [name for name, buffer in buffers(module) if name not in self.tensors and can_be_kept(buffer)]
            for name in made:
                replace_buffer(module, name, None)

    def restore_flags(self, module: nn.Module) -> None:
        """Put plain attributes, modes and ``requires_grad`` back as they were."""
        modules = dict(submodules(module))
        for (path, name), value in self.attributes.items():
            if path in modules:
                vars(modules[path])[name] = value
        for name, submodule in modules.items():
            submodule.training = name not in self.eval_mode
        for name, parameter in unique_parameters(module):
            parameter.requires_grad_(name not in self.frozen)
        if "_param_requires_grad_state" in vars(module):  # of Lightning's toggle_optimizer
            vars(module)["_param_requires_grad_state"] = {}

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

    Those of the root, and of submodules whose classes are not torch's own, are noted before each step. To look through
    everything before every step would cost too much: that is done before the first steps and then ever more rarely.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ignored = set(vars(nn.Module())) | _lightning_attributes(module)
        self._first = self._all()
        self._watched = {key for key in self._first if key[0] and not _is_torchs_own(module.get_submodule(key[0]))}
        self._homes: dict[str, dict[str, Any]] = {}
        self._looks = 0

    def keep(self) -> dict[tuple[str, str], Any]:
        """The attributes as they are now, by submodule and name."""
        self._looks += 1
        if is_rare(self._looks):
            self._watched |= self._changed(self._all()).keys()
            modules = dict(submodules(self._module))
            self._homes = {path: vars(modules[path]) for path, _ in self._watched if path in modules}
        found = {
            (path, name): self._homes[path][name]
            for path, name in self._watched
            if path in self._homes and name in self._homes[path]
        }
        return {**found, **self._of("", self._module)}

    def changed(self, kept: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        """Every plain attribute that is not what it was when fit began.

        Args:
            kept: those that :meth:`keep` noted; the others are as they are now.
        """
        now = {key: value for key, value in self._all().items() if key[0] and key not in self._watched}
        return self._changed({**now, **kept})

    def _changed(self, values: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
        return {
            key: value
            for key, value in values.items()
            if type(value) in _PLAIN and _differs(self._first.get(key, _ABSENT), value)
        }

    def _all(self) -> dict[tuple[str, str], Any]:
        found: dict[tuple[str, str], Any] = {}
        for path, submodule in submodules(self._module):
            found.update(self._of(path, submodule))
        return found

    def _of(self, path: str, module: nn.Module) -> dict[tuple[str, str], Any]:
        ignored = self._ignored
        return {
            (path, name): value for name, value in vars(module).items() if type(value) in _PLAIN and name not in ignored
        }


def _is_torchs_own(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


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
        copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad and not isinstance(tensor, nn.Parameter) else copy
