"""Watch every operation of a replay, and remember those that put out what is not finite, and what that came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_nancapture.bundle.tensors.kinds import bare, stored_values
from pytest_nancapture.bundle.tensors.names import buffers, parameters, submodules
from pytest_nancapture.diagnose.arguments import has_bad_number, is_written, values_of
from pytest_nancapture.diagnose.explain import explain, explain_gradient
from pytest_nancapture.diagnose.healing import Healing
from pytest_nancapture.diagnose.reads import Reads, Suspect, seen_by_others, unseen_in_texts
from pytest_nancapture.diagnose.records import Birth, Forward, GivenValue, Link, Origin, Record
from pytest_nancapture.diagnose.source import Source, user_source


@dataclass
class _Look:
    tensor: Tensor
    bad: Tensor | None
    nan: bool = False


_UNFILLED = ("empty", "new_empty", "lift_fresh")
"""Their outputs hold what was in memory before, or a constant made outside of torch's operations."""
_LARGE = 2**22
"""Tensors up to this number of elements are followed element by element."""


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active from the instant to the end of the step.

    Values are followed from tensor to tensor by their storage; in pointwise operations element by element, so that a
    padded lane that overflows is not taken for the cause of a NaN elsewhere in the same tensor.
    """

    def __init__(
        self, module: nn.Module, batch: Mapping[str, Tensor], package: str = "", *, heals: Healing | None = None
    ) -> None:
        """`batch`: the tensors that the step is given, by name; `package`: see :func:`user_source`.

        With `heals`, another number takes a bad value's place where it is born; the module is to be put back after.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._package = package
        self._given: dict[int, GivenValue] = {}
        self.heals = heals
        self._module = module
        self._is_active = self.is_early = False
        self._writers: dict[int, Record] = {}
        self._forwards: dict[int, Forward] = {}
        self._paths = {id(submodule): path for path, submodule in submodules(module)}
        self._stack: list[str] = []
        self._count = 0
        self._paused = False
        self.in_update = False
        self.reads: Reads[Origin] = Reads()
        """What the host has read of bad values."""
        self.births: dict[Birth, set[str]] = {}
        """Where bad values were born, and of what kind, also those that led to nothing."""
        self.expect(batch)

    def start(self) -> None:
        """Watch from here on: the instant, when the captured values are in the module's tensors."""
        if self.heals is not None:
            self._mend_given(tensor for _, tensor in parameters(self._module))
            self.heals.prepare_weights(self._module)
        for path, tensor in (*parameters(self._module), *buffers(self._module)):
            self._writers.pop(_memory(tensor), None)
            if _look(tensor).bad is not None:
                self._given[_memory(tensor)] = GivenValue("weights", path)
        if not self._is_active:
            self._is_active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def expect(self, batch: Mapping[str, Tensor]) -> None:
        """The tensors of a batch are given to the step, by name."""
        for name, tensor in batch.items():
            self._given[_memory(tensor)] = GivenValue("input", name)
        if self.heals is not None:
            with self.paused():
                self._mend_given(batch.values())
                self.heals.prepare_batch(batch)

    def _mend_given(self, tensors: Iterable[Tensor]) -> None:
        assert self.heals is not None
        for tensor in tensors if self.heals.given else ():
            look = _look(tensor)
            if look.nan:
                self._mend(look)

    def _mend(self, look: _Look) -> None:
        assert self.heals is not None
        assert look.bad is not None
        self.heals.mend(stored_values(look.tensor.data), look.bad)

    def stop(self) -> None:
        """Watch no more."""
        if self._is_active:
            self._is_active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Let all operations through unseen from here on."""
        self._paused = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations through unseen: those of a look, not of the step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def module_paths(self) -> Iterator[None]:
        """Follow which submodule is running."""
        hooks = nn.modules.module
        enter = hooks.register_module_forward_pre_hook(self._enter)
        leave = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def writer(self, tensor: Tensor) -> Origin | None:
        """Where the bad values of a tensor came from."""
        key = _memory(tensor)
        return self._writers.get(key) or self._given.get(key)

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._stack.append(self._paths.get(id(module), ""))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()

    @property
    def _module_path(self) -> str:
        return next((path for path in reversed(self._stack) if path), "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self._count += 1
        inputs = [_look(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        before = [self._origin(look) if look.bad is not None else None for look in inputs]
        node = torch._C._current_autograd_node()
        source = user_source(self._package)
        forward = self._forward(func, node, source)
        values = values_of(args, kwargs) if func._schema.is_mutable else (args, kwargs)
        suspects = self._suspects(inputs, before)
        try:
            result = func(*args, **kwargs)
        except Exception as error:  # goes on: it is only remembered what the operation was given
            self.reads.refused(error, suspects)
            raise
        outputs = [_look(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        is_unfilled = str(func).removeprefix("aten.").startswith(_UNFILLED)
        if not outputs:
            if inputs:  # else it is a mark for a profiler
                self.reads.read(suspects)
            return result
        if func.is_view and not is_unfilled:
            return result
        bad = [look for look in outputs if look.bad is not None and not is_unfilled]
        self.reads.operation(suspects, [(look.tensor, _memory(look.tensor), look.bad is not None) for look in outputs])
        if not bad:
            for look in outputs:
                self._forget(look.tensor)
            return result
        self._keep(self._record(func, values, inputs, before, bad, source, node, forward), bad)
        return result

    def _keep(self, record: Record, bad: list[_Look]) -> None:
        """Remember it as the writer of its bad outputs, unless these are healed."""
        self._note_birth(record, bad)
        if self.heals is not None and record.birth in ("computed", "nan"):
            for look in bad:
                self._mend(look)
            return
        for look in bad:
            self._writers[_memory(look.tensor)] = record

    def _forward(self, func: Any, node: Any, source: Source | None) -> Forward | None:
        """In a forward, remember the operation under its autograd node's number; in a backward, find it by that."""
        if node is not None and source is None:
            return self._forwards.get(node._sequence_nr())
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if number not in self._forwards and not func.is_view:
            self._forwards[number] = Forward(str(func), source, self._module_path)
        return None

    def _record(
        self,
        func: Any,
        values: tuple[Any, Any],
        inputs: list[_Look],
        before: list[Origin | None],
        bad: list[_Look],
        source: Source | None,
        node: Any,
        forward: Forward | None,
    ) -> Record:
        is_pointwise = torch.Tag.pointwise in func.tags and len(bad) == 1
        links: list[Link] = []
        nan_in = False
        overwritten = 1 if func is torch.ops.aten.copy_.default else 0
        for look, origin in list(zip(inputs, before, strict=True))[overwritten:]:
            reach = _reach(look, bad[0]) if is_pointwise else None
            if look.bad is None or origin is None or (reach is not None and not bool(reach.any())):
                continue
            nan_in = nan_in or look.nan
            links.append(Link(origin, reach, look.tensor.is_contiguous() and look.tensor.shape == bad[0].tensor.shape))
        if self.in_update and self.reads.last_value is not None and has_bad_number(values):
            # A hyperparameter that user code has made of values read from a tensor.
            links.append(Link(self.reads.last_value.origin))
        fresh = _fresh(bad[0], links) if is_pointwise else None
        birth = ""
        if not links or (fresh is not None and bool(fresh.any())):
            birth = "written" if is_written(values) else "computed"
        elif any(look.nan for look in bad) and not nan_in:
            birth = "nan"
        return Record(
            index=self._count,
            op=str(func),
            source=source,
            module_path=self._module_path if node is None else "",
            birth=birth,
            links=links,
            fresh=fresh,
            is_backward=node is not None and source is None,
            explanation=_explain(func, forward, values, bad[0].tensor) if birth else "",
            forward=forward,
            is_early=self.is_early,
            in_update=self.in_update,
            graphs=(node,) if node is not None else tuple(_graph(look) for look in inputs if look.tensor.requires_grad),
            is_literal=not links and has_bad_number(values),
        )

    def _note_birth(self, record: Record, bad: list[_Look]) -> None:
        place = record.forward if record.is_backward and record.forward is not None else record
        if record.birth in ("computed", "nan") and place.source is not None:
            birth = Birth(
                op=place.op,
                source=place.source,
                is_backward=record.is_backward,
                is_first=record.birth == "computed",
            )
            self.births.setdefault(birth, set()).add("nan" if any(look.nan for look in bad) else "inf")

    def _suspects(self, inputs: list[_Look], origins: list[Origin | None]) -> list[Suspect[Origin]]:
        """What an operation is given of bad values, or of hints at such."""
        found = []
        for look, origin in zip(inputs, origins, strict=True):
            if origin is not None:
                found.append(Suspect(origin, look.nan, is_value=True, is_made=isinstance(origin, Record)))
            elif (hint := self.reads.hint(_memory(look.tensor))) is not None:
                found.append(hint)
        return found

    def read_by_others(self, tensor: Tensor) -> None:
        """Somebody else than torch reads it."""
        if self._is_active and not self._paused:
            with self.paused():
                look = _look(tensor)
                self.reads.read(self._suspects([look], [self._origin(look) if look.bad is not None else None]))

    def _origin(self, look: _Look) -> Origin:
        return self.writer(look.tensor) or GivenValue("constant")

    def _forget(self, tensor: Tensor) -> None:
        """A storage that was written whole, with finite values, has no bad past any more."""
        values = stored_values(tensor)
        if values.numel() * values.element_size() >= values.untyped_storage().nbytes():
            key = _memory(tensor)
            self._writers.pop(key, None)
            self._given.pop(key, None)


