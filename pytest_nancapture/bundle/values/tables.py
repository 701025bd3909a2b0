"""Tables of pandas as trees of plain arrays: columns, labels and dtypes. Imports pandas where there is a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_nancapture.errors import RebuildError

Encode = Callable[[Any, str], Any]
Decode = Callable[[Any], Any]

_NULLABLE = re.compile(r"(U?Int(8|16|32|64)|Float(32|64)|boolean|str(ing)?(\[(python|pyarrow|pyarrow_numpy)\])?)$")
"""Dtypes that are made of a list of values and gaps."""
_PARTS = ("DataFrame", "Series", "Index", "MultiIndex", "RangeIndex")


class NoFormError(ValueError):
    """A table holds what has no form on disk."""


def is_table(value: Any) -> bool:
    """Whether it is an index, a series, a frame or an array of pandas'."""
    return any(base.__module__.partition(".")[0] == "pandas" for base in type(value).__mro__)


def encode_table(value: Any, where: str, encode: Encode) -> dict[str, Any]:
    """The tree of a table.

    Args:
        encode: of anything in it, with its path.

    Raises:
        NoFormError: it is of a kind that has none.
    """
    import pandas as pd

    if type(value) is pd.DataFrame:
        columns = [_column(value.iloc[:, i].array, f"{where}[{i}]", encode) for i in range(value.shape[1])]
        labels = {"columns": _index(value.columns, f"{where}.columns", encode)}
        index = _index(value.index, f"{where}.index", encode)
        return {"table": "DataFrame", "items": columns, **labels, "index": index, **_marks(value, where, encode)}
    if type(value) is pd.Series:
        return {
            "table": "Series",
            "items": [_column(value.array, where, encode)],
            "index": _index(value.index, f"{where}.index", encode),
            "name": encode(value.name, f"{where}.name"),
            **_marks(value, where, encode),
        }
    if isinstance(value, pd.Index):
        return _index(value, where, encode)
    if value is pd.NA or value is pd.NaT:
        return {"table": "NA" if value is pd.NA else "NaT"}
    if isinstance(value, pd.Timestamp | pd.Timedelta):
        return {"table": type(value).__name__, "items": [_column(pd.array([value]), where, encode)]}
    if isinstance(value, pd.api.extensions.ExtensionArray):
        return {"table": "array", "items": [_column(value, where, encode)]}
    raise NoFormError(f"a pandas {type(value).__name__} cannot be written")


def _marks(value: Any, where: str, encode: Encode) -> dict[str, Any]:
    return {"attrs": encode(value.attrs, f"{where}.attrs")} if value.attrs else {}


def _index(index: Any, where: str, encode: Encode) -> dict[str, Any]:
    import pandas as pd

    names = encode(list(index.names), f"{where}.names")
    if type(index) is pd.RangeIndex:
        return {"table": "RangeIndex", "items": [index.start, index.stop, index.step], "names": names}
    if type(index) is pd.MultiIndex:
        levels = [_index(level, f"{where}[{i}]", encode) for i, level in enumerate(index.levels)]
        codes = [encode(np.asarray(codes), f"{where}.codes[{i}]") for i, codes in enumerate(index.codes)]
        return {"table": "MultiIndex", "items": levels, "codes": codes, "names": names}
    if type(index) not in (pd.Index, pd.DatetimeIndex, pd.TimedeltaIndex, pd.CategoricalIndex):
        raise NoFormError(f"a pandas {type(index).__name__} cannot be written")
    frequency = getattr(index, "freqstr", None)
    return {"table": "Index", "items": [_column(index.array, where, encode)], "names": names, "frequency": frequency}


