"""What is not finite after a step's backward: names and kinds, for log and bundle. Slow; only for an alarm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from pytest_nancapture.bundle.manifest import Gradients, Raised
from pytest_nancapture.bundle.tensors.kinds import bare
from pytest_nancapture.bundle.tensors.names import unique_parameters
from pytest_nancapture.step.check import has_nan, is_finite, is_zero

Part = Literal["forward", "backward", "optimizer"]
_KINDS = {"nan": "NaN", "inf": "Inf"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one look at a step found.

    Attributes:
        losses: one text a micro-batch, such as ``nan`` or ``0.531``; empty where there was none.
        bad_losses: the positions of the non-finite ones in the window.
        gradients: those of the optimizer that was about to step.
        zeros: parameters whose gradients are there, and 0 throughout.
        taught: of each micro-batch, the parameters to whose gradients it added anything but 0.
        buffers: names of the non-finite ones.
        weights: names of the non-finite ones.
        by_update: the loss was computed with weights that an earlier update or evaluation of the same step, in the
            optimizer's own code, had made bad.
        kind: ``nan`` where any value is, else ``inf``; of the loss if that is bad, else of the rest.
        raised: what the step raised over a value that is not finite, instead of coming to its end.
        raised_in: where it was then.
    """

    losses: tuple[str, ...] = ()
    bad_losses: tuple[int, ...] = ()
    gradients: Gradients = field(default_factory=Gradients)
    zeros: tuple[str, ...] = ()
    taught: tuple[frozenset[str], ...] = ()
    buffers: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    by_update: bool = False
    kind: Literal["nan", "inf"] = "nan"
    raised: Raised | None = None
    raised_in: Part = "forward"

    @property
    def found_in(self) -> tuple[str, ...]:
        """Of ``loss``, ``gradients``, ``buffers``, ``weights``, those that are not finite; ``raised`` if it raised."""
        places = {
            "loss": self.bad_losses,
            "gradients": self.gradients.nonfinite,
            "buffers": self.buffers,
            "weights": self.weights,
            "raised": self.raised,
        }
        return tuple(name for name, bad in places.items() if bad)

    @property
    def summary(self) -> str:
        """As in the log: ``nan in loss, 161 of 161 gradients not finite``, ``ValueError over NaN``."""
        parts = [f"{self.raised.type} over {_KINDS[self.kind]}"] if self.raised is not None else []
        if self.bad_losses:
            parts.append(f"{self.kind} in loss")
        if self.gradients.nonfinite:
            parts.append(f"{len(self.gradients.nonfinite)} of {self.gradients.total} gradients not finite")
        elif self.bad_losses and self.gradients.total:
            parts.append(f"all {self.gradients.total} gradients finite")
        for noun, names in (("buffer", self.buffers), ("weight", self.weights)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                parts.append(f"{noun} {names[0]}{more} not finite")
        return ", ".join(parts)


def look(
    module: nn.Module,
    losses: Iterable[list[Tensor]],
    optimized: Iterable[Tensor],
    buffers: Mapping[str, Tensor],
) -> Finding:
    """Look at every loss, gradient and buffer.

    Args:
        losses: of each micro-batch, those it backpropagated.
        optimized: the parameters whose gradients are about to be used.
        buffers: those to look at.
    """
    per_batch = [list(values) for values in losses]
    ours = {id(parameter) for parameter in optimized}
    gradients = {name: p.grad for name, p in unique_parameters(module) if p.grad is not None and id(p) in ours}
    bad = {name: gradient for name, gradient in gradients.items() if not is_finite(gradient)}
    zeros = tuple(name for name, gradient in gradients.items() if name not in bad and is_zero(gradient))
    bad_losses = tuple(i for i, values in enumerate(per_batch) if not all(map(is_finite, values)))
    bad_buffers = {name: buffer for name, buffer in buffers.items() if not is_finite(buffer)}
    suspects = [loss for i in bad_losses for loss in per_batch[i]] or [*bad.values(), *bad_buffers.values()]
    return Finding(
        losses=tuple(_text(values) for values in per_batch),
        bad_losses=bad_losses,
        gradients=Gradients(
            total=len(gradients),
            nonfinite=tuple(bad),
            nonzero=tuple(name for name in gradients if name not in zeros),
        ),
        zeros=zeros,
        buffers=tuple(bad_buffers),
        kind="nan" if any(map(has_nan, suspects)) else "inf",
    )


def note_backward(loss: Tensor, losses: list[Tensor], *, is_certain: bool = False) -> None:
    """Add the loss to `losses` once a backward pass really begins at it: one that user code drops is no fault.

    Args:
        is_certain: no code of the user's has a say in whether it begins.
    """
    if not loss.requires_grad:
        return
    value = bare(loss)
    if is_certain:
        losses.append(value)
    else:
        loss.register_hook(lambda _: losses.append(value))  # type: ignore[no-untyped-call]


def _text(losses: list[Tensor]) -> str:
    """A micro-batch's losses added up, to six digits."""
    return f"{sum(bare(loss).double().sum().item() for loss in losses):.6g}" if losses else ""


def surfaces_in(finding: Finding) -> Part:
    """The phase of the step, as far as the symptoms tell."""
    if finding.by_update:
        return "optimizer"
    if finding.bad_losses:
        return "forward"
    if finding.gradients.nonfinite:
        return "backward"
    if finding.raised is not None:
        return finding.raised_in
    return "optimizer" if finding.weights else "forward"
