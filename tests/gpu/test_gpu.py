"""The same promises on an accelerator. ``python tests/gpu/run.py`` runs these and prints one table."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.rng import RandomStates
from pytest_nancapture.replay.hooks import ReplayHooks

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, and there is none")
BAD = 3


class Net(pl.LightningModule):
    mended = False

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        self.head = nn.Linear(8 * 6 * 6, 5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, weight = batch
        loss = nn.functional.cross_entropy(self.head(self.net(x)), y, reduction="none")
        total = weight.sum().clamp(min=1) if self.mended else weight.sum()
        noise = torch.randn((), device=self.device) * 1e-3
        return (loss * weight).sum() / total + noise * self.head.weight.float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.hparams.fused)


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.losses.append((loss.detach() / (scaler.get_scale() if scaler is not None else 1)).cpu())


def batches(bad: int = BAD) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(4, 3, 8, 8, generator=generator),
            torch.randint(0, 5, (4,), generator=generator),
            torch.full((4,), float(i != bad)),
        )
        for i in range(6)
    ]


def fit(module: Net, data: list[Any], callbacks: list[Any], **kwargs: Any) -> None:
    torch.manual_seed(0)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="auto", devices=1, callbacks=callbacks, **quiet, **kwargs)
    trainer.fit(module, DataLoader(data, batch_size=None))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_fault_is_captured_and_replayed(tmp_path, precision, fused):
    """Red with the losses of training, green once mended, on the device itself."""
    trained, replayed = Recorder(), Recorder()
    with pytest.raises(NonFiniteError):
        fit(Net(fused), batches(), [trained, NaNCapture(tmp_path)], precision=precision)
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs) == (BAD, 1)
    assert bundle.manifest.device_kind == torch.accelerator.current_accelerator().type
    hooks = ReplayHooks(trainer_kwargs=lambda _: {"callbacks": [replayed]})
    result = replay(bundle, hooks=hooks)
    assert (result.verdict, result.device) == ("nonfinite", f"{bundle.manifest.device_kind}:0")
    assert [loss.isnan().item() for loss in replayed.losses] == [True]
    module = Net(fused)
    module.mended = True
    assert replay(bundle, module=module).verdict == "finite"


def test_random_draws_on_the_device_are_repeated(tmp_path):
    """The loss before the fault is poisoned depends on the device's generator; the same is drawn again."""

    class Drawing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.drawn = torch.rand(3, device=self.device)
            return super().training_step(batch, batch_idx)

    module = Drawing()
    with pytest.raises(NonFiniteError):
        fit(module, batches(), [NaNCapture(tmp_path, confirm=0)])
    again = Drawing()
    assert replay(find_bundles(tmp_path)[0], module=again).verdict == "nonfinite"
    assert module.drawn.cpu().tolist() == again.drawn.cpu().tolist()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_training_is_bit_identical_with_the_callback(tmp_path, precision):
    """Where there is no fault, nothing changes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        states = []
        for callbacks in ([], [NaNCapture(tmp_path)]):
            torch.manual_seed(1)
            module = Net()
            fit(module, batches(bad=-1), callbacks, precision=precision)
            states.append(module.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_an_overflow_of_the_scaler_is_no_fault(tmp_path):
    """The scaler halves its scale and goes on, and no bundle is written."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    kind = torch.accelerator.current_accelerator().type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**40, growth_interval=1)
    fit(Net(), batches(bad=-1), [NaNCapture(tmp_path)], plugins=[MixedPrecision("16-mixed", kind, scaler=scaler)])
    assert find_bundles(tmp_path) == []
    assert scaler.get_scale() < 2.0**40


def test_states_of_every_device_come_back():
    """Taken, spoilt by drawing, restored."""
    device = torch.accelerator.current_accelerator()
    torch.rand(1, device=device)
    states = RandomStates.take()
    before = torch.rand(4, device=device)
    states.restore()
    assert torch.equal(before, torch.rand(4, device=device))


class Unsynchronized(pl.Callback):
    """From step `first` to `last`, anything that makes the host wait for the device is an error."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA alone tells when the host waits")
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_the_host_never_waits_where_the_optimizer_takes_found_inf(tmp_path, fused):
    """Steps 10 to 14: the first ones, and then every 2^n-th, are looked at more closely. The test can fail: foreach."""
    data = [[part.cuda() for part in batch] for batch in batches(bad=-1) * 3]
    callbacks = [Unsynchronized(10, 14), NaNCapture(tmp_path)]
    try:
        if fused:
            fit(Net(fused=True), data, callbacks)
        else:
            with pytest.raises(RuntimeError, match="synchroniz"):
                fit(Net(fused=False), data, callbacks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only there may a flag wait on the device")
@pytest.mark.parametrize("bad", [3, 5], ids=["in between", "last step"])
def test_the_bundle_is_that_of_the_guilty_step_though_the_flag_is_read_later(tmp_path, bad):
    """The weights are those from before it, and its replay is red."""
    module = Net(fused=True)
    with pytest.raises(NonFiniteError):
        fit(module, batches(bad=bad), [NaNCapture(tmp_path)])
    (path,) = find_bundles(tmp_path)
    assert Bundle.open(path).fault.global_step == bad
    assert replay(path).verdict == "nonfinite"
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())
