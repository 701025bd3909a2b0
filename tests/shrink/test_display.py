"""What people see while a bundle shrinks, and when it is done."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from fake_bundles import write_bundle

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.shrink.display import ProgressLine, gains_table, shrunk_page
from pytest_nancapture.shrink.shrinker import Gain, Progress, Shrunk


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress(size: int, tried: int, kept: int, seconds: float, what: str = "dropping samples") -> Progress:
    return Progress(pass_name="samples", size=size, tried=tried, kept=kept, seconds=seconds, what=what)


def test_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is rewritten in place, what was longer before it is wiped out, and it ends when told to."""
    monkeypatch.setenv("COLUMNS", "79")
    stream = Terminal()
    line = ProgressLine(stream)
    line(progress(95_000_000, 1, 0, 0.4))
    line(progress(12_000_000, 52, 14, 38.2, "samples: classes"))
    line.close()
    line.close()
    first = "shrinking   95 MB      0 s   kept 0 of 1      samples      dropping samples"
    second = "shrinking   12 MB     38 s   kept 14 of 52    samples      classes"
    assert f"\r{first}\r{second:{len(first)}}\n" == stream.getvalue()


def test_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is cut, since one that wraps could not be rewritten."""
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    ProgressLine(stream)(progress(1, 1, 0, 0.0))
    assert stream.getvalue() == "\rshrinking     1 B  "


def test_in_a_log() -> None:
    """A line for what was gained, but at most one a second; else one every ten seconds; and always the last."""
    stream, now = io.StringIO(), 0.0
    line = ProgressLine(stream, lambda: now)
    for now, size in (
        (0.0, 900),
        (0.5, 900),
        (1.5, 800),
        (1.9, 700),
        (9.0, 700),
        (12.0, 700),
        (13.5, 600),
        (13.6, 600),
        (23.5, 600),
        (23.9, 500),
    ):
        line(progress(size, 1, 1, now))
    line.close()
    shown = [text.split()[1:5] for text in stream.getvalue().splitlines()]
    assert [
        [size, "B", seconds, "s"]
        for size, seconds in (("900", "0"), ("800", "2"), ("700", "9"), ("600", "14"), ("600", "24"), ("500", "24"))
    ] == shown


def test_a_phrase_cannot_steer_the_terminal() -> None:
    """What comes from a bundle is escaped."""
    stream = io.StringIO()
    ProgressLine(stream)(progress(1, 1, 1, 0, "\x1b[2J"))
    assert "\x1b" not in stream.getvalue()


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shrunk:
    monkeypatch.chdir(tmp_path)
    bundle = Bundle.open(write_bundle(Path("small")))
    gains = (
        Gain(pass_name="window", before=95_000_000, after=48_000_000, tried=2, kept=1),
        Gain(pass_name="samples", before=48_000_000, after=6_200, tried=140, kept=31),
        Gain(pass_name="weights", before=6_200, after=6_200, tried=12, kept=0),
    )
    return Shrunk(
        bundle=bundle,
        before=95_000_000,
        after=6_200,
        gains=gains,
        kept=("20 classes: the loss counts them",),
        stopped="time",
        result={"reason": "nan in loss, 161 of 161 gradients not finite"},
    )


def test_the_report(shrunk: Shrunk) -> None:
    """From what to what, what each pass gained for how many tries, what had to stay, and how to go on."""
    expected = """\
shrunk  small   95 MB -> 6.2 kB
red     nan in loss, 161 of 161 gradients not finite
        pass      gained     left   tried   kept
        window     47 MB    48 MB       2      1
        samples    48 MB   6.2 kB     140     31
        weights        -   6.2 kB      12      0
holds   20 classes: the loss counts them
note    stopped after 300 s; run the same command again to go on
next    nancapture pin small fixtures"""
    page = shrunk_page(shrunk, earlier=0, seconds=300.0, following="nancapture pin small fixtures")
    assert expected == page


def test_no_table_without_passes(shrunk: Shrunk) -> None:
    """Headings alone would say nothing."""
    assert gains_table(dataclasses.replace(shrunk, gains=())) == []
