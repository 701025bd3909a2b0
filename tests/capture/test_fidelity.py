"""What a replay computes is what training computed, to the last bit."""

import dataclasses
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from training import Recorder, capture_one, replayed, same

from pytest_nancapture.bundle.bundle import Bundle


@dataclasses.dataclass(frozen=True)
class Plan:
    """A random small network, how it is trained, and where its fault is planted."""

    width: int
    depth: int
    batch_norm: bool
    dropout: float
    tied: bool
    manual: bool
    accumulate: int
    precision: str
    optimizer: str
    bad: int
    backward_only: bool


class Net(pl.LightningModule):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.plan = plan
        self.automatic_optimization = not plan.manual
        self.layers = nn.ModuleList(nn.Linear(plan.width, plan.width) for _ in range(plan.depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(plan.width) for _ in range(plan.depth if plan.batch_norm else 0))
        if plan.tied:
            self.layers.append(nn.Linear(plan.width, plan.width))
            self.layers[-1].weight = self.layers[0].weight
        self.scale = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        h, good = batch
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if i < len(self.norms):
                h = self.norms[i](h)
            h = nn.functional.dropout(torch.tanh(h), self.plan.dropout, self.training)
        h = h.float()
        if self.plan.backward_only:
            root = (self.scale * good[0] + 1 - good[0]).abs().add(good[0]).sub(1 - good[0]).sqrt()
            loss = h.pow(2).mean() + root.sum()
        else:
            loss = h.pow(2).mean() * (good.sum() / good.sum())
        if not self.plan.manual:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss / self.plan.accumulate)
        if (batch_idx + 1) % self.plan.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.plan.optimizer)(self.parameters(), lr=1e-2)


plans = st.builds(
    Plan,
    width=st.integers(1, 5),
    depth=st.integers(1, 3),
    batch_norm=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    tied=st.booleans(),
    manual=st.booleans(),
    accumulate=st.integers(1, 4),
    precision=st.sampled_from(["32-true", "bf16-mixed"]),
    optimizer=st.sampled_from(["SGD", "Adam", "AdamW"]),
    bad=st.integers(0, 7),
    backward_only=st.booleans(),
)


def capture_plan(plan: Plan, seed: int, folder: str, **kwargs: Any) -> Bundle:
    """Train as planned until the fault; a manual window that the fault ends in is always closed."""
    torch.manual_seed(seed)
    batches = [(torch.randn(3, plan.width), torch.full((2,), float(i != plan.bad))) for i in range(8)]
    batches += [(torch.randn(3, plan.width), torch.ones(2)) for _ in range(4 if plan.manual else 0)]
    if not plan.manual:
        kwargs["accumulate_grad_batches"] = plan.accumulate
    return capture_one(Net(plan), batches, folder, precision=plan.precision, **kwargs)


def differing(first: Recorder, second: Recorder, window: int) -> list[Any]:
    """What two runs of the window's step did not compute alike, to the bit."""
    losses = [recorder.losses[-window:] for recorder in (first, second)]
    assert [len(each) for each in losses] == [window, window]
    assert first.gradients.keys() == second.gradients.keys() != set()
    gradients = [name for name, value in first.gradients.items() if not same(value, second.gradients[name])]
    return [*gradients, *(i for i, pair in enumerate(zip(*losses, strict=True)) if not same(*pair))]


@settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(plan=plans, seed=st.integers(0, 1000))
def test_a_replay_repeats_losses_and_gradients_bit_for_bit(plan, seed):
    """For any small network, way of training and step at which the fault is planted."""
    trained = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        bundle = capture_plan(plan, seed, folder, callbacks=[trained])
        result, again = replayed(bundle)
    assert (result.verdict, bundle.fault.batch_idx) == ("nonfinite", plan.bad), result
    assert bundle.fault.reproduced.runs == 1
    assert len(again.losses) == len(bundle.manifest.batch.window)
    assert differing(trained, again, len(again.losses)) == []


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=15)
@given(plan=plans, seed=st.integers(0, 1000))
def test_a_trace_changes_nothing(plan, seed):
    """Losses and gradients of a traced replay are those of a plain one, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = capture_plan(plan, seed, folder, trace=False)
        (plain, first), (traced, second) = (replayed(bundle, trace=trace) for trace in (False, True))
    assert (plain.verdict, plain.nonfinite, plain.reason) == (traced.verdict, traced.nonfinite, traced.reason)
    assert differing(first, second, len(bundle.manifest.batch.window)) == []
    assert traced.culprit.op != ""
