"""Small training runs for the tests of capture."""

import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pytest_nancapture import NaNCapture, NonFiniteError, ReplayResult, find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.capture.proof import prove
from pytest_nancapture.replay.hooks import ReplayHooks

prove.FRESH = False  # what starts processes is tested in test_proofs.py
for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(pl.LightningModule):
    """The loss is NaN, and all gradients with it, on a batch whose second part is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return self.layer(x).pow(2).mean() * fault(good)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NormNet(Net):
    """Has what moves in a forward pass: running statistics and random draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        h = nn.functional.dropout(self.norm(self.layer(x * fault(good))), 0.2, self.training)
        return (h - x.flip(0)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fault(good: Tensor) -> Tensor:
    """1, or NaN where `good` is 0."""
    return good / good


def batches(count: int = 6, bad: Iterable[int] = (4,)) -> list[Any]:
    """The same ones at every call."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(4, 3, generator=generator), torch.tensor(float(i not in set(bad)))) for i in range(count)]


def fit(module: pl.LightningModule, data: Iterable[Any], capture: NaNCapture | None, **kwargs: Any) -> pl.Trainer:
    """Train quietly on the CPU, the batches as they are."""
    callbacks = [*kwargs.pop("callbacks", []), *([capture] if capture is not None else [])]
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **kwargs,
        },
        callbacks=callbacks,
    )
    loader = data if isinstance(data, DataLoader) else DataLoader(list(data), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def capture_one(module: pl.LightningModule, data: Iterable[Any], folder: Any, **kwargs: Any) -> Bundle:
    """Train until the fault is raised, and open the one bundle that must be there."""
    options = {
        name: kwargs.pop(name) for name in ("confirm", "optimizer_history", "factory", "trace") if name in kwargs
    }
    try:
        fit(module, data, NaNCapture(folder, **options), **kwargs)
    except NonFiniteError:
        pass
    else:
        raise AssertionError("nothing was captured")
    (path,) = find_bundles(folder)
    return Bundle.open(path)


def bundles_in(folder: Any) -> list[str]:
    """Their names; a folder that was never made holds none."""
    return [path.name for path in find_bundles(folder)] if Path(folder).exists() else []


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of everything a checkpoint would hold, and of the non-persistent buffers."""
    tensors = {**module.state_dict(), **dict(module.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit, NaNs in the same places."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    nan = left.isnan()
    return torch.equal(nan, right.isnan()) and torch.equal(left[~nan], right[~nan])


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same on both sides, or on one side only."""
    both = left.keys() & right.keys()
    return sorted((left.keys() ^ right.keys()) | {name for name in both if not same(left[name], right[name])})


class Recorder(pl.Callback):
    """What was backpropagated, and the gradients that the last optimizer step was about to use."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = {name: p.grad for name, p in pl_module.named_parameters()}
        self.gradients = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


class Instants(pl.Callback):
    """A copy of the module's tensors at each micro-batch's instant; to be the last of the callbacks."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.states.append(state_of(pl_module))


def replayed(
    bundle: Bundle, module: pl.LightningModule | None = None, *, trace: bool = False
) -> tuple[ReplayResult, Recorder]:
    """Replay a bundle, and record what its step computes."""
    recorder = Recorder()
    hooks = ReplayHooks(trainer_kwargs=lambda _: {"callbacks": [recorder]})
    return replay(bundle, module=module, hooks=hooks, trace=trace), recorder


def capture_and_replay(
    make: Callable[[], pl.LightningModule], data: Iterable[Any], folder: Any, **kwargs: Any
) -> Bundle:
    """Capture a fault, and replay it: red, with the very losses and gradients of training."""
    trained = Recorder()
    torch.manual_seed(1)
    bundle = capture_one(make(), data, folder, **{**kwargs, "callbacks": [*kwargs.get("callbacks", []), trained]})
    torch.manual_seed(2)
    result, again = replayed(bundle, make())
    assert result.verdict == "nonfinite", result
    assert list(map(same, trained.losses[-len(again.losses) :], again.losses)) == [True] * len(again.losses)
    guilty = bundle.fault.gradients.nonzero
    assert differing(chosen(trained.gradients, guilty), chosen(again.gradients, guilty)) == []
    return bundle


def chosen(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the optimizer in question; others' may be left over from an earlier step."""
    return {name: tensors[name] for name in names}
