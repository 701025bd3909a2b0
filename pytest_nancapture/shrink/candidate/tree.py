"""The tree of a micro-batch, encoded: the tensors and lists in it, and what is left of it where lists are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_nancapture.shrink.candidate.plan import Range

LIST = "list:"
"""What begins the name of an axis that is a list in a batch's tree, and not a tensor."""


def list_path(position: int) -> str:
    """Of the root of a micro-batch's tree."""
    return f"{LIST}{position}"


def lists_in(node: Any, path: str) -> Iterator[tuple[str, int]]:
    """Lists and tuples of a tree below its root, with their lengths."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        below = f"{path}/{key}"
        # A tuple at the root is a step's arguments.
        is_row = key == "list" or (key == "tuple" and "/" in path)
        if is_row and isinstance(child, list) and len(child) > 1:
            yield below, len(child)
        yield from lists_in(child, below)


def cut_lists(node: Any, path: str, choices: Mapping[tuple[str, int], tuple[Range, ...]]) -> Any:
    """The tree with what the choices leave of its lists; `path` is that of `node`."""
    if isinstance(node, dict):
        return {key: cut_lists(child, f"{path}/{key}", choices) for key, child in node.items()}
    if isinstance(node, list):
        items = [cut_lists(child, f"{path}/{i}", choices) for i, child in enumerate(node)]
        kept = choices.get((path, 0))
        return items if kept is None else [item for part in kept for item in items[part.start : part.stop]]
    return node


def tensor_names(node: Any) -> Iterator[str]:
    """Of the tensors in an encoded tree."""
    if isinstance(node, dict):
        for tag in ("tensor", "ndarray", "numpy_scalar"):
            if isinstance(node.get(tag), str):
                yield node[tag]
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from tensor_names(child)
