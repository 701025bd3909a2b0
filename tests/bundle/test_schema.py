"""schema.read: JSON into dataclasses, and what it says where they do not fit."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from pytest_nancapture.bundle.schema import SchemaError, read


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["nan", "inf"] = "nan"
    scale: float = 1.0
    ready: bool = False
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    free: Any = None


def test_every_kind_of_field_is_read() -> None:
    """Nested objects, lists and maps of them, literals and free JSON arrive as the dataclass says."""
    data = {
        "name": "a",
        "kind": "inf",
        "scale": 0.5,
        "ready": True,
        "inner": {"size": 1},
        "many": [{"size": 2}, {"size": 3}],
        "by_name": {"x": {"size": 4}},
        "free": [{"any": "thing"}],
    }
    expected = Outer("a", "inf", 0.5, True, Inner(1), (Inner(2), Inner(3)), {"x": Inner(4)}, [{"any": "thing"}])
    assert expected == read(Outer, data, "")


def test_absent_fields_take_their_defaults() -> None:
    """A field with a default may be missing."""
    assert Outer("a") == read(Outer, {"name": "a"}, "")


def test_unknown_fields_are_ignored() -> None:
    """A newer minor writer may add fields."""
    assert Outer("a") == read(Outer, {"name": "a", "colour": "red"}, "")


def test_null_is_read_where_none_is_allowed() -> None:
    """An optional field may be null."""
    assert Outer("a") == read(Outer, {"name": "a", "inner": None}, "")


def test_an_integer_is_a_number() -> None:
    """JSON writers drop the point of 2.0; it comes back as a float all the same."""
    scale = read(Outer, {"name": "a", "scale": 2}, "").scale
    assert (float, 2.0) == (type(scale), scale)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "top.name: missing"),
        ([], "top: expected an object, came a list"),
        ({"name": 1}, "top.name: expected a string, came a number"),
        ({"name": None}, "top.name: expected a string, came null"),
        ({"name": "a", "kind": "zero"}, "top.kind: expected one of 'nan', 'inf', came 'zero'"),
        ({"name": "a", "kind": ["nan"]}, "top.kind: expected one of 'nan', 'inf', came ['nan']"),
        ({"name": "a", "scale": True}, "top.scale: expected a number, came true or false"),
        ({"name": "a", "scale": "1"}, "top.scale: expected a number, came a string"),
        ({"name": "a", "scale": 10**400}, "top.scale: expected a number that fits a float, came a larger one"),
        ({"name": "a", "ready": 1}, "top.ready: expected true or false, came a number"),
        ({"name": "a", "inner": {"size": True}}, "top.inner.size: expected an integer, came true or false"),
        ({"name": "a", "inner": {"size": 1.0}}, "top.inner.size: expected an integer, came a number"),
        ({"name": "a", "many": {}}, "top.many: expected a list, came an object"),
        ({"name": "a", "many": [{"size": 1}, {}]}, "top.many[1].size: missing"),
        ({"name": "a", "by_name": []}, "top.by_name: expected an object, came a list"),
        ({"name": "a", "by_name": {"x": 3}}, "top.by_name['x']: expected an object, came a number"),
    ],
)
def test_what_does_not_fit_is_named(data: object, message: str) -> None:
    """The error names the field by its path, what was expected and what came."""
    with pytest.raises(SchemaError) as caught:
        read(Outer, data, "top")
    assert message == str(caught.value)


def test_a_long_value_is_cut_in_the_message() -> None:
    """A hostile file cannot flood the terminal."""
    with pytest.raises(SchemaError) as caught:
        read(Outer, {"name": "a", "kind": "x" * 10_000}, "")
    assert len(str(caught.value)) < 200


def test_a_type_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold ten thousand bundles; what a field's type is made of is found out for the first of them."""

    def never(*_: Any) -> Any:
        raise AssertionError("looked into again")

    data = {"name": "a", "inner": {"size": 1}, "many": [{"size": 2}], "by_name": {"x": {"size": 3}}}
    first = read(Outer, data, "")
    for name in ("get_args", "get_origin", "get_type_hints"):
        monkeypatch.setattr(typing, name, never)
    monkeypatch.setattr(dataclasses, "fields", never)
    assert read(Outer, data, "") == first
