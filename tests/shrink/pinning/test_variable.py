"""The variable that a culprit's line puts the blame on."""

from __future__ import annotations

import pytest

from pytest_nancapture.shrink.pinning.variable import guilty_variable


@pytest.mark.parametrize(
    ("source", "op", "expected"),
    [
        ("mean_loss = loss / count", "div", "count"),
        ("return -(mask * logp).sum(1) / pos.sum(1)", "div", "pos"),
        ("x /= batch['n_valid'].sum()", "div", "n_valid"),
        ("return self.scale / self.count", "div", "count"),
        ("torch.atan(w1 / h1)", "div", "h1"),
        ("num / (na[:, None] * nb[None, :])", "div", "na"),
        ("img.sub_(mean).div_(std)", "div", "std"),
        ("p.grad / p.grad.norm()", "div", "grad"),
        ("inv = 1.0 / (x * x + y * y)", "reciprocal", "x"),
        ("w = 1 / len(items)", "div", "items"),
        ("adv.std()", "std", "adv"),
        ("torch.exp(0.5 * logvar)", "exp", "logvar"),
        ("torch.log((w * dens).sum(-1))", "log", "dens"),
        ("F.cross_entropy(logits.flatten(0, 1), labels.flatten())", "nll_loss", "labels"),
        ("torch.where(d > 1.5, torch.log2(d) + 0.9, d)", "log2", "d"),
        ("if torch.log(p).sum() > 0:", "log", "p"),
        ("elif torch.log(p).sum() > 0:", "log", "p"),
        ("else: x = a / b", "div", "b"),
        ("for a in torch.log(q):", "log", "q"),
        ("loss = combine(a / b,", "div", "b"),
        ("/ count)", "div", "count"),
        ("], dim=0) / total", "div", "total"),
        ("x / 0", "div", ""),
        ("y = x / 0", "div", "y"),
        ("logits[mask] = -math.inf", "", "logits"),
        ("loss = (loss /", "div", ""),
        ("", "div", ""),
        ("???", "div", ""),
    ],
)
def test_guilty_variable(source: str, op: str, expected: str) -> None:
    """The divisor of a division, else what the operation is about; also where the line is part of a statement."""
    assert expected == guilty_variable(source, (0, 0), op)


@pytest.mark.parametrize(
    ("columns", "expected"), [((6, 10), "b"), ((13, 17), "d"), ((14, 18), "b"), ((21, 25), "d"), ((1, 99), "b")]
)
def test_columns_tell_one_expression_from_another(columns: tuple[int, int], expected: str) -> None:
    """The columns are those of the whole line, of which the source text has lost the indentation."""
    assert expected == guilty_variable("y = (a / b, c / d)", columns, "div")