def _column(array: Any, where: str, encode: Encode) -> dict[str, Any]:
    import pandas as pd

    dtype = array.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return {
            "codes": encode(np.asarray(array.codes), f"{where}.codes"),
            "categories": _index(array.categories, f"{where}.categories", encode),
            "ordered": bool(array.ordered),
        }
    if isinstance(dtype, pd.DatetimeTZDtype):
        moments = np.asarray(array.tz_convert("UTC").tz_localize(None))
        return {"moments": encode(moments, where), "zone": str(dtype.tz)}
    if isinstance(dtype, np.dtype) or type(array) is pd.arrays.NumpyExtensionArray:
        return {"plain": encode(np.asarray(array), where)}
    text = str(dtype)
    if not _NULLABLE.match(text):
        raise NoFormError(f"a pandas column of dtype {text} cannot be written")
    gaps = np.asarray(pd.isna(array))
    items = [None if gap else item for item, gap in zip(array.astype(object), gaps, strict=True)]
    native = [item.item() if isinstance(item, np.generic) else item for item in items]
    return {"nullable": encode(native, where), "dtype": _name_of(dtype)}


def _name_of(dtype: Any) -> str:
    """With the storage of strings, which ``str`` leaves out."""
    storage = getattr(dtype, "storage", None)
    return f"string[{storage}]" if storage is not None and str(dtype) == "string" else str(dtype)


def decode_table(node: dict[str, Any], decode: Decode) -> Any:
    """The inverse of :func:`encode_table`.

    Raises:
        RebuildError: pandas is not there, or the tree is not one that :func:`encode_table` writes.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise RebuildError("the bundle holds a table of pandas, which is not installed here") from error

    kind, items = node["table"], node.get("items", [])
    if kind in ("NA", "NaT"):
        return getattr(pd, kind)
    if kind in ("Timestamp", "Timedelta", "array"):
        array = _array(items[0], decode)
        return array if kind == "array" else array[0]
    if kind not in _PARTS:
        raise RebuildError(f"expected a table of one of {', '.join(_PARTS)}, came {kind!r:.40}")
    if kind not in ("DataFrame", "Series"):
        return _made_index(node, decode)
    index = _made_index(node["index"], decode)
    arrays = [_array(item, decode) for item in items]
    if kind == "Series":
        made: Any = pd.Series(arrays[0], index=index, name=decode(node["name"]), dtype=_object(arrays[0]), copy=True)
    else:
        columns = {i: pd.Series(a, index=index, dtype=_object(a), copy=True) for i, a in enumerate(arrays)}
        made = pd.DataFrame(columns, index=index)
        made.columns = _made_index(node["columns"], decode)
    made.attrs = decode(node["attrs"]) if "attrs" in node else {}
    return made


def _made_index(node: dict[str, Any], decode: Decode) -> Any:
    import pandas as pd

    kind, items, names = node["table"], node["items"], decode(node["names"])
    if kind == "RangeIndex":
        return pd.RangeIndex(*items, name=names[0])
    if kind == "MultiIndex":
        codes = [decode(codes) for codes in node["codes"]]
        return pd.MultiIndex([_made_index(level, decode) for level in items], codes, names=names)
    array = _array(items[0], decode)
    made = pd.Index(array, name=names[0], dtype=_object(array))
    if node.get("frequency"):
        made = type(made)(made, freq=node["frequency"])
    return made


def _object(array: Any) -> Any:
    """The dtype to ask for: of strings among objects pandas would make a column of strings."""
    return object if isinstance(array.dtype, np.dtype) and array.dtype == object else None


def _array(node: dict[str, Any], decode: Decode) -> Any:
    import pandas as pd

    if "plain" in node:
        return decode(node["plain"])
    if "codes" in node:
        categories = _made_index(node["categories"], decode)
        return pd.Categorical.from_codes(decode(node["codes"]), categories=categories, ordered=node["ordered"])
    if "moments" in node:
        return pd.DatetimeIndex(decode(node["moments"])).tz_localize("UTC").tz_convert(node["zone"]).array
    if not _NULLABLE.match(str(node["dtype"])):
        raise RebuildError(f"expected a dtype of pandas that a capture writes, came {node['dtype']!r:.40}")
    return pd.array([pd.NA if item is None else item for item in decode(node["nullable"])], dtype=node["dtype"])
