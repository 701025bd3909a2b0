"""Replay a bundle as the run's options ask: on which device, with whose hooks, traced or not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nancapture.errors import DeviceUnavailableError, NancaptureError
from pytest_nancapture.plugin.device import device_to_ask_for
from pytest_nancapture.replay import replay
from pytest_nancapture.replay.hooks import ReplayHooks

if TYPE_CHECKING:
    from torch import nn

    from pytest_nancapture.bundle.bundle import Bundle
    from pytest_nancapture.plugin.options import Settings
    from pytest_nancapture.replay.result import ReplayResult


def replay_for_node(
    bundle: Bundle, node: pytest.Item, settings: Settings, *, module: nn.Module | None = None
) -> ReplayResult:
    """Replay `bundle` for a test, with the hooks of the ``conftest.py`` files that the test sees.

    Skips the test where the bundle needs an accelerator that this machine lacks.

    Raises:
        DeviceUnavailableError: it lacks the device that was asked for, or one that ``--nan-require-gpu`` insists on.
        BundleError: the bundle cannot be used.
    """
    captured = bundle.manifest.device_kind
    try:
        device = device_to_ask_for(captured, settings, _worker(node.config))
    except DeviceUnavailableError as error:
        if settings.require_gpu:
            raise
        pytest.skip(str(error))
    result = _replay(bundle, settings, module=module, device=device, hooks=hooks_of(node))
    if settings.require_gpu and captured != "cpu" and result.device.partition(":")[0] == "cpu":
        raise DeviceUnavailableError(
            f"captured on {captured}: --nan-require-gpu expects a replay there, but it ran on {result.device}"
        )
    return result


def hooks_of(node: pytest.Item) -> ReplayHooks:
    """The user's pytest hooks, as a replay takes them."""
    hook = node.ihook

    def trainer_kwargs(bundle: Bundle) -> dict[str, Any] | None:
        answers = hook.pytest_nancapture_trainer_kwargs(bundle=bundle)
        # pytest calls the nearest conftest.py first: it is merged last, and wins.
        return {key: value for answer in reversed(answers) for key, value in answer.items()} or None

    return ReplayHooks(
        module=lambda bundle: hook.pytest_nancapture_module(bundle=bundle),
        batch=lambda bundle, batch: hook.pytest_nancapture_batch(bundle=bundle, batch=batch),
        trainer_kwargs=trainer_kwargs,
    )


def _replay(bundle: Bundle, settings: Settings, **how: Any) -> ReplayResult:
    result = replay(bundle, trace=settings.trace == "always", **how)
    if settings.trace != "auto" or result.verdict != "nonfinite":
        return result
    try:
        traced = replay(bundle, trace=True, **how)
    except NancaptureError as error:
        return _with_note(result, f"the culprit could not be traced: {error}")
    if traced.verdict != result.verdict:
        return _with_note(result, f"the traced replay came out otherwise: {traced.verdict}: {traced.reason}")
    return traced


def _with_note(result: ReplayResult, note: str) -> ReplayResult:
    return dataclasses.replace(result, notes=(*result.notes, note))


def _worker(config: pytest.Config) -> str | None:
    return getattr(config, "workerinput", {}).get("workerid")
