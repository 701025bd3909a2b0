"""A run without faults is the same with ``NaNCapture`` as without it, bit for bit, and nothing is left behind."""

import copy
import gc
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from training import Net, NormNet, batches, bundles_in, capture_one, differing, fit, state_of

from pytest_nancapture import NaNCapture, NonFiniteError
from pytest_nancapture.errors import CaptureError
from pytest_nancapture.step.state.batch import TakenBatch
from pytest_nancapture.step.state.window import Window


class Plain(NormNet):
    """Batch norm, dropout, Adam; the batches are all good."""


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Gan(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3))
        self.critic = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_critic)
        between = (x + self.generator(torch.randn(4, 3)).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        for_critic.zero_grad()
        self.manual_backward(self.critic(between).mean() + (slope.norm(dim=1) - 1).pow(2).mean())
        for_critic.step()
        self.untoggle_optimizer(for_critic)
        for_generator.zero_grad()
        self.manual_backward(-self.critic(self.generator(x)).mean())
        for_generator.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.RMSprop(self.critic.parameters())


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class RawSteps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OwnHooks(NormNet):
    """Draws, writes weights and changes gradients in its hooks."""

    def on_train_batch_start(self, batch, batch_idx):
        with torch.no_grad():
            self.layer.weight.add_(torch.randn(3, 3), alpha=0.01)

    def on_before_optimizer_step(self, optimizer):
        self.layer.bias.grad.add_(1e-3)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Denormal(Net):
    """Gradients so small that many a kernel would make them 0."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 1e-38

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e38)


def half_mixed() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


STYLES = [
    (Plain, {}),
    (Plain, {"accumulate_grad_batches": 3}),
    (Plain, {"gradient_clip_val": 0.1}),
    (Plain, {"precision": "bf16-mixed"}),
    (Plain, {"precision": "64-true"}),
    (Plain, {"plugins": "16-mixed"}),
    (Plain, {"callbacks": "averaging"}),
    (Momentum, {}),
    (Gan, {}),
    (Lbfgs, {}),
    (RawSteps, {}),
    (OwnHooks, {}),
    (Denormal, {}),
]


class Double(Plain):
    """Takes batches of any precision."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        return super().training_step((x.to(self.layer.weight.dtype), good), batch_idx)


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(("make", "options"), STYLES, ids=[f"{m.__name__}{list(o.values()) or ''}" for m, o in STYLES])
def test_training_is_the_same_to_the_bit(make, options, history, tmp_path):
    """Weights, buffers, optimizer states and random states."""
    runs = []
    for capture in (None, NaNCapture(tmp_path, optimizer_history=history)):
        kwargs = dict(options)
        if kwargs.get("plugins"):
            kwargs["plugins"] = half_mixed()
        if kwargs.get("callbacks"):
            kwargs["callbacks"] = [StochasticWeightAveraging(0.01, swa_epoch_start=1)]
        torch.manual_seed(7)
        module = Double() if kwargs.get("precision") == "64-true" else make()
        trainer = fit(module, batches(7, bad=[]), capture, max_epochs=3, **kwargs)
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in trainer.optimizers]
        runs.append((state_of(module), repr(states), {"rng": torch.get_rng_state()}))
    (weights, states, rng), (other_weights, other_states, other_rng) = runs
    assert differing(weights, other_weights) == []
    assert states == other_states
    assert differing(rng, other_rng) == []
    assert bundles_in(tmp_path) == []


class Fails(Net):
    """Raises, or is interrupted, in its fifth step."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            raise self.error
        return super().training_step(batch, batch_idx)


class FailsInHook(Net):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step == 4:
            raise self.error


def names_on(trainer: Any, module: Any) -> tuple[set[str], set[str]]:
    return set(vars(module)), set(vars(trainer.strategy))


ENDS = [
    (lambda: Net(), [], None),
    (lambda: Net(), [4], NonFiniteError),
    (lambda: Fails(LookupError), [], LookupError),
    (lambda: Fails(KeyboardInterrupt), [], SystemExit),
    (lambda: FailsInHook(LookupError), [], LookupError),
    (lambda: FailsInHook(KeyboardInterrupt), [], SystemExit),
]


@pytest.mark.parametrize(
    ("make", "bad", "error"), ENDS, ids=["end", "fault", "error", "interrupt", "hook", "hook-interrupt"]
)
def test_no_wrapper_is_left_whatever_ends_the_run(make, bad, error, tmp_path):
    """Neither on the module nor on the strategy; and it can be trained again."""

    class Remember(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            self.trainer, self.names = trainer, names_on(trainer, pl_module)

    module, remember, capture = make(), Remember(), NaNCapture(tmp_path)
    if error is None:
        fit(module, batches(bad=bad), capture, callbacks=[remember])
    else:
        with pytest.raises(error):
            fit(module, batches(bad=bad), capture, callbacks=[remember])
    (before, before_strategy), (now, now_strategy) = remember.names, names_on(remember.trainer, module)
    wrappers = {"on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "backward", "optimizer_step"}
    assert (now & wrappers, now_strategy & wrappers) == (set(), set())
    assert before & wrappers == before_strategy & wrappers == set()
    assert [hook for o in remember.trainer.optimizers for hook in o._optimizer_step_pre_hooks] == []
    assert len(bundles_in(tmp_path)) == len(bad)
    fit(module, batches(3, bad=[]), capture)


def test_an_own_wrapper_on_the_module_survives(tmp_path):
    """One that was there before, on the instance."""
    module, calls = Net(), []
    module.on_train_batch_start = lambda batch, batch_idx: calls.append(batch_idx)
    mine = module.on_train_batch_start
    fit(module, batches(bad=[]), NaNCapture(tmp_path))
    assert module.on_train_batch_start is mine
    assert calls == [0, 1, 2, 3, 4, 5]


class Copies(pl.Callback):
    """Copies the module in the midst of training, as averaging callbacks do, and runs the copy."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copy = copy.deepcopy(pl_module)
        self.copy(batch[0])


