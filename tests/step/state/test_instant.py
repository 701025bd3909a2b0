"""A bundle holds the module, the batch and the random states as of the instant, whatever the step makes of them."""

import inspect
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, Dataset
from training import (
    Instants,
    Net,
    NormNet,
    batches,
    capture_and_replay,
    capture_one,
    differing,
    fault,
    fit,
    state_of,
)

from pytest_nancapture import NaNCapture, NonFiniteError
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.tensors.file import read_tensors


def weights_in(bundle: Bundle) -> dict[str, torch.Tensor]:
    tensors = read_tensors(bundle.path / "weights.safetensors", bundle.manifest.module.layouts)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(("argument/", "attribute/"))}


def batch_in(bundle: Bundle) -> list[torch.Tensor]:
    return list(read_tensors(bundle.path / "batch.safetensors", bundle.manifest.batch.layouts).values())


def check(make, folder, data=None, **kwargs) -> Bundle:
    """Capture and replay: the same losses and gradients; and the bundle's tensors are those of the instant."""
    instants = Instants()
    callbacks = [*kwargs.pop("callbacks", []), instants]
    bundle = capture_and_replay(make, batches() if data is None else data, folder, callbacks=callbacks, **kwargs)
    instant = instants.states[-len(bundle.manifest.batch.window)]
    assert differing(weights_in(bundle), {name: instant[name] for name in instant.keys() & weights_in(bundle)}) == []
    assert bundle.fault.reproduced.runs == bundle.fault.reproduced.of == 1
    assert bundle.manifest.module.changed_before_copy == ()
    return bundle


class Spectral(Net):
    """The power iteration moves two buffers in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(3, 3))


class Codebook(Net):
    """Vector quantisation, its codes and counts moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 3))
        self.register_buffer("counts", torch.ones(4))

    def training_step(self, batch, batch_idx):
        x, good = batch
        h = self.layer(x)
        nearest = torch.cdist(h, self.codes).argmin(1)
        with torch.no_grad():
            chosen = nn.functional.one_hot(nearest, 4).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes = self.codes + 0.1 * (chosen.T @ h - self.codes)
        return (h - self.codes[nearest]).pow(2).mean() * fault(good)


class Teacher(Net):
    """A moving average of the weights, made in the step itself, before they are used."""

    def __init__(self, through_data: bool = False) -> None:
        super().__init__()
        self.through_data = through_data
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, good = batch
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                (mine.data if self.through_data else mine).mul_(0.9).add_(other.detach(), alpha=0.1)
        return (self.layer(x) - self.teacher(x) - 1).pow(2).mean() * fault(good)


class DataTeacher(Teacher):
    """Out of sight of version counters."""

    def __init__(self) -> None:
        super().__init__(through_data=True)


@pytest.mark.parametrize("make", [NormNet, Spectral, Codebook, Teacher, DataTeacher])
@pytest.mark.parametrize("bad", [1, 4])
def test_state_that_moves_in_the_step_is_of_the_instant(make, bad, tmp_path):
    """Running statistics, power iterations, codebooks, teachers."""
    check(make, tmp_path, batches(bad=[bad]))


class InPlace(Net):
    """Writes into its batch, and reads it back."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        x.sub_(x.mean()).div_(x.std())
        good.mul_(good)
        return self.layer(x).pow(2).mean() * fault(good)


class Doubles(pl.Callback):
    """Writes into the batch before the step sees it."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(2)


def test_a_batch_is_as_the_step_received_it(tmp_path):
    """After what callbacks made of it, and before what the step makes of it."""
    bundle = check(InPlace, tmp_path, callbacks=[Doubles()])
    assert (
        differing(dict(zip("xg", batch_in(bundle), strict=True)), dict(zip("xg", double(batches()[4]), strict=True)))
        == []
    )


def double(batch):
    return [batch[0] * 2, batch[1]]


