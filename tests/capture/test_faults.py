"""What is a fault and what is none, and the step it belongs to."""

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training import Net, batches, bundles_in, capture_and_replay, capture_one, fault, fit, replayed

from pytest_nancapture import NaNCapture, NonFiniteError, replay

NAN, INF = float("nan"), float("inf")


class Adds(Net):
    """Adds to its loss what no gradient goes through."""

    def __init__(self, value: float = INF) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).pow(2).mean() + torch.tensor(0.0 if good else self.value)


class AddsNan(Adds):
    def __init__(self) -> None:
        super().__init__(NAN)


@pytest.mark.parametrize(("make", "kind"), [(Adds, "inf"), (AddsNan, "nan")])
def test_a_bad_loss_is_a_fault_though_all_gradients_are_finite(make, kind, tmp_path):
    """An Inf is told from a NaN."""
    bundle = capture_and_replay(make, batches(), tmp_path)
    assert (bundle.fault.kind, bundle.fault.found_in) == (kind, ("loss",))
    assert bundle.fault.losses == (kind,)
    assert bundle.fault.gradients.nonfinite == ()


class Overflows(Net):
    """Inf in the gradients, and no NaN."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).mean() * (1.0 if good else 1e30) * (1.0 if good else 1e30)


def test_a_fault_without_nan_is_of_kind_inf(tmp_path):
    """Wherever it is found."""
    bundle = capture_and_replay(Overflows, batches(), tmp_path)
    assert (bundle.fault.kind, bundle.fault.found_in) == ("inf", ("loss", "gradients"))


class Poisoned(Net):
    """Its step leaves NaN in a buffer, and neither in the loss nor in a gradient."""

    def __init__(self, way: str = "in place", none: bool = False) -> None:
        super().__init__()
        self.way, self.none = way, none
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("constant", torch.full((2,), -INF))

    def training_step(self, batch, batch_idx):
        x, good = batch
        loss = self.layer(x).pow(2).mean()
        value = loss.detach() * fault(good)
        if self.way == "in place":
            self.average.mul_(0.9).add_(value)
        elif self.way == "data":
            self.average.data.copy_(value)
        else:
            self.average = value
        return None if self.none else loss


class PoisonedData(Poisoned):
    def __init__(self) -> None:
        super().__init__("data")


class PoisonedNew(Poisoned):
    def __init__(self) -> None:
        super().__init__("new")


class PoisonedNone(Poisoned):
    def __init__(self) -> None:
        super().__init__(none=True)


class PoisonedNorm(Net):
    """Its running statistics go bad, and its loss is made of something else; no version counter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    @property
    def average(self) -> torch.Tensor:
        return self.norm.running_mean

    def training_step(self, batch, batch_idx):
        x, good = batch
        with torch.no_grad():
            self.norm(x * fault(good))
        return self.layer(x).pow(2).mean()


class PoisonedLater(Poisoned):
    """The buffer is written after the update."""

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.add_(fault(batch[1]))


POISONED = [Poisoned, PoisonedData, PoisonedNew, PoisonedNone, PoisonedNorm, PoisonedLater]


@pytest.mark.parametrize(
    ("make", "accumulate"), [*((make, 1) for make in POISONED), (Poisoned, 2), (PoisonedNone, 2), (PoisonedNorm, 2)]
)
def test_a_poisoned_buffer_is_blamed_on_the_step_that_did_it(make, accumulate, tmp_path):
    """However it was written, also by a step that returned None, and by a hook after the update."""
    bundle = capture_one(make(), batches(8), tmp_path, accumulate_grad_batches=accumulate)
    names = ("norm.running_mean", "norm.running_var") if make is PoisonedNorm else ("average",)
    assert (bundle.fault.found_in, bundle.fault.buffers) == (("buffers",), names)
    assert (bundle.fault.global_step, bundle.fault.batch_idx, bundle.fault.kind) == (4 // accumulate, 4, "nan")
    result, _ = replayed(bundle)
    assert (result.verdict, result.nonfinite) == ("nonfinite", tuple(f"buffer {name}" for name in names))


@pytest.mark.parametrize("make", POISONED)
def test_a_poisoned_buffer_is_put_back_when_training_goes_on(make, tmp_path):
    """And its good value is there for the next step."""
    module = make()
    fit(module, batches(), NaNCapture(tmp_path, on_capture="skip"))
    assert bool(module.average.isfinite().all())
    assert len(bundles_in(tmp_path)) == 1


class Overflowing(Net):
    """A mask full of -Inf beside a fault that comes once only, so no rerun sees it."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -INF))

    def training_step(self, batch, batch_idx):
        type(self).count += 1
        return super().training_step((batch[0], torch.tensor(float(self.count != 3))), batch_idx)


def test_a_buffer_full_of_inf_does_not_pass_for_the_fault_coming_back(tmp_path, monkeypatch):
    """It is there in every rerun."""
    monkeypatch.setattr(Overflowing, "count", 0)
    bundle = capture_one(Overflowing(), batches(bad=[]), tmp_path)
    assert (bundle.fault.reproduced.runs, bundle.fault.reproduced.of, bundle.fault.buffers) == (0, 1, ())


class Extremes(Net):
    """Running extremes, which start at Inf on purpose; some never meet a value, and one mask is full of -Inf."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((3,), INF))
        self.register_buffer("high", torch.full((3,), -INF))
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))

    def training_step(self, batch, batch_idx):
        h = self.layer(batch[0])
        self.low[:2] = torch.minimum(self.low[:2], h.detach().amin(0)[:2])
        self.high = torch.maximum(self.high, torch.tensor([0.0, -INF, -INF]))
        self.mask.add_(0)
        return h.pow(2).mean()


