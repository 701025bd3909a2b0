"""Draw what overhead.py measured, as an SVG that is readable on light and on dark pages.

On the CPU: the time in a guard's own code, as a share of the step without any. On an accelerator, which runs behind the
host: what the whole step grows by.

usage: python tests/benchmarks/plot.py overhead.json [overhead.svg]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import tables

_SHOWN = ("floor", "this", "article", "flag per parameter", "anomaly mode")
_COLOURS = {  # on light and on dark pages
    "floor": ("#afb8c1", "#656d76"),
    "this": ("#0969da", "#58a6ff"),
    "article": ("#bc4c00", "#f0883e"),
    "flag per parameter": ("#8250df", "#bc8cff"),
    "anomaly mode": ("#57606a", "#8b949e"),
}
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 760, 120, 60, 64, 14, 16
_FLOOR, _CEILING = 0.001, 10.0
"""The scale is logarithmic: a tenth of a percent to ten times the step."""


def draw(results: dict[str, Any]) -> str:
    """The SVG's text: a group of bars for each model, on a logarithmic scale, whiskers at the quartiles."""
    settings = results["settings"]
    is_inside = settings["device"] == "cpu"
    models = {kind: _inside(model) if is_inside else model["shares"] for kind, model in results["models"].items()}
    shown = [name for name in _SHOWN if any(name in shares for shares in models.values())]
    group = len(shown) * _BAR + _GAP
    bottom = _TOP + len(models) * group
    title = "Time in a guard's own code, of a training step" if is_inside else "What a guard adds to a training step"
    title = f"{title} ({settings['device']}, {settings['precision']})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 40}" role="img" font-size="12" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        _style(shown),
        _text(_LEFT, 18, title, "start", bold=True),
        *_legend(shown),
        *_axis(bottom),
    ]
    for row, (kind, shares) in enumerate(models.items()):
        y = _TOP + row * group
        parts.append(_text(_LEFT - 8, y + len(shown) * _BAR / 2 + 4, kind, "end"))
        for place, name in enumerate(shown):
            if name in shares:
                parts += _bar(y + place * _BAR, place, shares[name])
    note = tables.machine_line(results["machine"])
    return "\n".join([*parts, _text(_LEFT, bottom + 34, note, "start", faint=True), "</svg>", ""])


def _inside(model: dict[str, Any]) -> dict[str, list[float]]:
    """Per guard with code of its own, the share of a step that goes by in it, round by round."""
    steps = model["medians"]["nothing"]
    return {name: tables.ratios(seconds, steps) for name, seconds in model["inside"].items() if any(seconds)}


def _bar(y: float, colour: int, shares: Sequence[float]) -> list[str]:
    low, middle, high = tables.quartiles(shares)
    start, end = _x(_FLOOR), _x(middle)
    middle_y = y + _BAR / 2 - 1
    label = f"{middle:+.1%}" if middle < 1 else f"x {1 + middle:.1f}"
    return [
        f'<rect class="c{colour}" x="{start:.1f}" y="{y}" width="{max(end - start, 1):.1f}" height="{_BAR - 2}"/>',
        f'<path class="w" d="M{_x(low):.1f} {middle_y}H{_x(high):.1f}"/>',
        _text(max(_x(high), end) + 5, y + _BAR - 4, label, "start"),
    ]


def _axis(bottom: float) -> list[str]:
    parts = []
    for share in (0.001, 0.01, 0.1, 1, 10):
        x = _x(share)
        parts.append(f'<path class="g" d="M{x:.1f} {_TOP - 6}V{bottom - 8}"/>')
        parts.append(_text(x, bottom + 8, f"{share:.1%}" if share < 0.01 else f"{share:.0%}", "middle", faint=True))
    return parts


def _legend(shown: Sequence[str]) -> list[str]:
    parts = []
    x = _LEFT
    for place, name in enumerate(shown):
        parts.append(f'<rect class="c{place}" x="{x}" y="30" width="12" height="12"/>')
        parts.append(_text(x + 17, 40, name, "start"))
        x += 40 + 7 * len(name)
    return parts


def _x(share: float) -> float:
    """From a share of a step to a place; what is below the scale lies at its start."""
    span = math.log(_CEILING / _FLOOR)
    part = math.log(min(max(share, _FLOOR), _CEILING) / _FLOOR) / span
    return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, faint: bool = False) -> str:
    look = ' font-weight="600"' if bold else ' class="f"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _style(shown: Sequence[str]) -> str:
    light = "".join(f".c{i}{{fill:{_COLOURS[name][0]}}}" for i, name in enumerate(shown))
    dark = "".join(f".c{i}{{fill:{_COLOURS[name][1]}}}" for i, name in enumerate(shown))
    return (
        f"<style>text{{fill:#1f2328}}.f{{fill:#59636e}}.g{{stroke:#d1d9e0}}.w{{stroke:#1f2328}}{light}"
        f"@media(prefers-color-scheme:dark){{text{{fill:#e6edf3}}.f{{fill:#9198a1}}.g{{stroke:#3d444d}}"
        f".w{{stroke:#e6edf3}}{dark}}}</style>"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what overhead.py --json wrote")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).with_name("overhead.svg"))
    options = parser.parse_args(argv)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    options.out.write_text(draw(results), encoding="utf-8")


if __name__ == "__main__":
    main()
