"""Whether two bundles hold the same fault, as far as their culprits tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_nancapture.bundle.bundle import Bundle, find_bundles
from pytest_nancapture.bundle.manifest import Manifest
from pytest_nancapture.errors import BundleError

Culprit = Mapping[str, Any]
"""As ``ReplayResult.as_dict`` and a bundle's ``fault`` give it."""


def is_traced(culprit: Culprit | None) -> bool:
    """Whether it names an operation or a line, or a value that was bad from the beginning."""
    culprit = culprit or {}
    given = culprit.get("phase") in ("input", "weights") and culprit.get("explanation")
    return bool(culprit.get("op") or culprit.get("source") or given)


def same_culprit(left: Culprit | None, right: Culprit | None) -> bool:
    """The same phase and, where both were traced, the same operation on the same source text of the same file.

    Line numbers may differ: code above moves them.
    """
    left, right = left or {}, right or {}
    if left.get("phase") != right.get("phase"):
        return False
    return not (is_traced(left) and is_traced(right)) or _place(left) == _place(right)


def pinned_twin(manifest: Manifest, culprit: Culprit, folder: Path) -> Bundle | None:
    """The first bundle at or below `folder` that holds the same fault of the same module.

    A fault whose culprit is not known has no twin; nor have damaged bundles.
    """
    if not is_traced(culprit):
        return None
    for bundle in _bundles(folder):
        other = bundle.fault.culprit
        if not is_traced(other) or not same_culprit(culprit, other):
            continue
        if _place(culprit) != ("", "", "") or _given(manifest, culprit) == _given(bundle.manifest, other or {}):
            return bundle
    return None


def _bundles(folder: Path) -> Iterator[Bundle]:
    for path in find_bundles(folder) if folder.is_dir() else ():
        try:
            yield Bundle.open(path)
        except BundleError:
            continue


def _place(culprit: Culprit) -> tuple[str, str, str]:
    op, file, source = (str(culprit.get(key) or "") for key in ("op", "file", "source"))
    return op, file, source.strip()


def _given(manifest: Manifest, culprit: Culprit) -> tuple[str, str]:
    """Of a value that was bad from the beginning: whose, and which; its counts may differ."""
    return manifest.module.target, str(culprit.get("explanation")).partition(" h")[0]
