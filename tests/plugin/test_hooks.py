"""The hooks with which a conftest.py says what a manifest cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project

# A replay that shows what the hooks answer.
SHOW = """
import sys
from pytest_nancapture.replay.result import ReplayResult

def show(bundle, *, hooks, **_):
    answers = hooks.module(bundle), hooks.batch(bundle, 20), hooks.trainer_kwargs(bundle)
    print("module={} batch={} trainer_kwargs={}".format(*answers))
    return ReplayResult(verdict="finite", loss=0.5, nonfinite=(), culprit=None, reason="", device="cpu", seconds=0)

sys.modules["pytest_nancapture.replay.run"].run_replay = show
"""
HOOKS = """
def pytest_nancapture_module(bundle): return f"{where} module of {{bundle.name}}"
def pytest_nancapture_batch(bundle, batch): return batch + 1
def pytest_nancapture_trainer_kwargs(bundle): return {{"where": "{where}", "{where}": 1}}
"""


@pytest.fixture
def showing(project: Project) -> Project:
    with (project.path / "conftest.py").open("a", encoding="utf-8") as stream:
        stream.write(SHOW)
    project.bundle("fixtures/finite-1")
    return project


def hooks(project: Project, folder: str, where: str) -> None:
    with (project.path / folder / "conftest.py").open("a", encoding="utf-8") as stream:
        stream.write(HOOKS.format(where=where))


def test_no_hooks(showing: Project) -> None:
    """Where no one answers, everything is as the bundle says."""
    showing.run("-s", "--nan-bundles=fixtures").stdout.fnmatch_lines(["*module=None batch=None trainer_kwargs=None*"])


def test_hooks(showing: Project) -> None:
    """Each is given the bundle, and its answer reaches the replay."""
    hooks(showing, ".", "root")

    showing.run("-s", "--nan-bundles=fixtures").stdout.fnmatch_lines(
        ["*module=root module of finite-1 batch=21 trainer_kwargs={'where': 'root', 'root': 1}*"]
    )


@pytest.mark.parametrize(
    "args",
    [(), ("tests", "--nan-bundles=fixtures"), ("fixtures/finite-1/bundle.json::replay",)],
    ids=["ini", "option", "id"],
)
def test_nearest_hooks(showing: Project, args: tuple[str, ...]) -> None:
    """A conftest.py in the bundles' folder counts, and wins over those above, however the bundle was asked for."""
    hooks(showing, ".", "root")
    hooks(showing, "fixtures", "near")
    showing.tests()
    showing.ini("nan_bundles = fixtures", "testpaths = tests")
    result = showing.run("-s", *args)

    [line] = [line for line in result.outlines if "trainer_kwargs=" in line]
    assert "module=near module of finite-1 batch=21" in line
    assert "'where': 'near'" in line
    assert "'root': 1" in line


def test_hooks_of_pytest(showing: Project) -> None:
    """pytest's own hooks in a conftest.py see the bundles too, though pytest never walked to them."""
    with (showing.path / "conftest.py").open("a", encoding="utf-8") as stream:
        stream.write("\ndef pytest_runtest_setup(item): print(f'setup of {item.nodeid}')\n")

    showing.run("-s", "--nan-bundles=fixtures").stdout.fnmatch_lines(
        ["*setup of fixtures/finite-1/bundle.json::replay"]
    )


def test_hooks_for_a_bundle_elsewhere(showing: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """For a bundle outside rootdir those of rootdir speak; a conftest.py that lies with it there is not even loaded."""
    folder = tmp_path_factory.mktemp("elsewhere")
    showing.bundle(str(folder / "finite-2"))
    hooks(showing, ".", "root")
    (folder / "conftest.py").write_text("raise SystemExit('loaded')", encoding="utf-8")

    showing.run("-s", f"--nan-bundles={folder}").stdout.fnmatch_lines(["*module=root module of finite-2 batch=21*"])


def test_hooks_of_another_folder(showing: Project) -> None:
    """A conftest.py speaks for its own folder only."""
    showing.tests()
    hooks(showing, "tests", "tests")

    showing.run("-s", "--nan-bundles=fixtures").stdout.fnmatch_lines(["*module=None batch=None trainer_kwargs=None*"])


def test_broken_conftest_beside_bundles(showing: Project) -> None:
    """One that cannot be imported is a collection error, as anywhere."""
    (showing.path / "fixtures/conftest.py").write_text("import nothing_of_that_name", encoding="utf-8")
    showing.tests()
    showing.ini("nan_bundles = fixtures", "testpaths = tests")
    result = showing.run()

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ModuleNotFoundError: No module named 'nothing_of_that_name'"])


def test_hooks_for_the_fixture(showing: Project) -> None:
    """The fixture `nan_replay` asks the hooks that the test sees."""
    showing.tests(text='def test_own(nan_replay): nan_replay("fixtures/finite-1")')
    hooks(showing, "tests", "tests")

    showing.run("-s").stdout.fnmatch_lines(["*module=tests module of finite-1 batch=21*"])
