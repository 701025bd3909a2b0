"""Rebuild the module of a bundle, run the captured step again, judge what came out."""

from __future__ import annotations

import inspect
import sys
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.replay.hooks import ReplayHooks
    from pytest_nancapture.replay.result import ReplayResult


def replay(
    bundle: str | PathLike[str] | Bundle,
    *,
    module: nn.Module | None = None,
    device: str = "auto",
    trace: bool = False,
    hooks: ReplayHooks | None = None,
) -> ReplayResult:
    """Run the captured step once more, with today's code, in a one-device run of its training loop.

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


class _Room(ModuleType):
    """The room can be called like its function, since both have one name in the package above.

    So ``from pytest_nancapture import replay`` and ``import pytest_nancapture.replay.run`` get along, in any order.
    """

    __signature__ = inspect.signature(replay)

    def __call__(self, *args: Any, **kwargs: Any) -> ReplayResult:
        return replay(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
