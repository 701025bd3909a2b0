"""Run the tests that need an accelerator, then measure what a guard costs there, and print tables to be pasted.

usage: python tests/gpu/run.py [--json=DIR]

Measured is a ResNet-50 on batches of 128 images of 224x224, as in the article: in bf16-mixed and in 32 bit, with fused
and with foreach AdamW. Without an accelerator only small sizes are measured, to show that it works:
--batch=2 --image=32 --rounds=1.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import torch

HERE = Path(__file__).parent
OVERHEAD = HERE.parent / "benchmarks" / "overhead.py"
_MUCH_FOR_A_CPU = 2**20
"""Pixels in a batch."""
WAYS = [(precision, optimizer) for precision in ("bf16-mixed", "32") for optimizer in ("fused", "foreach")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; the exit code is pytest's, or that of the first measurement that failed."""
    options = _parse(argv)
    print(f"{_machine()}\n", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        code = _run_tests(folder) if options.tests else 0
        if not options.overhead:
            return code
        if options.device == "cpu" and options.batch * options.image**2 > _MUCH_FOR_A_CPU:
            print("\nno accelerator: what a guard costs was not measured; for a trial: --batch=2 --image=32")
            return code
        return _measure(folder, options) or code


def _run_tests(folder: Path) -> int:
    report = folder / "gpu.xml"
    options = ["-p", "no:cacheprovider", "-q", "-rs", f"--junitxml={report}"]
    if not any("nancapture" in point.name for point in entry_points(group="pytest11")):
        options += ["-p", "pytest_nancapture.plugin"]
    run = subprocess.run([sys.executable, "-m", "pytest", str(HERE / "test_gpu.py"), *options])
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    print("\n| test | result | seconds |\n|---|---|---|")
    for case in cases:
        bad = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        print(f"| {case.get('name')} | {bad} | {float(case.get('time', 0)):.1f} |")
    return run.returncode


def _measure(folder: Path, options: argparse.Namespace) -> int:
    """One process for each way to train; what they printed is left out, their results make one table."""
    guards = ("this", "article", "flag per parameter", "nothing again")
    print(f"\n| resnet50, batch {options.batch} of {options.image}x{options.image} | step, ms | ", end="")
    print(f"{' | '.join(guards)} | this / article |\n|{'---|' * (len(guards) + 3)}", flush=True)
    for precision, optimizer in WAYS:
        out = folder / f"overhead-{precision}-{optimizer}.json"
        command = [sys.executable, str(OVERHEAD), "--models=resnet50", f"--guards={','.join(guards[:3])}"]
        command += [f"--{name}={getattr(options, name)}" for name in ("device", "batch", "image", "rounds", "seconds")]
        command += [f"--precision={precision}", f"--optimizer={optimizer}", f"--json={out}"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            print(f"\n{' '.join(command)}\n{run.stderr}", file=sys.stderr)
            return run.returncode
        found = json.loads(out.read_text(encoding="utf-8"))["models"]["resnet50"]
        cost = {guard: statistics.median(found["shares"][guard]) for guard in guards}
        step = statistics.median(found["means"]["nothing"]) * 1e3
        cells = " | ".join(f"{cost[guard]:+.2%}" for guard in guards)
        ratio = f"{cost['this'] / cost['article']:.2f}" if cost["article"] else ""
        print(f"| {precision}, {optimizer} AdamW | {step:.1f} | {cells} | {ratio} |", flush=True)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=device.type if device else "cpu", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--image", type=int, default=224, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="DIR", help="keep the raw results in this folder")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="measure only")
    parser.add_argument("--no-overhead", dest="overhead", action="store_false", help="test only")
    return parser.parse_args(argv)


def _machine() -> str:
    name = "no accelerator"
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}, python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
