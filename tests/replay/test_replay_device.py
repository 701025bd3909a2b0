"""Which device a replay runs on, on machines with and without accelerators."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fake_bundles import fake_manifest

from pytest_nancapture.errors import DeviceUnavailableError
from pytest_nancapture.replay.device import choose_device

ADVICE = (
    "; run it where there is one, or on the CPU with --device=cpu (in pytest --nan-device=cpu), where kernels and "
    "random numbers differ"
)


@dataclass
class Machine:
    """What ``torch.accelerator`` says."""

    kind: str | None
    count: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.accelerator, "is_available", lambda: self.kind is not None)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: self.kind and torch.device(self.kind))
        patch.setattr(torch.accelerator, "device_count", lambda: self.count)


NONE, TWO, MPS = Machine(None), Machine("cuda", 2), Machine("mps", 1)


@pytest.mark.parametrize(
    ("machine", "captured", "asked", "expected"),
    [
        (NONE, "cpu", "auto", "cpu"),
        (NONE, "cuda:0", "cpu", "cpu"),
        (NONE, "cpu", "cpu:3", "cpu"),
        (TWO, "cpu", "auto", "cpu"),
        (TWO, "cuda:0", "auto", "cuda:0"),
        (TWO, "cuda:7", "auto", "cuda:0"),
        (TWO, "cpu", "cuda", "cuda:0"),
        (TWO, "cpu", "cuda:1", "cuda:1"),
        (MPS, "mps:0", "auto", "mps:0"),
        (MPS, "cuda:0", "mps", "mps:0"),
    ],
)
def test_the_device(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, captured: str, asked: str, expected: str
) -> None:
    """``auto`` is the kind captured on, not its number; anything else is what was asked for."""
    machine.install(monkeypatch)
    assert torch.device(expected) == choose_device(asked, fake_manifest(environment={"device": captured}))


def test_a_manifest_that_names_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, which is everywhere."""
    TWO.install(monkeypatch)
    assert torch.device("cpu") == choose_device("auto", fake_manifest(environment={}))


@pytest.mark.parametrize(
    ("machine", "captured", "asked", "message"),
    [
        (NONE, "cuda:0", "auto", "the bundle was captured on cuda, and this machine has no accelerator"),
        (NONE, "cpu", "cuda:1", "cuda:1 was asked for, and this machine has no accelerator"),
        (TWO, "cpu", "cuda:2", "cuda:2 was asked for, and this machine has 2 of them"),
        (MPS, "cuda:0", "auto", "the bundle was captured on cuda, and this machine has mps"),
        (TWO, "cpu", "mps", "mps was asked for, and this machine has cuda"),
        (TWO, "meta", "auto", "the bundle was captured on meta, and this machine has cuda"),
    ],
)
def test_a_device_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, captured: str, asked: str, message: str
) -> None:
    """The error says what was wanted, what there is and what to do."""
    machine.install(monkeypatch)
    with pytest.raises(DeviceUnavailableError) as caught:
        choose_device(asked, fake_manifest(environment={"device": captured}))
    assert message + ADVICE == str(caught.value)


@pytest.mark.parametrize(
    ("captured", "asked", "shown"),
    [
        ("cpu", "gpu", "gpu"),
        ("cpu", "", ""),
        ("cpu", "cuda:x", "cuda:x"),
        ("cpu", "cuda:-1", "cuda:-1"),
        ("os", "auto", "os"),
    ],
)
def test_what_is_no_device(captured: str, asked: str, shown: str) -> None:
    """A word that torch does not know, from a person or from a bundle."""
    with pytest.raises(DeviceUnavailableError) as caught:
        choose_device(asked, fake_manifest(environment={"device": captured}))
    assert f"expected a device such as cpu, cuda or cuda:1, came {shown!r}" == str(caught.value)
