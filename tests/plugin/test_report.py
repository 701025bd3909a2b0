"""What a person reads when a bundle's test fails."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project


def failure(result: pytest.RunResult) -> list[str]:
    """The lines of the one failure, without its headline."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("____"))
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("===="))
    return [line for line in lines[start + 1 : end] if not line.startswith("---- Captured")]


def repeated(result: pytest.RunResult) -> list[str]:
    """The words of the command at the end of the one failure."""
    [line] = [line for line in result.outlines if line.startswith("repeat ")]
    return shlex.split(line.removeprefix("repeat"))


def test_nonfinite(project: Project) -> None:
    """The verdict first; then the culprit, what is not finite, what was seen at capture, and how to repeat it."""
    project.bundle("fixtures/nonfinite-1")
    result = project.run("--nan-bundles=fixtures", "--show-capture=no")

    result.stdout.fnmatch_lines(["*____ fixtures/nonfinite-1 ____*"])
    assert failure(result) == [
        "nonfinite: nan in loss, 161 of 161 gradients",
        "",
        "culprit    aten.div.Tensor, train.py:42, in head, surfaces in the forward",
        "           > mean_loss = loss / count",
        "           0 / 0: 3 of 20 classes have no sample",
        "not finite loss; 161 gradients: fc0.weight, fc1.weight, fc2.weight, fc3.weight",
        "           and 157 more",
        "captured   step 812, epoch 3, batch 12, on cpu: nan in loss, gradients",
        "           reproduced 1 of 1 at capture",
        "repeat     pytest fixtures/nonfinite-1/bundle.json::replay",
    ]


def test_culprit_of_the_capture(project: Project) -> None:
    """Where no trace was made, the culprit that capture found is given as such."""
    culprit = {"op": "aten.log.default", "file": "model.py", "line": 7, "source": "  x.log()", "phase": "forward"}
    project.bundle("f/nonfinite-1", fault={"culprit": culprit})
    result = project.run("--nan-bundles=f", "--nan-trace=never", "--show-capture=no")

    assert failure(result)[2:7] == [
        "culprit    surfaces in the forward",
        "not finite loss; 161 gradients: fc0.weight, fc1.weight, fc2.weight, fc3.weight",
        "           and 157 more",
        "captured   step 812, epoch 3, batch 12, on cpu: nan in loss, gradients",
        "           aten.log.default, model.py:7, x.log()",
    ]


def test_error_detail(project: Project) -> None:
    """An error's traceback stands between what was captured and the command, as it is."""
    project.bundle("f/error-1")
    result = project.run("--nan-bundles=f", "--show-capture=no")

    assert failure(result) == [
        "error: ValueError: bad class",
        "",
        "captured   step 812, epoch 3, batch 12, on cpu: nan in loss, gradients",
        "           reproduced 1 of 1 at capture",
        "",
        "Traceback:",
        "  File x.py, line 3",
        "ValueError: bad class",
        "",
        "repeat     pytest f/error-1/bundle.json::replay",
    ]


def test_width(project: Project) -> None:
    """No line but the command is longer than 80 columns, however long the texts are."""
    project.bundle("f/nonfinite-noted-1", fault={"reproduced": {"runs": 0, "of": 0}})
    result = project.run("--nan-bundles=f", "--show-capture=no")

    assert max(len(line) for line in failure(result)[:-1]) <= 80


def test_line_style(project: Project) -> None:
    """``--tb=line`` gives one line that names the bundle."""
    project.bundle("f/vacuous-1")

    project.run("--nan-bundles=f", "--tb=line").stdout.fnmatch_lines(["*/f/vacuous-1/bundle.json:1: vacuous: no loss"])


def test_hostile_text(project: Project) -> None:
    """What a bundle says cannot steer the terminal."""
    culprit = {"op": "\x1b[31mred", "file": "a\nb.py", "line": {"x": 1}}
    project.bundle("f/vacuous-1", fault={"culprit": culprit})
    result = project.run("--nan-bundles=f")

    assert "\x1b[31mred" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*\\x1b*31mred, a\\nb.py:*"])


def test_command_is_pasted(project: Project) -> None:
    """The command runs that test alone."""
    for name in ("my fixtures/vacuous-1", "my fixtures/finite-2"):
        project.bundle(name)
    command = repeated(project.run("--nan-bundles=my fixtures"))

    assert command == ["pytest", "my fixtures/vacuous-1/bundle.json::replay"]
    project.run(*command[1:]).assert_outcomes(failed=1)


def test_command_in_a_subfolder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is for the folder in which pytest was started."""
    project.bundle("fixtures/vacuous-1")
    project.ini("nan_bundles = fixtures")
    (project.path / "sub").mkdir()
    monkeypatch.chdir(project.path / "sub")

    assert repeated(project.run()) == ["pytest", "../fixtures/vacuous-1/bundle.json::replay"]


def test_command_with_options(project: Project) -> None:
    """It says again which options the replay was made with."""
    project.bundle("f/vacuous-1")
    options = ["--nan-device=cpu", "--nan-require-gpu", "--nan-allow-unreproduced", "--nan-trace=never"]

    assert repeated(project.run("--nan-bundles=f", *options)) == ["pytest", *options, "f/vacuous-1/bundle.json::replay"]


def test_command_outside_rootdir(project: Project, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A bundle elsewhere is repeated through the option: naming it would move rootdir."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name in ("vacuous-1", "finite-2"):
        project.bundle(str(folder / name))
    project.tests()
    command = repeated(project.run(f"--nan-bundles={folder}"))

    assert command == ["pytest", f"--nan-bundles=../{folder.name}/vacuous-1", "-m", "nan_bundle"]
    project.run(*command[1:]).assert_outcomes(failed=1, deselected=2)


def test_command_with_brackets(project: Project) -> None:
    """So is one whose path pytest would take for parameters."""
    project.bundle("f/vacuous-[1]")
    command = repeated(project.run("--nan-bundles=f"))

    project.run(*command[1:]).assert_outcomes(failed=1)
