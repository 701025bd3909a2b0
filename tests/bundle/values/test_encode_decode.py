"""Values as trees and back: what comes back is what went in."""

from __future__ import annotations

import argparse
import collections
import functools
import math
import pathlib
import uuid
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities.parsing import AttributeDict
from samples import (
    Bag,
    Boxes,
    Colour,
    Encoding,
    Frozen,
    Labels,
    Level,
    Mask,
    Masked,
    Pair,
    Private,
    Registry,
    Sample,
    Slotted,
    Speaking,
    Stack,
    Table,
    Triple,
    Untouchable,
    content,
    decode,
    helper,
    scaled,
    through,
    tree_of,
    with_attribute,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import RebuildError, UnwritableValueError

PLAIN = [None, True, 0, -(2**80), "", "ü \ud800\n", 0.1, -0.0, 5e-324]
NUMBERS = [math.nan, math.inf, -math.inf, complex(math.nan, -0.0), 3 + 4j]
ARRAYS = [
    *(np.array([0, 1, 2]).astype(code) for code in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")),
    *(np.array([0, 1, math.nan]).astype(code) for code in ("f2", "f4", "f8", "F", "D")),
    np.array(3.5),
    np.zeros((0, 3)),
    np.array([["a", "wörld"], ["", "b"]]),
    np.array([], dtype="U3"),
    np.array([b"a", b"bc"]),
    np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    np.array([1, 2], dtype="m8[ns]"),
]
SCALARS = [np.float16(1), np.int64(-1), np.bool_(True), np.complex64(1j), np.str_("é"), np.bytes_(b"x")]
SCALARS += [np.datetime64("2020-01-01"), np.timedelta64(3, "h")]
CONTAINERS = [
    [1, [2, ()]],
    (1, "a", None),
    {"x": 1, 2: "y", None: 0.5, (1, "a"): 3, 1.5: {}},
    {1, "a", 2.5},
    frozenset({(1, 2)}),
    torch.Size([2, 3]),
    range(1, 10, 3),
    slice(None, 5, -1),
    b"\x00\xff",
    bytearray(b"abc"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {"a": 1}),
    collections.Counter("aab"),
    collections.deque([1, 2], maxlen=3),
    collections.ChainMap({"a": 1}, {"b": 2}),
]
OBJECTS = [
    Pair(1),
    Sample(torch.ones(2)),
    Frozen([1, 2]),
    Slotted(torch.ones(1)),
    Private(torch.ones(2)),
    Encoding(input_ids=torch.ones(2, dtype=torch.long), length=3),
    Bag(x=torch.ones(2), name="a"),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    AttributeDict({"lr": 0.1, "sizes": (1, 2)}),
    Stack(1, torch.ones(1)),
    with_attribute(Triple((1, 2))),
    Labels({"a", "b"}),
    Untouchable(1),
    uuid.UUID(int=7),
    Fraction(1, 3),
    nn.Linear(2, 1),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    torch.distributions.Normal(torch.zeros(1), torch.ones(1), validate_args=False),
]
NAMED = [
    Colour.RED,
    Level.LOW,
    Mask.A,
    pathlib.Path("a/b.txt"),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda:1"),
    nn.ReLU,
    torch.optim.Adam,
    nn.functional.gelu,
    nn.functional.silu,
    torch.relu,
    torch.tanh,
    torch.einsum,
    np.float32,
    int,
    dict,
    helper,
    Sample,
    functools.partial(torch.optim.SGD, lr=0.1),
    functools.partial(helper, torch.ones(1)),
]


@pytest.mark.parametrize("value", [*PLAIN, *NUMBERS], ids=repr)
def test_numbers_and_text(value: Any) -> None:
    """JSON's own values stand for themselves; NaN, Inf and complex numbers, which JSON lacks, come back too."""
    assert content(value) == content(through(value))


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_written_as_they_are(value: Any) -> None:
    """So that a bundle can be read and compared by eye."""
    tree, _ = tree_of(value)
    assert content(value) == content(tree)


@pytest.mark.parametrize("value", CONTAINERS, ids=lambda value: type(value).__name__)
def test_containers(value: Any) -> None:
    """Type, order, keys of any kind, a deque's length and a defaultdict's factory."""
    actual = through(value)
    assert content(value) == content(actual)
    assert getattr(value, "maxlen", None) == getattr(actual, "maxlen", None)
    assert getattr(value, "default_factory", None) == getattr(actual, "default_factory", None)


@pytest.mark.parametrize("value", [*ARRAYS, *SCALARS], ids=lambda value: f"{value.dtype}-{np.shape(value)}")
def test_numpy(value: Any) -> None:
    """Arrays and scalars of every kind that has a form, with their shapes."""
    actual = through(value)
    assert content(value) == content(actual)
    assert np.shape(value) == np.shape(actual)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3).T,
        np.arange(6)[::-1],
        np.arange(6, dtype=">i4"),
        np.array(["2020"], dtype=">M8[Y]"),
        np.broadcast_to(np.arange(2), (3, 2)),
        np.asfortranarray(np.ones((2, 2), dtype="U1")),
    ],
    ids=["turned", "reversed", "swapped", "swapped-dates", "read-only", "text"],
)
def test_numpy_arrays_that_torch_does_not_take(value: np.ndarray) -> None:
    """Strides, byte order and flags are torch's affair no more: the values are the same, and may be written to."""
    actual = through(value)
    assert np.array_equal(value, actual)
    assert value.dtype.kind == actual.dtype.kind
    actual[...] = value