class Draws(Net):
    """Draws from three generators, in its own hook and in the step."""

    def on_train_batch_start(self, batch, batch_idx):
        self.noise = torch.randn(3) + random.random() + np.random.rand()

    def training_step(self, batch, batch_idx):
        x, good = batch
        noise = self.noise + torch.rand(3) * random.gauss(0, 1) * np.random.standard_normal()
        return (self.layer(x) - noise).pow(2).mean() * fault(good)


class CallbackDraws(pl.Callback):
    """Moves all generators on, before and after the callback that captures."""

    def on_train_batch_start(self, *args: Any) -> None:
        torch.rand(3), random.random(), np.random.rand()


class DrawingData(Dataset):
    """Its items are drawn in the main process, from the generators that the step uses."""

    def __init__(self, count: int = 6, bad: int = 4) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4, 3) * random.random() + np.random.rand(), torch.tensor(float(index != self.bad))


@pytest.mark.parametrize("workers", [0, 1])
def test_random_draws_repeat(workers, tmp_path):
    """Whoever drew before: other callbacks, the data loader, the module's own hook."""
    loader = DataLoader(DrawingData(), batch_size=None, num_workers=workers)
    check(Draws, tmp_path, loader, callbacks=[CallbackDraws()])


class PartlyFrozen(NormNet):
    """The norm stays in eval mode and the bias frozen, until a callback thaws them."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.BatchNorm1d(3)

    def on_train_start(self):
        self.norm.eval()
        self.layer.bias.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step((self.other(batch[0]), batch[1]), batch_idx)


def test_modes_and_frozen_parameters_are_kept(tmp_path):
    """Of each submodule and parameter."""
    bundle = check(PartlyFrozen, tmp_path)
    assert bundle.manifest.module.eval_mode == ("norm",)
    assert bundle.manifest.module.frozen == ("layer.bias",)


class TogglesMode(NormNet):
    """Switches a submodule to eval in the midst of the step, and back after the update."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.norm.eval()
        return loss

    def on_train_batch_end(self, *args):
        self.norm.train()


def test_modes_are_those_of_the_instant(tmp_path):
    """Not those that the step left behind."""
    assert check(TogglesMode, tmp_path).manifest.module.eval_mode == ()


class Tempered(Net):
    """A temperature that a callback anneals, and counters that the step keeps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.epsilon = 1e-6
        self.steps = 0
        self.inner = Counter()

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.steps += 1
        return (self.inner(self.layer(x)) * self.steps / self.temperature).pow(2).mean() * fault(good) + self.epsilon


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Anneal(pl.Callback):
    """Changes an attribute before each step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.temperature *= 0.5


def attributes_of(bundle):
    """Submodule -> name -> value, of what changed at the top of a submodule."""
    found = {}
    for state in bundle.manifest.module.state:
        ((_, name),) = state.path
        found.setdefault(state.module, {})[name] = state.value
    return found


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
def test_changed_attributes_are_those_of_the_instant(bad, tmp_path):
    """Changed by a callback, or by the step itself; those that never change are code, and stay out."""
    bundle = check(Tempered, tmp_path, batches(bad=[bad]), callbacks=[Anneal()])
    root = {"temperature": 0.5 ** (bad + 1), "steps": bad}
    inner = {"inner": {"calls": bad}}
    assert attributes_of(bundle) == ({"": root, **inner} if bad else {"": {"temperature": 0.5}})


class LateCounter(Net):
    """Changes an attribute for the first time in the very step that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        x, good = batch
        if batch_idx == 4:
            self.scale *= 3.0
        return self.layer(x).pow(2).mean() * self.scale * fault(good)


def test_an_attribute_first_changed_by_the_bad_step_is_not_changed_twice(tmp_path):
    """It is as it was when the step began."""
    assert check(LateCounter, tmp_path).manifest.module.state == ()


class Volatile(Net):
    """A non-persistent buffer that changes, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.zeros(3), persistent=False)
        self.register_buffer("fixed", torch.arange(3.0), persistent=False)

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.moved.add_(1)
        return (self.layer(x) - self.moved - self.fixed).pow(2).mean() * fault(good)


