"""Sizes, lists of names and text from elsewhere, as they are printed."""

from __future__ import annotations

import pytest

from pytest_nancapture.bundle.text import human_size, printable, some


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1499, "1.5 kB"),
        (6_000, "6 kB"),
        (9_960, "10 kB"),
        (95_400_000, "95 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_human_size(count: int, text: str) -> None:
    """Powers of 1000; one digit after the point below 10."""
    assert text == human_size(count)


@pytest.mark.parametrize(("limit", "text"), [(2, "a, b and 1 more"), (3, "a, b, c"), (4, "a, b, c")])
def test_some(limit: int, text: str) -> None:
    """Up to the limit all are named, beyond it the rest is counted."""
    assert text == some(["a", "b", "c"], limit)


def test_some_of_none() -> None:
    """No names, no text."""
    assert some([]) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größe, 损失", "plain, größe, 损失"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("two\nlines", "two\\nlines"),
        ("\u202eright to left", "\\u202eright to left"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """Letters of every script stay; what could steer a terminal, forge a line or break the encoder is escaped."""
    assert shown == printable(text)
