"""A step that raises over a value that is not finite is a fault; one that raises over anything else is left alone."""

import copy
import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import Net, batches, bundles_in, differing, fit, state_of

from pytest_nancapture import NaNCapture, find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle


class Raising(Net):
    """Makes a NaN on a batch whose second part is 0, and meets it in one of several ways."""

    healed = False

    def __init__(self, how: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.how = how
        self.other = nn.Linear(3, 3)
        self.automatic_optimization = how != "second backward by hand"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        value = self.layer(x).pow(2).mean(1)
        value = value * (good + 1) if self.healed else value * (good / good)
        return getattr(self, f"when_{self.how.replace(' ', '_')}")(value, x)

    def when_a_distribution_refuses(self, value: Tensor, x: Tensor) -> Tensor:
        return -torch.distributions.Normal(value, 1.0).log_prob(x[:, 0]).mean()

    def when_it_checks_its_loss(self, value: Tensor, x: Tensor) -> Tensor:
        if not torch.isfinite(value.mean()):
            raise ArithmeticError("training stopped")
        return value.mean()

    def when_it_asserts(self, value: Tensor, x: Tensor) -> Tensor:
        assert not value.isnan().any(), f"came {value}"
        return value.mean()

    def when_it_reads_a_number(self, value: Tensor, x: Tensor) -> Tensor:
        number = value.mean().item()
        other = x.sum().item()
        if math.isnan(number):
            raise ArithmeticError(f"loss {number}, {other}")
        return value.mean()

    def when_numpy_refuses(self, value: Tensor, x: Tensor) -> Tensor:
        np.asarray_chkfinite(value.detach().numpy())
        return value.mean()

    def when_an_operation_refuses(self, value: Tensor, x: Tensor) -> Tensor:
        return (value * torch.multinomial(value.abs() + 1, 1)).mean() + value.mean()

    def when_a_decomposition_refuses(self, value: Tensor, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(torch.eye(4) + torch.outer(value, value)).sum()

    def when_an_index_is_made_of_it(self, value: Tensor, x: Tensor) -> Tensor:
        return x[(value > 1e9).long() + (value != value).long() * 99].mean() + value.mean()

    def when_the_error_is_another_ones_cause(self, value: Tensor, x: Tensor) -> Tensor:
        try:
            return self.when_it_checks_its_loss(value, x)
        except ArithmeticError as error:
            raise RuntimeError("in batch") from error

    def when_the_loss_is_replaced(self, value: Tensor, x: Tensor) -> Tensor:
        """As forecasting libraries do; then there is nothing to backpropagate."""
        return torch.tensor(1e9) if value.isnan().any() else value.mean()

    def when_the_loss_is_replaced_and_more_is_read(self, value: Tensor, x: Tensor) -> Tensor:
        loss = torch.tensor(1e9) if value.isnan().any() else value.mean()
        assert x.abs().sum().item() > 0
        return loss

    def when_the_hook_refuses(self, value: Tensor, x: Tensor) -> Tensor:
        return value.mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "the hook refuses":
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
            if not norm.isfinite():
                raise ArithmeticError("bad gradients")

    def when_second_backward_by_hand(self, value: Tensor, x: Tensor) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        self.when_it_checks_its_loss(value, x)
        self.manual_backward(value.mean())
        optimizer.step()


HOWS = {
    "a distribution refuses": ValueError,
    "it checks its loss": ArithmeticError,
    "it asserts": AssertionError,
    "it reads a number": ArithmeticError,
    "numpy refuses": ValueError,
    "an operation refuses": RuntimeError,
    "a decomposition refuses": RuntimeError,
    "an index is made of it": IndexError,
    "the error is another ones cause": RuntimeError,
    "the loss is replaced": RuntimeError,
    "the loss is replaced and more is read": RuntimeError,
    "the hook refuses": ArithmeticError,
    "second backward by hand": ArithmeticError,
}


def ended_by(module: pl.LightningModule, folder: Any, **kwargs: Any) -> Exception:
    """Train until the step raises."""
    options = {name: kwargs.pop(name) for name in ("on_capture", "optimizer_history") if name in kwargs}
    with pytest.raises(Exception) as caught:  # noqa: PT011, whichever the step raises
        fit(module, kwargs.pop("data", batches()), NaNCapture(folder, **options), **kwargs)
    return caught.value


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("how", HOWS)
def test_a_step_that_raises_over_nan_is_captured(tmp_path, monkeypatch, how):
    """The exception is the user's own; the bundle is red over it, names the line, and is green with that mended."""
    history = how == "second backward by hand"
    error = ended_by(Raising(how), tmp_path, optimizer_history=history)
    assert type(error) is HOWS[how] or isinstance(error, HOWS[how])
    (path,) = find_bundles(tmp_path)
    fault = Bundle.open(path).fault
    assert ("raised" in fault.found_in, fault.kind, fault.batch_idx) == (True, "nan", 4)
    assert fault.culprit is not None
    assert "good / good" in fault.culprit["source"]
    assert fault.reproduced.runs == 1
    assert [str(path.name) in note for note in notes(error)] == [True]
    result = replay(path)
    assert (result.verdict, result.reason.startswith("raises as at capture: ")) == ("nonfinite", True)
    assert (result.culprit is not None and result.culprit.source) == fault.culprit["source"]
    monkeypatch.setattr(Raising, "healed", True)
    assert replay(path).verdict == "finite"


class Root(Net):
    """Finite in the forward, and not in the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return (self.layer(x) * good).square().sum(1).sqrt().mean()


class Later(Root):
    """Raises after its backward, over the loss that was bad before, or over a gradient."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.over = over

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        self.kept = super().training_step(batch, batch_idx) if self.over == "gradient" else self.layer(x).mean() / good
        return self.kept

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        value = self.layer.weight.grad if self.over == "gradient" else self.kept
        if not value.isfinite().all():
            raise ArithmeticError(self.over)


class Twice(Net):
    """Its first loss is backpropagated before it makes the second, which is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, good = batch
        self.manual_backward(self.layer(x).mean())
        if not (second := self.layer(x).mean() / good).isfinite():
            raise ArithmeticError("the second")
        self.manual_backward(second)
        self.optimizers().step()


@pytest.mark.parametrize(
    ("module", "phase"),
    [(Later("loss"), "forward"), (Later("gradient"), "backward"), (Twice(), "forward")],
    ids=["loss", "gradient", "second loss"],
)
def test_the_phase_is_where_the_value_was_born(tmp_path, module, phase):
    """Wherever the exception was raised: before a backward pass or after it."""
    ended_by(module, tmp_path)
    (path,) = find_bundles(tmp_path)
    assert (Bundle.open(path).fault.culprit or {}).get("phase") == phase
    culprit = replay(path).culprit
    assert culprit is not None
    assert culprit.phase == phase


class Checking(Net):
    """Its hook looks at what it makes of the batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, good = batch
        scaled = x / good
        if not scaled.isfinite().all():
            raise ValueError("bad batch")
        return scaled, good


def test_anomaly_mode_is_on_in_the_replay_as_it_was(tmp_path):
    """It raises in the backward where it is on; the Trainer has switched it off by the time of the capture."""
    error = ended_by(Root(), tmp_path, detect_anomaly=True)
    assert "returned nan values" in str(error)
    (path,) = find_bundles(tmp_path)
    fault = Bundle.open(path).fault
    assert (fault.culprit or {}).get("phase") == "backward"
    assert "sqrt()" in (fault.culprit or {}).get("source", "")
    assert replay(path).reason.startswith("raises as at capture: RuntimeError: Function 'PowBackward0' returned nan")


@pytest.mark.parametrize("on_capture", ["raise", "stop", "skip"])
def test_the_exception_goes_on_whatever_is_done_about_faults(tmp_path, on_capture):
    error = ended_by(Raising("it checks its loss"), tmp_path, on_capture=on_capture)
    assert (str(error), bundles_in(tmp_path)) == ("training stopped", ["step-000004-rank-0"])


def test_a_hook_that_makes_the_batch_may_raise(tmp_path):
    """It is code under test: the batch of the bundle is the one that it was given."""
    error = ended_by(Checking(), tmp_path)
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert (str(error), bundle.fault.batch_idx) == ("bad batch", 4)
    assert "scaled = x / good" in (bundle.fault.culprit or {}).get("source", "")
    assert replay(path).reason == "raises as at capture: ValueError: bad batch"


def test_a_window_of_several_micro_batches(tmp_path):
    ended_by(Raising("it checks its loss"), tmp_path, accumulate_grad_batches=3, data=batches(bad=[4]))
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert ([b.batch_idx for b in bundle.manifest.batch.window], bundle.fault.batch_idx) == ([3, 4], 4)
    assert replay(path).verdict == "nonfinite"


class Given(Net):
    """Raises over what came with the batch, once it has told of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        loss = (self.layer(x) * good).pow(2).mean()
        if torch.isnan(loss.detach()):
            raise ValueError(f"loss is NaN, of {torch.isnan(good).sum() + x.isnan().sum()} values")
        return loss


def test_a_value_that_was_given_to_the_step_is_named(tmp_path):
    """Though operations follow between the look at the loss and the exception."""
    data = [(x, torch.tensor(math.nan) if i == 4 else good) for i, (x, good) in enumerate(batches(bad=[]))]
    error = ended_by(Given(), tmp_path, data=data)
    (path,) = find_bundles(tmp_path)
    culprit = Bundle.open(path).fault.culprit or {}
    assert (str(error), culprit["phase"]) == ("loss is NaN, of 1 values", "input")
    assert culprit["explanation"].startswith("batch[1] holds 1 NaN among 1 values")


class Unrelated(Net):
    """Raises on the fifth batch over something else, though values that are not finite are about."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        value = getattr(self, f"with_{self.how}")(x)
        if batch_idx == 4:
            raise KeyError("width")
        return self.layer(value).pow(2).mean()

    def with_nothing(self, x: Tensor) -> Tensor:
        return x

    def with_a_mask(self, x: Tensor) -> Tensor:
        scores = x.masked_fill(x > 0, -math.inf)
        assert bool((scores == -math.inf).any())
        return scores.exp()

    def with_missing_values(self, x: Tensor) -> Tensor:
        marked = torch.where(x > 1, math.nan, x)
        present = ~marked.isnan()
        assert bool(present.any())
        return torch.where(present, marked, 0) * 2

    def with_a_harmless_birth(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.clamp(min=0).log(), 0).nan_to_num() + x.relu().log().exp()

    def with_a_number_that_is_read(self, x: Tensor) -> Tensor:
        return x * x.mean().item()


@pytest.mark.parametrize("how", ["nothing", "a_mask", "missing_values", "a_harmless_birth", "a_number_that_is_read"])
def test_any_other_exception_is_left_alone(tmp_path, caplog, how):
    data = [(x if how != "missing_values" else x.masked_fill(x > 1.5, math.nan), good) for x, good in batches(bad=[])]
    with caplog.at_level("WARNING", "pytest_nancapture"):
        error = ended_by(Unrelated(how), tmp_path, data=data)
    assert (type(error), error.args, notes(error)) == (KeyError, ("width",), [])
    assert (bundles_in(tmp_path), caplog.messages) == ([], [])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, torch.OutOfMemoryError, MemoryError])
