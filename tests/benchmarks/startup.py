"""What it costs to start: a replay, the plugin in somebody else's pytest run, a folder of 10,000 bundles.

usage: python tests/benchmarks/startup.py [--bundles=10000] [--json=startup.json]

Everything runs in fresh processes, the candidates in turn. A replay is measured from the start of its process to the
verdict, and its parts by the same clock in that process.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import tables

HERE = Path(__file__).resolve().parent
_PARTS = ("interpreter", "import torch and lightning", "import this", "replay")
_MODEL = """\
import lightning.pytorch as pl, torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum() / 0 * 0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
_TRAIN = """\
import lightning.pytorch as pl, torch
from model import Net
from torch.utils.data import DataLoader
from pytest_nancapture import NaNCapture

off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
callbacks = [NaNCapture("nan-bundles", on_capture="stop")]
pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **off).fit(Net(), DataLoader(torch.ones(2, 4), 2))
"""
# The clock is the system's, so that the time at which the parent started this process can be given to it.
_REPLAY = """\
import sys, time
times = [float(sys.argv[1]), time.monotonic()]
import torch, lightning.pytorch
times.append(time.monotonic())
import pytest_nancapture.replay.run, pytest_nancapture.diagnose.trace
from pytest_nancapture import replay
times.append(time.monotonic())
verdict = replay(sys.argv[2]).verdict
times.append(time.monotonic())
assert verdict == "nonfinite", verdict
print("parts", *[after - before for before, after in zip(times, times[1:])])
"""
_LIST = "import sys; from pytest_nancapture.cli import main; sys.exit(main(sys.argv[1:]))"
_READ = """\
import json, sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*/bundle.json")):
    json.loads(path.read_text())
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print three tables."""
    options = parse(argv)
    results: tables.Results = {"machine": tables.machine()}
    print(f"{tables.machine_line(results['machine'])}; medians (quartiles) of {options.rounds} rounds\n")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        results["replay"] = replays(place, options.rounds)
        results["plugin"] = plugin(place, options.rounds)
        if options.bundles:
            results["many"] = many(place, options.bundles, max(1, options.rounds // 3))
    tables.save(options.json, results)


def replays(place: Path, rounds: int) -> dict[str, list[float]]:
    (place / "model.py").write_text(_MODEL)
    run(place, "-c", _TRAIN)
    (bundle,) = (place / "nan-bundles").iterdir()
    parts: dict[str, list[float]] = {name: [] for name in _PARTS}

    def replay() -> float:
        told = run(place, "-c", _REPLAY, str(time.monotonic()), str(bundle))
        (line,) = re.findall(r"^parts (.*)$", told, re.MULTILINE)
        took = [float(part) for part in line.split()]
        for name, seconds in zip(_PARTS, took, strict=True):
            parts[name].append(seconds)
        return sum(took)

    named = f"{bundle.relative_to(place)}/bundle.json"
    commands = {
        "import torch, lightning.pytorch": partial(clocked, place, "-c", "import torch, lightning.pytorch"),
        "replay()": replay,
        "nancapture replay": partial(clocked, place, "-c", _LIST, "replay", str(bundle), code=1),
        "pytest": partial(clocked, place, *pytest_with_us(), named, code=1),
    }
    found = tables.interleaved(commands, rounds)
    tables.head("from the start of the process to", "seconds", "times that of the imports")
    for name, times in found.items():
        ratios = tables.ratios(times, found["import torch, lightning.pytorch"])
        tables.row([name, f"{statistics.median(times):.2f}", tables.spread(ratios)])
    print()
    tables.head("part of replay()", "seconds")
    for name, times in parts.items():
        tables.row([name, f"{statistics.median(times):.3f}"])
    return {**found, **parts}


def plugin(place: Path, rounds: int) -> dict[str, list[float]]:
    """What every pytest run of the environment pays."""
    empty = place / "empty"
    empty.mkdir()
    (empty / "pytest.ini").write_text("[pytest]\n")
    quiet = ("-p", "no:cacheprovider", "--co", "-q")
    without = ("-m", "pytest", *quiet, "-p", "no:nancapture")
    commands = {
        "pytest --co -q": partial(clocked, empty, *pytest_with_us(), *quiet, code=5),
        "pytest --co -q -p no:nancapture": partial(clocked, empty, *without, code=5),
        "own modules": partial(import_seconds, empty, own=True),
        "plugin with all it imports": partial(import_seconds, empty, own=False),
    }
    found = tables.interleaved(commands, rounds)
    added = [with_ - without for with_, without in zip(*list(found.values())[:2], strict=True)]
    print()
    tables.head("in an empty folder", "ms")
    for name, times in found.items():
        tables.row([name, tables.spread([value * 1e3 for value in times], "{:.1f}")])
    tables.row(["the plugin adds, round by round", tables.spread([value * 1e3 for value in added], "{:+.1f}")])
    return found


def import_seconds(place: Path, *, own: bool) -> float:
    """By ``-X importtime``, after pytest itself: of our modules alone, or of the plugin with what it brings along."""
    told = run(place, "-X", "importtime", "-c", "import pytest; import pytest_nancapture.plugin", output="stderr")
    lines = re.findall(r"import time:\s*(\d+) \|\s*(\d+) \|( *)(\S+)", told)
    ours = [line for line in lines if line[3].partition(".")[0] == "pytest_nancapture"]
    if own:
        return sum(int(alone) for alone, *_ in ours) / 1e6
    return sum(int(total) for _, total, indent, _ in ours if len(indent) == 1) / 1e6


def many(place: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """A folder of small true bundles, and as a measure as many tests of pytest's own."""
    sys.path.append(str(HERE.parent))
    from fake_bundles import write_bundle

    repository, plain = place / "repository", place / "plain"
    bundles = repository / "fixtures"
    for number in range(count):
        write_bundle(bundles / f"step-{number:06d}-rank-0", fault={"global_step": number})
    (repository / "tests").mkdir()
    (repository / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    plain.mkdir()
    (plain / "pytest.ini").write_text("[pytest]\n")
    text = f'import pytest\n\n@pytest.mark.parametrize("i", range({count}))\ndef test_it(i):\n    pass\n'
    (plain / "test_plain.py").write_text(text)
    quiet = ("-p", "no:cacheprovider", "--co", "-q")
    commands = {
        "nancapture list": partial(clocked, place, "-c", _LIST, "list", str(bundles)),
        "json.loads of each bundle.json": partial(clocked, place, "-c", _READ, str(bundles)),
        "pytest --co --nan-bundles": partial(collect, repository, *pytest_with_us(), *quiet, "--nan-bundles=fixtures"),
        "pytest --co of a parametrized test": partial(collect, plain, *pytest_with_us(), *quiet),
    }
    found = tables.interleaved(commands, rounds)
    names = list(found)
    print()
    tables.head(f"{count:,} bundles", "seconds", "times its measure")
    for name, measure in (names[:2], names[2:]):
        tables.row(
            [name, f"{statistics.median(found[name]):.2f}", tables.spread(tables.ratios(found[name], found[measure]))]
        )
        tables.row([measure, f"{statistics.median(found[measure]):.2f}", 1])
    return found


def collect(place: Path, *arguments: str) -> float:
    """By pytest's own clock."""
    told = run(place, *arguments)
    return float(re.findall(r"tests collected in ([\d.]+)s", told)[0])


def pytest_with_us() -> tuple[str, ...]:
    """Where this is not installed, the plugin is loaded by its module's name."""
    installed = any(point.name == "nancapture" for point in entry_points(group="pytest11"))
    return ("-m", "pytest", *(() if installed else ("-p", "pytest_nancapture.plugin")))


def clocked(place: Path, *arguments: str, code: int = 0) -> float:
    began = time.monotonic()
    run(place, *arguments, code=code)
    return time.monotonic() - began


def run(place: Path, *arguments: str, code: int = 0, output: str = "stdout") -> str:
    """Run Python in a folder, with compiled modules kept from run to run as is usual; what it printed."""
    paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=place,
        env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, [*paths, str(place)]))},
        capture_output=True,
        text=True,
    )
    if done.returncode != code:
        sys.exit(f"{arguments}: exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return str(getattr(done, output))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=9)
    parser.add_argument("--bundles", type=int, default=10_000, help="in the folder; 0 for none (default: %(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