def test_buffers_that_are_meant_to_hold_inf_raise_no_alarm(tmp_path):
    """They held it before the step."""
    fit(Extremes(), batches(bad=[]), NaNCapture(tmp_path), max_epochs=2)
    assert bundles_in(tmp_path) == []


class ExtremesFault(Extremes):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * fault(batch[1])


def test_a_fault_beside_such_buffers_names_none_of_them(tmp_path):
    """Neither does the replay, and weights are not to blame."""
    bundle = capture_and_replay(ExtremesFault, batches(), tmp_path)
    assert (bundle.fault.buffers, bundle.fault.weights) == ((), ())
    result, _ = replayed(bundle)
    assert (result.nonfinite, result.culprit.phase) == (
        ("loss", "gradient layer.weight", "gradient layer.bias"),
        "forward",
    )


def test_weights_bad_from_the_start_are_said_to_be_bad_before_the_step(tmp_path):
    """The phase is ``weights``, and they are named."""
    module = Net()
    module.layer.bias.data[1] = NAN
    bundle = capture_one(module, batches(bad=[]), tmp_path)
    assert (bundle.fault.found_in, bundle.fault.weights) == (("loss", "gradients", "weights"), ("layer.bias",))
    assert bundle.fault.global_step == 0
    assert replay(bundle).culprit.phase == "weights"


class Explodes(Net):
    """Gradients are finite, and the update is not: the learning rate jumps."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e38 if step == 3 else 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean() * 1e3


def test_a_fault_born_in_the_update_needs_the_history(tmp_path):
    """With it the bundle is of the update that did it, and the replay makes it again."""
    bundle = capture_one(Explodes(), batches(bad=[]), tmp_path, optimizer_history=True)
    assert (bundle.fault.found_in, bundle.fault.global_step, bundle.fault.batch_idx) == (("weights",), 3, 3)
    assert bundle.fault.weights == ("layer.weight", "layer.bias")
    result, _ = replayed(bundle)
    assert (result.verdict, result.culprit.phase) == ("nonfinite", "optimizer")


@pytest.mark.parametrize("on_capture", ["raise", "stop", "skip"])
def test_with_the_history_a_bad_update_is_undone(on_capture, tmp_path):
    """The weights are those from before it, and the optimizer's state too."""
    module = Explodes()
    try:
        fit(module, batches(4, bad=[]), NaNCapture(tmp_path, on_capture=on_capture, optimizer_history=True))
    except NonFiniteError:
        assert on_capture == "raise"
    reference = Explodes()
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
    assert [p.shape for p in reference.parameters()] == [p.shape for p in module.parameters()]


def test_without_the_history_the_next_step_says_what_to_do(tmp_path, caplog):
    """Its weights were bad before it began: the update before is to blame, and the option is named."""
    bundle = capture_one(Explodes(), batches(bad=[]), tmp_path)
    assert (bundle.fault.global_step, bundle.fault.weights) == (4, ("layer.weight", "layer.bias"))
    assert replay(bundle).culprit.phase == "weights"
    (advice,) = [record.message for record in caplog.records if "optimizer_history" in record.message]
    assert advice == (
        "nancapture: the weights were not finite before the step began: the update of step 3 is to blame; capture "
        "that with NaNCapture(optimizer_history=True)"
    )


def test_nan_in_the_batch_is_a_fault_of_the_input(tmp_path):
    """Phase ``input``."""
    data = batches(bad=[])
    data[3][0][2, 1] = NAN
    bundle = capture_and_replay(Net, data, tmp_path)
    assert (bundle.fault.batch_idx, replay(bundle).culprit.phase) == (3, "input")


# What the user's own code drops, masks or only looks at is none.


