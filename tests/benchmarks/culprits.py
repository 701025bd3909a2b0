"""Who names the guilty line: torch's anomaly mode, a monitor of module outputs, or this?

usage: python tests/benchmarks/culprits.py CASES

CASES is a folder of modules, each with `Model` (a LightningModule that goes non-finite), `make_loader()`, and the
constants `PHASE` and `CULPRIT` (text of the guilty statement). Each is trained once under each guard, in this process.
The monitor is the mechanism of Hugging Face's DebugUnderflowOverflow: it looks at what every submodule takes and gives,
and reports the first that is not finite; it counts where the guilty statement lies in that submodule's own class.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import logging
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from pytest_nancapture import Bundle, NaNCapture, find_bundles

GUARDS = ("anomaly mode", "module monitor", "this")


class Found(Exception):  # noqa: N818, no error: it ends the run
    """The monitor has seen something."""


def train(case: ModuleType, callbacks: list[pl.Callback], **kwargs: Any) -> None:
    seed = getattr(case, "SEED", 0)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    options = dict(getattr(case, "TRAINER_KWARGS", {}))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks = [*options.pop("callbacks", []), *callbacks]
    options = {"max_epochs": 1, **options, **quiet, **kwargs}
    pl.Trainer(accelerator="cpu", callbacks=callbacks, **options).fit(case.Model(), case.make_loader())


def statement(path: Path, line: int) -> str:
    """The innermost simple statement that covers a line."""
    source = path.read_text(encoding="utf-8")
    best = ""
    for node in ast.walk(ast.parse(source)):
        simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if simple and node.lineno <= line <= (node.end_lineno or node.lineno):
            best = ast.get_source_segment(source, node) or ""
    return best


def by_anomaly_mode(case: ModuleType, path: Path) -> bool:
    """Its warning holds the traceback of the forward call; the innermost line of the case counts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(case, [], detect_anomaly=True)
        except Exception as error:
            if "returned nan values" not in str(error):
                return False
    told = "".join(str(warning.message) for warning in caught if "Traceback of forward call" in str(warning.message))
    lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', told)
    return bool(lines) and case.CULPRIT in statement(path, int(lines[-1]))


def by_module_monitor(case: ModuleType, path: Path) -> bool:
    """The first submodule whose inputs or outputs are not finite."""
    seen: list[Any] = []

    def look(module: Any, args: Any, output: Any) -> None:
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, output)) if isinstance(t, torch.Tensor)]
        if not all(t.isfinite().all() for t in tensors if t.is_floating_point() or t.is_complex()):
            seen.append(module)
            raise Found

    class Monitor(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for module in pl_module.modules():
                module.register_forward_hook(look)

    try:
        train(case, [Monitor()])
    except Exception:
        return bool(seen) and _defines(type(seen[0]), case.CULPRIT)
    return False


def _defines(kind: type, text: str) -> bool:
    try:
        return text in inspect.getsource(kind)
    except (OSError, TypeError):
        return False


def by_this(case: ModuleType, path: Path) -> bool:
    """The culprit in the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(case, [NaNCapture(folder, **getattr(case, "CAPTURE_KWARGS", {}))])
        except Exception as error:
            if type(error).__name__ != "NonFiniteError":
                raise
        culprits = [Bundle.open(bundle).fault.culprit for bundle in find_bundles(folder)]
    return any(c and c["file"].endswith(path.name) and case.CULPRIT in statement(path, c["line"]) for c in culprits)


def main(argv: Sequence[str] | None = None) -> None:
    """Train every case under every guard and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    folder = parser.parse_args(argv).cases.resolve()
    sys.path.insert(0, str(folder))
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "pytest_nancapture"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    right = {(phase, guard): 0 for phase in ("forward", "backward") for guard in GUARDS}
    asked = dict.fromkeys(("forward", "backward"), 0)
    for path in sorted(folder.glob("c[0-9]*.py")):
        case = importlib.import_module(path.stem)
        if case.PHASE not in asked or getattr(case, "OP_ELSEWHERE", False):
            continue
        asked[case.PHASE] += 1
        for guard, look in zip(GUARDS, (by_anomaly_mode, by_module_monitor, by_this), strict=True):
            right[case.PHASE, guard] += look(case, path)
    print(f"| the guilty statement is named | {' | '.join(GUARDS)} |\n|---|---|---|---|")
    for phase, total in asked.items():
        print(f"| faults in the {phase} | {' | '.join(f'{right[phase, guard]} of {total}' for guard in GUARDS)} |")


if __name__ == "__main__":
    main()
