"""The properties that a CI server reads from the junit report."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from pytest_nancapture.bundle.manifest import PinRecord

if TYPE_CHECKING:
    from .conftest import Project


def properties(project: Project, *args: str) -> dict[str, str]:
    """Of the one test case that a run of the folder ``f`` reports."""
    project.run("--nan-bundles=f", "--junitxml=report.xml", *args)
    return read(project)


def read(project: Project) -> dict[str, str]:
    [case] = ElementTree.parse(project.path / "report.xml").getroot().iter("testcase")
    return {element.attrib["name"]: element.attrib["value"] for element in case.iter("property")}


def test_failed(project: Project) -> None:
    """Verdict, operation, source, phase, device, and how often the fault came back."""
    project.bundle("f/nonfinite-1", fault={"reproduced": {"runs": 2, "of": 3}})

    assert properties(project) == {
        "nan_verdict": "nonfinite",
        "nan_op": "aten.div.Tensor",
        "nan_source": "train.py:42",
        "nan_phase": "forward",
        "nan_device": "cpu",
        "nan_reproduced": "2 of 3",
    }


def test_untraced(project: Project) -> None:
    """What is not known is left out."""
    project.bundle("f/nonfinite-1")

    assert properties(project, "--nan-trace=never") == {
        "nan_verdict": "nonfinite",
        "nan_phase": "forward",
        "nan_device": "cpu",
        "nan_reproduced": "1 of 1",
    }


def test_passed(project: Project) -> None:
    """A pass has them too."""
    project.bundle("f/finite-1")

    assert properties(project) == {"nan_verdict": "finite", "nan_device": "cpu", "nan_reproduced": "1 of 1"}


def test_expected_to_fail(project: Project) -> None:
    """So has a known fault."""
    project.bundle("f/nonfinite-1", pin=PinRecord(known=True))

    assert properties(project)["nan_verdict"] == "nonfinite"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("altered-1", {"nan_verdict": "error", "nan_reproduced": "1 of 1"}),
        ("damaged-1", {"nan_verdict": "error"}),
    ],
)
def test_unusable_bundle(project: Project, name: str, expected: dict[str, str]) -> None:
    """A bundle that cannot be used is an error, with what is known of it."""
    bundle = project.bundle(f"f/{name}")
    if name == "damaged-1":
        (bundle / "bundle.json").write_text("{", encoding="utf-8")

    assert properties(project) == expected


def test_never_reproduced(project: Project) -> None:
    """A bundle that was not replayed has no verdict."""
    project.bundle("f/finite-1", fault={"reproduced": {"runs": 0, "of": 2}})

    assert properties(project) == {"nan_reproduced": "0 of 2"}


def test_skipped(project: Project) -> None:
    """Nor has one that was skipped."""
    project.bundle("f/finite-1", environment={"device": "cuda:0"})

    assert properties(project) == {"nan_reproduced": "1 of 1"}


def test_under_xdist(project: Project) -> None:
    """They survive the way from the worker."""
    project.bundle("f/finite-1")
    project.run_workers("-n1", "--nan-bundles=f", "--junitxml=report.xml")

    assert read(project)["nan_verdict"] == "finite"


def test_failure_message(project: Project) -> None:
    """The message of the failure is the verdict and its reason."""
    project.bundle("f/vacuous-1")
    project.run("--nan-bundles=f", "--junitxml=report.xml")
    [failure] = ElementTree.parse(project.path / "report.xml").getroot().iter("failure")

    assert failure.attrib["message"] == "vacuous: no loss"
    assert failure.text is not None
    assert "repeat     pytest f/vacuous-1/bundle.json::replay" in failure.text
