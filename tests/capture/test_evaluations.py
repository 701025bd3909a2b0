"""Optimizers that evaluate their closure several times a step, as sharpness-aware ones do: from the first step on."""

import inspect
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training import Instants, batches, capture_and_replay, capture_one, differing, fit, replayed, state_of

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.bundle.bundle import Bundle

FAR = 100.0


class Sharp(torch.optim.SGD):
    """Climbs far, evaluates there, comes back, and descends."""

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.climb()
        closure()
        self.come_back()
        super().step()
        return loss

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.clone()
                p.add_(torch.ones_like(p), alpha=FAR)

    @torch.no_grad()
    def come_back(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])


class Wrapping(torch.optim.Optimizer):
    """The same in two calls, around an optimizer that makes the update: as it is most often published."""

    def __init__(self, params):
        params = list(params)
        self.base = torch.optim.SGD(params, lr=0.01, momentum=0.9)
        super().__init__(params, {"lr": 0.01})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(torch.ones_like(p), alpha=FAR)

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class Model(pl.LightningModule):
    """Its loss takes a root that is fine near the weights of the start, and of a negative number far from there."""

    optimizer: Any = Sharp

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def loss(self, batch):
        x, good = batch
        h = self.norm(nn.functional.dropout(self.layer(x), 0.2, self.training))
        far = self.layer.bias.mean()
        return h.pow(2).mean() * 0.01 + self.root(FAR / 2 - far + good * 2 * FAR).sqrt() * 0.001

    def root(self, value):
        return value

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        if self.optimizer is Sharp:
            return Sharp(self.parameters(), lr=0.01, momentum=0.9)
        return self.optimizer(self.parameters())


class ByWrapping(Model):
    optimizer = Wrapping


class ByHand(Model):
    """Manual optimisation, with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class PastLightning(ByHand):
    """The plain torch optimizer."""

    def optimizers(self, use_pl_optimizer=False):
        return super().optimizers(use_pl_optimizer=False)


class InTwoCalls(ByHand):
    """Calls the two parts itself; no ``step`` of an optimizer that Lightning knows is ever called."""

    optimizer = Wrapping

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.first_step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.second_step()
        optimizer.zero_grad()


class OwnHook(Model):
    """Evaluates the closure itself, before it lets the optimizer do so."""

    optimizer = Wrapping

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.first_step()
        optimizer_closure()
        optimizer.second_step()


class Accumulating(Model):
    pass


EVERY = [Model, ByWrapping, ByHand, PastLightning, InTwoCalls]
ROOT = inspect.getsourcelines(Model.loss)[1] + 4


def run(make: Any, folder: Any, bad: int, on_capture: str, **kwargs: Any) -> tuple[pl.LightningModule, Instants, Any]:
    torch.manual_seed(1)
    module, instants, optimizers = make(), Instants(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            optimizers.append(trainer.optimizers[0])

    promise = "the weights are as they were before the step"
    ends = pytest.raises(NonFiniteError, match=promise) if on_capture == "raise" else nullcontext()
    capture = NaNCapture(folder, on_capture=on_capture)
    with ends:
        fit(module, batches(bad=[bad]), capture, callbacks=[instants, Keep()], **kwargs)
    return module, instants, optimizers[0]


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("on_capture", ["raise", "stop", "skip"])
@pytest.mark.parametrize("bad", [0, 4])
def test_a_fault_at_the_perturbed_point_leaves_the_weights_as_they_were(make, on_capture, bad, tmp_path):
    """To the bit, buffers too, in the very first step as in any other; under ``skip`` training goes on from there."""
    module, instants, _ = run(make, tmp_path, bad, on_capture)
    after = instants.states[bad + 1] if on_capture == "skip" else state_of(module)
    assert differing(instants.states[bad], after) == []
    if on_capture == "skip":
        assert "norm.weight" in differing(after, state_of(module))
        assert [name for name, value in state_of(module).items() if not value.isfinite().all()] == []


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("bad", [0, 4])
def test_a_fault_at_the_perturbed_point_is_replayed_there(make, bad, tmp_path):
    """The bundle is of that step, its fault comes back, and the line is that of the forward."""
    torch.manual_seed(1)
    bundle = capture_one(make(), batches(bad=[bad]), tmp_path)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs) == (bad, 1)
    assert (bundle.fault.found_in, bundle.fault.weights) == (("loss", "gradients"), ())
    result, _ = replayed(bundle, make(), trace=True)
    assert (result.verdict, result.culprit.phase, result.culprit.op, result.culprit.line) == (
        "nonfinite",
        "forward",
        "aten.sqrt.default",
        ROOT,
    )
    fixed = make()
    fixed.root = lambda value: value.clamp(min=1)
    assert replayed(bundle, fixed)[0].verdict == "finite"


@pytest.mark.parametrize("make", [Model, ByWrapping])
def test_the_optimizers_state_is_put_back_too(make, tmp_path):
    """And a wrapped optimizer goes on sharing its parameter groups with the one around it."""
    _, _, optimizer = run(make, tmp_path / "bundles", 4, "skip")
    base = getattr(optimizer, "base", optimizer)
    assert base.param_groups is optimizer.param_groups
    assert base.state_dict()["state"].keys() == {0, 1, 2, 3}


def test_a_later_evaluation_draws_other_random_numbers(tmp_path):
    """As in training: the rerun and the replay see the very losses of each evaluation, dropout and all."""
    torch.manual_seed(1)
    capture_and_replay(Model, batches(bad=[3]), tmp_path)


def test_with_accumulation_only_the_last_micro_batch_is_evaluated_again(tmp_path):
    """As Lightning does; the fault is found all the same."""
    torch.manual_seed(1)
    bundle = capture_one(Accumulating(), batches(bad=[3]), tmp_path, accumulate_grad_batches=2)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs, len(bundle.manifest.batch.window)) == (3, 1, 2)
    assert replayed(bundle, Accumulating())[0].verdict == "nonfinite"


class Plain(torch.optim.Optimizer):
    """Not torch's own, and evaluates once."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)
        return loss


