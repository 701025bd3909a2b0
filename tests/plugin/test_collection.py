"""Which tests a run has: every bundle asked for, once, beside the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Project

A = "fixtures/finite-a/bundle.json::replay"
B = "fixtures/finite-b/bundle.json::replay"
OWN = ["tests/test_own.py::test_a", "tests/test_own.py::test_b"]


@pytest.fixture
def shop(project: Project) -> Project:
    """A project with two bundles in the folder that the ini file names, and two tests of its own."""
    project.bundle("fixtures/finite-b")
    project.bundle("fixtures/finite-a")
    project.tests()
    project.ini("nan_bundles = fixtures", "testpaths = tests")
    return project


def test_option(project: Project) -> None:
    """The bundles of a folder, at any depth and sorted, come after the user's own tests."""
    project.bundle("fixtures/finite-b")
    project.bundle("fixtures/finite-a")
    project.bundle("fixtures/more/below/finite-c")
    project.tests()

    assert project.collected("--nan-bundles=fixtures") == [
        *OWN,
        A,
        B,
        "fixtures/more/below/finite-c/bundle.json::replay",
    ]


def test_options_together(project: Project) -> None:
    """The option can be repeated, may name a single bundle or its bundle.json, and names none of them twice."""
    project.bundle("fixtures/finite-b")
    project.bundle("fixtures/finite-a")
    paths = ["fixtures/finite-b", "fixtures", "fixtures/../fixtures/finite-a", "fixtures/finite-a/bundle.json"]

    assert project.collected(*(f"--nan-bundles={path}" for path in paths)) == [A, B]


def test_not_asked_for(project: Project) -> None:
    """A bundle.json that a walk passes by is left alone."""
    project.bundle("fixtures/finite-a")
    project.tests()

    assert project.collected() == OWN
    assert project.collected("fixtures", "tests") == OWN


def test_hidden_folders(project: Project) -> None:
    """A half-written bundle, in a hidden folder, is none yet."""
    project.bundle("fixtures/finite-a")
    project.bundle("fixtures/.finite-x.tmp")

    assert project.collected("--nan-bundles=fixtures") == [A]


def test_ini(shop: Project) -> None:
    """The ini file's bundles are part of a whole run."""
    assert shop.collected() == [*OWN, A, B]


def test_ini_and_option(shop: Project) -> None:
    """Bundles named twice are run once."""
    assert shop.collected("--nan-bundles=fixtures") == [*OWN, A, B]


def test_ini_without_testpaths(project: Project) -> None:
    """A folder that lies where pytest walks anyway is collected once."""
    project.bundle("fixtures/finite-a")
    project.tests()
    project.ini("nan_bundles = fixtures")

    assert project.collected() == [*OWN, A]
    assert project.collected(".") == [*OWN, A]


def test_arguments_choose_among_those_of_the_ini_file(shop: Project) -> None:
    """Positional arguments choose among the ini file's bundles, as they do among tests."""
    assert shop.collected("tests/test_own.py::test_a") == ["tests/test_own.py::test_a"]
    assert shop.collected("fixtures") == [A, B]
    assert shop.collected("fixtures/finite-b") == [B]
    assert shop.collected("tests", "fixtures/finite-b") == [*OWN, B]


def test_header_of_a_run_without_bundles(shop: Project) -> None:
    """A run that chose no bundle says nothing of them."""
    result = shop.run("tests/test_own.py::test_a")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("nancapture:*")


def test_arguments_do_not_choose_among_those_of_the_option(project: Project) -> None:
    """The command line's bundles are added to whatever else is run."""
    project.bundle("fixtures/finite-a")
    project.tests()

    assert project.collected("--nan-bundles=fixtures", OWN[0]) == [OWN[0], A]


@pytest.mark.parametrize("option", [(), ("--nan-bundles=fixtures",)], ids=["ini", "option"])
def test_pasted_id(shop: Project, option: tuple[str, ...]) -> None:
    """A pasted id runs alone, with and without the option."""
    assert shop.collected(*option, B) == [B]
    assert shop.collected(*option, "fixtures/finite-b/bundle.json") == [B]
    assert shop.collected(*option, B, "tests/test_own.py::test_b") == [B, "tests/test_own.py::test_b"]