class NoBackward(pl.LightningModule):
    """Leaves bad losses alone, under manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, good = batch
        loss = self.layer(x).pow(2).mean() * fault(good)
        if loss.isfinite():
            self.optimizers().zero_grad()
            self.manual_backward(loss)
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SkipsBackward(Net):
    """Overrides ``backward``."""

    def backward(self, loss, *args, **kwargs):
        if loss.isfinite():
            loss.backward()


class ReturnsNone(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.isfinite() else None


class ZeroesAfterBackward(Net):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


class DropsAfterBackward(Net):
    def on_after_backward(self):
        if any(not parameter.grad.isfinite().all() for parameter in self.parameters()):
            for parameter in self.parameters():
                parameter.grad = None


class ZeroesBeforeStep(Net):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


class DropsBeforeStep(Net):
    def on_before_optimizer_step(self, optimizer):
        if any(not parameter.grad.isfinite().all() for parameter in self.parameters()):
            optimizer.zero_grad()


class MendsInClipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


class Masked(Net):
    """A bad intermediate that reaches neither loss nor gradient."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        loss = self.layer(x).pow(2)
        bad = (loss.detach() * fault(good)).sum()
        return torch.where(good > 0, loss, loss + 1).mean() + bad.nan_to_num(0)


class Logged(Net):
    """A bad metric."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.log("metric", fault(good))
        self.log_dict({"other": fault(good) * INF}, on_epoch=True)
        return self.layer(x).pow(2).mean()


class LargeGradients(Net):
    """Finite gradients whose sum, or norm, would not be."""

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum() * 1e37

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-38)


HARMLESS = [
    NoBackward,
    SkipsBackward,
    ReturnsNone,
    ZeroesAfterBackward,
    DropsAfterBackward,
    ZeroesBeforeStep,
    DropsBeforeStep,
    MendsInClipping,
    Masked,
    Logged,
    LargeGradients,
]


@pytest.mark.parametrize("confirm", [0, 1])
@pytest.mark.parametrize("make", HARMLESS)
def test_what_user_code_drops_is_no_fault(make, confirm, tmp_path):
    """Nothing is captured, whether or not faults are confirmed, and the run ends as it would have."""
    module = make()
    fit(module, batches(), NaNCapture(tmp_path, confirm=confirm))
    assert bundles_in(tmp_path) == []
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


class Mends(pl.Callback):
    """Somebody's callback against NaN."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.mend)

    def mend(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


@pytest.mark.parametrize("confirm", [0, 1])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_what_another_callback_drops_is_no_fault(hook, confirm, tmp_path):
    """A rerun does without callbacks, and takes into account that their hooks had run in training."""
    fit(Net(), batches(), NaNCapture(tmp_path, confirm=confirm), callbacks=[Mends(hook)])
    assert bundles_in(tmp_path) == []


def test_a_bad_loss_beside_hooks_that_mend_nothing_is_a_fault(tmp_path):
    """The loss is bad, and the gradients were never anything but finite."""
    bundle = capture_one(AddsMending(), batches(), tmp_path)
    assert bundle.fault.found_in == ("loss",)


class AddsMending(Adds):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


class Sparse(Net):
    """An embedding with sparse gradients, the same row twice in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def training_step(self, batch, batch_idx):
        x, good = batch
        return (self.table(torch.tensor([1, 1, 4, 0])) * self.layer(x)).pow(2).mean() * fault(good)


def test_sparse_gradients_are_looked_at(tmp_path):
    """And nothing is made of finite ones."""
    fit(Sparse(), batches(bad=[]), NaNCapture(tmp_path / "good"))
    bundle = capture_one(Sparse(), batches(), tmp_path / "bad")
    assert bundles_in(tmp_path / "good") == []
    assert set(bundle.fault.gradients.nonfinite) == {"table.weight", "layer.weight", "layer.bias"}
    assert replayed(bundle)[0].verdict == "nonfinite"


class Expanded(Net):
    """Its own hook makes a gradient that is an expanded tensor, into which no kernel can write."""

    def on_after_backward(self):
        self.layer.bias.grad = self.good.reciprocal().expand(3)

    def training_step(self, batch, batch_idx):
        x, self.good = batch
        return self.layer(x).pow(2).mean()


def test_gradients_are_looked_at_however_they_lie_in_memory(tmp_path):
    """Whatever made them."""
    bundle = capture_and_replay(Expanded, batches(), tmp_path)
    assert bundle.fault.gradients.nonfinite == ("layer.bias",)


def test_a_parameter_that_no_optimizer_has_is_no_fault(tmp_path):
    """Its gradient reaches no weight."""

    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(1))

        def training_step(self, batch, batch_idx):
            x, good = batch
            return self.layer(x).pow(2).mean() + (self.spare * good).abs().sqrt().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    fit(Partly(), batches(), NaNCapture(tmp_path))
    assert bundles_in(tmp_path) == []


def test_nothing_is_said_about_a_run_without_faults(tmp_path, caplog):
    """No log line, and no folder."""
    module = Net()
    module.save_hyperparameters()
    with caplog.at_level(logging.DEBUG, "pytest_nancapture"):
        fit(module, batches(bad=[]), NaNCapture(tmp_path / "bundles"))
    assert [record.message for record in caplog.records if record.name == "pytest_nancapture"] == []
    assert not (tmp_path / "bundles").exists()
