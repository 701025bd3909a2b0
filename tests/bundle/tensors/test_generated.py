"""Tensors that a few numbers make: found to the bit, drawn alike everywhere, refused where they are hostile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from pytest_nancapture.bundle.tensors.file import plain_size, read_tensors, write_plain, write_tensors
from pytest_nancapture.bundle.tensors.generated import LIMIT, fill, noise
from pytest_nancapture.bundle.tensors.layouts import pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

GENERATOR = torch.Generator().manual_seed(2)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(1000), "fill"),
        (torch.full((30, 40), -0.0), "fill"),
        (torch.full((1000,), math.nan), "fill"),
        (torch.full((1000,), -math.inf, dtype=torch.float16), "fill"),
        (torch.full((1000,), 0.1, dtype=torch.float64), "fill"),
        (torch.full((1000,), 3.140625, dtype=torch.bfloat16), "fill"),
        (torch.full((1000,), 2**62 + 1), "fill"),
        (torch.ones(1000, dtype=torch.bool), "fill"),
        (torch.randn(1, 50, generator=GENERATOR).repeat(20, 1), "repeat"),
        (torch.randn(4, 1, 50, generator=GENERATOR).repeat(1, 20, 1), "repeat"),
        (torch.tensor([0.0, -0.0, math.nan, math.inf, 1e-40]).repeat(200, 1).flatten(), "palette"),
        (torch.randint(200, (500,), generator=GENERATOR), "palette"),
    ],
)
def test_found_to_the_bit(tensor: Tensor, kind: str) -> None:
    """A recipe is found, takes less room, and gives back every bit, signs of zeros too."""
    plain, layouts = pack({"x": tensor}, compact=True)

    assert layouts["x"]["recipe"] == kind
    assert plain_size(plain) < tensor.numel() * tensor.element_size()
    back = unpack(plain, layouts)
    assert list(back) == ["x"]
    assert back["x"].dtype == tensor.dtype
    assert back["x"].shape == tensor.shape
    assert bits(back["x"]) == bits(tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(20), torch.randn(1000, generator=GENERATOR), torch.zeros(1000, dtype=torch.complex64)],
    ids=["small", "random", "complex"],
)
def test_left_alone(tensor: Tensor) -> None:
    """What would gain nothing, or has no recipe, is stored as ever; nor is anything looked for unasked."""
    assert "recipe" not in pack({"x": tensor}, compact=True)[1].get("x", {})
    assert pack({"x": torch.zeros(1000)})[1] == {}


def test_ties_to_what_a_recipe_makes(tmp_path: Path) -> None:
    """Two names of one tensor still share their memory."""
    zeros = torch.zeros(1000)
    plain, layouts = pack({"a": zeros, "b": zeros}, compact=True)
    write_plain(tmp_path / "x.safetensors", plain)
    back = read_tensors(tmp_path / "x.safetensors", layouts)

    assert back["a"].data_ptr() == back["b"].data_ptr()


def made(tensor: Tensor, seed: int = 0) -> Tensor:
    layout = noise(tensor, seed)
    assert layout is not None
    return unpack({}, {"x": layout})["x"]


def test_noise_is_like_the_original() -> None:
    """In mean, spread and range; another seed gives other values."""
    tensor = torch.randn(10_000, generator=GENERATOR) * 3 + 1
    values = made(tensor)

    assert values.mean() == pytest.approx(tensor.mean().item(), abs=0.2)
    assert values.std() == pytest.approx(tensor.std().item(), rel=0.1)
    assert tensor.min() <= values.min() < values.max() <= tensor.max()
    assert not torch.equal(values, made(tensor, seed=1))


def test_noise_is_the_same_for_ever() -> None:
    """Bundles hang on these very values."""
    floats = unpack({}, {"x": {**base("float32", [3]), "seed": 7, "mean": 0.5, "std": 2.0, "low": -9.0, "high": 9.0}})
    ints = unpack({}, {"x": {**base("int64", [6]), "seed": 7, "mean": 0.0, "std": 0.0, "low": 3, "high": 9}})

    assert [number.hex() for number in floats["x"].tolist()] == FLOATS
    assert ints["x"].tolist() == INTS


FLOATS = ["-0x1.85633c0000000p-3", "0x1.21c6f20000000p+1", "0x1.570e080000000p-1"]
INTS = [3, 8, 6, 8, 9, 6]


def base(dtype: str, shape: list[int]) -> dict[str, Any]:
    return {"recipe": "noise", "dtype": dtype, "shape": shape}


def test_noise_of_integers_and_truths() -> None:
    """Integers stay within their own range, truths have the same share."""
    numbers, truths = torch.tensor([3, 9, 5] * 100), torch.tensor([True, False, False, False] * 500)

    assert set(made(numbers).tolist()) == set(range(3, 10))
    assert made(truths).float().mean() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize(
    "tensor", [torch.tensor([1.0, math.nan]), torch.tensor([1.0]), torch.zeros(3, dtype=torch.cfloat)]
)
def test_no_noise(tensor: Tensor) -> None:
    """Nothing is like a NaN, a single value, or a complex one."""
    assert noise(tensor, 0) is None


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ({**fill(torch.float32, [10**12], 0)}, f"ask for 4000000000000 bytes, more than the {LIMIT} that are allowed"),
        (
            {"recipe": "dream", "dtype": "float32", "shape": [1]},
            "x is made by a recipe of kind 'dream', which this pytest-nancapture does not know; upgrade it",
        ),
        ({"recipe": "fill", "dtype": "float32", "shape": [-1], "value": 0}, "expected a shape, came"),
        ({"recipe": "fill", "dtype": "object", "shape": [1], "value": 0}, "expected a dtype that a recipe can make"),
        ({"recipe": "fill", "dtype": "float32", "shape": [1], "value": "many"}, "could not convert string"),
        ({"recipe": "fill", "dtype": "float32", "shape": [1]}, "does not fit its layouts"),
        ({"recipe": "noise", "dtype": "float32", "shape": [1], "seed": -1}, "Seed must be between"),
        ({"recipe": "palette", "dtype": "int64", "shape": [2], "parts": ["v", "i"]}, "palette and indices do not fit"),
        ({"recipe": "repeat", "dtype": "int32", "shape": [2], "parts": ["v"]}, "expected a slice of torch.int32"),
        ({"recipe": "palette", "dtype": "int64", "shape": [3], "parts": ["v", "far"]}, "does not fit its layouts"),
    ],
)
def test_hostile(tmp_path: Path, layout: dict[str, Any], problem: str) -> None:
    """A recipe is data from elsewhere: it gives one clear error, before it takes any memory."""
    parts = {"v": torch.tensor([1, 2]), "i": torch.zeros(3, dtype=torch.uint8), "far": torch.tensor([1, 2, 9])}
    write_tensors(tmp_path / "x.safetensors", parts)

    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        read_tensors(tmp_path / "x.safetensors", {"x": layout})
