"""Rebuild the module of a bundle, run the captured step again, judge what came out."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.replay.hooks import ReplayHooks
    from pytest_nancapture.replay.result import ReplayResult


def replay(
    bundle: str | PathLike[str] | Bundle,
    *,
    module: LightningModule | None = None,
    device: str = "auto",
    trace: bool = False,
    hooks: ReplayHooks | None = None,
) -> ReplayResult:
    """Run the captured step once more, with today's code, in a one-device Trainer.

    Nothing is trained: the update is not made (only bundles that carry the optimizer's state make it, on the replay's
    own copy of the weights), no file is written, and random states, numeric settings and threads are put back.

    Args:
        bundle: a bundle, or its folder.
        module: the module to run, instead of the one the bundle names; its weights are overwritten.
        device: ``auto`` (the kind of device captured on), ``cpu``, ``cuda``, ``cuda:1``, ``mps`` ...
        trace: follow the operations and name the culprit.
        hooks: how to build what the bundle cannot say; the pytest plugin passes the user's pytest hooks.

    Returns:
        The verdict and what led to it. Whatever the captured step raises becomes the verdict ``error``.

    Raises:
        BundleError: the bundle is missing, damaged or too new.
        DeviceUnavailableError: this machine lacks the device.
    """
    from pytest_nancapture.replay.run import run_replay

    return run_replay(bundle, module=module, device=device, trace=trace, hooks=hooks)
