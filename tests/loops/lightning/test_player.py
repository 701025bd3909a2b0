"""The step as it was: weights, random numbers, modes and gradients of the instant; and what is seen of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import models
import pytest
import torch

from pytest_nancapture import replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.tensors.file import read_tensors

if TYPE_CHECKING:
    from pathlib import Path


def weights_of(bundle: Path) -> dict[str, torch.Tensor]:
    return read_tensors(bundle / "weights.safetensors", Bundle.open(bundle).manifest.module.layouts)


class Anneal(pl.Callback):
    """Changes an attribute, a mode and what is frozen, before each step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.temperature = 1.0 / (batch_idx + 1)
        pl_module.drop.train(batch_idx == 0)
        pl_module.linear.bias.requires_grad_(batch_idx == 0)


def test_the_step_computes_what_it_computed(tmp_path: Path) -> None:
    """To the bit, with dropout, batch statistics and frozen layers, from a batch that the step itself spoils; again and
    again, since a replay changes nothing of the bundle."""
    bundle = models.capture(models.Dropping(), tmp_path, settings={"confirm": 0})
    expected = models.SEEN[-1]
    models.SEEN.clear()
    for _ in range(2):
        torch.rand(5)
        assert replay(bundle).verdict == "nonfinite"
    assert [expected, expected] == models.SEEN


def test_what_callbacks_changed_is_state(tmp_path: Path) -> None:
    """A temperature, a mode and a frozen parameter that a callback of training sets are as they were, without it."""
    bundle = models.capture(models.Dropping(), tmp_path, settings={"confirm": 0}, callbacks=[Anneal()])
    expected = models.SEEN[-1]
    models.SEEN.clear()
    module = models.Dropping()
    assert replay(bundle, module=module).verdict == "nonfinite"
    assert [expected] == models.SEEN
    assert (expected[-1], expected[-2], module.linear.bias.requires_grad) == (0.5, False, False)


def test_an_attribute_that_did_not_change_is_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the constructor sets is today's code's: an epsilon that a fix changes must stay changed."""
    bundle = models.capture(models.Dropping(), tmp_path)
    constructor = models.Dropping.__init__

    def changed(self: Any) -> None:
        constructor(self)
        self.temperature = 7.0

    monkeypatch.setattr(models.Dropping, "__init__", changed)
    models.SEEN.clear()
    replay(bundle)
    assert [seen[-1] for seen in models.SEEN] == [7.0]


def test_the_loss_of_a_window(accumulated: Path, mended: None) -> None:
    """Each micro-batch's is divided, as training does, and they are added up."""
    module = models.Net()
    module.load_state_dict(weights_of(accumulated))
    expected = sum(module.training_step(batch, 0).item() / 2 for batch in models.batches(6, bad=3)[2:4])
    result = replay(accumulated)
    assert result.loss == pytest.approx(expected)
    assert result.verdict == "finite"


def test_a_window_is_replayed_as_a_whole(accumulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its micro-batches, with gradients that add up."""
    seen: list[Any] = []
    step = models.Net.training_step

    def noted(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append((batch_idx, self.linear.weight.grad is None))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(models.Net, "training_step", noted)
    assert replay(accumulated).verdict == "nonfinite"
    assert seen == [(2, True), (3, False)]


def test_the_weights_are_those_of_the_instant_and_stay(net: Path) -> None:
    """No update is made: it would be training."""
    module = models.Net()
    assert replay(net, module=module).verdict == "nonfinite"
    expected = weights_of(net)
    assert expected.keys() == module.state_dict().keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in module.state_dict().items())


def test_no_update_is_made_when_it_is_finite_either(net: Path, mended: None) -> None:
    """Nor where training would have gone on."""
    module = models.Net()
    assert replay(net, module=module).verdict == "finite"
    assert torch.equal(weights_of(net)["linear.weight"], module.linear.weight)


def test_gradients_that_were_there_are_gone(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that comes with gradients starts without them, as a window does."""
    module, seen = models.Net(), []
    module.linear.weight.grad = torch.full((2, 3), torch.nan)

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(self.linear.weight.grad)
        return self.linear(batch[0]).sum()

    monkeypatch.setattr(models.Net, "training_step", step)
    assert replay(net, module=module).verdict == "finite"
    assert seen == [None]


def test_one_module_for_several_replays(net: Path, accumulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay's wrappers are taken off again, so that a hook may return the same module each time."""
    module = models.Net()
    hooks = set(vars(module))
    assert [
        replay(net, module=module).verdict,
        replay(accumulated, module=module).verdict,
    ] == ["nonfinite", "nonfinite"]
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert [replay(accumulated, module=module).verdict, replay(net, module=module).verdict] == ["finite", "finite"]
    assert not {name for name in set(vars(module)) - hooks if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "nonfinite", "phase"),
    [
        (models.Net, ("loss", "gradient linear.weight", "gradient linear.bias"), "forward"),
        (models.Root, ("gradient linear.weight", "gradient linear.bias"), "backward"),
        (models.Mean, ("buffer mean",), "forward"),
        (models.Manual, ("loss", "gradient linear.weight", "gradient linear.bias"), "forward"),
        (models.Tied, ("loss", "gradient linear.weight", "gradient linear.bias", "gradient first.weight"), "forward"),
        (models.Careful, ("loss", "gradient linear.weight", "gradient linear.bias"), "forward"),
        (models.Adversarial, ("loss", "gradient two.weight", "gradient two.bias"), "forward"),
    ],
)
def test_where_a_fault_is_seen(
    tmp_path: Path, kind: Any, nonfinite: tuple[str, ...], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In losses, gradients or buffers; and not any more when the code is mended."""
    bundle = models.capture(kind(), tmp_path)
    result = replay(bundle)
    assert result.culprit is not None
    assert ("nonfinite", nonfinite, phase) == (result.verdict, result.nonfinite, result.culprit.phase)
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    monkeypatch.setattr(models.Root, "epsilon", staticmethod(lambda: 1e-6))
    assert (replay(bundle).verdict, replay(bundle).nonfinite) == ("finite", ())


def test_a_later_optimizer_of_a_step(tmp_path: Path) -> None:
    """The weights of both are those from before the first one's update, which is made again."""
    bundle = models.capture(models.Adversarial(), tmp_path, settings={"confirm": 0})
    expected = models.SEEN[-2:]
    models.SEEN.clear()
    replay(bundle)
    assert expected == models.SEEN


def test_no_user_code_catches_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches every error around the optimizer's step does not catch the end of the replay."""
    bundle = models.capture(models.Careful(), tmp_path)
    for verdict in ("nonfinite", "finite"):
        models.SEEN.clear()
        assert verdict == replay(bundle).verdict
        assert models.SEEN == ["after backward", "before the update"]
        monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))


def test_a_buffer_that_was_bad_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none of the step's doing: a running minimum may well begin at infinity."""
    module = models.Mean()
    module.register_buffer("least", torch.tensor(torch.inf))
    constructor = models.Mean.__init__

    def with_least(self: Any) -> None:
        constructor(self)
        self.register_buffer("least", torch.tensor(0.0))

    monkeypatch.setattr(models.Mean, "__init__", with_least)
    bundle = models.capture(module, tmp_path)
    assert replay(bundle).nonfinite == ("buffer mean",)
    monkeypatch.setattr(models.Net, "divisor", staticmethod(models.at_least_one))
    assert replay(bundle).verdict == "finite"
