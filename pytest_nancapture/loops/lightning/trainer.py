"""A one-device Trainer that shows user code what the training one showed it, and writes nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pytest_nancapture.bundle.manifest import TrainerRecord
from pytest_nancapture.errors import RebuildError
from pytest_nancapture.loops.lightning.silence import silent_logger

_NEVER = 2**31 - 1


def build_trainer(
    module: Any,
    record: TrainerRecord,
    device: torch.device,
    callback: Any,
    folder: str,
    overrides: dict[str, Any],
    *,
    anomaly: bool = False,
) -> Any:
    """The Trainer, from the same Lightning package as `module`.

    Args:
        anomaly: whether torch's anomaly mode is on, which the Trainer else switches off.
        folder: an empty one, for what user code writes below ``trainer.default_root_dir``.
        overrides: arguments of the user's, which win; a ``datamodule`` among them is none of the Trainer's.
    """
    package = framework_of(module)
    plugins = importlib.import_module(f"{package}.plugins.precision")
    is_known = _knows(package, device.type)
    arguments: dict[str, Any] = {
        **_place(package, device, overrides, is_known=is_known),
        "max_epochs": record.max_epochs,
        "max_steps": record.max_steps,
        "accumulate_grad_batches": record.accumulate_grad_batches,
        "gradient_clip_val": record.gradient_clip_val,
        "gradient_clip_algorithm": record.gradient_clip_algorithm,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        "detect_anomaly": anomaly,
        "logger": silent_logger(package, folder) if record.logger else False,
    }
    if not record.autocasts:
        arguments["precision"] = "32-true"
    elif record.precision == "16-mixed":
        # At scale 1: what is not finite then is no overflow of the scaler's making.
        scaler = torch.amp.GradScaler(device.type, init_scale=1.0, growth_interval=_NEVER)
        arguments["plugins"] = [plugins.MixedPrecision("16-mixed", device.type, scaler=scaler)]
    elif record.precision == "bf16-mixed" and not is_known:
        # Lightning would switch on autocast for CUDA.
        arguments["plugins"] = [plugins.MixedPrecision("bf16-mixed", device.type)]
    else:
        arguments["precision"] = record.precision
    if any(isinstance(plugin, plugins.Precision) for plugin in _listed(overrides.get("plugins"))):
        arguments.pop("precision", None)
    if "precision" in overrides:
        arguments.pop("plugins", None)
    callbacks = [callback, *_listed(overrides.get("callbacks"))]
    given = {name: value for name, value in overrides.items() if name != "datamodule"}
    return importlib.import_module(package).Trainer(**{**arguments, **given, "callbacks": callbacks})


def check_data_class(kind: type, source: str) -> None:
    """Refuse what a Trainer can have for no datamodule."""
    if not any(base.__name__ == "LightningDataModule" for base in kind.__mro__):
        raise RebuildError(f"{source}: expected a LightningDataModule, came {kind.__qualname__}")


def _knows(package: str, kind: str) -> bool:
    """Whether this Lightning, or an extension of it that is imported, has an accelerator of the kind's name."""
    registry = importlib.import_module(f"{package}.accelerators").AcceleratorRegistry
    return kind in registry.available_accelerators()


def _place(package: str, device: torch.device, overrides: dict[str, Any], *, is_known: bool) -> dict[str, Any]:
    """The arguments that put the Trainer on `device`, whether Lightning knows such devices or not."""
    if is_known or overrides.keys() & {"accelerator", "strategy"}:
        return {"accelerator": device.type, "devices": 1 if device.type == "cpu" else [device.index or 0]}
    strategies = importlib.import_module(f"{package}.strategies")

    class AnyAccelerator(importlib.import_module(f"{package}.accelerators").Accelerator):  # type: ignore[misc]
        """Of the kind that torch says this machine has."""

        def setup_device(self, device: torch.device) -> None:
            torch.accelerator.set_device_index(device.index)

        def teardown(self) -> None: ...

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(devices: int) -> list[torch.device]:
            return [device] * devices

        @staticmethod
        def auto_device_count() -> int:
            return 1

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return device.type

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return {}

    return {"strategy": strategies.SingleDeviceStrategy(device, accelerator=AnyAccelerator())}


def framework_of(module: Any) -> str:
    """``lightning.pytorch`` or ``pytorch_lightning``, whichever the module's class comes from."""
    base = [kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"][-1]
    return base.__module__.partition(".core")[0]


class WindowLoader:
    """Yields the captured micro-batches, and sets Lightning's counters to theirs as it does.

    Only then do they stay: the epoch loop resets them after ``on_train_epoch_start``.
    """

    def __init__(self, batches: Sequence[tuple[int, Any]], record: TrainerRecord) -> None:
        """`batches`: index in the epoch and the batch, already on the device."""
        self._batches = batches
        self._record = record
        self._position = 0
        self.trainer: Any = None

    def __len__(self) -> int:
        if self._record.num_training_batches is not None:
            return self._record.num_training_batches
        return len(self._batches) + (not self._record.last_batch)

    def __iter__(self) -> Iterator[Any]:
        # An epoch that ends within the window asks for a new iterator, and goes on where the last one was.
        while self._position < len(self._batches):
            _, batch = self._batches[self._position]
            self.count(self._position)
            self._position += 1
            yield batch

    def count(self, position: int) -> None:
        """Set Lightning's counters to those from before this micro-batch of the window."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        _set(progress.current, self._batches[position][0])
        _set(progress.total, self._record.total_batch_idx + position)


def set_counters(trainer: Any, record: TrainerRecord) -> None:
    """Epoch and global step, before fit."""
    for progress in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
        _set(progress, record.epoch)
    loop = trainer.fit_loop.epoch_loop
    _set(loop.automatic_optimization.optim_progress.optimizer.step.total, record.global_step)
    _set(loop.manual_optimization.optim_step_progress.total, record.global_step)
    loop._batches_that_stepped = record.global_step


def _listed(value: Any) -> list[Any]:
    """What the Trainer takes as None, as one thing or as a list of them."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _set(tracker: Any, count: int) -> None:
    for name in vars(tracker):
        setattr(tracker, name, count)