def test_pasted_id_in_a_bare_project(project: Project) -> None:
    """Neither option nor ini file are needed."""
    project.bundle("fixtures/finite-a")
    project.bundle("fixtures/finite-b")

    assert project.collected(A) == [A]
    assert project.collected("fixtures/finite-a/bundle.json") == [A]
    assert project.collected(B, A) == [B, A]


def test_pasted_beside_a_folder_that_holds_it(shop: Project) -> None:
    """A bundle that is both named and below another argument is run once."""
    assert sorted(shop.collected("fixtures", "fixtures/finite-b/bundle.json")) == [A, B]
    # pytest 8 loses its own tests to arguments that overlap, so that only the bundles are compared.
    both = shop.collected(".", "fixtures/finite-b/bundle.json")
    assert sorted(nodeid for nodeid in both if nodeid not in OWN) == [A, B]


def test_pasted_from_a_subfolder(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id stays relative to rootdir wherever pytest is started."""
    monkeypatch.chdir(shop.path / "fixtures")

    assert shop.collected("finite-b/bundle.json::replay") == [B]


def test_wrong_name_after_the_path(shop: Project) -> None:
    """A test that a bundle does not have is pytest's own usage error."""
    assert shop.run("fixtures/finite-a/bundle.json::other").ret == pytest.ExitCode.USAGE_ERROR


def test_bundle_json_of_another_tool(project: Project) -> None:
    """A file of that name which is not ours stays what it is to pytest."""
    (project.path / "bundle.json").write_text('{"name": "webpack"}', encoding="utf-8")
    project.tests()

    assert project.collected("tests", "bundle.json") == []
    assert project.run("bundle.json").ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_keywords_and_marks(shop: Project) -> None:
    """``-k`` sees the folder's name, ``-m nan_bundle`` chooses the bundles."""
    assert shop.collected("-k", "finite-b") == [B]
    assert shop.collected("-k", "fixtures and not finite-b") == [A]
    assert shop.collected("-m", "nan_bundle") == [A, B]
    assert shop.collected("-m", "not nan_bundle") == OWN


def test_deselect(shop: Project) -> None:
    """``--deselect`` takes the id."""
    assert shop.collected("--deselect", A) == [*OWN, B]


def test_tree(shop: Project) -> None:
    """``--co`` shows the bundles as nodes of their own, and counts them."""
    result = shop.run("--co")

    result.stdout.fnmatch_lines(
        [
            "nancapture: 2 bundles, device auto",
            "collected 4 items",
            "*<BundleFile fixtures/finite-a/bundle.json>",
            "*<BundleItem replay>",
        ]
    )


def test_collection_error_of_the_user(shop: Project) -> None:
    """A test file that cannot be imported is reported; it takes no bundle away."""
    shop.tests("tests/test_broken.py", "import nothing_of_that_name")
    result = shop.run("--continue-on-collection-errors")

    result.assert_outcomes(passed=4, errors=1)


def test_damaged_manifest(project: Project) -> None:
    """A bundle.json that cannot be read does not break collection, named by its folder or by itself."""
    bundle = project.bundle("fixtures/finite-a")
    (bundle / "bundle.json").write_text("{", encoding="utf-8")

    assert project.collected("--nan-bundles=fixtures") == [A]
    assert project.collected(A) == [A]


def test_rootdir_is_the_bundle(project: Project) -> None:
    """pytest can be started in a bundle's own folder."""
    project.bundle(".")
    result = project.run("--nan-bundles=.", "-v")

    result.stdout.fnmatch_lines(["bundle.json::replay FAILED *", f"____* {project.path.name} *____"])


def test_names_with_spaces_and_brackets(project: Project) -> None:
    """Any folder name will do."""
    project.bundle("my fixtures/finite-[1]")

    result = project.run("--nan-bundles=my fixtures")

    result.assert_outcomes(passed=1)
    assert project.collected("--nan-bundles=my fixtures") == ["my fixtures/finite-[1]/bundle.json::replay"]