def test_numpy_where_a_long_double_is_no_longer_than_a_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some machines: numpy takes the two for equal there, and doubles are written all the same."""
    monkeypatch.setattr(np, "longdouble", np.float64)
    assert content(np.ones(2)) == content(through(np.ones(2)))


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_objects(value: Any) -> None:
    """Attributes, slots (private ones too) and items, in the very class."""
    assert content(value) == content(through(value))


@pytest.mark.parametrize("value", NAMED, ids=lambda value: getattr(value, "__name__", str(value).partition(" ")[0]))
def test_what_has_a_name(value: Any) -> None:
    """Enum members, paths, dtypes, devices, classes, functions, and functions with some arguments given."""
    assert content(value) == content(through(value))


def test_objects_work_when_they_are_back() -> None:
    """Their methods find what they need."""
    encoding = through(Encoding(input_ids=torch.ones(2)))
    assert encoding.input_ids.tolist() == [1.0, 1.0]
    assert through(Bag(x=1, y=2)).size() == 2
    linear = nn.Linear(2, 1)
    assert torch.equal(linear(torch.ones(3, 2)), through(linear)(torch.ones(3, 2)))
    sampled = through(torch.distributions.Normal(torch.zeros(1), torch.ones(1))).sample()
    assert sampled.shape == (1,)


def test_packed_sequences() -> None:
    """The batches of recurrent nets are named tuples of a kind."""
    packed = pack_sequence([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    actual = through(packed)
    assert type(actual) is PackedSequence
    assert content(tuple(packed)) == content(tuple(actual))


def test_results_of_torch_functions() -> None:
    """Such as what ``torch.max`` returns along a dimension."""
    value = torch.max(torch.tensor([[1.0, 3.0]]), 1)
    actual = through(value)
    assert type(value) is type(actual)
    assert (value.values.tolist(), value.indices.tolist()) == (actual.values.tolist(), actual.indices.tolist())


def test_registered_pytree_nodes() -> None:
    """Types that somebody taught torch to flatten are flattened and built by what was registered for them."""
    actual = through({"boxes": Boxes(torch.ones(2, 4), (480, 640))})["boxes"]
    assert content(Boxes(torch.ones(2, 4), (480, 640))) == content(actual)


def test_a_pytree_node_whose_context_names_a_function() -> None:
    """One that every context of the class names, so that it says nothing that a tree could choose."""
    actual = through(Table({"a": torch.ones(2), "b": [1, 2]}))
    assert content(Table({"a": torch.ones(2), "b": [1, 2]})) == content(actual)


def test_a_method_of_its_own_object() -> None:
    """It is one of the new object, not of the old."""
    value = Speaking("so")
    actual = through([value])[0]
    value.word = "no"
    assert actual.speak["loud"][0]() == "SO"
    assert actual.speak["loud"][0].__self__ is actual


def test_tensors() -> None:
    """A tensor is a name in the tree, which is its path; flags, class and attributes are in the tree."""
    value = {"x": torch.ones(2), "y": [torch.ones(1, requires_grad=True), nn.Parameter(torch.ones(1))], "z": scaled()}
    tree, tensors = tree_of(value)
    assert [*tensors] == ["6/batch['x']", "6/batch['y'][0]", "6/batch['y'][1]", "6/batch['z']", "6/batch['z'].scale"]
    assert tree["dict"][0][1] == {"tensor": "6/batch['x']"}
    assert content(value) == content(through(value))


def test_frozen_parameters() -> None:
    """A parameter is one also where it asks for no gradient."""
    actual = through(nn.Parameter(torch.ones(1), requires_grad=False))
    assert (nn.Parameter, False) == (type(actual), actual.requires_grad)


def test_one_tensor_twice() -> None:
    """What was one tensor is one again."""
    x = torch.ones(2)
    first, second = through([x, x])
    assert first is second


def test_the_tensors_are_put_aside_as_they_are() -> None:
    """Encoding copies no tensor: that is up to whoever writes them."""
    x = torch.ones(2)
    _, tensors = tree_of([x])
    assert x is tensors["6/batch[0]"]


def test_keys_that_look_alike() -> None:
    """Tensors and numpy numbers as keys, and below keys of the same text, each keep their own value."""
    a, b, x, y = Masked("a"), Masked("b"), torch.tensor(1), torch.tensor(2)
    numbers = {np.int64(1): torch.tensor(1), np.int64(2): torch.tensor(2)}
    assert content(numbers) == content(through(numbers))
    assert [key.item() for key in through({torch.tensor(1): 0, torch.tensor(2): 0})] == [1, 2]

    assert content({a: x, b: y}) == content(through({a: x, b: y}))


def test_a_tensor_away_from_the_runs_device() -> None:
    """Keeps a note of where it was, so that lengths on the CPU stay there in a replay on a GPU."""
    tree, _ = tree_of([torch.ones(1)], device="cuda")
    assert tree == {"list": [{"tensor": "6/batch[0]", "device": "cpu"}]}
    assert decode(tree, {"6/batch[0]": torch.ones(1, device="cpu")})[0].device.type == "cpu"


def test_slices_of_numpy_numbers() -> None:
    """A bound need not be an int."""
    assert slice(np.int64(1), 2.5, None) == through(slice(np.int64(1), 2.5, None))


def test_decoding_calls_no_code_of_the_objects() -> None:
    """No constructor, no ``__setattr__``, no ``__setstate__``: an object is made empty and filled."""
    value = Untouchable(torch.ones(1))
    tree, tensors = tree_of(value)
    Untouchable.calls.clear()
    actual = decode(tree, tensors)
    assert (Untouchable, []) == (type(actual), Untouchable.calls)
    assert tensors["6/batch.x"] is actual.x


def test_decoding_a_dict_does_not_pass_by_its_own_setitem() -> None:
    """Nor do the items of a container go through methods of its class."""
    value = Registry()
    dict.__setitem__(value, "a", 1)
    assert content(value) == content(through(value))


def test_omegaconf_nodes() -> None:
    """Configurations come back as such, interpolations unresolved."""
    omegaconf = pytest.importorskip("omegaconf", reason="optional: only met where a user passes its nodes")
    value = omegaconf.OmegaConf.create({"lr": 0.1, "sizes": [1, 2], "last": "${sizes.1}", "missing": "???"})
    actual = through({"config": value})["config"]
    assert (type(value), value) == (type(actual), actual)
    assert actual.last == 2


class Deferred(functools.partial):
    """As configuration libraries make, for what is to be called later."""


class Choosy(functools.partial):
    def __new__(cls, *args, **kwargs):
        raise AssertionError


@pytest.mark.parametrize("kind", [functools.partial, Deferred])
def test_a_partial_of_any_class(kind):
    value = kind(torch.optim.SGD, lr=0.1)
    value.tag = "mine"
    again = through(value)
    assert (type(again), again.func, again.keywords, again.tag) == (kind, torch.optim.SGD, {"lr": 0.1}, "mine")


def test_a_partial_that_runs_code_of_its_own_when_made():
    value = functools.partial.__new__(Choosy, helper)
    with pytest.raises(UnwritableValueError, match="Choosy cannot be written"):
        Encoder().encode(value, "value")
    with pytest.raises(RebuildError):
        Decoder({}, LiveResolver()).decode({"partial": [None, {"tuple": []}, {"dict": []}], "kind": "builtins:list"})


def test_a_metric_goes_on_where_it_was():
    """It keeps wrappers around its own methods, and their signature."""
    metric = torchmetrics.MeanAbsoluteError()
    metric.update(torch.ones(2), torch.zeros(2))
    again = through(metric)
    again.update(torch.full((2,), 3.0), torch.zeros(2))
    assert (again.compute().item(), metric.compute().item()) == (2.0, 1.0)


def test_a_collection_of_metrics():
    metrics = torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()])
    metrics.update(torch.full((2,), 3.0), torch.zeros(2))
    assert {name: value.item() for name, value in through(metrics).compute().items()} == {
        "MeanAbsoluteError": 3.0,
        "MeanSquaredError": 9.0,
    }


def test_only_a_metric_is_made_by_its_own_method():
    with pytest.raises(RebuildError, match="expected a metric"):
        Decoder({}, LiveResolver()).decode({"metric": "torch.nn:Linear", "state": []})


OBJECTS = [
    np.array(["age", None, [1, 2], (3,), {"a": torch.ones(1)}], dtype=object),
    np.array([["a"], ["bb"]], dtype=object),
    np.array(3, dtype=object),
    np.empty((0, 2), dtype=object),
]


@pytest.mark.parametrize("array", OBJECTS, ids=lambda array: str(array.shape))
def test_an_array_of_objects(array):
    again = through(array)
    assert (again.dtype, again.shape, str(again)) == (array.dtype, array.shape, str(array))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor(layout, requires_grad):
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    value = torch.nested.nested_tensor(parts, layout=layout, requires_grad=requires_grad)
    again = through(value)
    assert (again.layout, again.requires_grad, again.is_leaf) == (layout, requires_grad, True)
    assert all(map(torch.equal, again.detach().unbind(), value.detach().unbind()))
