"""The words of blame: a number that is not finite, a step, a checkpoint; each is named only where it is known."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training import Net, batches, capture_one, fault, fit, replayed

from pytest_nancapture import NaNCapture, find_bundles
from pytest_nancapture.bundle.bundle import Bundle

INF, NAN = float("inf"), float("nan")


def said(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pytest_nancapture"]


class SetsNumber(Net):
    """A hook of its own sets a hyperparameter, once, to what is not finite."""

    name, good, bad = "lr", 0.1, INF

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        bad = self.trainer.fit_loop.epoch_loop.batch_idx == 3
        optimizer.param_groups[1][self.name] = self.number() if bad else self.good

    def number(self):
        return self.bad

    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": [p]} for p in self.parameters()], lr=0.1)


class Beta(SetsNumber):
    name, good, bad = "betas", (0.9, 0.99), (0.9, NAN)


class Decay(SetsNumber):
    name, good, bad = "weight_decay", 0.0, NAN


class RateTensor(SetsNumber):
    name, good, bad = "lr", torch.tensor(0.1), torch.tensor(NAN)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (SetsNumber, "the learning rate (lr) of parameter group 1 is inf"),
        (Beta, "the beta (betas) of parameter group 1 is nan"),
        (Decay, "the weight_decay of parameter group 1 is nan"),
        (RateTensor, "the learning rate (lr) of parameter group 1 is nan"),
    ],
)
def test_a_number_of_the_optimizer_that_is_not_finite_is_named(make, words, tmp_path, caplog):
    """With its parameter group, in the log, in the bundle, and in a replay, traced or not."""
    bundle = capture_one(make(), batches(bad=[]), tmp_path, optimizer_history=True)
    assert (bundle.fault.global_step, bundle.fault.found_in) == (3, ("weights",))
    assert f"nancapture: {words}; an update with it makes weights bad" in said(caplog)
    assert words in bundle.fault.culprit["explanation"]
    for trace in (False, True):
        result, _ = replayed(bundle, make(), trace=trace)
        assert (result.culprit.phase, words in result.culprit.explanation) == ("optimizer", True)


def test_the_fix_of_a_hook_that_sets_a_number_turns_the_test_green(tmp_path):
    """The bundle holds the numbers from before the module's own hooks, which run again."""
    bundle = capture_one(AddsToRate(), batches(bad=[]), tmp_path, optimizer_history=True)
    fixed = AddsToRate()
    fixed.number = lambda: 0.0
    assert [replayed(bundle, module)[0].verdict for module in (AddsToRate(), fixed)] == ["nonfinite", "finite"]


class AddsToRate(SetsNumber):
    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] += self.number() if self.trainer.fit_loop.epoch_loop.batch_idx == 3 else 0.0


def test_a_number_made_of_a_tensors_value_leads_to_its_line(tmp_path):
    """Though it left torch in between."""

    class OfNorm(AddsToRate):
        def number(self):
            zero = torch.zeros(())
            return (1 / zero).item()

    culprit = capture_one(OfNorm(), batches(bad=[]), tmp_path, optimizer_history=True).fault.culprit
    assert (culprit["op"], culprit["source"]) == ("aten.reciprocal.default", "return (1 / zero).item()")
    assert "the learning rate (lr) of parameter group 0 is inf" in culprit["explanation"]


@pytest.mark.parametrize("on_capture", ["skip", "stop"])
def test_a_number_that_a_hook_has_set_is_put_back(on_capture, tmp_path):
    """As of the instant, with a history or without."""
    rates = []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_end(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    capture = NaNCapture(tmp_path, on_capture=on_capture, optimizer_history=True)
    fit(AddsToRate(), batches(5, bad=[]), capture, callbacks=[Keep()])
    assert set(rates) == {0.1}


class Explodes(Net):
    """The update of one step makes its weights Inf; the step after trips over them."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e38 if step == self.bad else 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean() * 1e3


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (3, "the update of step 3 is to blame"),
        (5, "the update of some step up to 5 is to blame, as they were seen finite when step 3 began"),
    ],
)
def test_a_step_is_named_only_where_it_is_known(bad, words, tmp_path, caplog):
    """Weights are looked at rarely: a step that was looked at is known, and else a range."""
    capture_one(Explodes(bad), batches(8, bad=[]), tmp_path)
    (blame,) = [message for message in said(caplog) if "to blame" in message]
    assert blame == (
        f"nancapture: the weights were not finite before the step began: {words}; capture that with "
        "NaNCapture(optimizer_history=True)"
    )


class Unused(Net):
    """A part of it is used from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.late(batch[0]).sum() if batch_idx > 3 else 0)


def test_weights_that_were_bad_from_the_start_are_so_whenever_they_are_used(tmp_path, caplog):
    """No update is blamed for them."""
    module = Unused()
    module.late.bias.data[0] = NAN
    bundle = capture_one(module, batches(bad=[]), tmp_path)
    assert (bundle.fault.global_step, bundle.fault.weights) == (4, ("late.bias",))
    assert said(caplog)[-3] == (
        "nancapture: the weights were not finite when training began: the initialisation or the checkpoint is to blame"
    )


