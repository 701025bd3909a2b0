"""Which device a bundle is replayed on, under the run's options; torch is asked at run time only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_nancapture.errors import DeviceUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_nancapture.plugin.options import Settings


def count_devices(kind: str) -> int:
    """How many devices of a kind, such as ``cuda``, this machine has."""
    import torch

    if kind == "cpu":
        return 1
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0


def device_to_ask_for(
    captured: str, settings: Settings, worker: str | None, *, count: Callable[[str], int] = count_devices
) -> str:
    """What to ask a replay for.

    Args:
        captured: the kind of device captured on.
        settings: the run's options.
        worker: the name of this xdist worker, such as ``gw1``; None where there is none.
        count: counts the devices of a kind.

    Raises:
        DeviceUnavailableError: the bundle needs an accelerator, and is not to have one, or there is none.
    """
    asked = settings.device
    kind = captured if asked == "auto" else asked.partition(":")[0]
    if captured != "cpu" and kind == "cpu" and settings.require_gpu:
        raise DeviceUnavailableError(
            f"captured on {captured}: --nan-require-gpu expects a replay there, came --nan-device={asked}"
        )
    if asked == "auto" and captured != "cpu" and not count(captured):
        raise DeviceUnavailableError(
            f"captured on {captured}, and this machine has no {captured} device; to replay it on the CPU all the same: "
            "--nan-device=cpu"
        )
    return spread(kind, worker, count(kind)) if kind == "cuda" and ":" not in asked and worker else asked


def spread(kind: str, worker: str | None, devices: int) -> str:
    """The device of an xdist worker, so that all of `devices` have work.

    Example:
        >>> spread("cuda", "gw5", 4), spread("cuda", None, 4), spread("cuda", "gw5", 0)
        ('cuda:1', 'cuda', 'cuda')
    """
    number = worker.removeprefix("gw") if worker else ""
    return f"{kind}:{int(number) % devices}" if number.isdecimal() and devices else kind
