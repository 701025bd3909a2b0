"""Every exception of the package.

::

    NancaptureError
    ├── BundleError                 one bundle cannot be used; the others can
    │   ├── BundleNotFoundError     there is no bundle at that path
    │   ├── BundleDamagedError      its files are not what bundle.json says, or it asks for what no bundle may
    │   └── BundleVersionError      written by a newer version of the format
    ├── CaptureError
    │   ├── NonFiniteError          ends the training run under on_capture="raise"
    │   └── UnwritableValueError    a value in the batch or in hparams has no form on disk
    ├── ReplayError
    │   ├── RebuildError            the module cannot be built again from what the bundle says
    │   ├── MismatchError           captured tensors no longer fit today's module
    │   └── DeviceUnavailableError  the device asked for is not on this machine
    ├── ShrinkError                 a bundle that cannot be made smaller
    └── PinError                    a bundle that must not become a fixture
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

__all__ = [
    "BundleDamagedError",
    "BundleError",
    "BundleNotFoundError",
    "BundleVersionError",
    "CaptureError",
    "DeviceUnavailableError",
    "MismatchError",
    "NancaptureError",
    "NonFiniteError",
    "PinError",
    "RebuildError",
    "ReplayError",
    "ShrinkError",
    "UnwritableValueError",
]


class NancaptureError(Exception):
    """The root: catch this to catch everything the package raises on purpose."""


class BundleError(NancaptureError):
    """One bundle cannot be used.

    Args:
        path: the bundle's folder.
        problem: what was expected and what came.
        remedy: what to do about it.
    """

    def __init__(self, path: str | PathLike[str], problem: str, remedy: str = "") -> None:
        super().__init__(f"{fspath(path)}: {problem}" + (f" ({remedy})" if remedy else ""))
        self.path = fspath(path)
        self.problem = problem
        self.remedy = remedy


class BundleNotFoundError(BundleError):
    """There is no bundle at that path."""


class BundleDamagedError(BundleError):
    """A file is missing, cut short, altered or not a bundle's; or the bundle asks for what no bundle may."""


class BundleVersionError(BundleError):
    """The bundle was written by a newer version of the format than this reader knows."""


class CaptureError(NancaptureError):
    """Something went wrong, or was found, on the training side."""


class NonFiniteError(CaptureError):
    """A step's loss, gradients, buffers or weights are not finite; raised before they reach the weights.

    Attributes:
        global_step: the optimizer step, counted from 0.
        bundle: the folder of the bundle, or None where none could be written.
    """

    def __init__(self, message: str, *, global_step: int, bundle: str | None) -> None:
        super().__init__(message)
        self.global_step = global_step
        self.bundle = bundle


class UnwritableValueError(CaptureError):
    """A value has no form on disk.

    Attributes:
        where: the path to the value, such as ``batch['meta'][0]``.
        remedy: what to do about it.
    """

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(f"{where}: {problem}; {remedy}")
        self.where = where
        self.problem = problem
        self.remedy = remedy


class ReplayError(NancaptureError):
    """A replay could not be carried out."""


class RebuildError(ReplayError):
    """The module, or a type in its arguments or batch, cannot be built again from what the bundle says.

    Attributes:
        detail: what to print below the message, such as code that helps; may be empty.
    """

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class MismatchError(ReplayError):
    """Captured tensors no longer fit today's module.

    Attributes:
        names: the parameters and buffers that differ, each with how.
    """

    def __init__(self, names: Sequence[str]) -> None:
        shown = "; ".join(names[:5]) + (f"; and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(f"the captured tensors no longer fit the code: {shown}")
        self.names = tuple(names)


class DeviceUnavailableError(ReplayError):
    """The device asked for is not on this machine."""


class ShrinkError(NancaptureError):
    """A bundle that cannot be made smaller: not red, without a verdict, or the place for the result is taken."""


class PinError(NancaptureError):
    """A bundle that must not become a fixture: not red, too large, pinned already, or its place is taken."""
