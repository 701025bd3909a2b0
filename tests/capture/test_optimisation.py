"""Ways to optimise: each one's faults are captured at the right step, and replayed to the bit."""

from collections import OrderedDict
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training import Net, NormNet, batches, capture_and_replay, differing, fault, fit, replayed, state_of

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.bundle.bundle import Bundle


class Manual(pl.LightningModule):
    """A generator and a critic, each with an optimizer of its own."""

    def __init__(self, bad_part: str = "generator") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bad_part = bad_part
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def bad(self, part: str, good: torch.Tensor) -> torch.Tensor:
        return fault(good) if part == self.bad_part else torch.ones(())

    def update(self, optimizer: Any, loss: torch.Tensor, **kwargs: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss, **kwargs)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())


class Gan(Manual):
    """The critic's update comes first, so the generator's loss is one with the critic's new weights."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(4, 3))
        self.update(for_critic, (self.critic(fake.detach()) - self.critic(x)).mean() * self.bad("critic", good))
        self.update(for_generator, -self.critic(fake).mean() * self.bad("generator", good))


class CriticGan(Gan):
    def __init__(self) -> None:
        super().__init__("critic")


class Toggled(Gan):
    """Only one part's parameters require gradients at a time."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_critic)
        fake = self.generator(torch.randn(4, 3))
        self.update(for_critic, (self.critic(fake.detach()) - self.critic(x)).mean() * self.bad("critic", good))
        self.untoggle_optimizer(for_critic)
        self.toggle_optimizer(for_generator)
        self.update(for_generator, -self.critic(self.generator(x)).mean() * self.bad("generator", good))
        self.untoggle_optimizer(for_generator)


