"""Where a fused optimizer skips the bad update on the device, the flag is read one step later; nothing else differs.

Fused optimizers know the way on the CPU too, so these tests let it be taken there.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from training import Net, NormNet, batches, bundles_in, fit, same, state_of

from pytest_nancapture import Bundle, NaNCapture, NonFiniteError, find_bundles, replay
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.capture import deferral

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


class Fused(NormNet):
    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.hparams.optimizer](self.parameters())


@pytest.fixture
def looks(monkeypatch):
    """Lets flags wait on the CPU; the steps whose flags did."""
    monkeypatch.setattr(deferral, "_DEVICES", frozenset({"cpu"}))
    steps, begin = [], deferral.Look.begin.__func__

    def noted(cls, window, *rest):
        steps.append(window.counters["global_step"])
        return begin(cls, window, *rest)

    monkeypatch.setattr(deferral.Look, "begin", classmethod(noted))
    return steps


def trained(make: Any, data: Any, folder: Any, **kwargs: Any) -> tuple[pl.LightningModule, pl.Trainer | None]:
    """The module as the run left it; the Trainer unless the run was ended by the fault."""
    torch.manual_seed(3)
    module = make()
    options = {name: kwargs.pop(name) for name in ("on_capture", "confirm") if name in kwargs}
    try:
        trainer = fit(module, data, NaNCapture(folder, **options) if folder is not None else None, **kwargs)
    except NonFiniteError:
        return module, None
    return module, trainer


def content(folder: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What the one bundle says of its fault and Trainer, and all its tensors."""
    (path,) = find_bundles(folder)
    manifest = Bundle.open(path).manifest
    layouts = {"weights": manifest.module.layouts, "batch": manifest.batch.layouts, "rng": {}}
    tensors = {
        f"{file}/{name}": tensor
        for file, layout in layouts.items()
        for name, tensor in read_tensors(path / f"{file}.safetensors", layout).items()
    }
    return (manifest.fault, manifest.trainer, manifest.batch, manifest.module.frozen), tensors


def assert_same_bundle(left: Any, right: Any) -> None:
    (said, tensors), (said_too, others) = content(left), content(right)
    assert said == said_too
    assert tensors.keys() == others.keys()
    assert [name for name, tensor in tensors.items() if not same(tensor, others[name])] == []


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bundle_is_that_of_the_guilty_step(optimizer, accumulate, tmp_path, monkeypatch):
    """The same weights, buffers, batch, random states and counters as where the flag is read at once."""
    make = lambda: Fused(optimizer)  # noqa: E731
    data = batches(12, bad=(9,))
    at_once, _ = trained(make, data, tmp_path / "at-once", accumulate_grad_batches=accumulate)
    monkeypatch.setattr(deferral, "_DEVICES", frozenset({"cpu"}))
    late, _ = trained(make, data, tmp_path / "late", accumulate_grad_batches=accumulate)
    assert_same_bundle(tmp_path / "at-once", tmp_path / "late")
    assert all(same(value, state_of(late)[name]) for name, value in state_of(at_once).items())


def test_flags_wait_from_the_third_step_on(looks, tmp_path):
    """The first two are looked at closely; the flag of the bad one was among those that waited."""
    _, trainer = trained(Fused, batches(8, bad=(6,)), tmp_path)
    assert trainer is None
    assert looks == [2, 3, 4, 5, 6]
    (path,) = find_bundles(tmp_path)
    assert path.name == "step-000006-rank-0"
    assert replay(path).verdict == "nonfinite"


def test_a_fault_in_the_first_steps_is_found_at_once(looks, tmp_path):
    """Before anything is known about the run."""
    trained(Fused, batches(8, bad=(1,)), tmp_path)
    assert bundles_in(tmp_path) == ["step-000001-rank-0"]
    assert looks == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_the_same_with_and_without(optimizer, looks, tmp_path):
    """Bit for bit, optimizer state included."""
    data = batches(8, bad=())
    plain, without = trained(lambda: Fused(optimizer), data, None)
    watched, trainer = trained(lambda: Fused(optimizer), data, tmp_path)
    assert looks == [2, 3, 4, 5, 6, 7]
    assert all(same(value, state_of(watched)[name]) for name, value in state_of(plain).items())
    states = zip(without.optimizers[0].state.values(), trainer.optimizers[0].state.values(), strict=True)
    assert all(same(a[name], b[name]) for a, b in states for name in a if isinstance(a[name], torch.Tensor))
    assert "found_inf" not in vars(trainer.optimizers[0])


