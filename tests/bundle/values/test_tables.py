"""Tables of pandas come back as they were: values, dtypes, labels, order."""

import numpy as np
import pytest
import torch
from samples import through

from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.outline import inline
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import RebuildError, UnwritableValueError

pd = pytest.importorskip("pandas", reason="pandas is optional: it comes with the extra 'integration'")

COLUMNS = {
    "integers": [1, 2, 3],
    "floats": [1.5, np.nan, -0.0],
    "strings": ["x", "y", None],
    "objects": pd.Series([{"a": 1}, [1, 2], "s"], dtype=object),
    "categories": pd.Categorical(["u", "v", "u"], ordered=True),
    "moments": pd.date_range("2020-01-01", periods=3, tz="Europe/Berlin"),
    "naive": pd.date_range("2020-01-01", periods=3),
    "durations": pd.timedelta_range("1D", periods=3),
    "flags": [True, False, True],
    "nullable": pd.array([1, None, 3], dtype="Int64"),
    "nullable flags": pd.array([True, None, False], dtype="boolean"),
    "text": pd.array(["q", None, "r"], dtype="string[python]"),
}
INDICES = [
    pd.RangeIndex(2, 8, 2, name="n"),
    pd.date_range("2020", periods=4, freq="D"),
    pd.timedelta_range("1h", periods=2),
    pd.Index(["a", "b"], dtype=object),
    pd.Index(["a", "b"]),
    pd.Index([1.5, 2]),
    pd.CategoricalIndex(["a", "b", "a"]),
    pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", None]),
]


@pytest.mark.parametrize("name", COLUMNS)
def test_a_frame_with_a_column(name):
    frame = pd.DataFrame({name: COLUMNS[name]}, index=["a", "b", "c"])
    frame.attrs["unit"] = "m"
    again = through(frame)
    pd.testing.assert_frame_equal(frame, again, check_freq=True)
    assert (again.attrs, list(again.dtypes)) == ({"unit": "m"}, list(frame.dtypes))


def test_a_frame_whose_columns_share_a_name():
    frame = pd.DataFrame([[1, 2.5], [3, 4.5]], columns=["a", "a"])
    pd.testing.assert_frame_equal(frame, through(frame))


@pytest.mark.parametrize("index", INDICES, ids=lambda index: f"{type(index).__name__}-{index.dtype}")
def test_an_index(index):
    again = through(index)
    pd.testing.assert_index_equal(index, again, exact=True)
    assert getattr(again, "freq", None) == getattr(index, "freq", None)


@pytest.mark.parametrize("value", [pd.Timestamp("2020-01-01T10:00", tz="UTC"), pd.Timedelta("3h")])
def test_a_single_value(value):
    assert through(value) == value
    assert [through(missing) is missing for missing in (pd.NA, pd.NaT)] == [True, True]


def test_a_series_that_the_step_writes_into_is_a_copy():
    series = pd.Series([1.0, 2.0], name="s")
    encoder = Encoder()
    tree = encoder.encode(series, "batch")
    series.iloc[0] = 9.0
    again = Decoder(encoder.tensors, LiveResolver()).decode(tree)
    again.iloc[1] = 7.0
    assert (again.tolist(), series.tolist()) == ([1.0, 7.0], [9.0, 2.0])


@pytest.mark.parametrize(
    "value", [pd.period_range("2020", periods=2, freq="M"), pd.interval_range(0, 2), pd.arrays.SparseArray([1, 0])]
)
def test_what_has_no_form_is_named(value):
    with pytest.raises(UnwritableValueError, match=r"table: a pandas .* cannot be written; turn it into tensors"):
        Encoder().encode({"table": value}["table"], "table")


def test_arrow_strings():
    pytest.importorskip("pyarrow", reason="pyarrow is optional: it comes with the extra 'integration'")
    series = pd.Series(["q", None, "r"], dtype="string[pyarrow]")
    pd.testing.assert_series_equal(series, through(series))


@pytest.mark.parametrize(
    "node", [{"table": "read_pickle"}, {"table": "array", "items": [{"nullable": [], "dtype": "M8[ns]"}]}]
)
def test_a_tree_that_no_capture_writes(node):
    with pytest.raises(RebuildError):
        Decoder({}, LiveResolver()).decode(node)


def test_what_is_shown():
    tree = Encoder().encode({"frame": pd.DataFrame({"a": torch.arange(2).numpy()})}, "batch")
    assert "DataFrame" in inline(tree)
