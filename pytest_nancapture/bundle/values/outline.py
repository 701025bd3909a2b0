"""Encoded values as text: a batch's tree with dtypes and shapes, an argument on one line. Reads no tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_nancapture.errors import BundleDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pytest_nancapture.bundle.manifest import Layouts

_DTYPES = {"F": "float", "I": "int", "U": "uint", "BF": "bfloat"}
"""Of those that a bundle stores as they are; the others have a layout that gives torch's own name."""
_BRACKETS = {"list": "[]", "tuple": "()", "Size": "()", "set": "{}", "frozenset": "{}", "dict": "{}"}
_TENSORS = ("tensor", "ndarray", "numpy_scalar")
_NAMED = ("namedtuple", "pytree", "object", "enum", "reference")
_ITEMS = 8
"""Of a container, shown at most; a batch may hold thousands of strings."""
_DEPTH = 8
"""A tree is data from elsewhere, and may be nested to no end."""
_WIDTH = 200

Children = list[tuple[str, Any]]


def tensor_shapes(folder: Path, name: str, layouts: Layouts) -> dict[str, str]:
    """Dtype and shape of each tensor of a safetensors file, as text such as ``float32 [16, 8]``, from its header alone.

    Args:
        folder: the bundle's folder.
        name: the file in it.
        layouts: of the tensors that the file does not hold as they are.

    Raises:
        BundleDamagedError: it is not a safetensors file.
    """
    path = folder / name
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        shapes = {key: f"{_dtype(entry['dtype'])} {entry['shape']}" for key, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleDamagedError(folder, f"{name} is not a safetensors file: {error}") from error
    for key, layout in layouts.items():
        if "shape" in layout:
            shapes[key] = f"{layout.get('dtype') or layout.get('sparse', '')} {layout['shape']}{made_of(layout)}"
    tied = {key: shapes.get(str(layout.get("same_as")), "") for key, layout in layouts.items() if "same_as" in layout}
    return {**shapes, **tied}


def made_of(layout: Mapping[str, Any]) -> str:
    """The recipe of a layout in plain words, such as ``, all 0``; empty where there is none."""
    kind = layout.get("recipe")
    words = {
        "fill": f"all {layout.get('value')}",
        "repeat": "one slice, repeated",
        "palette": "few different values",
        "noise": f"noise from {layout.get('low')} to {layout.get('high')}",
    }
    return f", {words.get(str(kind), kind)}" if kind is not None else ""


def _dtype(name: str) -> str:
    """Torch's word for safetensors' one: ``BF16`` is ``bfloat16``."""
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters.lower()) + name[len(letters) :]


def outline(node: Any, shapes: dict[str, str], label: str = "", depth: int = 0) -> Iterator[tuple[int, str, str]]:
    """The tree below an encoded value: depth, label and what is there, a line each."""
    text, children = _parts(node, shapes)
    yield depth, label, text
    if depth >= _DEPTH and children:
        yield depth + 1, "...", ""
        return
    for name, child in children[:_ITEMS]:
        yield from outline(child, shapes, name, depth + 1)
    if len(children) > _ITEMS:
        yield depth + 1, "...", f"and {len(children) - _ITEMS} more"


def inline(node: Any, depth: int = 0) -> str:
    """An encoded value on one line."""
    text, children = _parts(node, {})
    if depth >= _DEPTH or not (children or text in _BRACKETS):
        return text
    items = [
        (f"{name}: " if text == "dict" else f"{name[1:]}=" if name.startswith(".") else "") + inline(child, depth + 1)
        for name, child in children[:_ITEMS]
    ]
    if len(children) > _ITEMS:
        items.append(f"and {len(children) - _ITEMS} more")
    brackets = _BRACKETS.get(text, "()")
    return f"{'' if text in _BRACKETS else text}{brackets[0]}{', '.join(items):.{_WIDTH}}{brackets[1]}"


def _parts(node: Any, shapes: dict[str, str]) -> tuple[str, Children]:
    """What a node is, and its labelled children; one of no known form stands as it is."""
    if not isinstance(node, dict):
        return f"{node!r:.{_WIDTH}}", []
    try:
        tag = next((tag for tag in (*_TENSORS, *_BRACKETS, *_NAMED) if tag in node), None) or next(iter(node))
        value = node[tag]
        if tag in _TENSORS:
            return f"{tag} {shapes.get(value, value)}", []
        if tag in _NAMED:
            return _named(node, tag)
        if tag == "dict":
            return tag, [(inline(key), item) for key, item in value]
        if tag in _BRACKETS:
            return tag, _numbered(value)
        return (value if tag == "float" else f"{tag} {_value(value)}"), []
    except (TypeError, ValueError, LookupError, AttributeError, StopIteration):
        return f"{node!r:.{_WIDTH}}", []


def _named(node: dict[str, Any], tag: str) -> tuple[str, Children]:
    target = node[tag] if isinstance(node[tag], str) else node[tag][0]
    text = target.replace(":", ".") + (f".{node['name']}" if tag == "enum" else "")
    attributes = [(f".{key}", value) for key, value in node.get("state", ())]
    pairs = [(f"[{inline(key)}]", value) for key, value in node.get("pairs", ())]
    items = node.get("fields") or node.get("children") or node.get("items") or []
    return text, [*attributes, *pairs, *_numbered(items)]


def _numbered(values: list[Any]) -> Children:
    return [(f"[{i}]", value) for i, value in enumerate(values)]


def _value(value: Any) -> str:
    return inline(value) if isinstance(value, dict) else f"{value!r:.{_WIDTH}}"
