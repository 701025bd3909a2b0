"""In a run that asks for no bundle the plugin costs nothing; one that asks collects without opening a tensor file."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project

HEAVY = ("torch", "lightning", "numpy", "safetensors")

REPORT = """
import sys

def pytest_unconfigure():
    print("imported:", sorted(name for name in {names} if name in sys.modules))
"""

AUDIT = """
import sys

def audit(event, args):
    if event == "open" and str(args[0]).endswith(".safetensors"):
        print("opened:", args[0])

sys.addaudithook(audit)
"""


@pytest.fixture
def bare(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, alone: None) -> pytest.Pytester:
    """A project where each heavy module is an empty stand-in, and reported at the very end if it was imported."""
    stand_ins = pytester.mkdir("stand-ins")
    for name in HEAVY:
        (stand_ins / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(stand_ins), os.environ.get("PYTHONPATH", "")])))
    pytester.makeconftest(REPORT.format(names=HEAVY))
    pytester.makepyfile("def test_own(): pass")
    return pytester


def test_nothing_heavy_is_imported(bare: pytest.Pytester) -> None:
    """No run imports torch, lightning, numpy or safetensors for our sake."""
    bare.runpytest_subprocess("-s").stdout.fnmatch_lines(["imported: [[][]]"])


def test_nothing_heavy_is_imported_to_collect(bare: pytest.Pytester, project: Project) -> None:
    """Not even to collect bundles, or to list what there is."""
    bare.makeconftest(REPORT.format(names=HEAVY))
    project.bundle("f/finite-1")

    for args in (("--co", "--nan-bundles=f"), ("--fixtures",), ("--help",)):
        bare.runpytest_subprocess("-s", *args).stdout.fnmatch_lines(["imported: [[][]]"])


def test_the_check_can_fail(bare: pytest.Pytester) -> None:
    """A heavy import is seen by the check."""
    bare.makepyfile("import torch, safetensors\ndef test_own(): pass")

    bare.runpytest_subprocess("-s").stdout.fnmatch_lines(["imported: [[]'safetensors', 'torch'[]]"])


def test_little_is_imported(bare: pytest.Pytester) -> None:
    """Of our own modules a run that asks for no bundle imports the start-up path alone."""
    bare.makeconftest(REPORT.format(names="[n for n in sys.modules if n.startswith('pytest_nancapture')]"))

    bare.runpytest_subprocess("-s").stdout.fnmatch_lines(
        [
            "imported: [[]'pytest_nancapture', 'pytest_nancapture.plugin', 'pytest_nancapture.plugin.fixtures', "
            "'pytest_nancapture.plugin.hookspecs'[]]"
        ]
    )


def test_header(bare: pytest.Pytester) -> None:
    """A run that asks for no bundle is not told of any."""
    result = bare.runpytest_subprocess()

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("nancapture:*")
    result.stdout.no_fnmatch_line("*= nancapture =*")


def test_collection_opens_no_tensor_file(project: Project) -> None:
    """Collection looks at names, and reads JSON at most; a test that opens a tensor file shows that the audit works."""
    with (project.path / "conftest.py").open("a", encoding="utf-8") as stream:
        stream.write(AUDIT)
    for n in range(20):
        project.bundle(f"f/finite-{n:02d}")
    result = project.pytester.runpytest_subprocess("--co", "-s", "--nan-bundles=f", "f/finite-07/bundle.json")
    result.stdout.no_fnmatch_line("*opened:*")

    project.tests(text="def test_own(): open('f/finite-00/weights.safetensors').close()")
    project.pytester.runpytest_subprocess("-s", "tests").stdout.fnmatch_lines(
        ["*opened: f/finite-00/weights.safetensors*"]
    )


@pytest.mark.skipif(not entry_points(group="pytest11", name="nancapture"), reason="the package is not installed")
@pytest.mark.parametrize("option", [(), ("-p", "nancapture"), ("-p", "pytest_nancapture.plugin")])
def test_installed(project: Project, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]) -> None:
    """Where it is installed, pytest loads the plugin by itself; naming it as well does no harm."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.delenv("PYTEST_PLUGINS")
    project.bundle("f/finite-1")

    project.pytester.runpytest_subprocess(*option, "--nan-bundles=f").assert_outcomes(passed=1)


def test_other_plugins_find_no_function(project: Project) -> None:
    """Plugins that look at ``item.obj``, lines, or names of all items are not put out."""
    with (project.path / "conftest.py").open("a", encoding="utf-8") as stream:
        stream.write(
            "\ndef pytest_collection_modifyitems(items):\n"
            "    for item in items: print('item:', item.obj, item.reportinfo()[1], item.location[1], item.name)\n"
        )
    project.bundle("f/finite-1")

    project.run("-s", "--nan-bundles=f").stdout.fnmatch_lines(["*item: None 0 0 replay"])
