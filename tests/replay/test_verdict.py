"""From what a replay saw to its verdict: only what was tested and is finite passes."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_nancapture.bundle.manifest import Fault, Gradients, Healed
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.verdict import Judgement, judge
from pytest_nancapture.step.finding import Finding

GOOD = Gradients(total=2, nonzero=("a", "b"))
BAD = Gradients(total=2, nonfinite=("a", "b"), nonzero=("a", "b"))
MASKED = "a masked fault is not a fixed one; "
GRADIENT = "a fix that leaves them a gradient passes"
UNKNOWN = f"{MASKED}{GRADIENT}; if zeros are right for this batch, capture or pin it anew to have that told"
FINE = Judgement(verdict="finite", reason="loss and gradients are finite")


def fault(**fields: Any) -> Fault:
    base = {"kind": "nan", "found_in": ("loss",), "global_step": 1, "epoch": 0, "batch_idx": 1}
    return Fault(**{**base, "losses": ("nan",), "gradients": BAD, **fields})


def finding(**fields: Any) -> Finding:
    """Every gradient that is not 0 comes of the first micro-batch, unless said otherwise."""
    base = {"losses": ("0.5",), "gradients": GOOD, **fields}
    return Finding(**{"taught": (frozenset(base["gradients"].nonzero),), **base})


def test_finite() -> None:
    """A loss and gradients where there were some, all finite."""
    assert judge(finding(), fault(), 0, None) == FINE


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
    expected = (
        "the step made no loss for micro-batch 2 of the window, where training had one; "
        f"{MASKED}a fix that lets it make a finite one passes"
    )
    judged = judge(finding(losses=("0.5", "")), fault(losses=("0.5", "nan")), 1, None)
    assert ("vacuous", expected) == (judged.verdict, judged.reason)


def test_no_loss_for_an_innocent_micro_batch() -> None:
    """Only the guilty one must have been tested."""
    seen = finding(losses=("", "0.5"), taught=(frozenset(), frozenset("ab")))
    assert judge(seen, fault(losses=("0.5", "nan")), 1, None).verdict == "finite"


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
    assert (judged.verdict, judged.reason) == ("vacuous", expected + UNKNOWN)


def test_no_gradients_where_there_were_good_ones() -> None:
    """Also where only the loss was bad; a single parameter is named."""
    was = Gradients(total=2, nonzero=("fc.weight",))
    expected = "fc.weight with non-zero gradients at capture now have none, or only zeros: nothing was tested; "
    judged = judge(finding(gradients=Gradients(total=2)), fault(gradients=was), 0, None)
    assert (judged.verdict, judged.reason) == ("vacuous", expected + UNKNOWN)


@pytest.mark.parametrize("name", ["a", "b"])
def test_some_gradients_are_enough(name: str) -> None:
    """A fix may cut some parameters off; one of those that were bad has to be tested."""
    now = Gradients(total=2, nonzero=(name, "new"))
    assert judge(finding(gradients=now), fault(), 0, None).verdict == "finite"


IDLE = Healed(learns=True, idle=("a", "b"))
NOTHING = Healed(learns=False, idle=("a", "b"))
CLIPPED = Gradients(total=2)
"""There, and 0 throughout."""


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gradients": CLIPPED, "zeros": ("a", "b")}, "finite"),
        ({"gradients": Gradients(total=1, nonzero=("c",))}, "finite"),
        ({"gradients": Gradients(total=2, nonzero=("a",)), "zeros": ("b",)}, "finite"),
    ],
)
def test_zeros_as_in_the_healed_step(fields: dict[str, Any], expected: str) -> None:
    """They are honest, and where the loss was bad the parameters may have no gradient at all."""
    assert judge(finding(**fields), fault(healed=IDLE), 0, None).verdict == expected


def test_honest_zeros_are_noted() -> None:
    """A reader should know that little was tested."""
    judged = judge(finding(gradients=CLIPPED, zeros=("a", "b")), fault(healed=IDLE), 0, None)
    note = "the gradients are zero, as those of the healed step are: this batch has nothing to teach them"
    assert judged.notes == (note,)


@pytest.mark.parametrize(("healed", "expected"), [(NOTHING, "finite"), (IDLE, "vacuous"), (None, "vacuous")])
def test_a_skipped_step(healed: Healed | None, expected: str) -> None:
    """It passes where no parameter at all would learn with the fault healed."""
    judged = judge(finding(losses=("",), gradients=Gradients()), fault(healed=healed), 0, None)
    assert judged.verdict == expected


def test_lost_gradients_that_the_healed_step_has() -> None:
    """What would make it pass is told, and no word of zeros that may be right."""
    judged = judge(finding(gradients=CLIPPED, zeros=("a", "b")), fault(healed=Healed(idle=("b",))), 0, None)
    expected = "2 parameters with non-finite gradients at capture now have none, or only zeros: nothing was tested; "
    assert (judged.verdict, judged.reason) == ("vacuous", expected + MASKED + GRADIENT)


@pytest.mark.parametrize(
    ("healed", "passes"),
    [(Healed(), GRADIENT), (IDLE, "a fix that leaves gradients there, be they zeros, passes")],
)
def test_a_parameter_cut_off_where_the_loss_was_finite(healed: Healed, passes: str) -> None:
    """Though others have their gradients: a mended operation leaves zeros at least."""
    seen = finding(gradients=Gradients(total=1, nonzero=("a",)))
    judged = judge(seen, fault(found_in=("gradients",), losses=("0.5",), healed=healed), 0, None)
    expected = "b, with non-finite gradients at capture, is cut off from the loss now; "
    assert (judged.verdict, judged.reason) == ("vacuous", expected + MASKED + passes)


def test_gradients_of_other_micro_batches() -> None:
    """They do not show that the guilty one was tested."""
    taught = (frozenset("ab"), frozenset[str]())
    judged = judge(finding(losses=("0.5", "0.0"), taught=taught), fault(losses=("0.5", "nan")), 1, None)
    expected = (
        "2 parameters with non-finite gradients at capture now get none of micro-batch 2 of the window, or only zeros: "
        "nothing was tested; "
    )
    assert (judged.verdict, judged.reason) == ("vacuous", expected + UNKNOWN)


def test_gradients_mended_after_the_backward_pass() -> None:
    """Nobody knows what they would have been."""
    judged = judge(finding(), fault(), 0, None, raw={"b", "c"})
    expected = "the gradients of b were not finite until code after the backward pass changed them; "
    passes = "a fix that makes the backward pass itself finite passes"
    assert (judged.verdict, judged.reason) == ("vacuous", expected + MASKED + passes)


@pytest.mark.parametrize(("updated", "expected"), [((), "vacuous"), (("c",), "vacuous"), (("b",), "finite")])
def test_an_update_at_fault_must_be_made(updated: tuple[str, ...], expected: str) -> None:
    """Of a parameter that went bad in it."""
    update = fault(found_in=("weights",), losses=("0.5",), gradients=Gradients(), weights=("a", "b"))
    assert judge(finding(), update, 0, None, updated=updated).verdict == expected


def test_other_weights_than_those_of_the_fault() -> None:
    """Never green; what is red says so."""
    assert judge(finding(), fault(), 0, None, others="others") == Judgement(verdict="vacuous", reason="others")
    assert judge(finding(buffers=("mean",)), fault(), 0, None, others="others").notes == ("others",)