def test_a_non_persistent_buffer_that_changed_is_state(tmp_path):
    """One that did not is code, and stays out of the bundle."""
    bundle = check(Volatile, tmp_path)
    assert set(weights_in(bundle)) == {"layer.weight", "layer.bias", "moved"}
    assert weights_in(bundle)["moved"].tolist() == [4.0, 4.0, 4.0]


class Counting(Net):
    """Its loss is made of Lightning's counters, and bad from a given epoch on."""

    def __init__(self, bad_epoch: int = 1) -> None:
        super().__init__()
        self.bad_epoch = bad_epoch

    def training_step(self, batch, batch_idx):
        x, good = batch
        number = 1 + batch_idx + 10 * self.global_step + 100 * self.current_epoch
        number += 1000 * self.trainer.fit_loop.total_batch_idx + 0.5 * self.trainer.is_last_batch
        scale = good if self.current_epoch >= self.bad_epoch else torch.ones(())
        return self.layer(x).tanh().mean() * number * fault(scale)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_user_code_reads_the_counters_of_training(accumulate, tmp_path):
    """In the second epoch, where all of them differ."""
    bundle = check(Counting, tmp_path, batches(bad=[5]), max_epochs=3, accumulate_grad_batches=accumulate)
    steps = {1: 11, 4: 3}[accumulate]
    assert (bundle.fault.epoch, bundle.fault.global_step, bundle.fault.batch_idx) == (1, steps, 5)


