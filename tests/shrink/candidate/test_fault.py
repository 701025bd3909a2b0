"""Which faults are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_nancapture.shrink.candidate.fault import SeenFault, difference

FIRST = SeenFault(
    result={
        "verdict": "nonfinite",
        "culprit": {
            "phase": "forward",
            "op": "aten.div.Tensor",
            "file": "model.py",
            "line": 7,
            "explanation": "0 / 0: the divisor is 0 in 3 of 20 places; keep it above 0",
        },
    },
    kind="nan",
    found_in=("loss", "gradients"),
    nonfinite=("w",),
    nonzero=("w",),
    healed=("w",),
    births=("model.py:7",),
    born=("nan",),
)


def changed(culprit: dict[str, Any] | None = None, **fields: Any) -> SeenFault:
    result = {**FIRST.result, "culprit": {**FIRST.culprit, **(culprit or {})}}
    return dataclasses.replace(FIRST, **{"result": result, **fields})


def test_same() -> None:
    """Numbers in the explanation follow from the size of things; fewer buffers may be bad, and more healed."""
    now = changed({"explanation": "0 / 0: the divisor is 0 in its only place; keep it above 0"}, healed=("v", "w"))
    first = dataclasses.replace(FIRST, found_in=("loss", "gradients", "buffers"), births=("model.py:3", "model.py:7"))

    assert difference(FIRST, now) == ""
    assert difference(first, now) == ""


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (changed(result={"verdict": "finite", "reason": "all is well"}), "it is finite: all is well"),
        (changed({"line": 8}), "another line: 8, was 7"),
        (changed({"op": "aten.exp.default"}), "another op: aten.exp.default, was aten.div.Tensor"),
        (changed({"phase": "backward"}), "another phase: backward, was forward"),
        (changed({"explanation": "overflow: float32 ends there"}), "another cause: overflow, was /"),
        (changed(kind="inf"), "inf in place of nan"),
        (changed(born=("inf", "nan")), "inf and nan was born there, not nan"),
        (changed(found_in=("loss",)), "found in loss, was in loss, gradients"),
        (changed(nonfinite=("w", "v")), "the gradients of other parameters are not finite"),
        (changed(nonzero=()), "other parameters have no gradient"),
        (changed(births=("model.py:7", "model.py:9")), "bad values are born in a place where none were: model.py:9"),
        (changed(healed=None), "with the fault mended, fewer parameters would have a gradient"),
        (changed(spares=False), "no good entry is left in the batch"),
    ],
)
def test_different(now: SeenFault, problem: str) -> None:
    """Whatever else than the size changes makes it another fault, or no test of this one."""
    assert difference(FIRST, now) == problem


def test_given() -> None:
    """Of bad values that the batch holds, it counts which tensor holds them, and which kind they are."""

    def given(text: str) -> SeenFault:
        return changed({"phase": "input", "op": "", "file": "", "line": 0, "explanation": text})

    first = given("batch[1] holds 3 NaN among 16 values, in samples 1, 2 of 16 (and 1 more)")
    assert difference(first, given("batch[1] holds 1 NaN among 2 values, in sample 0 of 2")) == ""
    assert "another cause" in difference(first, given("batch[0] holds 1 NaN among 2 values, in sample 0 of 2"))
    assert "another cause" in difference(first, given("batch[1] holds 1 Inf among 2 values, in sample 0 of 2"))
