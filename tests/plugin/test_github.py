"""What GitHub shows: an annotation at the guilty line, and a table on the job's page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Project

ANNOTATION = (
    "::error file=train.py,line=42,title=f/nonfinite-1/bundle.json%3A%3Areplay::"
    "nonfinite: nan in loss, 161 of 161 gradients"
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    path = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    return path


@pytest.mark.parametrize("workers", [False, True], ids=["plain", "xdist"])
def test_a_failure_is_an_annotation_and_a_row(project: Project, page: Path, workers: bool) -> None:
    """At the culprit's line; bundles that pass have a row only."""
    project.bundle("f/nonfinite-1")
    project.bundle("f/finite-1")
    result = project.run_workers("-n2", "--nan-bundles=f") if workers else project.run("--nan-bundles=f")

    assert [line for line in result.outlines if line.startswith("::")] == [ANNOTATION]
    assert page.read_text().splitlines()[:4] == [
        "### Replayed bundles",
        "",
        "| bundle | verdict | phase | operation | line | reproduced | device |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    assert sorted(page.read_text().splitlines()[4:]) == [
        "| f/finite-1 | finite |  |  |  | 1 of 1 | cpu |",
        "| f/nonfinite-1 | nonfinite | forward | aten.div.Tensor | train.py:42 | 1 of 1 | cpu |",
    ]


def test_a_failure_without_a_line_is_annotated_too(project: Project, page: Path) -> None:
    """As one of the whole run."""
    project.bundle("f/mismatch-1")
    result = project.run("--nan-bundles=f")

    assert [line for line in result.outlines if line.startswith("::")] == [
        "::error title=f/mismatch-1/bundle.json%3A%3Areplay::mismatch: fc.weight: (4, 8) is now (5, 8)"
    ]


def test_elsewhere_nothing_is_written(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GitHub's variables."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    project.bundle("f/nonfinite-1")

    assert [line for line in project.run("--nan-bundles=f").outlines if line.startswith("::")] == []


def test_a_run_without_bundles_writes_no_page(project: Project, page: Path) -> None:
    """The page belongs to others."""
    project.run("--co")

    assert not page.exists()
