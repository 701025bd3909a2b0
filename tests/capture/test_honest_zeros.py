"""Zeros that a right fix leaves pass, and those of a fault that is only masked never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from training import capture_one

from pytest_nancapture import replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Healed


class Two(pl.LightningModule):
    """A trunk with a head and an auxiliary one; what is made of their outputs is code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.aux = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(4, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = torch.tanh(self.trunk(batch[0]))
        return self.loss(self.head(hidden), self.aux(hidden), *batch[1:])

    def loss(self, head: Tensor, aux: Tensor, *rest: Tensor) -> Any:
        raise AssertionError("each net brings a loss of its own")

    def nothing(self) -> Tensor:
        return torch.stack([0.0 * parameter.sum() for parameter in self.parameters()]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


Step = Callable[..., Any]


def with_loss(step: Step) -> type[Two]:
    """A module with this in place of its loss; the module comes first."""
    return type("Module", (Two,), {"loss": step})


def x(size: int = 4) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(2))


def capture(step: Step, tmp_path: Any, *rest: Tensor, before: list[Any] | None = None, **options: Any) -> Bundle:
    torch.manual_seed(0)
    return capture_one(with_loss(step)(), [*(before or []), (x(), *rest)], tmp_path, **options)


def verdict(bundle: Bundle, step: Step) -> str:
    return replay(bundle, module=with_loss(step)()).verdict


# A mean over a mask without any entry: whatever the weights are, there is nothing to learn.

EMPTY = torch.zeros(4, 5)


def mean(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    return (head.square() * mask).sum() / mask.sum()


def mean_clamped(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    return (head.square() * mask).sum() / mask.sum().clamp(min=1)


def mean_epsilon(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    return (head.square() * mask).sum() / (mask.sum() + 1e-8)


def mean_skipped(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Any:
    return mean(self, head, aux, mask) if mask.any() else None


def mean_hidden(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    return torch.nan_to_num(mean(self, head, aux, mask))


@pytest.mark.parametrize("fix", [mean_clamped, mean_epsilon, mean_skipped])
def test_there_is_nothing_to_learn(tmp_path, fix):
    """Zeros pass then, and so does a skipped step; the replay says why."""
    bundle = capture(mean, tmp_path, EMPTY)
    names = ("trunk.weight", "trunk.bias", "head.weight", "head.bias")
    assert bundle.fault.healed == Healed(learns=False, idle=names)
    result = replay(bundle, module=with_loss(fix)())
    assert result.verdict == "finite"
    assert any("healed" in note for note in result.notes)


def test_a_hidden_mean_stays_red(tmp_path):
    """Autograd still divides by 0."""
    assert verdict(capture(mean, tmp_path, EMPTY), mean_hidden) == "nonfinite"


# Targets that are missing stay so: what a step would learn from them, were they there, asks nothing of a fix.

MISSING = torch.full((4, 5), torch.nan)
PARTLY = torch.where(torch.arange(20).reshape(4, 5) % 2 == 0, torch.nan, 1.0)


def measured(self: Two, head: Tensor, aux: Tensor, y: Tensor) -> Tensor:
    there = y.isfinite()
    return ((head - y.nan_to_num()).square() * there).sum() / there.sum()


def measured_clamped(self: Two, head: Tensor, aux: Tensor, y: Tensor) -> Tensor:
    there = y.isfinite()
    return ((head - y.nan_to_num()).square() * there).sum() / there.sum().clamp(min=1)


def unmeasured(self: Two, head: Tensor, aux: Tensor, y: Tensor) -> Tensor:
    return (head - y).square().mean()


def test_what_is_missing_teaches_nothing(tmp_path):
    """The code knows missing targets by their NaN, so a healed step must find it there."""
    bundle = capture(measured, tmp_path, MISSING)
    assert bundle.fault.healed is not None
    assert not bundle.fault.healed.learns
    assert verdict(bundle, measured_clamped) == "finite"


@pytest.mark.parametrize("y", [PARTLY, MISSING])
def test_what_is_missing_and_not_looked_at_is_healed(tmp_path, y):
    """Where NaN of the batch is the fault itself, a fix that takes it for missing must learn of what is left."""
    bundle = capture(unmeasured, tmp_path, y)
    assert bundle.fault.healed == Healed()
    assert verdict(bundle, measured_clamped) == ("finite" if y is PARTLY else "vacuous")


# The zeros of other healed steps are no proof that there is nothing to learn.

ZERO = torch.zeros(())


def divided(self: Two, head: Tensor, aux: Tensor, count: Tensor) -> Tensor:
    return head.square().sum() / count


def divided_clamped(self: Two, head: Tensor, aux: Tensor, count: Tensor) -> Tensor:
    return head.square().sum() / count.clamp(min=1)


def likelihood(self: Two, head: Tensor, aux: Tensor, scale: Tensor) -> Tensor:
    return -torch.log(torch.softmax(head * scale, -1)[:, 0]).mean()


def likelihood_stable(self: Two, head: Tensor, aux: Tensor, scale: Tensor) -> Tensor:
    return -torch.log_softmax(head * scale, -1)[:, 0].mean()


def density(self: Two, head: Tensor, aux: Tensor, y: Tensor) -> Tensor:
    return -torch.log(torch.exp(-(head - y).square()).sum(-1)).mean()


def density_stable(self: Two, head: Tensor, aux: Tensor, y: Tensor) -> Tensor:
    return -torch.logsumexp(-(head - y).square(), -1).mean()


def root(self: Two, head: Tensor, aux: Tensor, scale: Tensor) -> Tensor:
    return torch.sqrt((self.aux.weight * scale).square()).sum()


MASKS: dict[str, Callable[[Step], Step]] = {
    "a loss of 0": lambda step: lambda self, *args: loss if (loss := step(self, *args)).isfinite() else self.nothing(),
    "a constant": lambda step: lambda self, *args: torch.ones((), requires_grad=True),
    "no loss": lambda step: lambda self, *args: loss if (loss := step(self, *args)).isfinite() else None,
    "times 0": lambda step: lambda self, head, *args: 0 * head.sum(),
    "detached": lambda step: lambda self, head, aux, *args: self.nothing() + head.detach().sum() + 0 * aux.sum(),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("step", "given", "fix"),
    [
        (divided, ZERO, divided_clamped),
        (likelihood, torch.tensor(1e5), likelihood_stable),
        (density, torch.tensor(1e4), density_stable),
        (density, torch.full((4, 1), -300.0), density_stable),
    ],
)
def test_there_is_something_to_learn(tmp_path, step, given, fix, mask):
    """Though healing by 0 leaves no gradient: where an operation is saturated by its weights or its data, or cut."""
    bundle = capture(step, tmp_path, given)
    assert (bundle.fault.healed.learns, bundle.fault.healed.idle) == (True, ())
    assert verdict(bundle, fix) == "finite"
    assert verdict(bundle, MASKS[mask](step)) == "vacuous"


# Several terms.


def two_terms(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    return head.square().mean() + (aux.square() * mask).sum() / mask.sum()


def two_terms_one_left_out(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
    loss = head.square().mean()
    return loss + (aux.square() * mask).sum() / mask.sum() if mask.any() else loss


def ratio(self: Two, head: Tensor, aux: Tensor, count: Tensor) -> Tensor:
    return head.square().mean() + (aux.square() / count).mean()


def ratio_where_it_can_be(self: Two, head: Tensor, aux: Tensor, count: Tensor) -> Tensor:
    return head.square().mean() + (aux[count[:, 0] > 0].square() / count[count[:, 0] > 0]).mean()


def ratio_left_out(self: Two, head: Tensor, aux: Tensor, count: Tensor) -> Tensor:
    loss = ratio(self, head, aux, count)
    return loss if loss.isfinite() else head.square().mean()


def test_a_term_that_has_nothing_to_teach_may_be_left_out(tmp_path):
    """The commonest fix: ``if mask.any()``."""
    bundle = capture(two_terms, tmp_path, EMPTY)
    assert bundle.fault.healed == Healed(learns=True, idle=("aux.weight", "aux.bias"))
    assert verdict(bundle, two_terms_one_left_out) == "finite"


@pytest.mark.parametrize("count", [torch.tensor([[1.0], [1], [0], [1]]), torch.zeros(4, 1)])
def test_a_term_that_can_teach_must_not_be_left_out(tmp_path, count):
    """Its head would have a gradient with the fault healed; what it shares with another term has one all the same."""
    bundle = capture(ratio, tmp_path, count)
    result = replay(bundle, module=with_loss(ratio_left_out)())
    assert (result.verdict, result.reason) == (
        "vacuous",
        "aux.weight, aux.bias, with non-finite gradients at capture, are cut off from the loss now; a masked fault is "
        "not a fixed one; a fix that leaves them a gradient passes",
    )


def test_the_bad_sample_alone_may_be_left_out(tmp_path):
    """All parameters learn of the others."""
    bundle = capture(ratio, tmp_path, torch.tensor([[1.0], [1], [0], [1]]))
    assert verdict(bundle, ratio_where_it_can_be) == "finite"


def distance(self: Two, head: Tensor, aux: Tensor, shift: Tensor) -> Tensor:
    return head.square().mean() + self.length((aux * shift).square().sum())


def length(self: Two, square: Tensor) -> Tensor:
    return square.sqrt()


@pytest.mark.parametrize(
    ("mended", "expected"),
    [
        (lambda self, square: (square + 1e-6).sqrt(), "finite"),
        (lambda self, square: torch.where(square > 0, square.clamp(min=1e-12).sqrt(), 0 * square), "finite"),
        (lambda self, square: square.detach().sqrt(), "vacuous"),
    ],
)
def test_a_gradient_that_was_bad_alone_must_be_there(tmp_path, mended, expected):
    """Where the loss was finite, a mended operation leaves zeros, and one that is cut off leaves nothing."""
    module = type("Module", (Two,), {"loss": distance, "length": length})
    bundle = capture_one(module(), [(x(), ZERO)], tmp_path)
    assert bundle.fault.found_in == ("gradients",)
    fixed = type("Module", (Two,), {"loss": distance, "length": mended})
    assert replay(bundle, module=fixed()).verdict == expected


# Several micro-batches.


@pytest.mark.parametrize(
    ("step", "bad", "fix", "expected"),
    [
        (divided, ZERO, divided_clamped, "finite"),
        (divided, ZERO, MASKS["a loss of 0"](divided), "vacuous"),
        (divided, ZERO, MASKS["no loss"](divided), "vacuous"),
        (mean, EMPTY, mean_clamped, "finite"),
        (mean, EMPTY, mean_skipped, "finite"),
    ],
)
def test_the_guilty_micro_batch_counts(tmp_path, step, bad, fix, expected):
    """What others of the window teach does not show that it was tested."""
    bundle = capture(step, tmp_path, bad, before=[(x(), torch.ones_like(bad))], accumulate_grad_batches=2)
    assert verdict(bundle, fix) == expected


# Code that runs after the backward pass.


def test_gradients_that_a_hook_mends(tmp_path):
    """They are masked, also where something finite is left of them."""

    class Mending(Two):
        loss, length = distance, length

        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.nan_to_num_(0, 0, 0)

    module = type("Module", (Two,), {"loss": distance, "length": length})
    result = replay(capture_one(module(), [(x(), ZERO)], tmp_path), module=Mending())
    assert (result.verdict, result.reason) == (
        "vacuous",
        "the gradients of trunk.weight, trunk.bias, aux.weight, aux.bias were not finite until code after the backward "
        "pass changed them; a masked fault is not a fixed one; a fix that makes the backward pass itself finite passes",
    )


# What it costs, and what it leaves.


def test_nothing_of_a_healed_rerun_is_left(tmp_path):
    """Weights that were tried are put back, and no warning is given of them."""
    torch.manual_seed(0)
    module = with_loss(mean)()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    bundle = capture_one(module, [(x(), EMPTY)], tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert bundle.manifest.module.changed_before_copy == ()


def test_what_cannot_be_healed_is_not_known(tmp_path):
    """A step that raises with other weights: zeros are then vacuous, as ever, and the reason says what to do."""

    def strict(self: Two, head: Tensor, aux: Tensor, mask: Tensor) -> Tensor:
        if self.head.weight.abs().max() < 0.1:
            raise ValueError("no such weights")
        return mean(self, head, aux, mask)

    bundle = capture(strict, tmp_path, EMPTY)
    assert bundle.fault.healed is None
    result = replay(bundle, module=with_loss(mean_clamped)())
    assert (result.verdict, result.reason) == (
        "vacuous",
        "4 parameters with non-finite gradients at capture now have none, or only zeros: nothing was tested; a masked "
        "fault is not a fixed one; a fix that leaves them a gradient passes; if zeros are right for this batch, "
        "capture or pin it anew to have that told",
    )


class Rooted(pl.LightningModule):
    """A layer that is given the root of what should not be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def root(self, x: Tensor) -> Tensor:
        return x.sqrt()

    def made(self, loss: Tensor) -> Tensor:
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.made(nn.functional.l1_loss(self.layer(self.root(x)), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Clamped(Rooted):
    def root(self, x: Tensor) -> Tensor:
        return x.clamp(min=0).sqrt()


class Masked(Rooted):
    def made(self, loss: Tensor) -> Tensor:
        return loss.nan_to_num() * 0 if loss.isnan() else loss


@pytest.mark.parametrize(("module", "verdict"), [(Clamped, "finite"), (Masked, "nonfinite")])
def test_a_weight_whose_input_is_zero(module, verdict, tmp_path):
    """Has a gradient of 0 honestly, as long as its own layer goes on learning: the bias does."""
    bundle = capture_one(Rooted(), [(-torch.ones(4, 3), torch.ones(4, 1))], tmp_path)
    assert bundle.fault.healed.silent == ("layer.weight",)
    assert replay(bundle, module=module()).verdict == verdict
