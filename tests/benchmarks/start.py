"""What ``NaNCapture`` adds to the start of a run: from ``on_train_start`` to the first batch, and at its instant.

usage: python tests/benchmarks/start.py [--models=meta,...] [--json=start.json]

Each round fits one module twice, without and with the callback, and ends the run in its first step. The first columns
are the time from the first callback's ``on_train_start`` to the last one's ``on_train_batch_start``; what the callback
adds to it is to stay below two seconds. The last one is the time from there to ``training_step``, in which the first
state is taken. A billion parameters on meta have no values, so nothing there is read; ``--models=memory`` has them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import tables
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytest_nancapture import NaNCapture

_LIMIT = 2.0
"""Seconds."""


class _Begun(BaseException):
    """Ends the run in its first step."""


class _First(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.times.append(time.perf_counter())


class _Last(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.times.append(time.perf_counter())


class _Net(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = MODELS[name]()
        self.times: list[float] = []

    def _apply(self, fn: Any, recurse: bool = True) -> _Net:
        """What is on meta cannot be moved, neither as the run starts nor as it ends."""
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.times.append(time.perf_counter())
        raise _Begun

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Stateful(nn.Module):
    """A small module of a user's: numbers, a list, a dict, a tensor that is no buffer."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.rates, self.counts = number, [0.1, 0.2], {"seen": 0}
        self.scale = torch.ones(2)
        self.weight = nn.Parameter(torch.ones(2))


def _layers(depth: int, width: int, device: str) -> nn.Module:
    """Linear layers and norms in turn."""
    kinds = [partial(nn.Linear, width, width), partial(nn.LayerNorm, width)]
    return nn.Sequential(*(kinds[i % 2](device=device) for i in range(depth)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "meta": partial(_layers, 122, 4096, "meta"),
    "submodules": partial(_layers, 10_000, 2, "cpu"),
    "stateful": lambda: nn.ModuleList(_Stateful(number) for number in range(10_000)),
    "memory": partial(_layers, 122, 4096, "cpu"),
}
TOLD = {
    "meta": "a billion parameters on meta",
    "submodules": "10,000 submodules of torch's",
    "stateful": "10,000 submodules with state of their own",
    "memory": "a billion parameters, 4 GB",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(argv)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "pytest_nancapture"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    results: tables.Results = {"machine": tables.machine(), "models": {}}
    print(f"{tables.machine_line(results['machine'])}; medians (quartiles) of {options.rounds} rounds\n")
    tables.head("module", "without: s", "with: s", "added: s", "with / without", f"below {_LIMIT:g} s", "instant: s")
    for name in options.models:
        module = _Net(name)
        instants: list[float] = []
        candidates = {"without": partial(start, module, None), "with": partial(start, module, instants)}
        found = tables.interleaved(candidates, options.rounds)
        added = [with_ - without for without, with_ in zip(found["without"], found["with"], strict=True)]
        is_below = statistics.median(added) < _LIMIT
        times = [tables.spread(found[each], "{:.3f}") for each in candidates]
        ratio = tables.spread(tables.ratios(found["with"], found["without"]), "{:.1f}")
        taken = tables.spread(instants[1:], "{:.3f}")
        row = [TOLD[name], *times, tables.spread(added, "{:.3f}"), ratio, "yes" if is_below else "no", taken]
        tables.row(row)
        results["models"][name] = {**found, "instant": instants[1:]}
    tables.save(options.json, results)


def start(module: _Net, instants: list[float] | None) -> float:
    """Seconds from the start of training to the first batch.

    Args:
        instants: gets the seconds from there to the step; None for a run without the callback.
    """
    module.times.clear()
    with tempfile.TemporaryDirectory() as folder:
        callbacks: list[Any] = [_First(), *([NaNCapture(folder)] if instants is not None else []), _Last()]
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        with suppress(_Begun):
            trainer.fit(module, DataLoader(torch.zeros(1), batch_size=1))
    started, came, entered = module.times
    if instants is not None:
        instants.append(entered - came)
    return came - started


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=5)
    parser.add_argument(
        "--models",
        type=lambda text: text.split(","),
        default=[name for name in MODELS if name != "memory"],
        help=f"of {', '.join(MODELS)}; 'memory' needs 4 GB (default: all others)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
