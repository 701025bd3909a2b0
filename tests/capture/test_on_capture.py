"""What a run does once a step is not finite: ``raise``, ``stop`` or ``skip``; never do the weights see that step."""

import inspect
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, TQDMProgressBar
from torch import nn
from training import Net, NormNet, batches, bundles_in, differing, fit, state_of

from pytest_nancapture import NaNCapture, NonFiniteError
from pytest_nancapture.bundle import paths
from pytest_nancapture.errors import CaptureError

EVERY = ["raise", "stop", "skip"]


class States(pl.Callback):
    """The module's tensors when each micro-batch begins, and after its update."""

    def __init__(self) -> None:
        self.before: list[dict[str, torch.Tensor]] = []
        self.after: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before.append(state_of(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(state_of(pl_module))


def run(module: pl.LightningModule, folder: Any, on_capture: str, data: Any = None, **kwargs: Any) -> pl.Trainer | None:
    with suppress(NonFiniteError):
        return fit(module, batches() if data is None else data, NaNCapture(folder, on_capture=on_capture), **kwargs)
    return None


def test_raise_ends_the_run_with_a_typed_error(tmp_path, monkeypatch):
    """It says what, where, and that the weights are good; the step and the bundle are attributes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "_STARTED_IN", tmp_path)
    with pytest.raises(NonFiniteError) as caught:
        fit(Net(), batches(), NaNCapture("bundles"))
    bundle = Path("bundles") / "step-000004-rank-0"
    assert str(caught.value) == (
        f"step 4: nan in loss, 2 of 2 gradients not finite; bundle {bundle}; "
        "the weights are as they were before the step"
    )
    assert (caught.value.global_step, caught.value.bundle) == (4, str(tmp_path / bundle))


@pytest.mark.parametrize("on_capture", EVERY)
def test_the_bad_step_reaches_neither_weights_nor_buffers(on_capture, tmp_path):
    """They are bit for bit as they were when it began."""
    module, states = NormNet(), States()
    run(module, tmp_path, on_capture, callbacks=[states], max_steps=5)
    assert differing(state_of(module), states.before[4]) == []
    assert differing(states.before[4], states.before[3]) != []


@pytest.mark.parametrize("on_capture", EVERY)
def test_no_state_of_the_optimizer_is_ever_bad(on_capture, tmp_path):
    """Neither is its step counted."""
    kept = []

    class Keep(NormNet):
        def configure_optimizers(self):
            kept.append(torch.optim.Adam(self.parameters(), lr=0.01))
            return kept[0]

    run(Keep(), tmp_path, on_capture, max_steps=5)
    state = kept[0].state_dict()["state"]
    values = {(i, key): value for i, entry in state.items() for key, value in entry.items()}
    assert [key for key, value in values.items() if not value.isfinite().all()] == []
    assert {value.item() for (_, key), value in values.items() if key == "step"} == {4.0}


def test_stop_ends_the_run_cleanly(tmp_path):
    """After the captured step, without an error."""
    trainer = run(Net(), tmp_path, "stop")
    assert (trainer.global_step, trainer.state.status) == (5, "finished")


def test_stop_beats_minimum_epochs_and_steps(tmp_path):
    """Lightning would otherwise go on until they are met."""
    trainer = run(Net(), tmp_path, "stop", max_epochs=5, min_epochs=3, min_steps=20)
    assert (trainer.global_step, trainer.current_epoch) == (5, 1)


def test_skip_trains_on_and_ends_finite(tmp_path):
    """Exactly as if the bad batches were not in the data."""
    module, reference = Net(), Net()
    reference.load_state_dict(module.state_dict())
    trainer = run(module, tmp_path, "skip", batches(8, bad=[0, 3, 7]))
    assert (trainer.global_step, trainer.state.status) == (8, "finished")
    fit(reference, [batch for i, batch in enumerate(batches(8, bad=[])) if i not in (0, 3, 7)], None)
    assert differing(state_of(module), state_of(reference)) == []


def test_skip_drops_a_whole_window(tmp_path):
    """With accumulation the good micro-batches beside the bad one go too."""
    module, states = NormNet(), States()
    run(module, tmp_path, "skip", batches(8, bad=[3]), callbacks=[states], accumulate_grad_batches=2)
    assert differing(states.after[3], states.before[2]) == []
    assert differing(states.after[5], states.before[4]) != []


@pytest.mark.parametrize("on_capture", EVERY)
def test_no_checkpoint_holds_a_bad_value(on_capture, tmp_path):
    """Neither those of every step, nor the last, nor those saved because of the error."""
    options = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": True}
    if (
        "save_on_exception" in inspect.signature(ModelCheckpoint).parameters
    ):  # newer than the oldest Lightning supported
        options["save_on_exception"] = True
    every = ModelCheckpoint(tmp_path / "every", **options)
    on_exception = OnExceptionCheckpoint(tmp_path / "exception")
    run(NormNet(), tmp_path / "b", on_capture, callbacks=[every, on_exception], enable_checkpointing=True)
    paths = sorted(tmp_path.rglob("*.ckpt"))
    assert len(paths) >= 5
    for path in paths:
        saved = torch.load(path, weights_only=False)
        assert [name for name, value in saved["state_dict"].items() if not value.isfinite().all()] == []
        states = saved["optimizer_states"][0]["state"].values()
        assert [state for state in states if not all(value.isfinite().all() for value in state.values())] == []
    assert (tmp_path / "exception" / "on_exception.ckpt").exists() == (on_capture == "raise")


@pytest.mark.parametrize("on_capture", EVERY)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipped_gradients_of_a_bad_step_do_no_harm(on_capture, clip, tmp_path):
    """Clipping by norm would spread one NaN over all gradients, or hide an Inf; the look comes before it."""
    module, states = Net(), States()
    run(
        module,
        tmp_path,
        on_capture,
        callbacks=[states],
        max_steps=5,
        gradient_clip_val=0.5,
        gradient_clip_algorithm=clip,
    )
    assert differing(state_of(module), states.before[4]) == []


def test_schedulers_go_on_after_a_skipped_step(tmp_path):
    """One that is stepped with every batch counts the skipped one."""
    rates = []

    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])

    run(Scheduled(), tmp_path, "skip", batches(4, bad=[1]))
    assert rates == [1 / 2, 1 / 3, 1 / 4, 1 / 5]


def test_a_buffer_that_follows_the_loss_of_the_bad_step_is_put_back(tmp_path):
    """It is written after the step was dropped, and that is one fault, not two."""

    class Follows(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.zeros(()))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.average.mul_(0.9).add_(0.1 * outputs["loss"])

    module, states = Follows(), States()
    run(module, tmp_path, "skip", callbacks=[states])
    assert differing(states.before[5], states.before[4]) == []
    assert bool(module.average.isfinite())
    assert bundles_in(tmp_path) == ["step-000004-rank-0"]


class Gan(pl.LightningModule):
    """The fault is in the first of two steps; the second would use weights and gradients of its own."""

    def __init__(self, bad_step: str = "first") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.bad_step = bad_step
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def training_step(self, batch, batch_idx):
        x, good = batch
        for name, optimizer in zip(("first", "second"), self.optimizers(), strict=True):
            loss = self.norm(getattr(self, name)(x)).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss * good / good if name == self.bad_step else loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.first.parameters()), torch.optim.Adam(self.second.parameters())


@pytest.mark.parametrize("on_capture", EVERY)
@pytest.mark.parametrize("bad_step", ["first", "second"])
def test_all_updates_of_a_bad_training_step_are_dropped(on_capture, bad_step, tmp_path):
    """Under manual optimisation those before the fault are undone, and those after it are not made."""
    module, states = Gan(bad_step), States()
    run(module, tmp_path, on_capture, callbacks=[states])
    index = 5 if on_capture == "skip" else None
    now = states.before[index] if index else state_of(module)
    assert differing(now, states.before[4]) == []
    assert bundles_in(tmp_path) == ["step-000008-rank-0"]


STORY = """\
nancapture: step 4: nan in loss, 2 of 2 gradients not finite
nancapture: bundle   nan-bundles/step-000004-rank-0   SIZE kB, reproduced 1 of 1 in this process
nancapture: replay   pytest --nan-bundles=nan-bundles
"""
LAST = {
    "raise": "",
    "stop": "nancapture: stopping the run (on_capture='stop')\n",
    "skip": "nancapture: step dropped, training goes on (on_capture='skip')\n",
}


@pytest.mark.parametrize("on_capture", EVERY)
def test_the_log_tells_the_story(on_capture, tmp_path, monkeypatch, caplog):
    """What, where the bundle is, how to replay it, and what the run does now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "_STARTED_IN", tmp_path)
    module = Net()
    module.save_hyperparameters()
    run(module, "nan-bundles", on_capture)
    ours = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    told = "".join(f"{line}\n" for line in ours if not line.startswith("nancapture: culprit"))
    assert re.sub(r"[\d.]+ kB", "SIZE kB", told) == STORY + LAST[on_capture]


def test_the_story_begins_on_a_line_of_its_own_below_a_progress_bar(tmp_path, caplog):
    """The bar leaves the cursor in the middle of its line."""
    run(Net(), tmp_path, "raise", enable_progress_bar=True, callbacks=[TQDMProgressBar(refresh_rate=0)])
    (first, *_) = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    assert first == "\nnancapture: step 4: nan in loss, 2 of 2 gradients not finite"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"on_capture": "ignore"}, "on_capture: expected one of raise, stop, skip, came 'ignore'"),
        ({"max_bundles": -1}, "max_bundles: expected a number from 0 up, came -1"),
        ({"confirm": True}, "confirm: expected a number from 0 up, came True"),
        ({"confirm": 1.5}, "confirm: expected a number from 0 up, came 1.5"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_was_expected(argument, message):
    """At once, not at the first fault."""
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        NaNCapture(**argument)
