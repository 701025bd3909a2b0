"""Where a run took place: versions, device, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pytest_nancapture.bundle.manifest import CodeRecord

_PACKAGES = ("torch", "numpy", "safetensors", "pytest-nancapture")
_GIT_SECONDS = 10


def environment(device: torch.device, distributions: Iterable[str]) -> dict[str, Any]:
    """Versions, platform and device of this process, as JSON-ready values.

    Args:
        distributions: the training loop's, whose versions are told too.
    """
    found: dict[str, Any] = {
        "device": str(with_index(device)),
        "device_name": platform.processor() or platform.machine(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in (*_PACKAGES, *distributions) if (version := _version(name))},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["versions"]["cuda"] = str(torch.version.cuda)
        found["versions"]["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def with_index(device: torch.device) -> torch.device:
    """An accelerator's device by its number, since a replay has to know whose random states are whose."""
    if device.index is not None or device.type == "cpu" or not torch.accelerator.is_available():
        return device
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def distributions_of(module: Any) -> tuple[str, ...]:
    """The installed package that holds the module's class; none where it is the user's own code."""
    top = type(module).__module__.partition(".")[0]
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
    if "site-packages" not in Path(file).parts:
        return ()
    return tuple(dict.fromkeys(metadata.packages_distributions().get(top, ())))


def code_of(module: Any) -> CodeRecord:
    """The commit of the repository that holds the module's source, and whether files differ from it."""
    source = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    folder = Path(source).absolute().parent if source else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return CodeRecord()
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return CodeRecord(commit=commit, dirty=None if status is None else bool(status))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(  # noqa: S603, fixed arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607, git is wherever the user has it
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.distribution(package).version
    except metadata.PackageNotFoundError:
        return None
