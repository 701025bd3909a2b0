"""The culprit: the first cause that mattered, on the user's line, whichever way it travelled."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles, replay
from pytest_nancapture.capture.proof import prove
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.result import ReplayResult

prove.FRESH = False  # what starts processes is tested in test_proofs.py

NAN, INF = float("nan"), float("inf")


class Model(pl.LightningModule):
    """Its step is a function of the weight, shape [4], the batch, and whether the fault is to strike."""

    def __init__(
        self, step: Callable[[Any, torch.Tensor, bool], torch.Tensor], optimizer: Any = torch.optim.SGD
    ) -> None:
        super().__init__()
        self.step, self.optimizer = step, optimizer
        self.weight = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1, batch_first=True))
        self.table = nn.Embedding(4, 2, sparse=True)
        self.register_buffer("average", torch.ones(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, bad = batch
        return self.step(self, x, bad)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=1e-3)


def culprit_of(
    step: Any, folder: Any, *, x: torch.Tensor | None = None, optimizer: Any = torch.optim.SGD, **kwargs: Any
) -> Culprit:
    """Train a good step and a bad one, capture, replay traced; the traced replay sees what the plain one sees."""
    torch.manual_seed(0)
    batches = [(torch.ones(4), False), (torch.ones(4) if x is None else x, True)]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[NaNCapture(folder, **kwargs)], **quiet)
    with pytest.raises(NonFiniteError):
        trainer.fit(Model(step, optimizer), torch.utils.data.DataLoader(batches, batch_size=None))
    (path,) = find_bundles(folder)
    plain, traced = (replay(path, module=Model(step, optimizer), trace=trace) for trace in (False, True))
    assert outcome(plain) == outcome(traced)
    assert traced.culprit is not None
    return traced.culprit


def outcome(result: ReplayResult) -> tuple[Any, ...]:
    return (result.verdict, str(result.loss), result.nonfinite, result.reason)


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# The text after "# blame" in each step is on the guilty line.


def division(model, x, bad):
    count = x.sum() * (0 if bad else 1)
    return (model.weight / count).sum()  # blame


def log_of_zero(model, x, bad):
    shifted = torch.relu(model.weight - (5 if bad else 0))
    return torch.log(shifted).mul(x).sum()  # blame


def overflow(model, x, bad):
    big = torch.exp(model.weight * (100 if bad else 1))  # blame
    return (big / big.sum()).sum() * x.sum()


def empty_row(model, x, bad):
    scores = model.weight.masked_fill(torch.full((4,), bad), -INF)
    return (torch.softmax(scores, 0) * x).sum()  # blame


def attention(model, x, bad):
    tokens = model.inner[0](x).reshape(1, 4, 1).expand(1, 4, 4)
    out, _ = model.inner[1](tokens, tokens, tokens, key_padding_mask=torch.full((1, 4), bad))  # blame
    return out.sum()


def masked_then_bad(model, x, bad):
    scores = model.weight.masked_fill(torch.tensor([True, False, False, False]), -INF)
    weights = torch.softmax(scores, 0)
    return (weights / (0 if bad else 1)).sum()  # blame


def overflow_selected_away(model, x, bad):
    harmless = torch.where(x > 5, torch.exp(x.detach() * 1000), x)
    return (harmless * model.weight / (0.0 if bad else 1.0)).sum()  # blame


def metric_beside(model, x, bad):
    with torch.no_grad():
        model.metric = ((x - x) / (x - x)).mean()
    return (model.weight / (0 if bad else 1)).sum()  # blame


def lane_beside(model, x, bad):
    first = torch.tensor([True, False, False, False])
    padded = torch.log(x * ~first)
    total = padded + model.weight / torch.tensor([1.0, 1.0, 0.0 if bad else 1.0, 1.0])  # blame
    return torch.where(first, 0.0, total).sum()


def in_one_lane_of_many(model, x, bad):
    lanes = torch.exp(torch.tensor([1000.0, 1.0, 1.0, 1.0]) * x)
    total = lanes + model.weight / torch.tensor([1.0, 1.0, 0.0 if bad else 1.0, 1.0])  # blame
    return torch.where(torch.arange(4) == 0, 0.0, total).sum()


def sqrt_gradient(model, x, bad):
    root = torch.sqrt(model.weight * (0 if bad else 1))  # blame
    return root.sum()


def where_trap(model, x, bad):
    safe = torch.where(model.weight > 0, model.weight, torch.exp(-model.weight * (1e3 if bad else 1)))
    return (safe * x).sum() + log_branch(model, bad)


def log_branch(model, bad):
    d = model.weight - (model.weight.detach() if bad else 0)
    return torch.where(d > 1.2, torch.log(d), d).sum()  # blame


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, bad):
        ctx.bad = bad
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (0 if ctx.bad else 1), None  # blame


def custom_function(model, x, bad):
    return Steep.apply(model.weight, bad).sum()


def in_checkpoint(model, x, bad):
    def block(weight):
        return weight / (0 if bad else 1)  # blame

    return checkpoint(block, model.weight, use_reentrant=False).sum()


def second_order(model, x, bad):
    (inner,) = torch.autograd.grad((model.weight * x).pow(2).sum(), model.weight, create_graph=True)
    return torch.sqrt((inner * (0 if bad else 1)).pow(2).sum())  # blame


def in_place(model, x, bad):
    value = model.weight * 1
    value.div_(0 if bad else 1)  # blame
    return value.sum()


def complex_phase(model, x, bad):
    z = torch.complex(model.weight * (0 if bad else 1), torch.zeros(4))
    return (z / z.abs()).abs().sum()  # blame


def compiled(model, x, bad):
    def inside(weight, divisor):
        return (weight / divisor).sum()  # blame

    return torch.compile(inside, backend="aot_eager")(model.weight, x.sum() * (0 if bad else 1))


def all_ignored(model, x, bad):
    target = torch.tensor([-100 if bad else 1])
    return F.cross_entropy(model.weight[None], target)  # blame


def half(model, x, bad):
    wide = model.weight * (1e5 if bad else 1)
    return wide.half().float().sum()  # blame


def poisoned_buffer(model, x, bad):
    model.average.copy_(x / (0 if bad else 1))  # blame
    return (model.weight * x).sum()


def sparse(model, x, bad):
    rows = model.table(torch.tensor([0, 2])) * model.weight[:2]
    return torch.sqrt(rows.sum() * (0 if bad else 1))  # blame


STEPS = {
    division: ("aten.div.Tensor", "forward"),
    log_of_zero: ("aten.log.default", "forward"),
    overflow: ("aten.exp.default", "forward"),
    empty_row: ("aten._softmax.default", "forward"),
    attention: ("aten._softmax.default", "forward"),
    masked_then_bad: ("aten.div.Tensor", "forward"),
    overflow_selected_away: ("aten.div.Tensor", "forward"),
    metric_beside: ("aten.div.Tensor", "forward"),
    lane_beside: ("aten.div.Tensor", "forward"),
    in_one_lane_of_many: ("aten.div.Tensor", "forward"),
    sqrt_gradient: ("aten.sqrt.default", "backward"),
    where_trap: ("aten.log.default", "backward"),
    custom_function: ("aten.div.Tensor", "backward"),
    in_checkpoint: ("aten.div.Tensor", "forward"),
    second_order: ("aten.sqrt.default", "backward"),
    in_place: ("aten.div_.Tensor", "forward"),
    complex_phase: ("aten.div.Tensor", "forward"),
    compiled: ("aten.div.Tensor", "forward"),
    all_ignored: ("aten.nll_loss_forward.default", "forward"),
    half: ("aten._to_copy.default", "forward"),
    poisoned_buffer: ("aten.div.Tensor", "forward"),
    sparse: ("aten.sqrt.default", "backward"),
}
ELSEWHERE = {where_trap: log_branch, custom_function: Steep}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_the_guilty_operation_and_line_are_named(tmp_path, step):
    """Harmless infinities on the way, masks and lanes that are selected away, are not blamed."""
    culprit = culprit_of(step, tmp_path)
    place = line_of(ELSEWHERE.get(step, step), "# blame")
    assert (culprit.op, culprit.phase, culprit.line) == (*STEPS[step], place)
    assert culprit.file.endswith("test_blame.py")
    assert culprit.source.endswith("# blame")


def test_a_fault_of_the_update_is_blamed_on_the_optimizer(tmp_path):
    """With the history that it takes to replay an update."""

    class Normalised(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / p.grad.norm())  # blame

    def step(model, x, bad):
        return (model.weight * (0 if bad else 1)).sum()

    culprit = culprit_of(step, tmp_path, optimizer=Normalised, optimizer_history=True)
    assert (culprit.op, culprit.phase) == ("aten.div.Tensor", "optimizer")
    assert culprit.line == line_of(test_a_fault_of_the_update_is_blamed_on_the_optimizer, "# blame")


def test_a_bad_batch_is_blamed_itself(tmp_path):
    """With the leaf, how many values, and in which sample."""

    def step(model, x, bad):
        return (model.weight * x).sum()

    culprit = culprit_of(step, tmp_path, x=torch.tensor([1.0, NAN, 1.0, 1.0]))
    assert (culprit.phase, culprit.op) == ("input", "")
    assert culprit.explanation == "batch[0] holds 1 NaN among 4 values, in sample 1 of 4"


def test_a_bad_value_of_the_batch_that_is_masked_is_not_blamed(tmp_path):
    """The fault lies elsewhere, and that is named."""

    def step(model, x, bad):
        seen = torch.nan_to_num(x)
        return (model.weight * seen / (0 if bad else 1)).sum()  # blame

    culprit = culprit_of(step, tmp_path, x=torch.tensor([1.0, NAN, 1.0, 1.0]))
    assert (culprit.phase, culprit.op) == ("forward", "aten.div.Tensor")


def test_the_submodule_is_named(tmp_path):
    """As the path from the module's root."""

    class Dividing(nn.Module):
        def forward(self, value, divisor):
            return value / divisor

    def step(model, x, bad):
        return model.inner.late(model.weight, 0 if bad else 1).sum()

    original = Model.__init__

    def with_late(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.inner.add_module("late", Dividing())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "__init__", with_late)
        assert culprit_of(step, tmp_path).module_path == "inner.late"


