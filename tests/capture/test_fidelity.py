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


@settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(plan=plans, seed=st.integers(0, 1000))
def test_a_replay_repeats_losses_and_gradients_bit_for_bit(plan, seed):
    """For any small network, way of training and step at which the fault is planted."""
    torch.manual_seed(seed)
    batches = [(torch.randn(3, plan.width), torch.full((2,), float(i != plan.bad))) for i in range(8)]
    kwargs = {"precision": plan.precision}
    if not plan.manual:
        kwargs["accumulate_grad_batches"] = plan.accumulate
    else:
        batches += [(torch.randn(3, plan.width), torch.ones(2)) for _ in range(4)]
    trained = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        bundle = capture_one(Net(plan), batches, folder, callbacks=[trained], **kwargs)
        result, again = replayed(bundle)
    assert (result.verdict, bundle.fault.batch_idx) == ("nonfinite", plan.bad), result
    assert bundle.fault.reproduced.runs == 1
    window = len(bundle.manifest.batch.window)
    assert all(map(same, trained.losses[-window:], again.losses))
    assert len(again.losses) == window
    assert trained.gradients.keys() == again.gradients.keys()
    assert [name for name, value in trained.gradients.items() if not same(value, again.gradients[name])] == []


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=15)
@given(plan=plans, seed=st.integers(0, 1000))
def test_a_trace_changes_nothing(plan, seed):
    """Losses and gradients of a traced replay are those of a plain one, bit for bit."""
    torch.manual_seed(seed)
    batches = [(torch.randn(3, plan.width), torch.full((2,), float(i != plan.bad))) for i in range(12)]
    kwargs = {"precision": plan.precision}
    if not plan.manual:
        kwargs["accumulate_grad_batches"] = plan.accumulate
    with tempfile.TemporaryDirectory() as folder:
        bundle = capture_one(Net(plan), batches, folder, trace=False, **kwargs)
        (plain, first), (traced, second) = (replayed(bundle, trace=trace) for trace in (False, True))
    assert (plain.verdict, plain.nonfinite, plain.reason) == (traced.verdict, traced.nonfinite, traced.reason)
    assert all(map(same, first.losses, second.losses))
    assert [name for name, value in first.gradients.items() if not same(value, second.gradients[name])] == []
    assert traced.culprit.op != ""
