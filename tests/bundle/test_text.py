"""Sizes, lists of names and text from elsewhere, as they are printed."""

from __future__ import annotations

import pytest

from pytest_nancapture.bundle.text import human_size, parse_size, printable, size_above, some


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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1MB", 1_000_000),
        ("500kB", 500_000),
        ("500 KB", 500_000),
        ("2M", 2_000_000),
        ("2m", 2_000_000),
        ("1.5 GB", 1_500_000_000),
        ("1MiB", 1_048_576),
        ("1Ki", 1024),
        (" 300000 ", 300_000),
        ("300B", 300),
        ("0", 0),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    """Powers of 1000 unless an i says otherwise; case and a space don't matter."""
    assert count == parse_size(text)


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 XB", "1MBs", "1e6", "1,5MB", "iB", "1iB", "nan"])
def test_parse_size_of_something_else(text: str) -> None:
    """Whatever is no size is refused with examples of one."""
    with pytest.raises(ValueError, match="expected a size such as 1MB, 500kB, 2M or 2000000") as caught:
        parse_size(text)
    assert str(caught.value).endswith(f"came {text!r}")


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 3_210_000, 9_900_001, 9_990_000, 95_400_000, 2_000_000_001])
def test_size_above(count: int) -> None:
    """It is short, is not below, and not far above."""
    text = size_above(count)
    assert len(text) <= 5
    assert count <= parse_size(text) <= count * 1.11
