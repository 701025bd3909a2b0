"""A project with bundles whose replay is a stand-in: the name of a bundle says how its replay comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_bundles import write_bundle

CONFTEST = """
import os, sys, types
from pytest_nancapture.errors import BundleDamagedError, DeviceUnavailableError
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.replay.result import ReplayResult

def run_replay(bundle, *, module=None, device="auto", trace=False, hooks=None):
    print(f"replay {bundle.name} device={device} trace={trace} module={module}")
    verdict = bundle.name.partition("-")[0]
    if verdict == "crash":
        raise RuntimeError("a defect of the plugin")
    if verdict == "altered":
        raise BundleDamagedError(bundle.path, "weights.safetensors was altered", "copy the bundle anew")
    if device.startswith("cuda") and not os.environ.get("GPUS"):
        raise DeviceUnavailableError(f"device {device}: expected a CUDA device, this machine has none")
    if verdict == "flaky":
        verdict = "finite" if trace else "nonfinite"
    if verdict == "untraceable":
        if trace:
            raise DeviceUnavailableError("out of memory while tracing")
        verdict = "nonfinite"
    bad = ("loss", *(f"gradient fc{i}.weight" for i in range(161))) if verdict == "nonfinite" else ()
    culprit = None
    if verdict == "nonfinite":
        culprit = Culprit(phase="forward")
        if trace:
            culprit = Culprit(
                phase="forward", op="aten.div.Tensor", file="train.py", line=42, source="    mean_loss = loss / count",
                module_path="head", explanation="0 / 0: 3 of 20 classes have no sample",
            )
    return ReplayResult(
        verdict=verdict,
        loss=float("nan") if verdict == "nonfinite" else 0.5,
        nonfinite=bad,
        culprit=culprit,
        reason={"nonfinite": "nan in loss, 161 of 161 gradients", "mismatch": "fc.weight: (4, 8) is now (5, 8)",
                "error": "ValueError: bad class", "vacuous": "no loss"}.get(verdict, "loss and gradients are finite"),
        detail="Traceback:\\n  File x.py, line 3\\nValueError: bad class" if verdict == "error" else "",
        notes=("replayed without the optimizer",) if "noted" in bundle.name else (),
        device="cpu" if device == "auto" else device,
        seconds=0.1,
    )

run = sys.modules["pytest_nancapture.replay.run"] = types.ModuleType("pytest_nancapture.replay.run")
run.run_replay = run_replay

gpus = int(os.environ.get("GPUS", 0))
sys.modules["torch"] = types.SimpleNamespace(accelerator=types.SimpleNamespace(
    is_available=lambda: gpus > 0,
    current_accelerator=lambda: types.SimpleNamespace(type="cuda"),
    device_count=lambda: gpus,
))
"""


class Project:
    """A folder with a stand-in replay in its ``conftest.py``, and shorthands for what the tests do with it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        pytester.makeconftest(CONFTEST)

    def bundle(self, path: str, **sections: Any) -> Path:
        """Write a bundle; the part of its name before the first hyphen is the verdict of its replay."""
        return write_bundle(self.path / path, **sections)

    def ini(self, *lines: str) -> None:
        self.pytester.makeini("\n".join(["[pytest]", *lines]))

    def tests(self, path: str = "tests/test_own.py", text: str = "def test_a(): pass\ndef test_b(): pass\n") -> None:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def run(self, *args: str) -> pytest.RunResult:
        return self.pytester.runpytest(*args)

    def run_workers(self, *args: str) -> pytest.RunResult:
        """With xdist, in a process of its own."""
        pytest.importorskip("xdist")
        return self.pytester.runpytest_subprocess("-p", "xdist", *args)

    def collected(self, *args: str) -> list[str]:
        """The node ids that ``--co`` prints, in order."""
        return [line for line in self.run("--co", "-q", *args).outlines if "::" in line]


@pytest.fixture
def project(pytester: pytest.Pytester, alone: None) -> Project:
    return Project(pytester)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inner runs, no plugin but ours, and a terminal wide enough for whole reasons."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_nancapture.plugin")
    monkeypatch.setenv("COLUMNS", "250")
