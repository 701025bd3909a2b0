"""Many programs at a time: captured in one process, replayed in another, and in a third after their fix."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from kinds import INSIDE, KINDS
from programs import FIX, Program, source

_CAPTURE = """\
import importlib, json, logging, random, sys, warnings
import lightning, numpy, torch
from pytest_nancapture import NaNCapture

from pytest_nancapture.capture.proof import prove

prove.FRESH = sys.argv[1] == "fresh"

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
ended, told = {}, []


class Ear(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())


logging.getLogger("pytest_nancapture").addHandler(Ear())
for name in sys.argv[2:]:
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(1)
    try:
        importlib.import_module(name).run([NaNCapture(f"bundles/{name}")])
        how = "finished"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    ended[name] = how, "; ".join(told)
    told.clear()
print("ENDED " + json.dumps(ended))
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one program.

    Attributes:
        ended: how its training ended.
        log: what was said meanwhile.
        bundles: how many it left.
        batch: which batch the bundle is of.
        runs: how many proofs found the fault, of how many.
        missing: state that the bundle says it lacks.
        before: the verdict of its test with the program as it was; ``cannot gate`` where none was made.
        after: with the program fixed.
    """

    ended: str
    bundles: int
    batch: int = -1
    runs: int = 0
    of: int = 0
    missing: tuple[str, ...] = ()
    log: str = ""
    before: str = ""
    after: str = ""


def carry_out(programs: Sequence[Program], folder: Path) -> list[Trial]:
    """Capture, replay, fix and replay all."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    paths = [folder / f"m{number:03}.py" for number in range(len(programs))]
    for path, program in zip(paths, programs, strict=True):
        path.write_text(source(program))
    ended: dict[str, tuple[str, str]] = {}
    for is_outside in (False, True):
        chosen = [p.stem for p, program in zip(paths, programs, strict=True) if _is_outside(program) == is_outside]
        if chosen:
            # A process for each proof is needed only where the state is no part of the module.
            told = _python(folder, "-c", _CAPTURE, "fresh" if is_outside else "here", *chosen)
            found = re.findall("^ENDED (.*)$", told.stdout, re.MULTILINE)
            assert found, told.stderr
            ended |= json.loads(found[0])
    before = _replay(folder)
    for path in paths:
        path.write_text(path.read_text() + FIX)
    after = _replay(folder)
    return [_trial(folder, path.stem, ended[path.stem], before, after) for path in paths]


def _is_outside(program: Program) -> bool:
    return KINDS[program.kind].outside


def _trial(folder: Path, name: str, ended: tuple[str, str], before: dict[str, str], after: dict[str, str]) -> Trial:
    found = sorted((folder / "bundles" / name).glob("*/bundle.json"))
    if len(found) != 1:
        return Trial(ended=ended[0], bundles=len(found))
    bundle = json.loads(found[0].read_text())
    reproduced, module = bundle["fault"]["reproduced"], bundle["module"]
    return Trial(
        ended=ended[0],
        log=ended[1],
        bundles=1,
        batch=bundle["fault"]["batch_idx"],
        runs=reproduced["runs"],
        of=reproduced["of"],
        missing=(*(each["where"] for each in module["missing"]), *module["unwritten"]),
        before=before.get(name, "no test"),
        after=after.get(name, "no test"),
    )


def _replay(folder: Path) -> dict[str, str]:
    """The verdict of each program's test, by pytest in a process of its own."""
    options = ("--nan-bundles=bundles", "--nan-trace=never", "--junitxml=junit.xml", "-p", "no:cacheprovider", "-q")
    _python(folder, "-m", "pytest", *options)
    verdicts = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        (name,) = set(re.findall(r"\bm\d{3}\b", f"{case.get('classname')} {case.get('name')}"))
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        verdict = properties.get("nan_verdict") or "cannot gate"
        is_passed = not [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        verdicts[name] = "passed" if is_passed else str(verdict)
    return verdicts


def _python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


def wrong(program: Program, trial: Trial) -> str:
    """What must not be, in words; empty where all is well."""
    said = f"it says {trial.runs} of {trial.of}" + (f" and lacks {', '.join(trial.missing)}" if trial.missing else "")
    if trial.bundles != 1 or trial.batch != program.bad:
        return f"{trial.bundles} bundles, of batch {trial.batch}; training ended with {trial.ended}"
    if trial.before == "passed":
        return f"green with nothing fixed, and {said}"
    if trial.runs and trial.before == "finite":
        return f"{said}, but the replay is finite"
    if program.can_be_written and (trial.missing or not trial.runs):
        return f"all of its state could be written, but {said}; the test: {trial.before}"
    if not trial.runs:
        is_asked = program.kind in INSIDE and KINDS[program.kind].named
        is_named = trial.missing or re.search("nobody can look into .*state", trial.log) or not is_asked
        return "" if is_named else f"{said} and does not name the state that it lacks"
    if trial.missing:
        return ""
    if trial.before != "nonfinite":
        return f"not red: {trial.before}, and {said}"
    return "" if trial.after == "passed" else f"the fix is not green: {trial.after}, and {said}"


def simplest(program: Program, folder: Path, *, rounds: int = 3) -> Program:
    """The simplest program of the same kind that is wrong as well."""
    for number in range(rounds):
        candidates = [each for each in program.simpler() if each.complexity < program.complexity]
        trials = carry_out(candidates, folder / f"simpler-{number}") if candidates else []
        bad = [each for each, trial in zip(candidates, trials, strict=True) if wrong(each, trial)]
        if not bad:
            break
        program = min(bad, key=lambda each: each.complexity)
    return program
