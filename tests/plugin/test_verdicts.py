"""How a bundle's test comes out: only a finite replay passes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_nancapture.bundle.manifest import PinRecord

if TYPE_CHECKING:
    from .conftest import Project

KNOWN = PinRecord(known=True)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("nonfinite", "nan in loss, 161 of 161 gradients"),
        ("vacuous", "no loss"),
        ("mismatch", "fc.weight: (4, 8) is now (5, 8)"),
        ("error", "ValueError: bad class"),
    ],
)
def test_failing_verdicts(project: Project, verdict: str, reason: str) -> None:
    """Every verdict but finite fails, its reason in the short summary."""
    project.bundle(f"f/{verdict}-1")
    result = project.run("--nan-bundles=f", "-vv")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"{verdict}: {reason}", f"FAILED f/{verdict}-1/bundle.json::replay - {verdict}: {reason}"]
    )


def test_finite(project: Project) -> None:
    """A finite replay passes, without a word."""
    project.bundle("f/finite-1")
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*= nancapture =*")


def test_notes_on_a_pass(project: Project) -> None:
    """What a reader should know before trusting a pass stands at the end of the run, once."""
    project.bundle("f/finite-noted-1")
    project.bundle("f/finite-noted-2")
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "*= nancapture =*",
            "passed, but replayed without the optimizer",
            "  f/finite-noted-1/bundle.json::replay, f/finite-noted-2/bundle.json::replay",
        ],
        consecutive=True,
    )


def test_unusable_bundles(project: Project) -> None:
    """A bundle that is damaged, too new or altered fails with one clear error; the others still run."""
    project.bundle("f/finite-1")
    project.bundle("f/altered-1")
    (project.bundle("f/damaged-1") / "bundle.json").write_text("{", encoding="utf-8")
    (project.bundle("f/short-1") / "weights.safetensors").write_bytes(b"")
    newer = project.bundle("f/newer-1") / "bundle.json"
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "version": 99}), encoding="utf-8")
    result = project.run("--nan-bundles=f", "-vv")

    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "FAILED f/altered-1/bundle.json::replay - error: weights.safetensors was altered (copy the bundle anew)",
            "FAILED f/damaged-1/bundle.json::replay - error: bundle.json is not strict JSON: *",
            "FAILED f/newer-1/bundle.json::replay - error: written in version 99 of the bundle format, newer than *",
            "FAILED f/short-1/bundle.json::replay - error: weights.safetensors: expected * bytes, came 0 (copy *",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")


def test_defect_of_the_plugin(project: Project) -> None:
    """What is not foreseen keeps pytest's traceback, which leaves out pytest's own frames."""
    project.bundle("f/crash-1")
    result = project.run("--nan-bundles=f")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*def run_replay(*", "E  * RuntimeError: a defect of the plugin", "FAILED * - RuntimeError: *"]
    )
    result.stdout.no_fnmatch_line("*_multicall*")


def test_full_trace_of_a_defect(project: Project) -> None:
    """``--full-trace`` brings pytest's own frames back."""
    project.bundle("f/crash-1")

    project.run("--nan-bundles=f", "--full-trace").stdout.fnmatch_lines(["*_multicall*"])


def test_known_fault_still_there(project: Project) -> None:
    """A bundle pinned as known is expected to fail."""
    project.bundle("f/nonfinite-1", pin=KNOWN)
    result = project.run("--nan-bundles=f", "-rx")

    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(
        ["XFAIL f/nonfinite-1/bundle.json::replay*known fault: nan in loss, 161 of 161 gradients"]
    )


def test_known_fault_fixed(project: Project) -> None:
    """Once it is gone the test fails, strictly, and says so."""
    project.bundle("f/finite-1", pin=KNOWN)
    result = project.run("--nan-bundles=f", "-vv")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "fixed: unpin or promote it: it is pinned as a known fault, and the fault is gone",
            "",
            "promote    so that it fails from now on whenever the fault is back:",
            "           nancapture promote f/finite-1",
            "or unpin   so that nothing watches over it:",
            "           git rm -r f/finite-1",
            "captured   step 812, *",
        ],
        consecutive=True,
    )
    result.stdout.fnmatch_lines(["FAILED f/finite-1/bundle.json::replay - fixed: unpin or promote it: *"])


def test_the_command_that_promotes_fits_a_shell(project: Project) -> None:
    """A long path, one with a space in it, is quoted and stays on one line, ready to paste."""
    place = f"f/{'a folder ' * 12}/finite-1"
    project.bundle(place, pin=KNOWN)
    result = project.run("--nan-bundles=f")

    result.stdout.fnmatch_lines([f"           nancapture promote '{place}'"])


@pytest.mark.parametrize("verdict", ["vacuous", "mismatch", "error", "altered", "crash"])
def test_known_fault_that_cannot_be_seen(project: Project, verdict: str) -> None:
    """A known fault excuses that fault alone: a bundle that no longer replays it fails."""
    project.bundle(f"f/{verdict}-1", pin=KNOWN)

    project.run("--nan-bundles=f").assert_outcomes(failed=1)


def test_runxfail(project: Project) -> None:
    """``--runxfail`` lets known faults count as they come out."""
    project.bundle("f/finite-1", pin=KNOWN)
    project.bundle("f/nonfinite-1", pin=KNOWN)

    project.run("--nan-bundles=f", "--runxfail").assert_outcomes(passed=1, failed=1)