@pytest.mark.parametrize("every", [6, 3])
def test_user_code_reads_the_counters_of_a_resumed_run(every, tmp_path):
    """One that begins in the second epoch, or in the midst of one."""
    from training import fit

    saving = ModelCheckpoint(tmp_path, filename="at-{step}", every_n_train_steps=every, save_top_k=-1)
    fit(Counting(9), batches(bad=[5]), None, callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    (path,) = tmp_path.glob("at-step=9.ckpt" if every == 3 else "at-step=6.ckpt")
    bundle = check(Counting, tmp_path / "b", batches(bad=[2]), max_epochs=3, ckpt_path=path)
    assert (bundle.fault.epoch, bundle.fault.global_step, bundle.fault.batch_idx) == {6: (1, 8, 2), 3: (1, 11, 5)}[
        every
    ]


class OwnHook(Net):
    """Changes weights in its own hook, which a replay runs again."""

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        self.layer.bias.data.add_(1)


def test_weights_that_the_modules_own_hook_changes_are_changed_once(tmp_path):
    """The bundle has them from before."""
    check(OwnHook, tmp_path)


class Renormalised(Net):
    """Writes into its weights at the begin of the step, as clamped critics and unit-norm embeddings do."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.layer.weight.div_(self.layer.weight.norm(dim=1, keepdim=True) * 2)
        return super().training_step(batch, batch_idx)


def test_weights_that_the_step_itself_changes_are_of_the_instant(tmp_path):
    """Once it has been seen to do so, which takes a step."""
    check(Renormalised, tmp_path)


def test_weights_that_the_first_step_changes_are_of_the_instant_too(tmp_path):
    """All are copied in the first window."""
    check(Renormalised, tmp_path, batches(bad=[0]))


class Initialises(Net):
    """A layer sets its own parameters from the first data that it sees, and is used for the first time late."""

    used_from = 0

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.is_set = False

    def training_step(self, batch, batch_idx):
        x, good = batch
        if batch_idx >= self.used_from:
            if not self.is_set:
                self.is_set = True
                with torch.no_grad():
                    self.gain.copy_(self.initial(x * good))
            x = x * self.gain
        return self.layer(x).pow(2).mean()

    def initial(self, x):
        return 1 / x.std(0)


class InitialisesLate(Initialises):
    used_from = 4


class InitialisesThroughData(InitialisesLate):
    """The version counter does not see the write."""

    def training_step(self, batch, batch_idx):
        if batch_idx == self.used_from:
            self.gain.data.copy_(self.initial(batch[0] * batch[1]))
            self.is_set = True
        return super().training_step(batch, batch_idx)


class InitialisesLaterYet(InitialisesLate):
    used_from = 5


@pytest.mark.parametrize(
    ("make", "bad"), [(Initialises, 0), (InitialisesLate, 4), (InitialisesThroughData, 4), (InitialisesLaterYet, 5)]
)
def test_a_parameter_that_the_forward_writes_is_of_the_instant(make, bad, tmp_path):
    """The bundle holds it from before; the fault is the forward's, at the line that made the values."""
    bundle = check(make, tmp_path, batches(bad=[bad]))
    line = inspect.getsourcelines(Initialises.initial)[1] + 1
    found = {name: bundle.fault.culprit[name] for name in ("phase", "op", "line")}
    assert found == {"phase": "forward", "op": "aten.reciprocal.default", "line": line}
    assert bundle.fault.weights == ()


@pytest.mark.parametrize("on_capture", ["stop", "skip"])
@pytest.mark.parametrize(("make", "bad"), [(Initialises, 0), (InitialisesLate, 4), (InitialisesThroughData, 4)])
def test_such_a_parameter_is_put_back(make, bad, on_capture, tmp_path):
    """To what it was before the forward wrote it."""
    module, instants = make(), Instants()
    fit(module, batches(bad=[bad]), NaNCapture(tmp_path, on_capture=on_capture), callbacks=[instants])
    after = instants.states[bad + 1] if on_capture == "skip" else state_of(module)
    assert differing(instants.states[bad], after) == []


class RestartsCode(Net):
    """Sometimes writes into a parameter that updates write into, too, which cannot be known before."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        if batch_idx == 4:
            with torch.no_grad():
                self.layer.bias.copy_(1 / (x * good).std(0))
        return self.layer(x).pow(2).mean()


def test_a_value_that_is_lost_is_not_blamed_on_an_earlier_step(tmp_path, caplog):
    """The line that wrote it is named, and nobody says that the weights are as they were."""
    bundle = capture_one(RestartsCode(), batches(), tmp_path)
    assert (bundle.fault.weights, bundle.manifest.module.changed_before_copy) == ((), ("layer.bias",))
    assert (bundle.fault.culprit["phase"], bundle.fault.culprit["op"]) == ("forward", "aten.reciprocal.default")
    assert [record for record in caplog.records if "to blame" in record.message] == []
    with pytest.raises(NonFiniteError, match=r"had written layer\.bias before a copy was made"):
        fit(RestartsCode(), batches(), NaNCapture(tmp_path / "again"))


class DropsSometimes(Net):
    """Trains a part in some steps only, through ``.data``, as old optimizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, good = batch
        return (self.other(x) if batch_idx > 2 else self.layer(x)).pow(2).mean() * fault(good)

    def configure_optimizers(self):
        class Old(torch.optim.Optimizer):
            def step(self, closure=None):
                closure()
                for p in self.param_groups[0]["params"]:
                    if p.grad is not None:
                        p.data.sub_(p.grad.data * 0.1)

        return Old(self.parameters(), {})


def test_a_copy_of_what_no_update_had_touched_is_not_kept_once_one_does(tmp_path):
    """Though the version counter says that nothing was written."""
    check(DropsSometimes, tmp_path, batches(bad=[5]))


class Grows(Net):
    """Its queue is a buffer that grows with every step, and another is there after the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 3))
        self.register_buffer("late", None)

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.queue = torch.cat([self.queue, x])[-9:]
        self.late = x.mean(0) if self.late is None else self.late + x.mean(0)
        return (self.layer(x) - self.queue.mean(0)).pow(2).mean() * fault(good)


@pytest.mark.parametrize(("bad", "size"), [(0, 0), (1, 4), (4, 9)])
def test_a_buffer_that_changes_its_size_is_of_the_instant(bad, size, tmp_path):
    """The replay makes it that large again."""
    assert weights_in(check(Grows, tmp_path, batches(bad=[bad])))["queue"].shape == (size, 3)
