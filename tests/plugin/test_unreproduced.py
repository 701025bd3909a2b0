"""A green test is worth something only if it was red: bundles whose fault never came back cannot gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .conftest import Project

NEVER = {"reproduced": {"runs": 0, "of": 2}}
UNCONFIRMED = {"reproduced": {"runs": 0, "of": 0}}


def test_never_reproduced(project: Project) -> None:
    """It fails, unreplayed, and says why and what to do."""
    project.bundle("f/finite-1", fault=NEVER)
    result = project.run("--nan-bundles=f", "-vv", "-s")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "cannot gate: never reproduced: the fault came back in 0 of 2 reruns, so a pass",
            "would prove nothing",
            "remedy     if it fails with the faulty code, pin it: nancapture pin replays it",
            "           --nan-allow-unreproduced",
            "FAILED * - cannot gate: never reproduced: the fault came back in 0 of 2 *",
        ]
    )
    result.stdout.no_fnmatch_line("*replay finite-1 device*")


def test_allowed(project: Project) -> None:
    """``--nan-allow-unreproduced`` replays it; a pass is marked as one that proves little."""
    project.bundle("f/finite-1", fault=NEVER)
    project.bundle("f/nonfinite-1", fault=NEVER)
    result = project.run("--nan-bundles=f", "--nan-allow-unreproduced")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nonfinite: nan in loss, 161 of 161 gradients",
            "           reproduced 0 of 2 at capture",
            "passed, but reproduced 0 of 2 at capture",
            "  f/finite-1/bundle.json::replay",
        ]
    )


def test_sometimes_reproduced(project: Project) -> None:
    """One time of many is enough to gate."""
    project.bundle("f/finite-1", fault={"reproduced": {"runs": 1, "of": 9}})
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("passed, but*")


def test_never_confirmed(project: Project) -> None:
    """Where capture made no rerun nothing is known: it is replayed and judged, and the report says so."""
    project.bundle("f/finite-1", fault=UNCONFIRMED)
    project.bundle("f/nonfinite-1", fault=UNCONFIRMED)
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["           never proven at capture: no replay of the bundle*", "passed, but never proven at capture: *"]
    )
