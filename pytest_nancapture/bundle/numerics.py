"""Settings that decide what arithmetic does, and what raises: taken at capture, applied in a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flag(owner: Any, name: str) -> _Setting:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _fp32_precision(path: str) -> _Setting:
    """Torch's newer word for TF32 and its like, of 2.9 on; where it was used the older flags cannot be read."""
    owner = attrgetter(path)
    return (lambda: owner(torch).fp32_precision), (lambda value: setattr(owner(torch), "fp32_precision", value))


def _anomaly_mode() -> list[bool]:
    return [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]


def _set_anomaly_mode(value: list[bool]) -> None:
    torch.autograd.set_detect_anomaly(value[0], check_nan=value[1])


def _set_sparse_checks(value: bool) -> None:
    checks: Any = torch.sparse.check_sparse_tensor_invariants
    checks.enable() if value else checks.disable()


def _deterministic() -> list[bool]:
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]


def _set_deterministic(value: list[bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_SETTINGS: dict[str, _Setting] = {
    "default_dtype": (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic_algorithms": (_deterministic, _set_deterministic),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "cudnn_enabled": _flag(torch.backends.cudnn, "enabled"),
    "cudnn_benchmark": _flag(torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": _flag(torch.backends.cudnn, "deterministic"),
    "cudnn_allow_tf32": _flag(torch.backends.cudnn, "allow_tf32"),
    "cuda_matmul_allow_tf32": _flag(torch.backends.cuda.matmul, "allow_tf32"),
    "fp32_precision": _fp32_precision("backends"),
    "cuda_matmul_fp32_precision": _fp32_precision("backends.cuda.matmul"),
    "cudnn_fp32_precision": _fp32_precision("backends.cudnn"),
    "cudnn_conv_fp32_precision": _fp32_precision("backends.cudnn.conv"),
    "cudnn_rnn_fp32_precision": _fp32_precision("backends.cudnn.rnn"),
    "mkldnn_fp32_precision": _fp32_precision("backends.mkldnn"),
    "mkldnn_matmul_fp32_precision": _fp32_precision("backends.mkldnn.matmul"),
    "mkldnn_conv_fp32_precision": _fp32_precision("backends.mkldnn.conv"),
    "mkldnn_rnn_fp32_precision": _fp32_precision("backends.mkldnn.rnn"),
    "cuda_matmul_allow_fp16_reduced_precision": _flag(
        torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"
    ),
    "cuda_matmul_allow_bf16_reduced_precision": _flag(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    ),
    "sdp_flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "sdp_mem_efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    "sdp_math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "sdp_cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "flush_denormal": (
        # The only way to read it: a denormal survives a multiplication or does not.
        lambda: bool((torch.tensor([1e-310], dtype=torch.float64) * 1.0).item() == 0.0),
        torch.set_flush_denormal,
    ),
    "fill_uninitialized_memory": _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    "anomaly_mode": (_anomaly_mode, _set_anomaly_mode),
    "distributions_validate_args": _flag(Distribution, "_validate_args"),
    "sparse_invariants": (torch.sparse.check_sparse_tensor_invariants.is_enabled, _set_sparse_checks),
    "numpy_errors": (np.geterr, lambda value: np.seterr(**value)),
}


def settings_of_a_context() -> dict[str, Any]:
    """Those that a training loop sets around its steps, and which are others again once an exception has left it."""
    return {"anomaly_mode": _anomaly_mode()}


def numeric_settings() -> dict[str, Any]:
    """The settings now, as JSON-ready values; those that this torch cannot read are left out."""
    found = {}
    for name, (get, _) in _SETTINGS.items():
        try:
            value = get()
        except (AttributeError, RuntimeError):
            continue
        found[name] = value
    return found


@contextmanager
def preserved() -> Iterator[None]:
    """Put back, on leaving, every setting that was changed."""
    before = numeric_settings()
    try:
        yield
    finally:
        now = numeric_settings()
        apply({name: value for name, value in before.items() if now.get(name) != value})


def apply(settings: Mapping[str, Any]) -> None:
    """Apply captured settings; names and values that this torch does not know are passed over."""
    for name, value in settings.items():
        if name in _SETTINGS:
            with suppress(AttributeError, RuntimeError, TypeError, ValueError, IndexError):
                _SETTINGS[name][1](value)