@pytest.mark.parametrize(("optimizer", "taken"), [(Plain, [1]), (torch.optim.Adam, []), (Wrapping, [1, 2, 3, 4, 5, 6])])
def test_weights_are_copied_until_it_is_known_that_none_is_needed(optimizer, taken, tmp_path, monkeypatch):
    """Of torch's own optimizers that is known; of others after a step."""
    from pytest_nancapture.step.state.keeper import Keeper

    windows, take = [], Keeper._take

    def noting(self, window, position):
        windows.append(window.number)
        take(self, window, position)

    monkeypatch.setattr(Keeper, "_take", noting)
    module = Model()
    module.optimizer = optimizer
    fit(module, batches(bad=[]), NaNCapture(tmp_path))
    assert windows == taken


class Zero(Sharp):
    """Climbs along the gradient, whose size may be 0."""

    @torch.no_grad()
    def climb(self):
        size = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        for p in self.param_groups[0]["params"]:
            self.state[p]["before"] = p.clone()
            p.add_(self.direction(p.grad, size))

    def direction(self, grad, size):
        return grad * (1.0 / size)


class ClimbsNowhere(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).pow(2).mean() * good

    def configure_optimizers(self):
        return Zero(self.parameters(), lr=0.01)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_point_that_the_optimizer_made_bad_is_its_own_codes_fault(bad, tmp_path):
    """The loss is bad only there; the line is in the optimizer, and the step is this one."""
    bundle = capture_one(ClimbsNowhere(), batches(bad=[bad]), tmp_path)
    line = inspect.getsourcelines(Zero.direction)[1] + 1
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs, bundle.fault.weights) == (bad, 1, ())
    assert (bundle.fault.culprit["phase"], bundle.fault.culprit["line"]) == ("optimizer", line)
    for trace in (False, True):
        assert replayed(bundle, ClimbsNowhere(), trace=trace)[0].culprit.phase == "optimizer"


def test_the_promise_is_made_only_where_it_is_true(tmp_path):
    """An optimizer that evaluates once for some steps, and then twice: what it has moved by then is not put back."""

    class Late(Sharp):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps < 4:
                return torch.optim.SGD.step(self, closure)
            return super().step(closure)

    class Lately(Model):
        def configure_optimizers(self):
            return Late(self.parameters(), lr=0.01)

    with pytest.raises(NonFiniteError) as caught:
        fit(Lately(), batches(bad=[3]), NaNCapture(tmp_path))
    assert str(caught.value).endswith(
        "; the step had written layer.bias, layer.weight, norm.bias, norm.weight before a copy "
        "was made, which cannot be put back"
    )
    (path,) = find_bundles(tmp_path)
    assert Bundle.open(path).fault.global_step == 3