def test_what_ends_a_run_from_outside_is_no_fault(tmp_path, kind):
    class Ended(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not batch[1]:
                assert (batch[1] / batch[1]).isnan()
                raise kind
            return super().training_step(batch, batch_idx)

    with pytest.raises((kind, SystemExit)):
        fit(Ended(), batches(), NaNCapture(tmp_path))
    assert bundles_in(tmp_path) == []


def test_what_is_raised_outside_of_a_step_is_no_fault(tmp_path):
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if (batch[0] / 0).isinf().any():
                raise ValueError("over Inf, but in no step")

    loader = torch.utils.data.DataLoader(batches(bad=[]), batch_size=None)
    module = Validated()
    module.val_dataloader = lambda: loader
    with pytest.raises(ValueError, match="in no step"):
        fit(module, batches(bad=[]), NaNCapture(tmp_path), num_sanity_val_steps=0)
    assert bundles_in(tmp_path) == []


def test_everything_is_left_as_the_exception_left_it(tmp_path):
    """For those who look at it, or save it, once the run has ended."""

    class Watching(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            gradients = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}
            self.seen = [*vars(self).get("seen", []), (state_of(pl_module), gradients, torch.get_rng_state())]

    class Two(Raising):
        def __init__(self, how: str) -> None:
            super().__init__(how)
            self.norm = nn.BatchNorm1d(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.norm(batch[0] + torch.rand(()))
            return super().training_step(batch, batch_idx)

    before, after = Watching(), Watching()
    capture = NaNCapture(tmp_path)
    with pytest.raises(ArithmeticError):
        fit(Two("the hook refuses"), batches(), None, callbacks=[before, capture, after])
    (state, gradients, rng), (state_after, gradients_after, rng_after) = before.seen[0], after.seen[0]
    assert differing(state, state_after) == []
    assert differing(gradients, gradients_after) == []
    assert torch.equal(rng, rng_after)


def test_a_capture_that_fails_hides_nothing(tmp_path, caplog):
    """Here the folder is a file."""
    (tmp_path / "bundles").write_text("in the way")
    with caplog.at_level("WARNING", "pytest_nancapture"):
        error = ended_by(Raising("it checks its loss"), tmp_path / "bundles")
    assert (str(error), notes(error)) == ("training stopped", [])
    assert any("no bundle" in message for message in caplog.messages)


def captured(folder: Any, how: str = "it checks its loss") -> Bundle:
    ended_by(Raising(how), folder)
    (path,) = find_bundles(folder)
    return Bundle.open(path)


class Fixed(Raising):
    """The same module with another step."""

    def __init__(self, step: Any) -> None:
        super().__init__("it checks its loss")
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


def raise_another(module: Any, batch: Any) -> Any:
    raise KeyError("width")


STEPS = {
    "it ends well": (lambda m, b: m.layer(b[0]).pow(2).mean(), "finite"),
    "the loss is bad now": (lambda m, b: m.layer(b[0]).pow(2).mean() * (b[1] / b[1]), "nonfinite"),
    "it raises something else": (raise_another, "error"),
    "it makes no loss": (lambda m, b: None, "vacuous"),
    "it learns nothing": (lambda m, b: m.layer(b[0]).pow(2).mean() * 0, "vacuous"),
    "it learns with other weights": (lambda m, b: m.other(b[0]).pow(2).mean(), "vacuous"),
}


@pytest.mark.parametrize("change", STEPS)
def test_what_becomes_of_the_test(tmp_path, change):
    step, verdict = STEPS[change]
    result = replay(captured(tmp_path), module=Fixed(step))
    assert result.verdict == verdict, result


def test_a_check_that_is_put_in_place_of_a_fix_is_no_error_but_red(tmp_path):
    """The bundle is of a loss that was bad; today's step raises over it."""

    class Plain(Raising):
        def when_it_checks_its_loss(self, value: Tensor, x: Tensor) -> Tensor:
            return value.mean()

    with pytest.raises(Exception, match="nan in loss"):
        fit(Plain("it checks its loss"), batches(), NaNCapture(tmp_path))
    (path,) = find_bundles(tmp_path)
    result = replay(path, module=Raising("it checks its loss"))
    assert (result.verdict, result.reason) == ("nonfinite", "raises ArithmeticError: training stopped")


def test_the_settings_that_make_steps_raise_are_kept(tmp_path):
    """A script that has switched the validation of distributions off sees none in its replays, and the other way."""
    before = copy.copy(torch.distributions.Distribution._validate_args)
    bundle = captured(tmp_path, "a distribution refuses")
    assert bundle.manifest.numerics["distributions_validate_args"] is True
    try:
        torch.distributions.Distribution.set_default_validate_args(False)
        assert replay(bundle).reason.startswith("raises as at capture: ValueError")
        assert torch.distributions.Distribution._validate_args is False
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


class Refusing(torch.optim.SGD):
    """An optimizer that raises over what its own update makes."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        values = [p / (p.grad.abs().max() * 0) for group in self.param_groups for p in group["params"]]
        if self.param_groups[0]["lr"] > 1 and not all(bool(v.isfinite().all()) for v in values):
            raise ArithmeticError("the update is bad")
        return loss


class Updated(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            self.optimizers().param_groups[0]["lr"] = 2.0
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return Refusing(self.parameters(), lr=0.1)


def test_an_update_that_raises_is_captured_where_there_is_a_copy(tmp_path):
    error = ended_by(Updated(), tmp_path, optimizer_history=True, data=batches(bad=[]))
    (path,) = find_bundles(tmp_path)
    bundle = Bundle.open(path)
    assert (str(error), (bundle.fault.culprit or {}).get("phase")) == ("the update is bad", "optimizer")
    assert replay(path).reason == "raises as at capture: ArithmeticError: the update is bad"