def test_skip_drops_the_bad_step_and_the_one_that_was_under_way(looks, tmp_path):
    """As if neither of the two batches had ever come."""
    data = batches(9, bad=(5,))
    watched, trainer = trained(Fused, data, tmp_path, on_capture="skip")
    assert trainer is not None
    assert bundles_in(tmp_path) == ["step-000005-rank-0"]
    assert all(bool(value.isfinite().all()) for value in state_of(watched).values())
    assert int(watched.norm.num_batches_tracked) == 7
    assert trainer.optimizers[0].state[watched.layer.weight]["step"] == 7
    assert looks == [2, 3, 4, 5, 7, 8]


def test_stop_ends_the_run_with_the_weights_from_before_the_fault(looks, tmp_path):
    """No step is made after it."""
    until, _ = trained(Fused, batches(9, bad=())[:5], None)
    stopped, trainer = trained(Fused, batches(9, bad=(5,)), tmp_path, on_capture="stop")
    assert trainer is not None
    assert all(same(value, state_of(stopped)[name]) for name, value in state_of(until).items())
    assert bundles_in(tmp_path) == ["step-000005-rank-0"]


class Validates(Fused):
    """Notes which buffers validation was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(bool(self.norm.running_mean.isfinite().all()))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(batches(1), batch_size=None)


@pytest.mark.parametrize("every", [4, None])
def test_the_last_step_is_known_before_validation_begins(every, looks, tmp_path):
    """In the middle of an epoch as at its end."""
    bad = 3 if every else 7
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    module, trainer = trained(Validates, batches(8, bad=(bad,)), tmp_path, val_check_interval=every, **options)
    assert trainer is None
    assert bundles_in(tmp_path) == [f"step-00000{bad}-rank-0"]
    assert module.seen == []


class Epochs(pl.Callback):
    """Notes which epochs began."""

    def __init__(self) -> None:
        self.begun = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)


def test_an_epoch_begins_only_when_the_last_one_is_known_to_be_good(looks, tmp_path):
    """Else the bundle would tell of the wrong one."""
    epochs = Epochs()
    trained(Fused, batches(6, bad=(5,)), tmp_path, max_epochs=2, callbacks=[epochs])
    assert bundles_in(tmp_path) == ["step-000005-rank-0"]
    assert epochs.begun == [0]


def test_no_checkpoint_is_made_of_a_step_not_yet_known(looks, tmp_path):
    """Of the bad step there is none."""
    saves = pl.callbacks.ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    options = {"callbacks": [saves], "enable_checkpointing": True}
    trained(Fused, batches(8, bad=(5,)), tmp_path / "bundles", **options)
    assert bundles_in(tmp_path / "bundles") == ["step-000005-rank-0"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        f"epoch=0-step={n}.ckpt" for n in range(1, 6)
    ]


class Trips(Fused):
    """Its own check stumbles over what the bad step left in a buffer."""

    def training_step(self, batch, batch_idx):
        if not self.norm.running_mean.isfinite().all():
            raise ZeroDivisionError("the statistics are bad")
        return super().training_step(batch, batch_idx)


def test_an_error_in_the_step_after_comes_with_the_bundle_of_the_bad_one(looks, tmp_path):
    """And is the one that is raised."""
    with pytest.raises(ZeroDivisionError, match="the statistics are bad"):
        trained(Trips, batches(8, bad=(5,)), tmp_path)
    assert bundles_in(tmp_path) == ["step-000005-rank-0"]


class Clamps(pl.Callback):
    """Writes into the weights between two steps, past their version counters or not, from one step on."""

    def __init__(self, since: int, hidden: bool) -> None:
        self.since, self.hidden = since, hidden

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx >= self.since:
            weight = pl_module.layer.weight
            (weight.data if self.hidden else weight.detach()).mul_(0.99)


@pytest.mark.parametrize(("since", "hidden", "waited"), [(0, True, []), (0, False, []), (4, False, [2, 3, 4])])
def test_no_flag_waits_once_somebody_else_writes_weights(since, hidden, waited, looks, tmp_path, monkeypatch):
    """The bundle would not hold the guilty step's."""
    data = batches(9, bad=(7,))
    trained(Fused, data, tmp_path / "late", callbacks=[Clamps(since, hidden)])
    assert looks == waited
    monkeypatch.setattr(deferral, "_DEVICES", frozenset())
    trained(Fused, data, tmp_path / "at-once", callbacks=[Clamps(since, hidden)])
    assert_same_bundle(tmp_path / "at-once", tmp_path / "late")


