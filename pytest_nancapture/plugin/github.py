"""What GitHub shows of a run: an annotation at the guilty line, and a table on the job's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = tuple[str, dict[str, str], str]
"""Of one replayed bundle: its node id, its properties, and the headline of its failure; empty where it passed."""

_HEADINGS = ("bundle", "verdict", "phase", "operation", "line", "reproduced", "device")
_PROPERTIES = ("nan_verdict", "nan_phase", "nan_op", "nan_source", "nan_reproduced", "nan_device")


def replayed(reports: Iterable[Any]) -> list[Row]:
    """A row for each of the reports that a bundle's test made."""
    found = []
    for report in reports:
        properties = {name: str(value) for name, value in getattr(report, "user_properties", ())}
        if report.when == "call" and "nan_verdict" in properties:
            crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
            found.append((report.nodeid, properties, crash.message if crash is not None else ""))
    return found


def workflow_commands(rows: Sequence[Row]) -> list[str]:
    """Error annotations, one for each bundle that failed; at the culprit's line where that is known.

    Example:
        >>> workflow_commands([("a/bundle.json::replay", {"nan_source": "train.py:42"}, "nonfinite: nan in loss")])
        ['::error file=train.py,line=42,title=a/bundle.json%3A%3Areplay::nonfinite: nan in loss']
    """
    lines = []
    for nodeid, properties, headline in rows:
        if headline:
            file, _, line = properties.get("nan_source", "").rpartition(":")
            place = f"file={_property(file)},line={line}," if file and line.isdigit() else ""
            lines.append(f"::error {place}title={_property(nodeid)}::{_message(headline)}")
    return lines


def table(rows: Sequence[Row]) -> str:
    """A markdown table, a row for each bundle."""
    lines = ["### Replayed bundles", "", _row(_HEADINGS), _row(["---"] * len(_HEADINGS))]
    for nodeid, properties, _ in rows:
        bundle = nodeid.removesuffix("/bundle.json::replay")
        lines.append(_row([bundle, *(properties.get(name, "") for name in _PROPERTIES)]))
    return "\n".join([*lines, ""])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
