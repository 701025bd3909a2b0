"""Run the tests that need an accelerator and print one table, to be pasted into README.md beside this file.

usage: python tests/gpu/run.py
"""

import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent


def main() -> int:
    """Run them; the exit code is pytest's."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "gpu.xml")
        options = ["-p", "no:cacheprovider", "-q", "-rs", f"--junitxml={report}"]
        if not any("nancapture" in name for name in _entry_points()):
            options += ["-p", "pytest_nancapture.plugin"]
        run = subprocess.run([sys.executable, "-m", "pytest", str(HERE / "test_gpu.py"), *options])
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    print(f"\n{_machine()}\n\n| test | result | seconds |\n|---|---|---|")
    for case in cases:
        bad = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        print(f"| {case.get('name')} | {bad} | {float(case.get('time', 0)):.1f} |")
    return run.returncode


def _entry_points() -> list[str]:
    from importlib.metadata import entry_points

    return [point.name for point in entry_points(group="pytest11")]


def _machine() -> str:
    name = "no accelerator"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
