"""How small do captured bundles get, and are they still worth something as tests?

usage: python tests/benchmarks/shrunk.py CASES [NAME ...]

CASES is a folder of modules, each with `Model` (a LightningModule that goes non-finite), `FixedModel`, `make_loader()`
and the constants `PHASE` and, where the fix cannot make the step finite, `CURABLE = False`. Each is captured, its
bundle shrunk, replayed red in a fresh pytest (the culprit must be the same), and green with the fix.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.bundle import Bundle, find_bundles
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.errors import NancaptureError
from pytest_nancapture.shrink.shrinker import shrink

CAPTURE = """
import importlib, logging, random, sys, warnings
import numpy, torch
import lightning.pytorch as pl
from pytest_nancapture import NaNCapture, NonFiniteError
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
for name in sys.argv[1:]:
    case = importlib.import_module(name)
    seed = getattr(case, "SEED", 0)
    torch.manual_seed(seed); random.seed(seed); numpy.random.seed(seed)
    options = {"max_epochs": 1, **getattr(case, "TRAINER_KWARGS", {})}
    callbacks = [*options.pop("callbacks", []), NaNCapture("bundles/" + name, **getattr(case, "CAPTURE_KWARGS", {}))]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    try:
        pl.Trainer(accelerator="cpu", callbacks=callbacks, **quiet, **options).fit(case.Model(), case.make_loader())
    except NonFiniteError:
        pass
"""


def constants(path: Path) -> dict[str, Any]:
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def verdicts(work: Path, folder: str) -> dict[str, dict[str, str]]:
    """Of each case, the properties that a pytest run gave its bundle, and whether it passed."""
    report = work / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--nan-bundles={folder}", f"--junitxml={report}"]
    subprocess.run([*command, "-p", "no:cacheprovider"], cwd=work, capture_output=True, check=False)
    found = {}
    for case in ET.parse(report).iter("testcase"):
        name = next(part for part in f"{case.get('classname')}".replace("/", ".").split(".") if part[1:3].isdigit())
        bad = [case.find(tag) for tag in ("failure", "error", "skipped")]
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        found[name] = {"passed": "" if any(item is not None for item in bad) else "yes", **properties}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Capture, shrink and replay every case, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--keep", type=Path, help="a new folder to work in and to leave behind")
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args(argv)
    paths = {path.stem: path for path in sorted(args.cases.resolve().glob("c[0-9]*.py"))}
    paths = {name: path for name, path in paths.items() if constants(path)["PHASE"] != "harmless"}
    if args.names:
        paths = {name: path for name, path in paths.items() if any(part in name for part in args.names)}
    work = args.keep.resolve() if args.keep else Path(tempfile.mkdtemp(prefix="shrunk-"))
    work.mkdir(exist_ok=True)
    for path in paths.values():
        shutil.copy(path, work)
    (work / "pytest.ini").write_text("[pytest]\npythonpath = .\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", CAPTURE, *paths], cwd=work, env=environment, capture_output=True, check=True)
    os.chdir(work)
    rows: dict[str, dict[str, Any]] = {}
    for name in paths:
        (path,) = find_bundles(work / "bundles" / name)
        start = time.perf_counter()
        try:
            shrunk = shrink(Bundle.open(path), work / "small" / name / path.name, max_seconds=args.seconds)
        except NancaptureError as error:
            rows[name] = {"kept": [f"{type(error).__name__}: {error}".splitlines()[0]]}
        else:
            tried = sum(gain.tried for gain in shrunk.gains)
            rows[name] = {
                "before": shrunk.before,
                "after": shrunk.after,
                "tried": tried,
                "kept": shrunk.kept,
                "stopped": shrunk.stopped,
            }
        rows[name]["seconds"] = time.perf_counter() - start
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    was, red = verdicts(work, "bundles"), verdicts(work, "small")
    for name in paths:
        with (work / f"{name}.py").open("a", encoding="utf-8") as file:
            file.write("\n\nModel = FixedModel\n")
    green_before, green = verdicts(work, "bundles"), verdicts(work, "small")
    same = ("nan_op", "nan_source", "nan_phase")
    print("| case | before | after | tried | seconds | red | green | kept |\n|---|---|---|---|---|---|---|---|")
    totals = {"red": 0, "green": 0}
    for name, row in rows.items():
        now = red.get(name, {})
        is_red = now.get("nan_verdict") == "nonfinite" and all(now.get(key) == was[name].get(key) for key in same)
        is_green = green.get(name, {}).get("passed") == "yes"
        could = green_before.get(name, {}).get("passed") == "yes"
        totals["red"] += is_red
        totals["green"] += is_green or not could
        told = "yes" if is_green else f"{green.get(name, {}).get('nan_verdict', 'no')}{'' if could else ' (as before)'}"
        sizes = " | ".join(human_size(row[key]) if key in row else "" for key in ("before", "after"))
        print(
            f"| {name} | {sizes} | {row.get('tried', '')} | {row['seconds']:.0f}{row.get('stopped', '')} | "
            f"{'yes' if is_red else 'NO'} | {told} | {'; '.join(row['kept'])} |"
        )
    after = sorted(row["after"] for row in rows.values() if "after" in row)
    print(f"\nred {totals['red']} of {len(rows)}, green with the fix or as before {totals['green']}")
    print(f"median {human_size(int(statistics.median(after)))}, largest {human_size(after[-1])}")
    if not args.keep:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
