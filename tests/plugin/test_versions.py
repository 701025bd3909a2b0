"""The plugin's tests on the older pytest versions it supports, in small environments without torch.

Slow, so only on request: ``pytest tests/plugin/test_versions.py -m versions``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def interpreter(config: pytest.Config, version: str) -> Path:
    """Of an environment with that pytest and xdist, kept in pytest's cache from run to run."""
    assert config.cache is not None
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = config.cache.mkdir("nancapture-versions") / f"{python}-pytest-{version.removesuffix('.*')}"
    executable = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = folder / "complete"
    if not complete.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(executable), "-m", "pip", "install", "--quiet", f"pytest=={version}", "pytest-xdist"],
        ):
            done = run(command)
            assert done.returncode == 0, done.stdout + done.stderr
        complete.touch()
    return executable


@pytest.mark.versions
@pytest.mark.parametrize("version", ["8.0.*", "8.4.*"])
def test_version(request: pytest.FixtureRequest, version: str, tmp_path: Path) -> None:
    """All tests of this folder pass there."""
    if "versions" not in request.config.option.markexpr:
        pytest.skip("slow: asked for with -m versions")
    done = run(
        [
            str(interpreter(request.config, version)),
            "-m",
            "pytest",
            "tests/plugin",
            "-m",
            "not versions",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path / 'inner'}",
        ],
        PYTHONPATH=str(ROOT),
        PYTEST_PLUGINS="pytest_nancapture.plugin",
        PYTEST_ADDOPTS="",
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pytest-{version.removesuffix('*')}" in done.stdout
