"""Turn the training step that went NaN into a regression test.

``NaNCapture`` watches a Lightning training run and exports a reproduction bundle; the pytest plugin (``pytest
--nan-bundles=DIR``) and :func:`replay` run that step again with today's code. Names are resolved on first use, so
importing this package costs nothing in a pytest run that asks for no bundle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_nancapture.bundle.bundle import Bundle as Bundle
    from pytest_nancapture.bundle.bundle import find_bundles as find_bundles
    from pytest_nancapture.diagnose.culprit import Culprit as Culprit
    from pytest_nancapture.errors import NancaptureError as NancaptureError
    from pytest_nancapture.errors import NonFiniteError as NonFiniteError
    from pytest_nancapture.loops.lightning.callback import NaNCapture as NaNCapture
    from pytest_nancapture.replay import replay as replay
    from pytest_nancapture.replay.result import ReplayResult as ReplayResult

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "bundle.bundle",
    "Culprit": "diagnose.culprit",
    "NaNCapture": "loops.lightning.callback",
    "NancaptureError": "errors",
    "NonFiniteError": "errors",
    "ReplayResult": "replay.result",
    "find_bundles": "bundle.bundle",
}

__all__ = ["__version__", "replay", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name == "replay":  # the room can be called, and importing it has bound its name here
        return import_module(f"{__name__}.replay")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
