"""Where a bundle is replayed, and what happens where there is no such device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_nancapture.errors import DeviceUnavailableError
from pytest_nancapture.plugin.device import device_to_ask_for, spread
from pytest_nancapture.plugin.options import Settings

if TYPE_CHECKING:
    from .conftest import Project

CUDA = {"device": "cuda:0"}


def test_spread() -> None:
    """Workers take the GPUs in turn; without a worker or a GPU nothing is said."""
    assert [spread("cuda", f"gw{n}", 2) for n in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert spread("cuda", None, 2) == "cuda"
    assert spread("cuda", "master", 2) == "cuda"
    assert spread("cuda", "gw1", 0) == "cuda"


@pytest.mark.parametrize(
    ("captured", "asked", "worker", "expected"),
    [
        ("cuda", "auto", None, "auto"),
        ("cuda", "auto", "gw1", "cuda:1"),
        ("cuda", "cuda", "gw4", "cuda:0"),
        ("cuda", "cuda:1", "gw4", "cuda:1"),
        ("cuda", "cpu", "gw1", "cpu"),
        ("cpu", "auto", "gw1", "auto"),
        ("cpu", "cuda", "gw1", "cuda:1"),
        ("xpu", "auto", "gw1", "auto"),
    ],
)
def test_device_to_ask_for(captured: str, asked: str, worker: str | None, expected: str) -> None:
    """The option is passed on as it is, except that a worker is given one GPU of several."""
    assert device_to_ask_for(captured, Settings(device=asked), worker, count=lambda _: 2) == expected


def test_devices_are_not_counted_for_a_cpu_bundle() -> None:
    """A replay on the CPU asks torch for no device."""

    def count(kind: str) -> int:
        raise AssertionError(kind)

    assert device_to_ask_for("cpu", Settings(), "gw0", count=count) == "auto"


def test_absent_device() -> None:
    """Left to auto, a device that is not there is an error that names the way out."""
    with pytest.raises(
        DeviceUnavailableError, match=r"captured on cuda, and this machine has no cuda .*--nan-device=cpu"
    ):
        device_to_ask_for("cuda", Settings(), None, count=lambda _: 0)


def test_skipped(project: Project) -> None:
    """A bundle that needs an absent accelerator is skipped, by name; one from the CPU runs."""
    project.bundle("f/finite-1", environment=CUDA)
    project.bundle("f/finite-2")
    result = project.run("--nan-bundles=f", "-rs")

    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(
        ["SKIPPED [[]1[]] f/finite-1/bundle.json:1: captured on cuda, and this machine has no *"]
    )


def test_required(project: Project) -> None:
    """``--nan-require-gpu`` fails it instead: for the gate."""
    project.bundle("f/finite-1", environment=CUDA)
    project.bundle("f/finite-2")
    result = project.run("--nan-bundles=f", "--nan-require-gpu")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["error: captured on cuda, and this machine has no cuda device; *"])


def test_required_but_sent_to_the_cpu(project: Project) -> None:
    """``--nan-require-gpu`` does not let a GPU bundle pass on the CPU, though that was asked for."""
    project.bundle("f/finite-1", environment=CUDA)
    result = project.run("--nan-bundles=f", "--nan-require-gpu", "--nan-device=cpu", "-vv")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["FAILED * - error: captured on cuda: --nan-require-gpu expects a replay there, came *=cpu"]
    )


def test_required_but_ran_on_the_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that a replay left to itself put there."""
    monkeypatch.setenv("GPUS", "1")
    project.bundle("f/finite-1", environment=CUDA)
    result = project.run("--nan-bundles=f", "--nan-require-gpu", "-vv")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAILED * - error: captured on cuda: * but it ran on cpu"])


def test_cpu_on_request(project: Project) -> None:
    """``--nan-device=cpu`` replays a GPU bundle on the CPU."""
    project.bundle("f/finite-1", environment=CUDA)

    project.run("--nan-bundles=f", "--nan-device=cpu").assert_outcomes(passed=1)


def test_absent_device_on_request(project: Project) -> None:
    """A device asked for by name that is not there fails, with the replay's own words."""
    project.bundle("f/finite-1")
    result = project.run("--nan-bundles=f", "--nan-device=cuda")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["error: device cuda: expected a CUDA device, this machine has none"])


def test_workers_share_the_gpus(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under xdist each worker replays on a GPU of its own."""
    monkeypatch.setenv("GPUS", "2")
    for n in range(4):
        project.bundle(f"f/nonfinite-{n}", environment=CUDA)
    result = project.run_workers("-n2", "--dist=each", "--nan-bundles=f", "--nan-trace=never")

    result.assert_outcomes(failed=8)
    devices = [line.split()[2] for line in result.outlines if line.startswith("replay nonfinite-")]
    assert sorted(devices) == ["device=cuda:0"] * 4 + ["device=cuda:1"] * 4
