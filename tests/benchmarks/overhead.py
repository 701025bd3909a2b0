"""What a guard costs a training step: nothing / this / the article's / a flag per parameter / anomaly mode.

usage: python tests/benchmarks/overhead.py [--models=mlp,cnn] [--rounds=15] [--json=overhead.json]

The guards take turns within one run, a block of steps each. A guard's cost is the median over the rounds of what its
turn's step takes longer than that without any guard in the same round, as a share of the latter; quartiles follow. The
last column is the same of a second turn without any guard: smaller differences mean nothing.

A second table tells the time that a step spends in each guard's own code, which varies less; not on accelerators, which
run behind the host. The floor is the least that a bundle can be made from: batch and buffers copied into memory that is
kept, torch's random state, one read of the gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from typing import Any

import tables
import torch
from networks import MODELS, OPTIMIZERS, Net
from turns import ALL, CONTROL, shares, take_turns


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one table, or two with --memory."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    results: tables.Results = {"machine": tables.machine(options.device), "models": {}}
    results["settings"] = {name: getattr(options, name) for name in ("device", "precision", "optimizer", "rounds")}
    print(f"{tables.machine_line(results['machine'])}; {options.precision}, AdamW {options.optimizer}, ", end="")
    print(f"medians (quartiles) of {options.rounds} rounds\n")
    names = [name for name in ALL if name in (*options.guards, "nothing", CONTROL)]
    guards = [name for name in names if name not in ("nothing", CONTROL)]
    tables.head("model", "step", *guards, "this / article", CONTROL)
    for kind in options.models:
        module = net(kind, options)
        found = take_turns(
            module,
            names,
            rounds=options.rounds,
            seconds=options.seconds,
            device=options.device,
            precision=options.precision,
        )
        costs = shares(found.turns)
        results["models"][kind] = {
            "parameters": sum(p.numel() for p in module.parameters()),
            "tensors": sum(1 for _ in module.parameters()),
            "shape": list(module.shape),
            "steps": found.steps,
            "means": found.means,
            "medians": found.medians,
            "shares": costs,
            "inside": found.inside,
        }
        step = f"{statistics.median(found.turns['nothing']) * 1e3:.1f} ms"
        cells = [tables.spread(costs[name], "{:+.1%}") for name in guards]
        tables.row([kind, step, *cells, ratio(costs), tables.spread(costs[CONTROL], "{:+.1%}")])
    if options.device == "cpu":
        print_inside(guards, results)
    if options.memory:
        print_memory(options, ["nothing", *guards], results)
    tables.save(options.json, results)


def ratio(costs: dict[str, list[float]]) -> str:
    """This one's cost by the article's; not where either is lost in what the machine varies."""
    if not costs.keys() >= {"this", "article"}:
        return ""
    mine, theirs = statistics.median(costs["this"]), statistics.median(costs["article"])
    low, _, high = tables.quartiles(costs[CONTROL])
    return f"{mine / theirs:.2f}" if theirs > high - low and mine > 0 else "within noise"


def net(kind: str, options: argparse.Namespace) -> Net:
    torch.manual_seed(0)
    return Net(kind, options.optimizer, options.batch, options.image)


def print_inside(guards: Sequence[str], results: tables.Results) -> None:
    """What of a step goes by in the guards' own code."""
    guards = [guard for guard in guards if guard != "anomaly mode"]  # which has none
    pairs = [pair for pair in (("this", "article"), ("this", "floor")) if set(pair) <= {*guards}]
    print("\nIn the guard's own code, ms a step and share of it\n")
    tables.head("model", "step", *guards, *(f"{mine} / {other}" for mine, other in pairs))
    for kind, model in results["models"].items():
        inside = {guard: statistics.median(model["inside"][guard]) for guard in guards}
        step = statistics.median(model["medians"]["nothing"])
        ratios = [tables.spread(tables.ratios(*(model["inside"][name] for name in pair))) for pair in pairs]
        cells = [f"{seconds * 1e3:.2f} ({seconds / step:.1%})" for seconds in inside.values()]
        tables.row([kind, f"{step * 1e3:.1f} ms", *cells, *ratios])


def print_memory(options: argparse.Namespace, guards: Sequence[str], results: tables.Results) -> None:
    """What each guard adds to the peak of a run of its own, in a process of its own."""
    print("\nPeak memory that a guard adds, in MB\n")
    tables.head("model", "nothing", *guards[1:])
    for kind in options.models:
        peaks = {guard: peak_alone(kind, guard, options) for guard in guards}
        results["models"][kind]["peaks"] = peaks
        base = peaks["nothing"]
        added = [f"{(peaks[guard] - base) / 1e6:+.0f}" for guard in guards[1:]]
        tables.row([kind, f"{base / 1e6:.0f}", *added])


def peak_alone(kind: str, guard: str, options: argparse.Namespace) -> int:
    # Freed blocks go back at once, so that what is resident is what is in use.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, (kind, guard, vars(options)))


def peak(kind: str, guard: str, options: dict[str, Any]) -> int:
    """Bytes at the height of a few steps: of the accelerator, or resident in this process."""
    given = argparse.Namespace(**options)
    torch.set_num_threads(given.threads)
    take_turns(net(kind, given), [guard], rounds=1, seconds=0, device=given.device, precision=given.precision)
    if given.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return tables.peak_resident()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=15)
    models = ", ".join(f"{name} ({what})" for name, what in MODELS.items())
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {models}")
    parser.add_argument("--guards", default=",".join(ALL[1:-1]), help="which to measure (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps ... (default: %(default)s)")
    parser.add_argument("--precision", default="32", help="as the Trainer's: 32, bf16-mixed ... (default: %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="default", help="AdamW's implementation")
    parser.add_argument("--batch", type=int, help="samples in a batch, instead of each model's own number")
    parser.add_argument("--image", type=int, help="height and width of images, instead of each model's own")
    parser.add_argument("--memory", action="store_true", help="also print what each adds to the peak memory")
    options = parser.parse_args(argv)
    options.models, options.guards = options.models.split(","), options.guards.split(",")
    for given, known in ((options.models, MODELS), (options.guards, ALL)):
        unknown = ", ".join(name for name in given if name not in known)
        if unknown:
            parser.error(f"expected some of {', '.join(known)}; came {unknown}")
    return options


if __name__ == "__main__":
    main()
