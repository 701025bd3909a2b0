"""The run's own log and the bundle name the culprit, at the price of one more rerun."""

import inspect
import logging

import pytest
import torch
from training import Net, batches, capture_one, fault, fit

from pytest_nancapture import NaNCapture


class Counted(Net):
    """Counts its steps in the class, where no rerun puts it back."""

    calls = 0

    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        return super().training_step(batch, batch_idx)


def messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pytest_nancapture"]


def test_the_log_names_the_line_the_operation_and_why(tmp_path, caplog):
    """Between what was found and the bundle."""
    caplog.set_level(logging.WARNING)
    bundle = capture_one(Net(), batches(), tmp_path)
    line = inspect.getsourcelines(fault)[1] + 2
    assert messages(caplog)[1] == (
        f"nancapture: culprit  return good / good   tests/training.py:{line}   aten.div "
        "(0 / 0: the divisor is 0 in its only place; keep it above 0, as with clamp(min=...))"
    )
    assert {name: bundle.fault.culprit[name] for name in ("op", "line", "phase")} == {
        "op": "aten.div.Tensor",
        "line": line,
        "phase": "forward",
    }


@pytest.mark.parametrize(("options", "reruns"), [({}, 4), ({"trace": False}, 1), ({"confirm": 0}, 0)])
def test_the_trace_costs_a_few_reruns(tmp_path, monkeypatch, options, reruns):
    """One for the culprit, and some to see what a fix may leave to learn; none where it is switched off."""
    monkeypatch.setattr(Counted, "calls", 0)
    bundle = capture_one(Counted(), batches(), tmp_path, **options)
    proofs = min(reruns, 1)
    assert (Counted.calls, bundle.fault.culprit is not None) == (5 + reruns + proofs, reruns == 4)


def test_the_same_fault_again_is_not_healed_again(tmp_path, monkeypatch):
    """It is counted, and its bundle says already what there is to learn."""
    monkeypatch.setattr(Counted, "calls", 0)
    fit(Counted(), batches(bad=[1, 3]), NaNCapture(tmp_path, on_capture="skip"))
    assert Counted.calls == 6 + 4 + 2 + 1


def test_a_step_that_takes_long_is_not_traced(tmp_path, monkeypatch):
    """The run is not held up; a replay will name the culprit."""
    monkeypatch.setattr("pytest_nancapture.capture.rerun._TRACE_SECONDS", 0)
    assert capture_one(Net(), batches(), tmp_path).fault.culprit is None


def test_a_transient_fault_is_not_traced(tmp_path, monkeypatch):
    """There is nothing to follow once it is gone."""

    class Once(Counted):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss / 0 if self.calls == 3 else loss

    monkeypatch.setattr(Counted, "calls", 0)
    assert capture_one(Once(), batches(bad=[]), tmp_path).fault.culprit is None


def test_faults_on_different_lines_are_different_faults(tmp_path):
    """Though the same gradients are bad."""

    class TwoLines(Net):
        def training_step(self, batch, batch_idx):
            x, good = batch
            if batch_idx == 1:
                return self.layer(x).pow(2).mean() / good
            return self.layer(x).pow(2).mean() / good.abs()

    fit(TwoLines(), batches(bad=[1, 3, 4]), NaNCapture(tmp_path, on_capture="skip"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001-rank-0", "step-000003-rank-0"]


def test_training_goes_on_as_if_there_had_been_no_trace(tmp_path):
    """Weights, buffers and random draws after a skipped step are the same with and without it."""
    states = []
    for trace in (False, True):
        torch.manual_seed(0)
        module = Net()
        fit(module, batches(), NaNCapture(tmp_path / str(trace), on_capture="skip", trace=trace))
        states.append([*module.state_dict().values(), torch.rand(3)])
    assert all(map(torch.equal, *states))
