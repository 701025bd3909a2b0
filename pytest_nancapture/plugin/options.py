"""The ``--nan-*`` options and their ini twins, read and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import pytest

Trace = Literal["auto", "always", "never"]

_KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu", "mlu", "musa", "privateuseone")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How this run replays its bundles.

    Attributes:
        device: ``auto``, or a device as torch names it.
        require_gpu: fail, rather than skip, a bundle that needs an absent accelerator.
        allow_unreproduced: replay bundles whose fault never came back at capture.
        trace: when to look for the culprit.
    """

    device: str = "auto"
    require_gpu: bool = False
    allow_unreproduced: bool = False
    trace: Trace = "auto"


def read_settings(config: pytest.Config) -> Settings:
    """The command line's values, and the ini file's where it gives none.

    Raises:
        pytest.UsageError: a value is none of those that exist.
    """
    device, trace = _value(config, "nan_device"), _value(config, "nan_trace")
    if not re.fullmatch(rf"auto|({'|'.join(_KINDS)})(:\d+)?", device):
        raise pytest.UsageError(
            f"{_said(config, 'nan_device', device)}: expected auto or a device of torch ({', '.join(_KINDS)}), with a "
            f"number where there are several, such as cuda:1; came {device!r}"
        )
    if trace not in get_args(Trace):
        raise pytest.UsageError(
            f"{_said(config, 'nan_trace', trace)}: expected one of {', '.join(get_args(Trace))}; came {trace!r}"
        )
    return Settings(
        device=device,
        require_gpu=_value(config, "nan_require_gpu"),
        allow_unreproduced=_value(config, "nan_allow_unreproduced"),
        trace=cast("Trace", trace),
    )


def flags(config: pytest.Config) -> list[str]:
    """What the command line said of these options, to be said again when a test is repeated alone."""
    said = []
    for name in ("nan_device", "nan_require_gpu", "nan_allow_unreproduced", "nan_trace"):
        value = getattr(config.option, name)
        if value is not None:
            said.append(_flag(name) if value is True else f"{_flag(name)}={value}")
    return said


def _value(config: pytest.Config, name: str) -> Any:
    value = getattr(config.option, name)
    return config.getini(name) if value is None else value


def _said(config: pytest.Config, name: str, value: str) -> str:
    if getattr(config.option, name) is None:
        return f"{config.inipath}: {name} = {value}"
    return f"{_flag(name)}={value}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
