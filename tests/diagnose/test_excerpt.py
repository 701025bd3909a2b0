"""The culprit's line among its neighbours, as the report shows it."""

import pytest

from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.diagnose.excerpt import excerpt

SOURCE = """\
def step(x):
    count = x.sum()

    mean = loss / count
    return mean
"""


@pytest.fixture
def culprit(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SOURCE)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")

    def make(line, columns=(0, 0), source=None):
        text = SOURCE.splitlines()[line - 1].strip() if source is None else source
        return Culprit(phase="forward", file="train.py", line=line, source=text, columns=columns)

    return make


def test_three_lines_and_carets_under_the_expression(culprit):
    """Empty neighbours are left out; the file is found from a folder below its repository."""
    assert excerpt(culprit(4, (12, 23))) == [
        "> 4 | mean = loss / count",
        "    |        ^^^^^^^^^^^^",
        "  5 | return mean",
    ]


def test_without_columns_the_statement_is_marked(culprit):
    """As with Python 3.10, which knows none."""
    assert excerpt(culprit(2)) == [
        "  1 | def step(x):",
        "> 2 |     count = x.sum()",
        "    |     ^^^^^^^^^^^^^^^",
    ]


@pytest.mark.parametrize(("line", "source"), [(0, ""), (4, "mean = loss / other")])
def test_nothing_is_shown_that_may_be_wrong(culprit, line, source):
    """Where the line is unknown, or the file has changed since the trace."""
    assert excerpt(culprit(line, source=source)) == []


def test_nothing_is_shown_of_a_file_that_is_gone(culprit, tmp_path):
    """The line itself is in the culprit."""
    (tmp_path / "train.py").unlink()
    assert excerpt(culprit(4)) == []


def test_of_a_long_line_the_guilty_part_is_shown(culprit, tmp_path):
    """So that the report stays within 80 columns."""
    line = "    loss = " + " + ".join(f"term_{i:02}" for i in range(20)) + " + bad / count"
    (tmp_path / "train.py").write_text(f"def step():\n{line}\n")
    start = line.index("bad / count") + 1
    shown = excerpt(culprit(2, (start, len(line)), source=line.strip()))
    assert shown[1:] == ["> 2 | rm_19 + bad / count", "    |         ^^^^^^^^^^^"]
