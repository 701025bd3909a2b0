"""The options and their ini twins: what they take, and what they say to what they do not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project


def test_missing_path(project: Project) -> None:
    """A path that does not exist is a usage error which names it."""
    result = project.run("--nan-bundles=nowhere")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --nan-bundles=nowhere: expected a folder to search for bundles, or a bundle; came a path that does *"]
    )


def test_no_path(project: Project) -> None:
    """Nor is an empty value, such as an unset variable gives, taken for the current folder."""
    project.bundle("finite-1")
    result = project.run("--nan-bundles=")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nan-bundles=: expected a folder * came nothing"])


def test_path_is_a_file(project: Project) -> None:
    """A file that is no bundle.json is a usage error."""
    project.tests()
    result = project.run("--nan-bundles=tests/test_own.py")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nan-bundles=tests/test_own.py: expected a folder *; came a file"])


def test_missing_path_in_ini(project: Project) -> None:
    """So is one in the ini file, which the message names."""
    project.ini("nan_bundles = nowhere")
    result = project.run()

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: */tox.ini: nan_bundles: */nowhere: expected a folder *"])


def test_missing_path_in_ini_leaves_help(project: Project) -> None:
    """``--help`` works all the same, and shows each option under a heading of ours."""
    project.ini("nan_bundles = nowhere")
    result = project.run("--help")

    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "regression tests from captured NaN steps (pytest-nancapture):",
            "*--nan-bundles=PATH*",
            "*--nan-device=DEVICE*",
            "*--nan-require-gpu*",
            "*--nan-allow-unreproduced*",
            "*--nan-trace=WHEN*",
        ]
    )


def test_empty_folder(project: Project) -> None:
    """``--nan-bundles`` with no bundle below is a usage error: what replays nothing must not be green."""
    (project.path / "empty").mkdir()
    project.tests()
    result = project.run("--nan-bundles=empty")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nan-bundles=empty: expected at least one bundle *came none*"])


def test_one_empty_folder_of_two(project: Project) -> None:
    """Each of several paths must lead to a bundle."""
    (project.path / "empty").mkdir()
    project.bundle("full/finite-1")
    result = project.run("--nan-bundles=full", "--nan-bundles=empty")

    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_empty_folder_in_ini(project: Project) -> None:
    """An empty folder in the ini file is a place for bundles to come: a line in the header, no error."""
    (project.path / "fixtures").mkdir()
    project.ini("nan_bundles = fixtures")
    project.tests()
    result = project.run()

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["nancapture: no bundle in fixtures"])


@pytest.mark.parametrize("value", ["gpu", "auto:1", "cuda:x", "cuda:", ""])
def test_invalid_device(project: Project, value: str) -> None:
    """A device that torch does not know is a usage error, also where no bundle is asked for."""
    result = project.run(f"--nan-device={value}")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: --nan-device={value}: expected auto or a device of torch (cpu, cuda, *; came *"]
    )


@pytest.mark.parametrize("value", ["auto", "cpu", "mps", "xpu:1"])
def test_valid_device(project: Project, value: str) -> None:
    """The device asked for is the one that the replay is given."""
    project.bundle("finite-1")
    result = project.run("-s", "--nan-bundles=finite-1", f"--nan-device={value}")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"nancapture: 1 bundle, device {value}", f"*replay finite-1 device={value} *"])


def test_invalid_trace(project: Project) -> None:
    """``--nan-trace`` takes three words."""
    result = project.run("--nan-trace=yes")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --nan-trace=yes: expected one of auto, always, never; came 'yes'"])


def test_invalid_ini_values(project: Project) -> None:
    """A wrong value in the ini file is reported as such where bundles are asked for."""
    project.bundle("fixtures/finite-1")
    project.ini("nan_bundles = fixtures", "nan_device = gpu")
    result = project.run()

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: */tox.ini: nan_device = gpu: expected auto or *"])


def test_ini_twins(project: Project) -> None:
    """Each option has its twin in the ini file."""
    never = {"reproduced": {"runs": 0, "of": 2}}
    project.bundle("fixtures/finite-1", fault=never)
    project.bundle("fixtures/finite-2", environment={"device": "cuda:0"})
    project.ini(
        "nan_bundles = fixtures",
        "nan_device = cpu",
        "nan_require_gpu = true",
        "nan_allow_unreproduced = true",
        "nan_trace = always",
    )
    result = project.run("-s")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*replay finite-1 device=cpu trace=True*", "FAILED fixtures/finite-2/* - error: captured on*"]
    )


def test_command_line_wins(project: Project) -> None:
    """An option outweighs its twin."""
    project.bundle("fixtures/finite-1")
    project.ini("nan_bundles = fixtures", "nan_device = cuda", "nan_trace = always")
    result = project.run("-s", "--nan-device=cpu", "--nan-trace=never")

    result.stdout.fnmatch_lines(["*replay finite-1 device=cpu trace=False*"])


def test_ini_path_is_relative_to_the_ini_file(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ini file's paths start at the ini file, the command line's where pytest is started."""
    project.bundle("fixtures/finite-1")
    project.bundle("sub/finite-2")
    project.ini("nan_bundles = fixtures")
    monkeypatch.chdir(project.path / "sub")

    assert project.collected("--nan-bundles=finite-2") == [
        "fixtures/finite-1/bundle.json::replay",
        "sub/finite-2/bundle.json::replay",
    ]
