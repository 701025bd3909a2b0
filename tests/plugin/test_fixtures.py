"""The marker and the fixtures for tests that people write themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project

MARKED = """
import pytest

@pytest.mark.nan_bundle("{path}")
def test_own(nan_bundle, nan_replay):
    assert nan_bundle.fault.global_step == 812
    assert nan_replay().finite
"""


@pytest.mark.parametrize("place", ["tests/data", "data"], ids=["test file's folder", "rootdir"])
def test_marker(project: Project, place: str) -> None:
    """The marker's path is seen from the test file's folder or, if there is none, from rootdir; no option is needed."""
    project.bundle(f"{place}/finite-1")
    project.tests(text=MARKED.format(path="data/finite-1"))
    result = project.run("--strict-markers", "-s")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*replay finite-1 device=auto trace=False module=None*"])
    result.stdout.no_fnmatch_line("nancapture:*")


def test_marker_prefers_the_test_file(project: Project) -> None:
    """The test file's folder comes first."""
    project.bundle("tests/data/finite-1")
    project.bundle("data/finite-1", fault={"global_step": 1})
    project.tests(text=MARKED.format(path="data/finite-1"))

    project.run().assert_outcomes(passed=1)


def test_marker_is_documented(project: Project) -> None:
    """``--markers`` and ``--fixtures`` explain them."""
    project.run("--markers").stdout.fnmatch_lines(["@pytest.mark.nan_bundle(path): the bundle that *"])
    project.run("--fixtures").stdout.fnmatch_lines(
        ["nan_bundle*", "    The bundle that *", "nan_replay*", "    A function *"]
    )


def test_no_marker(project: Project) -> None:
    """A test without the marker is told how to give one."""
    project.tests(text="def test_own(nan_bundle): pass")
    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_own: expected a marker that names the bundle, such as @pytest.mark.nan_bundle(*no marker"]
    )


def test_marker_without_a_path(project: Project) -> None:
    """So is one whose marker names nothing."""
    project.tests(text="import pytest\n@pytest.mark.nan_bundle\ndef test_own(nan_bundle): pass")

    project.run().stdout.fnmatch_lines(["test_own: expected a marker * came one without a path"])


def test_no_bundle_there(project: Project) -> None:
    """A path that leads nowhere is reported with the places where it was looked for."""
    project.tests(text=MARKED.format(path="data/finite-1"))
    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "test_own: no bundle 'data/finite-1': expected it at "
            f"{project.path}/tests/data/finite-1 nor {project.path}/data/finite-1"
        ]
    )


def test_damaged_bundle(project: Project) -> None:
    """A bundle that cannot be opened is one clear error, without a traceback."""
    bundle = project.bundle("tests/finite-1")
    (bundle / "batch.safetensors").unlink()
    project.tests(text=MARKED.format(path="finite-1"))
    result = project.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"{bundle}: batch.safetensors is missing (copy the bundle anew)"])


def test_options_are_the_defaults(project: Project) -> None:
    """``nan_replay()`` goes by the run's options, also for tracing."""
    project.bundle("tests/nonfinite-1")
    project.tests(
        text="""
import pytest

@pytest.mark.nan_bundle("nonfinite-1")
def test_own(nan_replay):
    assert nan_replay().culprit.op == "aten.div.Tensor"
"""
    )
    result = project.run("-s", "--nan-device=cpu")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*replay nonfinite-1 device=cpu trace=False *", "*replay nonfinite-1 device=cpu trace=True *"]
    )


def test_arguments(project: Project) -> None:
    """Bundle, module, device and trace can be given; a bundle as a path or opened."""
    project.bundle("tests/nonfinite-1")
    project.bundle("tests/finite-2")
    project.tests(
        text="""
import pytest
from pytest_nancapture import Bundle

@pytest.mark.nan_bundle("finite-2")
def test_own(nan_bundle, nan_replay):
    nan_replay("nonfinite-1", module="mine", device="mps", trace=False)
    nan_replay(nan_bundle, trace=True)
"""
    )
    result = project.run("-s", "--nan-device=cpu")

    result.assert_outcomes(passed=1)
    assert [line for line in result.outlines if "replay " in line and "device=" in line][-2:] == [
        next(line for line in result.outlines if "replay nonfinite-1 device=mps trace=False module=mine" in line),
        "replay finite-2 device=cpu trace=True module=None",
    ]


def test_absent_device(project: Project) -> None:
    """A test whose bundle needs an absent accelerator is skipped, or fails under ``--nan-require-gpu``."""
    project.bundle("tests/finite-1", environment={"device": "cuda:0"})
    project.tests(text=MARKED.format(path="finite-1"))

    project.run().assert_outcomes(skipped=1)
    project.run("--nan-require-gpu").assert_outcomes(failed=1)
