"""Which device a replay runs on."""

from __future__ import annotations

import torch

from pytest_nancapture.bundle.manifest import Manifest
from pytest_nancapture.errors import DeviceUnavailableError


def choose_device(asked: str, manifest: Manifest) -> torch.device:
    """The device for ``asked``: ``auto`` is the kind of device captured on.

    Raises:
        DeviceUnavailableError: this machine does not have it, or there is no such kind of device.
    """
    name = manifest.device_kind if asked == "auto" else asked
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailableError(f"expected a device such as cpu, cuda or cuda:1, came {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here is not None and here.type == device.type else 0
    if (device.index or 0) >= count:
        have = f"has {count} of them" if count else f"has {here.type if here is not None else 'no accelerator'}"
        wanted = f"the bundle was captured on {name}" if asked == "auto" else f"{asked} was asked for"
        raise DeviceUnavailableError(
            f"{wanted}, and this machine {have}; run it where there is one, or on the CPU with --device=cpu "
            "(in pytest --nan-device=cpu), where kernels and random numbers differ"
        )
    return torch.device(device.type, device.index or 0)
