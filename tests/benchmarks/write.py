"""Writing and reading a bundle, against plain safetensors.

usage: python tests/benchmarks/write.py [--megabytes=1000] [--folder=DIR] [--json=write.json]

Written: `write_bundle` against `safetensors.torch.save_file` with a SHA-256 of the file; both flush to the device.
Read: `Bundle.open`, `Bundle.verify` and `read_tensors` against a SHA-256 of the file and `safetensors.torch.load_file`.
The memory is what a writer of its own process holds beyond the tensors, at its height.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import tables
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pytest_nancapture import Bundle
from pytest_nancapture.bundle.manifest import WEIGHTS
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.bundle.write import write_bundle

sys.path.append(str(Path(__file__).parents[1]))
from fake_bundles import fake_manifest

_LARGEST = 2**24
"""Values of one tensor, so that a gigabyte lies in many."""
_SMALL = 10_000
_BLOCK = 2**20


def large(megabytes: int) -> dict[str, Tensor]:
    """fp32, in tensors of 64 MB or less."""
    total = megabytes * 10**6 // 4
    sizes = [min(_LARGEST, total - start) for start in range(0, total, _LARGEST)]
    return {f"layer.{i}": torch.randn(size) for i, size in enumerate(sizes)}


def small() -> dict[str, Tensor]:
    """Many of 64 bytes."""
    return {f"layer.{i}": torch.randn(16) for i in range(_SMALL)}


def write_ours(folder: Path, tensors: dict[str, Tensor]) -> None:
    one = {"x": torch.zeros(1)}
    write_bundle(folder, "bundle", fake_manifest(), weights=tensors, batch=one, rng=one)


def write_plain(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / WEIGHTS
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    hash_plain(path)


def hash_plain(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {"this": write_ours, "save_file, sha256": write_plain}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print three tables."""
    options = parse(argv)
    logging.getLogger("pytest_nancapture").setLevel(logging.ERROR)
    results: tables.Results = {"machine": tables.machine(), "write": {}, "read": {}, "memory": {}}
    print(f"{tables.machine_line(results['machine'])}; medians (quartiles) of {options.rounds} rounds\n")
    kinds = {f"{options.megabytes} MB": large(options.megabytes), f"{_SMALL:,} tensors of 64 bytes": small()}
    tables.head("written", *WRITERS, "speed of this / of save_file, sha256")
    for name, tensors in kinds.items():
        found = written(tensors, options)
        results["write"][name] = found
        speeds = tables.ratios(found["save_file, sha256"], found["this"])
        tables.row([name, *(seconds(found[writer]) for writer in WRITERS), tables.spread(speeds)])
    print()
    tables.head("read", "Bundle.open", "Bundle.verify", "sha256", "verify / sha256", "read_tensors", "/ load_file")
    for name, tensors in kinds.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results["read"][name] = found = read(Path(folder), tensors, options.rounds)
        tables.row(
            [
                name,
                *(seconds(found[what]) for what in ("Bundle.open", "Bundle.verify", "sha256")),
                tables.spread(tables.ratios(found["Bundle.verify"], found["sha256"])),
                seconds(found["read_tensors"]),
                tables.spread(tables.ratios(found["read_tensors"], found["load_file"])),
            ]
        )
    del kinds, tensors  # the next processes need the memory
    print()
    tables.head("memory beyond the tensors, MB", *WRITERS)
    extra = {writer: extra_memory(writer, options) for writer in WRITERS}
    results["memory"] = extra
    tables.row([f"{options.megabytes} MB", *(f"{extra[writer] / 1e6:.0f}" for writer in WRITERS)])
    tables.save(options.json, results)


def written(tensors: dict[str, Tensor], options: argparse.Namespace) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(dir=options.folder))

    def turn(write: Callable[[Path, dict[str, Tensor]], None]) -> float:
        shutil.rmtree(folder)
        folder.mkdir()
        os.sync()
        return clocked(lambda: write(folder, tensors))()

    found = tables.interleaved({name: partial(turn, write) for name, write in WRITERS.items()}, options.rounds)
    shutil.rmtree(folder)
    return found


def read(folder: Path, tensors: dict[str, Tensor], rounds: int) -> dict[str, list[float]]:
    write_ours(folder, tensors)
    path = folder / "bundle"
    bundle = Bundle.open(path)

    def every_value(values: dict[str, Tensor]) -> None:
        for value in values.values():  # load_file maps the file, and reads it no sooner than somebody looks
            value.sum()

    candidates = {
        "Bundle.open": lambda: Bundle.open(path),
        "Bundle.verify": bundle.verify,
        "sha256": lambda: hash_plain(path / WEIGHTS),
        "read_tensors": lambda: every_value(read_tensors(path / WEIGHTS, {})),
        "load_file": lambda: every_value(load_file(path / WEIGHTS)),
    }
    return tables.interleaved({name: clocked(run) for name, run in candidates.items()}, rounds)


def extra_memory(writer: str, options: argparse.Namespace) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_beyond, (writer, options.megabytes, options.folder))


def peak_beyond(writer: str, megabytes: int, where: Path | None) -> int:
    """Bytes between what is resident before writing and the height while writing."""
    logging.getLogger("pytest_nancapture").setLevel(logging.ERROR)
    tensors = large(megabytes)
    with tempfile.TemporaryDirectory(dir=where) as folder:
        WRITERS[writer](Path(folder), {"x": torch.zeros(1)})  # imports and buffers that are made once
        shutil.rmtree(folder)
        Path(folder).mkdir()
        before = tables.peak_resident(reset=True)
        WRITERS[writer](Path(folder), tensors)
        return tables.peak_resident() - before


def clocked(run: Callable[[], object]) -> Callable[[], float]:
    def turn() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return turn


def seconds(times: Sequence[float]) -> str:
    middle = statistics.median(times)
    return f"{middle:.2f} s" if middle >= 0.1 else f"{middle * 1e3:.1f} ms"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=7)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the large bundle (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to write to (default: the folder for temporary files)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