def saved(module: pl.LightningModule, folder, spoil) -> str:
    """A checkpoint after two steps, spoiled."""
    path = str(folder / "spoiled.ckpt")
    fit(module, batches(2, bad=[]), None).save_checkpoint(path)
    state = torch.load(path, weights_only=False)
    spoil(state)
    torch.save(state, path)
    return path


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_bad_weights_of_a_checkpoint_are_the_checkpoints(tmp_path, caplog):
    """A run that was resumed names it."""
    path = saved(Net(), tmp_path, lambda state: state["state_dict"]["layer.bias"].fill_(NAN))
    capture_one(Net(), batches(bad=[]), tmp_path / "b", ckpt_path=path, max_epochs=2)
    assert (
        f"nancapture: the weights were not finite when training began: the state came from the checkpoint {path}"
        in said(caplog)
    )


@pytest.mark.parametrize("history", [True, False])
def test_a_bad_optimizer_state_of_a_checkpoint_is_the_checkpoints(history, tmp_path, caplog):
    """Weights go bad in the first update."""

    def spoil(state):
        state["optimizer_states"][0]["state"][0]["momentum_buffer"].fill_(INF)

    path = saved(Momentum(), tmp_path, spoil)
    capture_one(Momentum(), batches(bad=[]), tmp_path / "b", ckpt_path=path, max_epochs=2, optimizer_history=history)
    (blame,) = [message for message in said(caplog) if "came from" in message]
    assert blame == (
        "nancapture: momentum_buffer of the optimizer's state was not finite when training began: the state came from "
        f"the checkpoint {path}"
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"trace": False}, "trace=False; a replay names it, and so does NaNCapture(trace=True)"),
        (
            {"confirm": 0},
            "confirm=0 leaves out the reruns that tell; a replay names it, and so does NaNCapture(confirm=1)",
        ),
    ],
)
def test_the_log_says_why_there_is_no_culprit(options, why, tmp_path, caplog):
    """And how to get one."""
    capture_one(Net(), batches(), tmp_path, **options)
    assert said(caplog)[1] == f"nancapture: no culprit: {why}"


def test_a_trace_that_would_take_too_long_is_said_to(tmp_path, monkeypatch, caplog):
    """With how long a rerun took."""
    monkeypatch.setattr("pytest_nancapture.capture.rerun._TRACE_SECONDS", 0)
    capture_one(Net(), batches(), tmp_path)
    assert said(caplog)[1] == (
        "nancapture: no culprit: a rerun took 0 s, and following its operations would hold up the run for more than "
        "0 s; a replay names it"
    )


@pytest.mark.parametrize("options", [{"trace": False}, {"confirm": 0}])
def test_faults_without_a_culprit_are_not_taken_for_the_same(options, tmp_path):
    """Nobody knows whether they are."""
    fit(Net(), batches(bad=[1, 3]), NaNCapture(tmp_path, on_capture="skip", **options))
    assert [(Bundle.open(path).fault.seen, path.name) for path in find_bundles(tmp_path)] == [
        (1, "step-000001-rank-0"),
        (1, "step-000003-rank-0"),
    ]


class Again(SetsNumber):
    """Bad at two steps."""

    def on_before_optimizer_step(self, optimizer):
        bad = self.trainer.fit_loop.epoch_loop.batch_idx in (2, 4)
        optimizer.param_groups[1]["lr"] = INF if bad else 0.1

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": [p]} for p in self.parameters()], lr=0.1)


def test_bad_updates_for_the_same_reason_are_the_same_fault(tmp_path):
    """They have a culprit, too."""
    fit(Again(), batches(bad=[]), NaNCapture(tmp_path, on_capture="skip", optimizer_history=True))
    (path,) = find_bundles(tmp_path)
    assert (Bundle.open(path).fault.seen, Bundle.open(path).fault.reproduced.runs) == (2, 1)


class RaisesAfter(pl.LightningModule):
    """Manual optimisation whose code goes on after the update with what only a good step has."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = nn.Linear(3, 3)
        self.runs = 0

    def training_step(self, batch, batch_idx):
        x, good = batch
        type(self).count += 1
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(x).pow(2).mean() * fault(good))
        optimizer.step()
        if type(self).count > 5:
            raise LookupError("only in a rerun")

    count = 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_a_rerun_raises_after_the_fault_was_found_takes_nothing_away(tmp_path, monkeypatch):
    """It is confirmed, and its culprit is named."""
    monkeypatch.setattr(RaisesAfter, "count", 0)
    bundle = capture_one(RaisesAfter(), batches(), tmp_path)
    assert (bundle.fault.reproduced.runs, bundle.fault.culprit["op"]) == (1, "aten.div.Tensor")
