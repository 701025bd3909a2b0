"""Trees and arguments as text, as ``nancapture show`` prints them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import tensor_file

from pytest_nancapture.bundle.values.outline import inline, outline, tensor_shapes
from pytest_nancapture.errors import BundleDamagedError

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_nancapture.bundle.manifest import Layouts


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (None, "None"),
        (0.5, "0.5"),
        ("a\n", "'a\\n'"),
        ({"float": "nan"}, "nan"),
        ({"list": []}, "[]"),
        ({"list": [1, {"tuple": [True, "x"]}]}, "[1, (True, 'x')]"),
        ({"dict": [["lr", 0.1], [1, {"set": [2]}]]}, "{'lr': 0.1, 1: {2}}"),
        ({"list": list(range(10))}, "[0, 1, 2, 3, 4, 5, 6, 7, and 2 more]"),
        ({"tensor": "arguments/w"}, "tensor arguments/w"),
        ({"path": "data/train"}, "path 'data/train'"),
        ({"slice": [1, None, 2]}, "slice [1, None, 2]"),
        ({"enum": "shop.kinds:Kind", "name": "RED"}, "shop.kinds.Kind.RED"),
        ({"reference": ["shop.model:relu", "shop/model.py"]}, "shop.model.relu"),
        ({"object": "types:SimpleNamespace", "state": [["a", 1], ["b", None]]}, "types.SimpleNamespace(a=1, b=None)"),
        ({"namedtuple": "shop.data:Pair", "fields": [1, 2]}, "shop.data.Pair(1, 2)"),
        ({"omegaconf": {"dict": [["a", 1]]}}, "omegaconf {'a': 1}"),
        ({}, "{}"),
        ({"list": 3}, "{'list': 3}"),
        ({"tensor": ["unhashable"]}, "{'tensor': ['unhashable']}"),
        ({"object": []}, "{'object': []}"),
    ],
)
def test_inline(node: Any, text: str) -> None:
    """A value reads as in Python; one of no known form stands as it is."""
    assert text == inline(node)


def test_inline_of_a_deep_value() -> None:
    """However deep, a line stays a line."""
    node: Any = 1
    for _ in range(900):
        node = {"list": [node]}
    assert len(inline(node)) < 100


def test_outline() -> None:
    """Each container is followed by its members, one level deeper, with dtypes and shapes from the file."""
    node = {"dict": [["image", {"tensor": "0/image"}], ["meta", {"tuple": ["a", {"ndarray": "0/n"}]}]]}
    expected = [
        (0, "", "dict"),
        (1, "'image'", "tensor float32 [16, 8]"),
        (1, "'meta'", "tuple"),
        (2, "[0]", "'a'"),
        (2, "[1]", "ndarray 0/n"),
    ]
    assert expected == list(outline(node, {"0/image": "float32 [16, 8]"}))


def test_outline_of_many_and_deep() -> None:
    """Long lists and deep nests are cut, and the cut is shown."""
    node: Any = {"list": list(range(100))}
    assert [*outline(node, {})][-1] == (1, "...", "and 92 more")
    for _ in range(20):
        node = {"list": [node]}
    assert [*outline(node, {})][-1] == (9, "...", "")


def test_tensor_shapes(tmp_path: Path) -> None:
    """Dtypes are called as torch calls them; tensors that are stored otherwise are shown as they will be."""
    header = {
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [12, 13]},
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [13, 14]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(14))
    layouts: Layouts = {
        "v": {"base": "v::base", "dtype": "float16", "shape": [4], "stride": [2], "offset": 0},
        "s": {"sparse": "sparse_coo", "shape": [9, 9], "parts": []},
        "t": {"same_as": "a"},
    }
    expected = {
        "a": "bfloat16 [2, 3]",
        "b": "bool []",
        "c": "uint8 [1]",
        "v": "float16 [4]",
        "s": "sparse_coo [9, 9]",
        "t": "bfloat16 [2, 3]",
    }
    assert expected == tensor_shapes(tmp_path, "x", layouts)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        tensor_file(x=("F32", (1,)))[:20],
        b"\x02" + bytes(7) + b"[]",
        b"\x09" + bytes(7) + b'{"x": 33}',
    ],
)
def test_not_a_tensor_file(tmp_path: Path, content: bytes) -> None:
    """The error names the bundle and the file."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BundleDamagedError) as caught:
        tensor_shapes(tmp_path, "x", {})
    assert str(caught.value).startswith(f"{tmp_path}: x is not a safetensors file: ")