def _explain(func: Any, forward: Forward | None, values: tuple[Any, Any], output: Tensor) -> str:
    if forward is not None:
        return explain_gradient(forward.op, *values, output)
    return explain(str(func), *values, output)


@contextmanager
def traced(trace: Trace | None) -> Iterator[None]:
    """Around a fit that starts `trace` when it comes to the instant; code compiled by torch runs as it is written."""
    if trace is None:
        yield
        return
    with (
        torch.compiler.set_stance("force_eager"),
        trace.module_paths(),
        seen_by_others(trace.read_by_others),
        unseen_in_texts(trace.paused),
    ):
        try:
            yield
        finally:
            trace.stop()


def _graph(look: _Look) -> Any:
    return look.tensor if look.tensor.is_leaf else look.tensor.grad_fn


def _memory(tensor: Tensor) -> int:
    """By which a tensor's values are known, whatever view of them is met."""
    return stored_values(tensor).untyped_storage().data_ptr()


def _look(tensor: Tensor) -> _Look:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or not tensor.numel() or tensor.is_meta:
        return _Look(tensor, None)
    values = stored_values(bare(tensor))
    if values.dtype.itemsize == 1:
        values = values.float()
    finite = values.isfinite()
    return _Look(tensor, None) if bool(finite.all()) else _Look(tensor, ~finite, bool(values.isnan().any()))


def _reach(look: _Look, output: _Look) -> Tensor | None:
    """Where a bad element of an input lies at a bad element of the output; None where that cannot be told."""
    if look.bad is None or output.bad is None or output.bad.numel() > _LARGE:
        return None
    try:
        return torch.broadcast_to(look.bad, output.bad.shape) & output.bad
    except RuntimeError:
        return None


def _fresh(output: _Look, links: list[Link]) -> Tensor | None:
    """The bad elements that no input made bad."""
    if output.bad is None or any(link.reach is None for link in links):
        return None
    fresh = output.bad
    for link in links:
        assert link.reach is not None
        fresh = fresh & ~link.reach
    return fresh