class GradientPenalty(Manual):
    """WGAN-GP: the norm of the critic's gradient is part of its loss; several critic steps to one of the generator."""

    def __init__(self) -> None:
        super().__init__("critic")

    def training_step(self, batch, batch_idx):
        x, good = batch
        for_generator, for_critic = self.optimizers()
        for round_ in range(3):
            between = torch.lerp(x, self.generator(torch.randn(4, 3)).detach(), torch.rand(4, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            last = good if round_ == 2 else torch.ones(())
            penalty = (slope.mul(last).pow(2).sum(1).sqrt() - 1).pow(2).mean()
            self.update(for_critic, self.critic(between).mean() + penalty)
        self.update(for_generator, -self.critic(self.generator(x)).mean())


class Clamped(Manual):
    """WGAN: the critic's weights are clamped through ``.data`` after its update."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        for_generator, for_critic = self.optimizers()
        self.update(for_critic, (self.critic(self.generator(x).detach()) - self.critic(x)).mean())
        for weight in self.critic.parameters():
            weight.data.clamp_(-0.05, 0.05)
        self.update(for_generator, -self.critic(self.generator(x)).mean() * self.bad("generator", good))


@pytest.mark.parametrize(
    ("make", "bad_part", "guilty_step", "steps"),
    [
        (Gan, "generator", 1, 2),
        (CriticGan, "critic", 0, 2),
        (Toggled, "generator", 1, 2),
        (GradientPenalty, "critic", 2, 4),
        (Clamped, "generator", 1, 2),
    ],
)
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_the_guilty_of_several_optimizers_is_found(make, bad_part, guilty_step, steps, bad, tmp_path):
    """Its step counted within the ``training_step``; the weights from before the earlier ones."""
    bundle = capture_and_replay(make, batches(bad=[bad]), tmp_path)
    trainer = bundle.manifest.trainer
    assert (trainer.guilty_step, trainer.global_step, bundle.fault.batch_idx) == (guilty_step, bad * steps, bad)
    assert {name.partition(".")[0] for name in bundle.fault.gradients.nonfinite} == {bad_part}
    assert bundle.fault.reproduced.runs == 1


class ReadsStep(Gan):
    """Its loss is made of the global step, which each of the two updates moves on."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        super().training_step((x * (1 + self.global_step), good), batch_idx)


def test_a_rerun_reads_the_global_step_of_the_instant(tmp_path):
    """Though an earlier optimizer of the same ``training_step`` has moved it on."""
    seen = []

    class Notes(ReadsStep):
        def training_step(self, batch, batch_idx):
            seen.append(self.global_step)
            super().training_step(batch, batch_idx)

    capture = NaNCapture(tmp_path, on_capture="skip", trace=False)
    fit(Notes(), batches(bad=[2]), capture)
    assert seen == [0, 2, 4, 4, 6, 8, 10]


class Quadratic(pl.LightningModule):
    """Trained by LBFGS, which evaluates its closure many times a step; bad from the n-th evaluation on."""

    def __init__(self, bad_evaluation: int = 0) -> None:
        super().__init__()
        self.bad_evaluation = bad_evaluation
        self.evaluations = 0
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.evaluations += 1
        number = self.evaluations if batch_idx == 2 else 0
        if batch_idx == 1:
            self.evaluations = 0
        bad = not good and number > self.bad_evaluation
        return (
            ((x @ self.weight - 1).pow(2).mean() + self.weight.pow(4).sum()) / (0.0 if bad else 1.0) * (0 if bad else 1)
        )

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)


class FirstEvaluation(Quadratic):
    pass


class LaterEvaluation(Quadratic):
    def __init__(self) -> None:
        super().__init__(3)


@pytest.mark.parametrize(("make", "evaluation"), [(FirstEvaluation, 0), (LaterEvaluation, 3)])
def test_any_evaluation_of_lbfgs_may_be_the_guilty_one(make, evaluation, tmp_path):
    """Before a later one the optimizer has moved the weights: its history is in the bundle, to do so again."""
    bundle = capture_and_replay(make, batches(bad=[2]), tmp_path)
    assert (bundle.manifest.trainer.guilty_step, bundle.fault.global_step) == (evaluation, 2)
    assert (bundle.manifest.optimizer is not None) == (evaluation > 0)
    assert bundle.fault.reproduced.runs == 1


def test_lbfgs_goes_on_from_the_weights_before_a_dropped_step(tmp_path):
    """With the history that it had then."""
    module, states = LaterEvaluation(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            states.append(state_of(pl_module))

    fit(module, batches(bad=[2]), NaNCapture(tmp_path, on_capture="skip"), callbacks=[Keep()])
    assert differing(states[2], states[3]) == []
    assert differing(states[3], states[4]) == ["weight"]


class ReturnsDict(NormNet):
    """The loss in a dict, with things that are none."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "seen": torch.tensor(float("nan")), "names": ["a"]}


class ReturnsOrderedDict(NormNet):
    def training_step(self, batch, batch_idx):
        return OrderedDict(loss=super().training_step(batch, batch_idx))


class TakesNoIndex(Net):
    """Signature without ``batch_idx``."""

    def training_step(self, batch):
        return super().training_step(batch, 0)


class Fused(NormNet):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Scheduled(NormNet):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnStep(NormNet):
    """Warms the learning rate up, as Lightning's own documentation has it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.trainer.global_step)


class SumOfLosses(NormNet):
    """A loss that is no scalar's own tensor but a view."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).reshape(1)[0]


@pytest.mark.parametrize(
    "make", [ReturnsDict, ReturnsOrderedDict, TakesNoIndex, Fused, Scheduled, OwnStep, SumOfLosses]
)
def test_any_automatic_optimisation_is_replayed(make, tmp_path):
    """Whatever ``training_step`` returns and whoever makes the update."""
    bundle = capture_and_replay(make, batches(), tmp_path)
    assert (bundle.fault.global_step, bundle.fault.reproduced.runs) == (4, 1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_set_in_the_replay(algorithm, tmp_path):
    """As the bundle says."""
    kwargs = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    trainer = capture_and_replay(NormNet, batches(), tmp_path, **kwargs).manifest.trainer
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (0.01, algorithm)


class StepsWithClosure(Gan):
    """Manual steps may have closures too."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        for_generator, for_critic = self.optimizers()

        def closure():
            loss = self.critic(x).mean() * self.bad("critic", good)
            for_critic.zero_grad()
            self.manual_backward(loss)
            return loss

        for_critic.step(closure)
        self.update(for_generator, -self.critic(self.generator(x)).mean() * self.bad("generator", good))


def test_a_manual_step_with_a_closure_is_captured(tmp_path):
    """The backward pass is then made within the step."""
    bundle = capture_and_replay(StepsWithClosure, batches(), tmp_path)
    assert (bundle.manifest.trainer.guilty_step, bundle.fault.batch_idx) == (1, 4)


class RawOptimizer(pl.LightningModule):
    """Steps the plain torch optimizer, past Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, good = batch
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.layer(x).pow(2).mean() * fault(good))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("on_capture", ["raise", "stop", "skip"])
def test_a_step_made_past_lightning_is_watched_too(on_capture, tmp_path):
    """``use_pl_optimizer=False`` leaves the hooks out; the weights stay as they were all the same."""
    module, states = RawOptimizer(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            states.append(state_of(pl_module))

    try:
        fit(module, batches(), NaNCapture(tmp_path, on_capture=on_capture), callbacks=[Keep()])
    except NonFiniteError:
        assert on_capture == "raise"
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs, len(bundle.manifest.batch.window)) == (4, 1, 1)
    assert differing(states[4], states[5] if on_capture == "skip" else state_of(module)) == []
    assert replayed(bundle)[0].verdict == "nonfinite"
