"""Weights that are left to the code's initialiser: a replay with others proves nothing, and says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from inline import Inline
from torch import nn

from pytest_nancapture import Bundle, replay
from pytest_nancapture.bundle.manifest import InitialRecord, Manifest
from pytest_nancapture.replay.initial import Fingerprint, other_initial
from pytest_nancapture.shrink import shrinker

REMEDY = "pin it again with the code that has the fault: nancapture pin BUNDLE fixtures"


def one_more_draw(self: models.Net, width: int) -> None:
    super(models.Net, self).__init__()
    torch.rand(1)
    self.linear = nn.Linear(3, width)


def other_initialiser(self: models.Net, width: int) -> None:
    super(models.Net, self).__init__()
    self.linear = nn.Linear(3, width)
    nn.init.orthogonal_(self.linear.weight)


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without weights."""
    folder = tmp_path_factory.mktemp("initial")
    captured = Bundle.open(models.capture(models.Net(width=100), folder / "captured"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinker, "Pool", Inline)
        bundle = shrinker.shrink(captured, folder / "small").bundle
    assert bundle.manifest.module.initial is not None
    return bundle.path


def test_the_same_weights(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red as ever, and green with the fault mended; nothing is noted."""
    assert (replay(shrunk).verdict, replay(shrunk).notes) == ("nonfinite", ())
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert (replay(shrunk).verdict, replay(shrunk).notes) == ("finite", ())


@pytest.mark.parametrize("init", [one_more_draw, other_initialiser])
def test_other_weights(shrunk: Path, monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    """One more draw before them, or another initialiser: never green; a red one is told."""
    reason = (
        "2 weights are left to the code's initialiser, which makes others than those that the fault was seen with "
        f"({'linear.bias, linear.weight' if init is one_more_draw else 'linear.weight'}): another initialiser, "
        f"another draw before it, or another torch; {REMEDY}"
    )
    monkeypatch.setattr(models.Net, "__init__", init)
    red = replay(shrunk)
    assert (red.verdict, red.notes) == ("nonfinite", (reason,))
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    green = replay(shrunk)
    assert (green.verdict, green.reason) == ("vacuous", reason)


def test_a_module_of_ones_own(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are its own."""
    torch.manual_seed(12)
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert replay(shrunk, module=models.Net(width=100)).verdict == "vacuous"


def test_a_bundle_that_does_not_say(shrunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of version 1: red as ever, but not green."""
    manifest = Bundle.open(shrunk).manifest
    assert manifest.module.initial is not None
    initial = dataclasses.replace(manifest.module.initial, sha256="", sketch=())
    old = with_initial(manifest, initial)
    bundle = Bundle(shrunk, old)
    reason = (
        "2 weights are left to the code's initialiser, and this bundle is too old to say whether it makes the same "
        f"ones still; {REMEDY}"
    )
    assert replay(bundle).verdict == "nonfinite"
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert (replay(bundle).verdict, replay(bundle).reason) == ("vacuous", reason)


def with_initial(manifest: Manifest, initial: InitialRecord) -> Manifest:
    return dataclasses.replace(manifest, module=dataclasses.replace(manifest.module, initial=initial))


def recorded(module: nn.Module) -> InitialRecord:
    record = InitialRecord.of([name for name, _ in module.named_parameters()], 0)
    now = Fingerprint.of(module, record)
    return dataclasses.replace(record, sha256=now.sha256, sketch=now.sketch)


def test_rounding_of_another_processor(tmp_path: Path) -> None:
    """Vectorised code rounds otherwise in the last bit: the same weights all the same."""
    module = nn.Sequential(nn.Linear(7, 5), nn.Embedding(9, 4), nn.LayerNorm(4))
    record = recorded(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 1e-7)
    now = Fingerprint.of(module, record)
    assert now.sha256 != record.sha256
    assert other_initial(record, now) == ""


def swapped(module: nn.Sequential) -> None:
    module[0].weight.data = module[0].weight.data.flip(0)


def halved(module: nn.Sequential) -> None:
    module.half()


def larger(module: nn.Sequential) -> None:
    module[0].weight.data *= 1.01


def filled(module: nn.Sequential) -> None:
    module[0].bias.data.fill_(torch.nan)


def shorter(module: nn.Sequential) -> None:
    module[0].bias.data = module[0].bias.data[:3]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (swapped, "0.weight"),
        (larger, "0.weight"),
        (filled, "0.bias"),
        (shorter, "0.bias"),
        (halved, "0.bias, 0.weight"),
    ],
)
def test_more_than_rounding(change: Any, name: str) -> None:
    """The same numbers in other places, a little larger ones, such as are not finite, another shape."""
    module = nn.Sequential(nn.Linear(7, 5))
    record = recorded(module)
    change(module)
    assert f"({name})" in other_initial(record, Fingerprint.of(module, record))


def test_a_one_in_another_place() -> None:
    """A tensor of zeros and ones has the same sums in many orders."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.eye_(module[0].weight)
    record = recorded(module)
    for order in ([1, 0, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]):
        nn.init.eye_(module[0].weight)
        module[0].weight.data = module[0].weight.data[order]
        assert "(0.weight)" in other_initial(record, Fingerprint.of(module, record))
