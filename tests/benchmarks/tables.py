"""What all benchmarks share: where they ran, medians, a table to paste, raw results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="turns of each candidate (default: %(default)s)")
    made.add_argument("--json", type=Path, metavar="OUT", help="write the raw results to this file")
    return made


def machine(device: str = "cpu") -> dict[str, Any]:
    """Processor, accelerator and versions."""
    import lightning
    import torch

    accelerator = torch.cuda.get_device_name() if device.startswith("cuda") else None if device == "cpu" else device
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "accelerator": accelerator,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def machine_line(found: dict[str, Any]) -> str:
    """``x86_64, 2 CPUs, 2 threads, python 3.11.7, torch 2.13.0, lightning 2.6.6``."""
    where = ", ".join(filter(None, (found["accelerator"], found["machine"])))
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "lightning"))
    return f"{where}, {found['threads']} threads, {versions}"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def interleaved(candidates: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each candidate returned in each round; every second round goes backwards, and one before all is dropped."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(-1, rounds):
        order = list(candidates) if number % 2 == 0 else list(reversed(candidates))
        for name in order:
            value = candidates[name]()
            if number >= 0:
                found[name].append(value)
    return found


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round."""
    return [time / other for time, other in zip(times, base, strict=True)]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The median, and in brackets the quartiles."""
    low, middle, high = (form.format(value) for value in quartiles(values))
    return f"{middle} ({low} to {high})"


def head(*columns: str) -> None:
    """The first two lines of a table."""
    row(columns)
    print(f"|{'---|' * len(columns)}", flush=True)


def row(cells: Iterable[Any]) -> None:
    """One more line."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def peak_resident(*, reset: bool = False) -> int:
    """Bytes that this process held at its height; not that of the process which started it, as getrusage may give.

    Args:
        reset: let the height be that of now, where the system can.
    """
    status = Path("/proc/self/status")
    if status.exists():
        if reset:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def save(path: Path | None, results: Results) -> None:
    """Write the raw results, with the command that made them."""
    if path is not None:
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        path.write_text(json.dumps({"command": command, **results}, indent=1) + "\n", encoding="utf-8")
