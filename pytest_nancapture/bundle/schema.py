"""Read plain JSON into frozen dataclasses, and say exactly what does not fit."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class SchemaError(ValueError):
    """A value is not what its field asks for; the message names the field."""


def read(cls: type[T], data: object, where: str) -> T:
    """Build the dataclass `cls` from JSON `data`; unknown fields are ignored.

    Raises:
        SchemaError: a field is missing or of the wrong type.
    """
    if not isinstance(data, dict):
        raise SchemaError(f"{where}: expected an object, came {_kind(data)}")
    values = {}
    for name, hint, is_needed in _fields(cls):  # type: ignore[arg-type]
        place = f"{where}.{name}" if where else name
        if name in data:
            values[name] = _convert(hint, data[name], place)
        elif is_needed:
            raise SchemaError(f"{place}: missing")
    return cls(**values)


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, bool]]:
    """Name, type, and whether it has to be given; found out once, since thousands of bundles may be read."""
    hints, missing = typing.get_type_hints(cls), dataclasses.MISSING
    return [
        (field.name, hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    ]


@functools.cache
def _form(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a type is made of, and of which; found out once."""
    is_record = dataclasses.is_dataclass(hint) and isinstance(hint, type)
    return dataclasses.dataclass if is_record else typing.get_origin(hint), typing.get_args(hint)


def _convert(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    origin, args = _form(hint)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), data, where)
    if origin is typing.Literal:
        if data not in args:
            raise SchemaError(f"{where}: expected one of {', '.join(map(repr, args))}, came {data!r:.80}")
        return data
    if origin is dataclasses.dataclass:
        return read(hint, data, where)
    if origin is tuple:
        _expect(isinstance(data, list), "a list", data, where)
        return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), "an object", data, where)
        return {key: _convert(args[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if hint is float:
        return _float(data, where)
    _expect(type(data) is hint, {int: "an integer", str: "a string", bool: "true or false"}[hint], data, where)
    return data


def _float(data: Any, where: str) -> float:
    _expect(isinstance(data, (int, float)) and not isinstance(data, bool), "a number", data, where)
    try:
        return float(data)
    except OverflowError:
        raise SchemaError(f"{where}: expected a number that fits a float, came a larger one") from None


def _expect(fits: bool, wanted: str, data: object, where: str) -> None:
    if not fits:
        raise SchemaError(f"{where}: expected {wanted}, came {_kind(data)}")


def _kind(data: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(data), "a number")
