"""How a result shows, where somebody looks at it by itself."""

from __future__ import annotations

import dataclasses

from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.result import ReplayResult

RED = ReplayResult(
    verdict="nonfinite",
    loss=float("nan"),
    nonfinite=("loss", "gradient w"),
    culprit=Culprit(
        phase="forward", op="aten.div.Tensor", file="net.py", line=7, source="a / <b>", explanation="0 / 0"
    ),
    reason="nan in loss",
    notes=("captured on cuda",),
    device="cpu",
    seconds=0.25,
)


def test_a_result_shows_as_text() -> None:
    """The verdict first, then the culprit and what else there is to know."""
    assert repr(RED).splitlines() == [
        "nonfinite: nan in loss",
        "  culprit     a / <b>",
        "  born at     net.py:7   aten.div.Tensor",
        "  because     0 / 0",
        "  surfaces    forward",
        "  not finite  2: loss, gradient w",
        "  loss        nan",
        "  note        captured on cuda",
        "  ran on      cpu, 0.2 s",
    ]


def test_an_untraced_result_says_how_to_find_the_line() -> None:
    """In the words of whoever called replay."""
    result = dataclasses.replace(RED, culprit=Culprit(phase="backward"))
    assert "  surfaces    backward   (give replay trace=True to find the operation and its line)" in repr(result)


def test_a_result_in_a_notebook() -> None:
    """A table, in which what the bundle says is text and nothing else."""
    shown = dataclasses.replace(RED, detail="Traceback <i>\x1b[31m")._repr_html_()
    assert shown.startswith("<div><b style='color:firebrick'>nonfinite</b>: nan in loss<table>")
    assert ("a / &lt;b&gt;" in shown, "<b>" in shown, "<i>" in shown, "\x1b" in shown) == (True, False, False, False)