@pytest.mark.parametrize(
    ("step", "explanation"),
    [
        (division, "division by zero: the divisor is 0 in its only place; keep it above 0, as with clamp(min=...)"),
        (log_of_zero, "logarithm of what is not positive: 0 in 4 of 4 places; add an eps or clamp"),
        (overflow, "exp overflows float32 above 88.72: the largest input is 200.0; clamp it or scale it down"),
        (empty_row, "softmax over a row that is entirely -inf: row 0 of 1; leave an entry in each"),
        (sqrt_gradient, "the gradient of sqrt at 0 is infinite (in 4 of 4 places); add an eps under the root"),
        (
            all_ignored,
            "all targets are ignored: a mean over 0 elements; divide the sum by the number of targets, at least 1",
        ),
        (half, "overflow: float16 ends at 6.55e+04, the largest input is 199900.0 in size"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_explanation_comes_from_the_values(tmp_path, step, explanation):
    """In a sentence, with the usual remedy."""
    assert culprit_of(step, tmp_path).explanation == explanation


def long_way(model, x, bad):
    value = model.weight / (0 if bad else 1)
    value = value + x
    value = value * 2
    value = value - x
    value = value.abs()
    value = value + 1
    value = value * x
    return value.sum()


def test_the_chain_leads_from_the_birth_to_the_symptom(tmp_path):
    """An operation for each line on the way, the first the culprit's own."""
    chain = culprit_of(overflow, tmp_path).chain
    assert [(step.split()[0], step.split("   ")[-1]) for step in chain] == [
        ("aten.exp.default", "big = torch.exp(model.weight * (100 if bad else 1))  # blame"),
        ("aten.div.Tensor", "return (big / big.sum()).sum() * x.sum()"),
    ]


def test_the_middle_of_a_long_chain_is_left_out(tmp_path):
    """Its ends tell the most."""
    chain = culprit_of(long_way, tmp_path).chain
    assert [step.split()[0] for step in chain] == [
        *("aten.div.Tensor", "aten.add.Tensor", "aten.mul.Tensor", "...", "aten.add.Tensor", "aten.mul.Tensor"),
        "aten.sum.default",
    ]
    assert chain[3] == "... 2 more"


def test_a_fault_under_lbfgs_is_blamed(tmp_path):
    """In whichever evaluation of the closure it comes."""
    culprit = culprit_of(division, tmp_path, optimizer=torch.optim.LBFGS)
    assert (culprit.op, culprit.line) == ("aten.div.Tensor", line_of(division, "# blame"))


def test_the_guilty_expression_in_the_line_is_known(tmp_path):
    """Its first and last character, where Python tells (from 3.11 on)."""
    culprit = culprit_of(division, tmp_path)
    line = inspect.getsourcelines(division)[0][2]
    start, end = culprit.columns
    expected = "model.weight / count" if sys.version_info >= (3, 11) else ""
    assert line[max(start - 1, 0) : end].strip("()") == expected


def test_the_line_in_the_library_is_told_beside_the_users(tmp_path):
    """Where the operation lies inside of torch.nn; an operation of the user's own has none."""
    inside = culprit_of(attention, tmp_path / "a").library
    assert re.fullmatch(r"torch/nn/functional\.py:\d+", inside)
    assert culprit_of(division, tmp_path / "b").library == ""
