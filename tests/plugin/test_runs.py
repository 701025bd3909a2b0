"""Every way to run a selection of tests works on bundles too, in and outside rootdir."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Project

OWN = "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass\n"


@pytest.fixture(params=["inside", "outside"])
def mixed(request: pytest.FixtureRequest, project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Three bundles, in or outside rootdir, of which two fail, and three tests of the user's, of which one fails."""
    folder: Path = project.path / "fixtures" if request.param == "inside" else tmp_path_factory.mktemp("elsewhere")
    for name in ("finite-1", "nonfinite-2", "vacuous-3"):
        project.bundle(str(folder / name))
    project.tests(text=OWN)
    project.ini("testpaths = tests", f"nan_bundles = {folder}")
    return project


def test_plain(mixed: Project) -> None:
    """All run, and the counters agree."""
    result = mixed.run()

    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(["collected 6 items"])


def test_last_failed(mixed: Project) -> None:
    """``--lf`` runs what failed: bundles as well as tests."""
    mixed.run()
    result = mixed.run("--lf")

    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["run-last-failure: rerun previous 3 failures*"])


def test_last_failed_bundles_only(mixed: Project) -> None:
    """``--lf`` after a run in which bundles alone failed."""
    mixed.tests(text="def test_a(): pass\n")
    mixed.run().assert_outcomes(passed=2, failed=2)
    mixed.run("--lf").assert_outcomes(failed=2)


def test_last_failed_test_only(mixed: Project) -> None:
    """``--lf`` after a run in which the user's tests alone failed."""
    mixed.run("-k", "finite-1 or test_").assert_outcomes(passed=3, failed=1, deselected=2)
    mixed.run("--lf").assert_outcomes(failed=1, deselected=3)


def test_failed_first(mixed: Project) -> None:
    """``--ff`` runs all, what failed before the rest."""
    before = mixed.collected()
    mixed.run()
    after = mixed.collected("--ff")

    failed = [before[1], before[4], before[5]]
    assert after == [*failed, *(nodeid for nodeid in before if nodeid not in failed)]


def test_stepwise(mixed: Project) -> None:
    """``--sw`` stops at a bundle that fails, and goes on from there."""
    mixed.tests(text="def test_a(): pass\n")
    mixed.run("--sw").assert_outcomes(passed=2, failed=1)
    mixed.run("--sw").assert_outcomes(failed=1, deselected=2)
    mixed.run("--sw", "--sw-skip").assert_outcomes(failed=2, deselected=2)


def test_exit_first(mixed: Project) -> None:
    """``-x`` stops at the first bundle that fails."""
    mixed.tests(text="def test_a(): pass\n")
    mixed.run("-x").assert_outcomes(passed=2, failed=1)


def test_xdist(mixed: Project) -> None:
    """``-n2`` gives the same outcomes, the same failure text and the same summary."""
    result = mixed.run_workers("-n2")

    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines(
        ["nancapture: 3 bundles, device auto", "nonfinite: nan in loss, 161 of 161 gradients", "culprit *train.py:42*"]
    )
    result.stdout.fnmatch_lines(["FAILED *nonfinite-2/bundle.json::replay*"])


def test_xdist_pasted_id(project: Project) -> None:
    """A pasted id runs alone on workers too."""
    project.bundle("fixtures/finite-1")
    project.bundle("fixtures/finite-2")
    result = project.run_workers("-n2", "fixtures/finite-2/bundle.json::replay")

    result.assert_outcomes(passed=1)


def test_xdist_summary_reason(project: Project) -> None:
    """The short summary's reason survives the way from the worker."""
    project.bundle("a/vacuous-1")
    result = project.run_workers("-n1", "--nan-bundles=a")

    result.stdout.fnmatch_lines(["FAILED a/vacuous-1/bundle.json::replay - vacuous: no loss"])


def test_last_failed_under_xdist(mixed: Project) -> None:
    """``--lf`` and ``-n2`` together."""
    mixed.run()
    mixed.run_workers("-n2", "--lf").assert_outcomes(failed=3)


def test_outside_ids(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bundles outside rootdir have ids that lead to them, all different; a pasted one runs alone."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for place in ("x/finite-1", "y/finite-1"):
        project.bundle(str(folder / place))
    ids = project.collected(f"--nan-bundles={folder}")

    assert [(project.path / nodeid.partition("::")[0]).resolve() for nodeid in ids] == [
        folder / "x/finite-1/bundle.json",
        folder / "y/finite-1/bundle.json",
    ]
    assert all(nodeid.startswith("../") for nodeid in ids)
    assert len(project.collected(ids[1])) == 1
    assert project.collected(f"--rootdir={project.path}", ids[1]) == [ids[1]]
