"""When a replay is traced, and whose verdict counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project


@pytest.mark.parametrize(
    ("option", "name", "traces"),
    [
        ("auto", "finite-1", ["trace=False"]),
        ("auto", "nonfinite-1", ["trace=False", "trace=True"]),
        ("auto", "mismatch-1", ["trace=False"]),
        ("always", "finite-1", ["trace=True"]),
        ("always", "nonfinite-1", ["trace=True"]),
        ("never", "nonfinite-1", ["trace=False"]),
    ],
)
def test_traces(project: Project, option: str, name: str, traces: list[str]) -> None:
    """Auto traces only what is not finite, in a second replay; always and never make one replay."""
    project.bundle(f"f/{name}")
    result = project.run("-s", "--nan-bundles=f", f"--nan-trace={option}")

    assert [word for line in result.outlines for word in line.split() if word.startswith("trace=")] == traces


def test_culprit_of_the_traced_replay(project: Project) -> None:
    """The second replay's culprit is reported."""
    project.bundle("f/nonfinite-1")

    project.run("--nan-bundles=f").stdout.fnmatch_lines(["culprit    aten.div.Tensor, train.py:42, *"])


def test_traced_replay_disagrees(project: Project) -> None:
    """The verdict stays that of the untraced replay; a note tells of the other."""
    project.bundle("f/flaky-1")
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["nonfinite: nan in loss, *", "note       the traced replay came out otherwise: finite: loss and*"]
    )


def test_trace_that_fails(project: Project) -> None:
    """A trace that cannot be made takes nothing from the verdict."""
    project.bundle("f/untraceable-1")
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["nonfinite: nan in loss, *", "note       the culprit could not be traced: out of memory while tracing"]
    )
