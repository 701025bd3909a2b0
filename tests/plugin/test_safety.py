"""A bundle is data from elsewhere: collecting it runs no code that lies in its folder, and a run writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Project

CODE = "open('ran', 'w').close()\ndef test_evil(): pass\n"
A = "fixtures/finite-a/bundle.json::replay"


@pytest.fixture
def hostile(project: Project) -> Project:
    """A project with a bundle that brings a test file and a conftest.py."""
    bundle = project.bundle("fixtures/finite-a")
    for name in ("conftest.py", "test_evil.py"):
        (bundle / name).write_text(CODE, encoding="utf-8")
    return project


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not {".pytest_cache", "__pycache__"} & set(path.parts)}


def test_walk(hostile: Project) -> None:
    """pytest, which walks through rootdir, is kept out of the folder of a bundle that is asked for."""
    hostile.run("--nan-bundles=fixtures").assert_outcomes(passed=1)
    hostile.ini("nan_bundles = fixtures")
    hostile.run().assert_outcomes(passed=1)
    hostile.run("fixtures").assert_outcomes(passed=1)

    assert not (hostile.path / "ran").exists()


@pytest.mark.parametrize("argument", [A, "fixtures/finite-a/bundle.json", "fixtures/finite-a"])
def test_named(hostile: Project, argument: str) -> None:
    """pytest imports a conftest.py beside whatever is named: in a bundle that is refused before it happens."""
    hostile.ini("nan_bundles = fixtures")
    result = hostile.run(argument)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: fixtures/finite-a/conftest.py lies inside a bundle, and pytest would run it: *"]
    )
    assert not (hostile.path / "ran").exists()


@pytest.mark.parametrize("argument", [A, "fixtures/finite-a"])
def test_named_with_a_test_file(hostile: Project, argument: str) -> None:
    """A test file in the folder of a bundle that is named is not collected."""
    (hostile.path / "fixtures/finite-a/conftest.py").unlink()
    hostile.ini("nan_bundles = fixtures")

    assert hostile.collected(argument) == [A]
    assert hostile.collected(".", argument) == [A]
    assert not (hostile.path / "ran").exists()


def test_conftest_of_another_tool(project: Project) -> None:
    """A conftest.py beside a bundle.json that is none of ours is loaded as ever."""
    project.tests("web/test_own.py")
    (project.path / "web/bundle.json").write_text("{}", encoding="utf-8")
    (project.path / "web/conftest.py").write_text("print('loaded')", encoding="utf-8")
    result = project.run("-s", "web")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["loaded*"])


def test_nothing_is_written(project: Project) -> None:
    """Bundles that pass, fail or are damaged leave the project as it was."""
    for name in ("finite-1", "nonfinite-2", "altered-3"):
        project.bundle(f"fixtures/{name}")
    before = files(project.path)
    project.run("--nan-bundles=fixtures").assert_outcomes(passed=1, failed=2)

    assert files(project.path) == before
