"""The finite check alone, against the fastest way to read all values once.

usage: python tests/benchmarks/check.py [--cases=resnet50,...] [--device=cuda] [--json=check.json]

The floor is the fastest of several ways to read every value once and bring one number to the host: a sum or a maximum
for each tensor, norms of all at once. It is no check: a sum of finite values may overflow. All figures are ratios to
it, taken round by round. The article's check concatenates, then looks for NaN.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import tables
import torch
from networks import Net
from torch import Tensor

from pytest_nancapture.step.check import all_finite

_SHORTEST = 0.02
"""Seconds of a turn; quick candidates are repeated within it."""


def _resnet50(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn_like(parameter).to(dtype) for parameter in Net("resnet50").parameters()]


_rows = partial(torch.sparse_coo_tensor, check_invariants=True)

CASES: dict[str, Callable[[], list[Tensor]]] = {
    "resnet50": lambda: _resnet50(torch.float32),
    "huge": lambda: [torch.randn(2**26)],
    "tiny": lambda: [torch.randn(16) for _ in range(10_000)],
    "bf16": lambda: _resnet50(torch.bfloat16),
    "fp16": lambda: _resnet50(torch.float16),
    "fp64": lambda: _resnet50(torch.float64),
    "complex64": lambda: _resnet50(torch.complex64),
    "sparse": lambda: [_rows(torch.arange(2**18)[None], torch.randn(2**18, 64), (2**20, 64))],
}
TOLD = {
    "resnet50": "ResNet-50: 24 M fp32 in 161 tensors",
    "huge": "67 M fp32 in one tensor",
    "tiny": "10,000 tensors of 16 fp32",
    "bf16": "ResNet-50 in bf16",
    "fp16": "ResNet-50 in fp16",
    "fp64": "ResNet-50 in fp64",
    "complex64": "ResNet-50 in complex64",
    "sparse": "a sparse gradient of 17 M fp32",
}


def _values(tensors: list[Tensor]) -> list[Tensor]:
    """Plain numbers: the stored ones of sparse tensors, complex ones as pairs."""
    stored = [tensor._values() if tensor.is_sparse else tensor for tensor in tensors]
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in stored]


def _one(parts: Sequence[Tensor]) -> float:
    return float(torch.stack(list(parts)).sum())


FLOORS: dict[str, Callable[[list[Tensor]], float]] = {
    "sum": lambda values: _one([value.sum() for value in values]),
    "max": lambda values: _one([value.amax() for value in values]),
    "foreach norm": lambda values: _one(torch._foreach_norm(values)),
    "foreach max norm": lambda values: _one(torch._foreach_norm(values, float("inf"))),
}


def _article(tensors: list[Tensor]) -> bool:
    dense = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    return bool(torch.isnan(torch.cat([tensor.reshape(-1) for tensor in dense])).any().item())


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one table."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    results: tables.Results = {"machine": tables.machine(options.device), "cases": {}}
    print(f"{tables.machine_line(results['machine'])}; medians (quartiles) of {options.rounds} rounds\n")
    tables.head("gradients", "floor", "the fastest is", "this / floor", "article / floor", "GB/s of this")
    for case in options.cases:
        torch.manual_seed(0)
        tensors = [tensor.to(options.device) for tensor in CASES[case]()]
        values = _values(tensors)
        candidates = {name: timed(partial(read, values)) for name, read in FLOORS.items()}
        candidates["this"] = timed(partial(all_finite, tensors))
        candidates["article"] = timed(partial(_article, tensors))
        found = tables.interleaved(candidates, options.rounds)
        results["cases"][case] = found
        floor = min(FLOORS, key=lambda name: statistics.median(found[name]))
        size = sum(value.numel() * value.element_size() for value in values)
        tables.row(
            [
                TOLD[case],
                f"{statistics.median(found[floor]) * 1e3:.2f} ms",
                floor,
                tables.spread(tables.ratios(found["this"], found[floor])),
                tables.spread(tables.ratios(found["article"], found[floor])),
                f"{size / statistics.median(found['this']) / 1e9:.1f}",
            ]
        )
    tables.save(options.json, results)


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call, of as many as fill a turn; each brings its answer to the host, so none runs ahead."""
    run()
    began = time.perf_counter()
    run()
    calls = max(1, round(_SHORTEST / (time.perf_counter() - began)))

    def turn() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls

    return turn


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = tables.parser(__doc__, rounds=15)
    parser.add_argument("--cases", default=",".join(CASES), help="of %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps ... (default: %(default)s)")
    options = parser.parse_args(argv)
    options.cases = options.cases.split(",")
    unknown = ", ".join(case for case in options.cases if case not in CASES)
    if unknown:
        parser.error(f"expected some of {', '.join(CASES)}; came {unknown}")
    return options


if __name__ == "__main__":
    main()