class Usable(Net):
    def forward(self, x):
        return self.layer(x)


def test_a_copy_of_the_module_made_during_fit_is_its_own(tmp_path):
    """It can be used and trained, and the original is not touched by it."""
    copies, module = Copies(), Usable()
    fit(module, batches(3, bad=[]), NaNCapture(tmp_path), callbacks=[copies])
    before = state_of(module)
    fit(copies.copy, batches(3, bad=[]), NaNCapture(tmp_path))
    assert differing(before, state_of(module)) == []
    assert differing(before, state_of(copies.copy)) != []


class OwnStart(Usable):
    """Counts its own steps in its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.started += 1


class Pickles(pl.Callback):
    """Keeps the whole module, as people do with their best one."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer_of, pl_module._trainer = pl_module._trainer, None
        self.copy, self.pickled = copy.deepcopy(pl_module), pickle.dumps(pl_module)
        pl_module._trainer = trainer_of


def test_a_copy_runs_its_own_hooks(tmp_path):
    """Not those of the module it was copied from; and it can be pickled, during the run and after it."""
    keeps, module = Pickles(), OwnStart()
    fit(module, batches(3, bad=[]), NaNCapture(tmp_path), callbacks=[keeps])
    for other in (keeps.copy, pickle.loads(keeps.pickled), pickle.loads(pickle.dumps(keeps.copy))):
        fit(other, batches(2, bad=[]), NaNCapture(tmp_path))
        assert (module.started, other.started) == (3, 5)


class WrapsAgain(pl.Callback):
    """Wraps a hook on the module once more, in the midst of the run, and leaves it there."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        original = pl_module.on_train_batch_start
        pl_module.on_train_batch_start = lambda *args: original(*args)


def test_somebody_elses_wrapper_around_ours_does_no_harm(tmp_path):
    """The rerun works, and what is left of ours after the run only passes on."""
    module = OwnStart()
    bundle = capture_one(module, batches(), tmp_path / "first", callbacks=[WrapsAgain()])
    assert bundle.fault.reproduced.runs == 1
    fit(module, batches(bad=[]), None)
    with pytest.raises(NonFiniteError):
        fit(module, batches(), NaNCapture(tmp_path / "second"))
    assert bundles_in(tmp_path / "first") == bundles_in(tmp_path / "second") == ["step-000004-rank-0"]


def test_two_of_the_callback_are_refused(tmp_path):
    """Before training."""
    with pytest.raises(CaptureError, match=r"^expected one NaNCapture in a run, came 2: each would capture"):
        fit(Net(), batches(), NaNCapture(tmp_path), callbacks=[NaNCapture(tmp_path)])


def test_checkpoints_hold_what_they_always_held(tmp_path):
    """And load into a run without the callback."""
    saved = []
    for capture in (None, NaNCapture(tmp_path / "b")):
        torch.manual_seed(0)
        saving = ModelCheckpoint(tmp_path / str(len(saved)), every_n_train_steps=4, filename="four")
        fit(Net(), batches(bad=[]), capture, callbacks=[saving], enable_checkpointing=True)
        saved.append(torch.load(tmp_path / str(len(saved)) / "four.ckpt", weights_only=False))
    assert differing(saved[0]["state_dict"], saved[1]["state_dict"]) == []
    assert saved[0].keys() == saved[1].keys()
    assert repr(saved[0]["loops"]) == repr(saved[1]["loops"])
    trainer = fit(Net(), batches(bad=[]), None, max_epochs=2, ckpt_path=tmp_path / "1" / "four.ckpt")
    assert trainer.global_step == 12


@pytest.mark.parametrize("bad", [[], [4]])
def test_nothing_of_a_run_is_held_after_it(bad, tmp_path):
    """No batch and no copy of a buffer."""
    trainer = fit(NormNet(), batches(bad=bad), NaNCapture(tmp_path, on_capture="stop"))
    gc.collect()
    assert [thing for thing in gc.get_objects() if type(thing) in (TakenBatch, Window)] == []
    del trainer


def test_validation_and_testing_are_let_be(tmp_path):
    """Only training is watched: NaN in a validation loss is none of ours."""

    class Validates(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", torch.tensor(float("nan")))

        def val_dataloader(self):
            return torch.utils.data.DataLoader(batches(2), batch_size=None)

    fit(Validates(), batches(bad=[]), NaNCapture(tmp_path), max_epochs=2, val_check_interval=2)
    assert bundles_in(tmp_path) == []


def test_one_callback_watches_one_run_after_another(tmp_path):
    """Each with its own faults."""
    capture = NaNCapture(tmp_path)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            fit(Net(), batches(), capture)
    assert bundles_in(tmp_path) == ["step-000004-rank-0", "step-000004-rank-0-2"]