class ByHook(Fused):
    def on_after_backward(self):
        pass


class Closing(Fused):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class ByCallback(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class Unfused(Fused):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), foreach=True)


@pytest.mark.parametrize(
    ("make", "callbacks"), [(ByHook, []), (Closing, []), (Unfused, []), (Fused, [ByCallback()]), (Net, [])]
)
def test_no_flag_waits_where_somebody_may_still_mend_or_the_optimizer_cannot_skip(make, callbacks, looks, tmp_path):
    """The fault is found before the update."""
    trained(make, batches(8, bad=(5,)), tmp_path, callbacks=callbacks)
    assert bundles_in(tmp_path) == ["step-000005-rank-0"]
    assert looks == []


class LossOnly(Fused):
    """Adds an Inf that no gradient goes through."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x, torch.ones(())), batch_idx) + torch.tensor(0.0 if good else float("inf"))


def test_a_bad_loss_with_finite_gradients_skips_the_update_too(looks, tmp_path):
    """And the fault is told as it would be at once."""
    module, _ = trained(LossOnly, batches(8, bad=(5,)), tmp_path)
    (path,) = find_bundles(tmp_path)
    assert Bundle.open(path).fault.found_in == ("loss",)
    until, _ = trained(LossOnly, batches(8, bad=())[:5], None)
    assert same(module.layer.weight.detach(), until.layer.weight.detach())


class ZeroesEarly(pl.Callback):
    """Drops the gradients as soon as the update is over."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.zero_grad()


class GradientOnly(Fused):
    """A finite loss whose gradient is not."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return self.layer(x).pow(2).mean() + (self.layer.weight.sum() * good).abs().sqrt()


def test_gradients_that_are_gone_by_then_are_made_again(looks, tmp_path):
    """By the rerun in place, also where none was asked for."""
    trained(GradientOnly, batches(8, bad=(5,)), tmp_path, callbacks=[ZeroesEarly()], confirm=0)
    (path,) = find_bundles(tmp_path)
    found = Bundle.open(path).fault
    assert looks == [2, 3, 4, 5]
    assert found.global_step == 5
    assert found.found_in == ("gradients",)
    assert found.gradients.nonfinite == ("layer.weight",)


class OnlyOnce(Fused):
    """A gradient that is bad at one step, and not when that step is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(self.spoil)

    def spoil(self, gradient):
        OnlyOnce.calls += 1
        return gradient * float("nan") if OnlyOnce.calls == 6 else gradient


def test_what_nothing_shows_any_more_is_told(looks, tmp_path, caplog):
    """The device has left the update out, so that must not pass in silence."""
    OnlyOnce.calls = 0
    module, trainer = trained(OnlyOnce, batches(8, bad=()), tmp_path, callbacks=[ZeroesEarly()])
    assert trainer is not None
    assert bundles_in(tmp_path) == []
    assert "step 5 was not finite, and nothing shows it any more: its update was left out" in caplog.text
    assert trainer.optimizers[0].state[module.layer.weight]["step"] == 7


def test_a_first_update_is_not_left_to_the_device(looks, tmp_path):
    """Skipped there, momentum would begin with whatever the memory held."""
    trained(lambda: Fused("sgd"), batches(7, bad=(0, 1, 2)), tmp_path, on_capture="skip")
    assert looks == [4, 5, 6]


class AtStep(Fused):
    """Bad at one step, as the Trainer counts them."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x, good * (self.global_step != 5)), batch_idx)


def test_the_rerun_counts_as_the_guilty_step_did(looks, tmp_path):
    """Though the next one is under way."""
    trained(AtStep, batches(8, bad=()), tmp_path)
    (path,) = find_bundles(tmp_path)
    assert Bundle.open(path).fault.global_step == 5
    assert Bundle.open(path).fault.reproduced.runs == 1
