"""From what a replay saw to its verdict: only what was tested and is finite passes."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_nancapture.bundle.manifest import Fault, Gradients
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.verdict import Judgement, judge
from pytest_nancapture.step.finding import Finding

GOOD = Gradients(total=2, nonzero=("a", "b"))
BAD = Gradients(total=2, nonfinite=("a", "b"), nonzero=("a", "b"))
MASKED = "a masked fault is not a fixed one"


def fault(**fields: Any) -> Fault:
    base = {"kind": "nan", "found_in": ("loss",), "global_step": 1, "epoch": 0, "batch_idx": 1}
    return Fault(**{**base, "losses": ("nan",), "gradients": BAD, **fields})


def finding(**fields: Any) -> Finding:
    return Finding(**{"losses": ("0.5",), "gradients": GOOD, **fields})


def test_finite() -> None:
    """A loss and gradients where there were some, all finite."""
    assert Judgement(verdict="finite", reason="loss and gradients are finite") == judge(finding(), fault(), 0, None)


@pytest.mark.parametrize(
    ("seen", "reason", "names", "phase"),
    [
        (
            {"losses": ("nan",), "bad_losses": (0,), "gradients": BAD},
            "nan in loss, 2 of 2 gradients not finite",
            ("loss", "gradient a", "gradient b"),
            "forward",
        ),
        (
            {"losses": ("inf",), "bad_losses": (0,), "kind": "inf"},
            "inf in loss, all 2 gradients finite",
            ("loss",),
            "forward",
        ),
        (
            {"gradients": Gradients(total=2, nonfinite=("b",), nonzero=("a", "b"))},
            "1 of 2 gradients not finite",
            ("gradient b",),
            "backward",
        ),
        ({"buffers": ("mean", "var")}, "buffer mean and 1 more not finite", ("buffer mean", "buffer var"), "forward"),
        ({"weights": ("a",)}, "weight a not finite", ("weight a",), "optimizer"),
    ],
)
def test_nonfinite(seen: dict[str, Any], reason: str, names: tuple[str, ...], phase: Any) -> None:
    """What is not finite is named, and the phase says where the fault surfaces."""
    expected = Judgement(verdict="nonfinite", reason=reason, nonfinite=names, culprit=Culprit(phase=phase))
    assert expected == judge(finding(**seen), fault(), 0, None)


def test_what_was_bad_before_the_step() -> None:
    """It is the culprit, not the operation that came upon it."""
    given = Culprit(phase="input", explanation="batch['x'] holds 1 NaN")
    judged = judge(finding(losses=("nan",), bad_losses=(0,)), fault(), 0, given)
    assert ("nonfinite", given) == (judged.verdict, judged.culprit)


def test_what_was_bad_before_and_did_no_harm() -> None:
    """A batch with NaN that the step masks is no fault."""
    assert judge(finding(), fault(), 0, Culprit(phase="input")).verdict == "finite"


def test_no_loss() -> None:
    """A step that returns None where training had a loss tests nothing."""
    expected = "the step made no loss for micro-batch 2 of the window, where training had one; " + MASKED
    judged = judge(finding(losses=("0.5", "")), fault(losses=("0.5", "nan")), 1, None)
    assert ("vacuous", expected) == (judged.verdict, judged.reason)


def test_no_loss_for_an_innocent_micro_batch() -> None:
    """Only the guilty one must have been tested."""
    assert judge(finding(losses=("", "0.5")), fault(losses=("0.5", "nan")), 1, None).verdict == "finite"


def test_fewer_losses_than_micro_batches() -> None:
    """A replay that never came to the guilty one has not tested it."""
    assert judge(finding(losses=("0.5",)), fault(losses=("0.5", "nan")), 1, None).verdict == "vacuous"


def test_no_loss_in_training_either() -> None:
    """A fault in a buffer, of a step that was skipped, is fixed where the buffer is finite."""
    skipped = fault(found_in=("buffers",), losses=("",), gradients=Gradients(), buffers=("mean",))
    assert judge(finding(losses=("",), gradients=Gradients()), skipped, 0, None).verdict == "finite"


@pytest.mark.parametrize("now", [Gradients(), Gradients(total=2), Gradients(total=2, nonzero=("c",))])
def test_no_gradients_where_there_were_bad_ones(now: Gradients) -> None:
    """None, or only zeros: the loss was cut off or masked as a whole."""
    expected = "2 parameters with non-finite gradients at capture now have none, or only zeros: nothing was tested; "
    judged = judge(finding(gradients=now), fault(), 0, None)
    assert ("vacuous", expected + MASKED) == (judged.verdict, judged.reason)


def test_no_gradients_where_there_were_good_ones() -> None:
    """Also where only the loss was bad; a single parameter is named."""
    was = Gradients(total=2, nonzero=("fc.weight",))
    expected = "fc.weight with non-zero gradients at capture now have none, or only zeros: nothing was tested; "
    judged = judge(finding(gradients=Gradients(total=2)), fault(gradients=was), 0, None)
    assert ("vacuous", expected + MASKED) == (judged.verdict, judged.reason)


@pytest.mark.parametrize("name", ["a", "b"])
def test_some_gradients_are_enough(name: str) -> None:
    """A fix may cut some parameters off; one of those that were bad has to be tested."""
    now = Gradients(total=2, nonzero=(name, "new"))
    assert judge(finding(gradients=now), fault(), 0, None).verdict == "finite"
