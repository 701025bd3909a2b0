"""How a guard's cost grows: with the number of parameters, and with the size of the batch.

usage: python tests/benchmarks/growth.py [--tensors=100,300,1000] [--batches=1,4,16,64] [--json=growth.json]

The parameters are tiny (256 values and 16 in turn), so that what a guard does for each shows, not what it reads. The
batch is that of the mlp, 8 samples of 4 KB times the factor. Guards take turns as in overhead.py. The times are those
that a step spends in a guard's own code, which vary less; the shares are of whole steps, with and without the guard.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import tables
import torch
from networks import OPTIMIZERS, Net
from turns import CONTROL, shares, take_turns

_GUARDS = ("this", "article")
_SMALLEST_BATCH = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print two tables."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    results: tables.Results = {"machine": tables.machine(options.device), "tensors": {}, "batches": {}}
    print(f"{tables.machine_line(results['machine'])}; AdamW {options.optimizer}, ", end="")
    print(f"medians of {options.rounds} rounds\n")
    columns = [f"{guard}: {what}" for guard in _GUARDS for what in ("µs a parameter inside", "share of the step")]
    tables.head("parameters", "step", *columns, CONTROL)
    for number in options.tensors:
        measure(results["tensors"], number, number, Net(f"tiny:{number}", options.optimizer), options)
    print()
    columns = [f"{guard}: {what}" for guard in _GUARDS for what in ("µs inside", "share of the step")]
    tables.head("batch, MB", "step", *columns, CONTROL)
    for factor in options.batches:
        module = Net("mlp", options.optimizer, batch=_SMALLEST_BATCH * factor)
        measure(results["batches"], round(module.shape[0] * 4096 / 1e6, 2), 1, module, options)
    tables.save(options.json, results)


def measure(results: dict[str, Any], name: float, parts: int, module: Net, options: argparse.Namespace) -> None:
    """Print one line: what each guard costs, divided by the number of `parts`."""
    names = ("nothing", *_GUARDS, CONTROL)
    found = take_turns(module, names, rounds=options.rounds, seconds=options.seconds, device=options.device)
    costs = shares(found.turns)
    results[str(name)] = {
        "means": found.means,
        "medians": found.medians,
        "inside": found.inside,
        "shares": costs,
        "steps": found.steps,
    }
    step = statistics.median(found.turns["nothing"])
    cells = []
    for guard in _GUARDS:
        inside = statistics.median(found.inside[guard]) / parts * 1e6
        cells += [f"{inside:.2f}", tables.spread(costs[guard], "{:+.1%}")]
    tables.row([name, f"{step * 1e3:.1f} ms", *cells, tables.spread(costs[CONTROL], "{:+.1%}")])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=9)
    parser.add_argument("--tensors", default="100,300,1000,3000,10000", help="numbers of parameters")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64", help="factors of the batch")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, mps ...; there, read the shares")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="default", help="AdamW's implementation")
    options = parser.parse_args(argv)
    options.tensors = [int(number) for number in options.tensors.split(",") if number]
    options.batches = [int(factor) for factor in options.batches.split(",") if factor]
    return options


if __name__ == "__main__":
    main()
