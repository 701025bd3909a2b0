"""Values as trees and back: what comes back is what went in, what cannot is named, and no tree runs code."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import gc
import io
import json
import math
import pathlib
import shelve
import threading
import types
import typing
import uuid
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.parsing import AttributeDict
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree

from pytest_nancapture.bundle.values.decode import Decoder
from pytest_nancapture.bundle.values.encode import Encoder
from pytest_nancapture.bundle.values.references import LiveResolver
from pytest_nancapture.errors import RebuildError, UnwritableValueError

HERE = "tests/bundle/values/test_encode_decode.py"
REMEDY = "turn it into tensors, numbers, strings or containers of them"


def tree_of(value: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """As strict JSON would bring it, and the tensors by name."""
    encoder = Encoder(prefix="6/", **options)
    text = json.dumps(encoder.encode(value, "batch"), allow_nan=False)
    return json.loads(text), encoder.tensors


def decode(tree: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    return Decoder(tensors or {}, LiveResolver()).decode(tree)


def through(value: Any) -> Any:
    """There and back, the tensors copied as a file would do."""
    tree, tensors = tree_of(value)
    return decode(tree, {name: tensor.detach().clone() for name, tensor in tensors.items()})


def content(value: Any) -> Any:
    """What can be compared with ``==`` and tells types, dtypes and NaN apart."""
    if isinstance(value, Tensor):
        extra = {name: content(item) for name, item in vars(value).items()}
        return type(value), value.dtype, value.requires_grad, value.detach().cpu().tolist(), extra
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, repr(value.tolist())
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, dict):
        return type(value), [(content(key), content(item)) for key, item in value.items()], attributes(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [content(item) for item in value], attributes(value)
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(content(item)) for item in value), attributes(value)
    known = (bool, int, str, bytes, bytearray, type(None), type, enum.Enum, slice, range, pathlib.PurePath)
    if isinstance(value, (*known, torch.dtype, torch.device, types.FunctionType, types.BuiltinFunctionType)):
        return type(value), value
    if isinstance(value, functools.partial):
        return value.func, content(value.args), content(value.keywords)
    return type(value), attributes(value)


def attributes(value: Any) -> Any:
    names = [*getattr(value, "__dict__", {}), *(name for kind in type(value).__mro__ for name in slots(kind))]
    return {name: content(getattr(value, name)) for name in names}


def slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    mangled = [name if not name.startswith("__") else f"_{kind.__name__}{name}" for name in names]
    return [name for name in mangled if "weakref" not in name]


class Pair(typing.NamedTuple):
    x: Any
    y: Any = 5


@dataclasses.dataclass
class Sample:
    x: Any
    label: str = "cat"
    _score: float = math.nan


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: int = 1


@dataclasses.dataclass(frozen=True)
class Masked:
    """Two of them look alike."""

    secret: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: int = 1


class Private:
    """Slots as classes that are careful have them."""

    __slots__ = ("__hidden", "shown")

    def __init__(self, hidden: Any) -> None:
        self.__hidden = hidden
        self.shown = 2


class Encoding(collections.UserDict[str, Any]):
    """Like the batches of a well-known tokenizer: items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Bag(types.SimpleNamespace):
    """A namespace with a method."""

    def size(self) -> int:
        return len(vars(self))


class Stack(list[Any]):
    """A list that remembers."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)
        self.pushed = len(items)


class Triple(tuple[Any, ...]):
    """A tuple with an attribute."""


class Registry(dict[str, Any]):
    """A dict that refuses: what it is filled with must not pass by here."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("code of the class was run")


class Labels(frozenset[Any]):
    """A frozenset of the user's."""


class Colour(enum.Enum):
    RED = "r"


class Level(str, enum.Enum):
    LOW = "low"


class Mask(enum.Flag):
    A = 1
    B = 2


class Scaled(Tensor):
    """A tensor subclass; instances get a ``scale``."""


class Boxes:
    """Registered with pytree below: its children are tensors, its context is not."""

    def __init__(self, corners: Any, size: Any) -> None:
        self.corners = corners
        self.size = size


_pytree.register_pytree_node(
    Boxes, lambda boxes: ([boxes.corners], {"size": boxes.size}), lambda children, context: Boxes(*children, **context)
)


class Untouchable:
    """An object whose own code must not run when a tree is decoded."""

    calls: typing.ClassVar[list[str]] = []

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.calls.append("new")
        return super().__new__(cls)

    def __init__(self, x: Any) -> None:
        self.calls.append("init")
        self.__dict__["x"] = x

    def __setattr__(self, name: str, value: Any) -> None:
        self.calls.append("setattr")

    def __setstate__(self, state: Any) -> None:
        self.calls.append("setstate")

    def __reduce__(self) -> Any:
        self.calls.append("reduce")
        return super().__reduce__()


class Closing:
    """An object that acts when it is dropped."""

    dropped: typing.ClassVar[list[Any]] = []

    def __del__(self) -> None:
        self.dropped.append(vars(self).get("name"))


CALLS: list[Any] = []


def helper(x: Any) -> Any:
    return x


def spy(*args: Any) -> Any:
    CALLS.append(args)
    return args


def scaled() -> Scaled:
    tensor = torch.ones(2).as_subclass(Scaled)
    tensor.scale = torch.tensor(3.0)
    tensor.label = "ü"
    return tensor


def with_attribute(value: Any) -> Any:
    value.note = torch.tensor(1)
    return value


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


def local() -> Any:
    class Local:
        pass

    return Local()


def endless() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


class Holder:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize(
    ("make", "where", "problem"),
    [
        (lambda: (i for i in range(3)), "['x'][1]", "a generator cannot be written"),
        (lambda: iter([1]), "['x'][1]", "a list_iterator cannot be written"),
        (lambda: map(str, [1]), "['x'][1]", "a map cannot be written"),
        (threading.Lock, "['x'][1]", "a _thread.lock cannot be written"),
        (lambda: {"a": threading.Lock()}, "['x'][1]['a']", "a _thread.lock cannot be written"),
        (lambda: Sample(io.BytesIO()), "['x'][1].x", "a BytesIO cannot be written"),
        (lambda: Slotted(io.StringIO()), "['x'][1].x", "a StringIO cannot be written"),
        (lambda: Pair(1, lambda: 2), "['x'][1][1]", "<lambda> is defined inside of a function, so no import finds it"),
        (local, "['x'][1]", "local.<locals>.Local is defined inside of a function, so no import finds it"),
        (lambda: [].append, "['x'][1]", "<built-in method append of list object at"),
        (lambda: Bag().size, "['x'][1]", "a builtins.method cannot be written"),
        (lambda: print, "['x'][1]", "<built-in function print> is nothing that a bundle may name"),
        (lambda: open, "['x'][1]", "<built-in function open> is nothing that a bundle may name"),
        (lambda: torch.load, "['x'][1]", " is nothing that a bundle may name"),
        (lambda: collections.defaultdict(breakpoint), "['x'][1].default_factory", " is nothing that a bundle may name"),
        (lambda: functools.partial(eval, "1"), "['x'][1].func", " is nothing that a bundle may name"),
        (lambda: pathlib, "['x'][1]", "a builtins.module cannot be written"),
        (object, "['x'][1]", "a builtins.object cannot be written"),
        (lambda: Ellipsis, "['x'][1]", "a builtins.ellipsis cannot be written"),
        (lambda: ValueError("x"), "['x'][1]", "a builtins.ValueError cannot be written"),
        (lambda: list[int], "['x'][1]", "a types.GenericAlias cannot be written"),
        (torch.Generator, "['x'][1]", "a torch._C.Generator cannot be written"),
        (lambda: np.random.default_rng(0), "['x'][1]", "a Generator cannot be written"),
        (lambda: __import__("random").Random(0), "['x'][1]", "a random.Random cannot be written"),
        (lambda: __import__("array").array("d", [1]), "['x'][1]", "a array.array cannot be written"),
        (lambda: __import__("re").compile("x"), "['x'][1]", "a re.Pattern cannot be written"),
        (lambda: np.array([object()]), "['x'][1]", "a numpy array of dtype object cannot be written"),
        (lambda: np.zeros(1, "i4,f4"), "['x'][1]", "a numpy array of dtype [('f0', '<i4'), ('f1', '<f4')] cannot be"),
        (lambda: np.longdouble(1), "['x'][1]", "a numpy array of dtype"),
        (lambda: np.ones(2, np.clongdouble), "['x'][1]", "a numpy array of dtype"),
        (lambda: np.ma.masked_array([1, 2], [0, 1]), "['x'][1]", "a MaskedArray, which is more than a numpy array,"),
        (lambda: np.ones((1, 1)).view(np.matrix), "['x'][1]", "a matrix, which is more than a numpy array, cannot be"),
        (lambda: torch.ones(1, device="meta"), "['x'][1]", "it is on the meta device and has no values"),
        (lambda: Mask.A | Mask.B, "['x'][1]", "a combination that has no name of its own"),
        (lambda: Boxes(torch.ones(1), threading.Lock()), "['x'][1].context['size']", "a _thread.lock cannot be"),
        (Closing, "['x'][1]", " is nothing that a bundle may name"),
        (endless, "['x'][1][0]['again']", "it contains itself"),
        (Holder, "['x'][1].me", "it contains itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_written(make: Any, where: str, problem: str) -> None:
    """The error names the path to it, what it is, and the remedy."""
    with pytest.raises(UnwritableValueError) as caught:
        Encoder().encode({"x": (torch.ones(1), make())}, "batch")
    assert f"batch{where}" == caught.value.where
    assert problem in caught.value.problem
    assert f"{caught.value.where}: {caught.value.problem}; {REMEDY}" == str(caught.value)


def test_what_is_nested_too_deeply() -> None:
    """An error of its own, not of the interpreter's."""
    with pytest.raises(UnwritableValueError, match="it is nested too deeply"):
        Encoder().encode(deep(), "batch")


def test_the_remedy_is_the_callers() -> None:
    """A constructor's argument needs other advice than a batch."""
    with pytest.raises(UnwritableValueError) as caught:
        Encoder(remedy="give a factory").encode(object(), "argument")
    assert str(caught.value) == "argument: a builtins.object cannot be written; give a factory"


def test_the_same_value_twice_does_not_contain_itself() -> None:
    """Only what is above a value counts."""
    inner = [1]
    assert through([inner, inner, {"a": inner}]) == [[1], [1], {"a": [1]}]


def objects(target: Any, **fields: Any) -> dict[str, Any]:
    return {"object": target, **fields}


@pytest.mark.parametrize(
    "target",
    [
        *("os:system", "posix:system", "os:popen", "builtins:eval", "builtins:exec", "builtins:open", "io:open"),
        *("subprocess:Popen", "subprocess:run", "importlib:import_module", "runpy:run_path", "shutil:rmtree"),
        *("sys:exit", "timeit:timeit", "pty:spawn", "ctypes:CDLL", "pickle:loads", "_pickle:loads", "code:interact"),
        *("torch:load", "torch.hub:load", "torch.fx.graph_module:_exec_with_source", "torch.package:PackageImporter"),
        *("torch.utils.cpp_extension:load", "torch.jit:load", "torch._inductor:aot_compile", "numpy:load"),
        *("lightning.fabric.utilities.cloud_io:_load", "pytest:main", "_pytest.config:main"),
        "pytest_nancapture.replay:replay",
    ],
)
@pytest.mark.parametrize(
    "tree",
    [
        lambda target: {"reference": target},
        lambda target: {"partial": [{"reference": target}, {"tuple": []}, {"dict": []}]},
        lambda target: objects(target, state=[]),
        lambda target: objects("collections:defaultdict", pairs=[], default=target),
        lambda target: {"namedtuple": target, "fields": ["true"]},
        lambda target: {"enum": target, "name": "x"},
        lambda target: {"tensor": "t", "subclass": target, "state": []},
        lambda target: {"pytree": target, "children": ["true"], "context": None},
        lambda target: {"pytree": "collections:namedtuple", "children": ["true"], "context": {"reference": target}},
        lambda target: {"pytree": "collections:deque", "children": [], "context": {"reference": target}},
    ],
    ids=[
        "reference",
        "partial",
        "object",
        "default",
        "namedtuple",
        "enum",
        "subclass",
        "node",
        "namedtuple-node",
        "context",
    ],
)
def test_nothing_dangerous_is_named(target: str, tree: Any) -> None:
    """Functions that run commands or code, open files or import are refused wherever a tree can name something."""
    with pytest.raises(RebuildError):
        decode(tree(target), {"t": torch.ones(1)})


def test_the_refusal_names_the_function() -> None:
    """So that a person sees what a bundle asked for."""
    with pytest.raises(RebuildError) as caught:
        decode({"reference": "os:system"})
    assert str(caught.value) == "'os:system': a bundle may not name <built-in function system>"


@pytest.mark.parametrize("context", [{"reference": f"{__name__}:spy"}, {"partial": [{"reference": f"{__name__}:spy"}]}])
@pytest.mark.parametrize("kind", ["collections:namedtuple", "torch.return_types:max", "collections:defaultdict"])
def test_no_function_is_called(kind: str, context: Any) -> None:
    """Torch's own unflatten functions call what they are given as context: it must not be any function there is."""
    with pytest.raises(RebuildError):
        decode({"pytree": kind, "children": [1], "context": context})
    with pytest.raises(RebuildError):
        decode({"pytree": kind, "children": [1], "context": {"list": [context, {"list": ["a"]}]}})
    assert CALLS == []


def test_a_context_may_name_its_own_class_alone() -> None:
    """A registered type may need to know what it was; a function it needs not."""
    node = {"pytree": f"{__name__}:Boxes", "children": [1]}
    own = decode({**node, "context": {"dict": [["size", {"reference": f"{__name__}:Boxes"}]]}})
    assert Boxes is own.size
    with pytest.raises(RebuildError, match=r"the context of a .*Boxes.* may not name <function helper"):
        decode({**node, "context": {"dict": [["size", {"reference": f"{__name__}:helper"}]]}})


def test_nothing_that_acts_when_it_is_dropped() -> None:
    """A class with a ``__del__`` is not filled from a tree: dropping it would act on what the tree says."""
    gc.collect()
    Closing.dropped.clear()
    with pytest.raises(RebuildError, match="is not a kind of object that a bundle may hold"):
        decode(objects([f"{__name__}:Closing", HERE], state=[["name", "/etc/passwd"]]))
    with pytest.raises(RebuildError, match="is not a kind of object that a bundle may hold"):
        decode(objects("tempfile:_TemporaryFileCloser", state=[["name", "/etc/passwd"], ["delete", True]]))
    gc.collect()
    assert Closing.dropped == []


def test_nothing_that_unpickles() -> None:
    """A shelf would unpickle what a tree puts on it."""
    assert issubclass(shelve.Shelf, collections.abc.MutableMapping)
    with pytest.raises(RebuildError, match="is not a kind of object that a bundle may hold"):
        decode(objects("shelve:Shelf", state=[["dict", {"dict": []}]]))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"enum": f"{__name__}:Sample", "name": "x"}, "expected a subclass of Enum, came <class"),
        ({"enum": f"{__name__}:helper", "name": "x"}, "expected a subclass of Enum, came <function helper"),
        ({"enum": f"{__name__}:Colour", "name": "BLUE"}, "not a tree of a bundle"),
        ({"namedtuple": f"{__name__}:Sample", "fields": []}, "expected a subclass of tuple, came <class"),
        ({"object": f"{__name__}:helper"}, "expected a subclass of object, came <function helper"),
        ({"object": "builtins:type"}, "is not a kind of object that a bundle may hold"),
        ({"object": "threading:Thread"}, "is not a kind of object that a bundle may hold"),
        ({"object": "torch:Generator"}, "is not a kind of object that a bundle may hold"),
        ({"object": "functools:partial"}, "is not a kind of object that a bundle may hold"),
        ({"tensor": "t", "subclass": f"{__name__}:Sample", "state": []}, "expected a subclass of Tensor, came <class"),
        (
            {"pytree": f"{__name__}:Sample", "children": [], "context": None},
            "is not registered with torch.utils._pytree",
        ),
        ({"dtype": "load"}, "torch has no dtype 'load'"),
        ({"dtype": "nn"}, "torch has no dtype 'nn'"),
        ({"dtype": "nothing"}, "not a tree of a bundle"),
        ({"device": "nowhere"}, "not a tree of a bundle"),
        ({"reference": f"{__name__}:gone"}, f"{__name__} has no 'gone'; if it was renamed, say so in bundle.json"),
        ({"reference": f"{__name__}:PLAIN"}, "not a tree of a bundle"),
        ({"reference": "no_such_module:x"}, "cannot import no_such_module"),
        ({"reference": 3}, "not a tree of a bundle"),
        ({"reference": [1, 2, 3]}, "not a tree of a bundle"),
        ({"tensor": "gone"}, "not a tree of a bundle"),
        ({"tensor": ["t"]}, "not a tree of a bundle"),
        ({"tensor": "t", "device": "nowhere"}, "not a tree of a bundle"),
        ({"ndarray": "t", "dtype": "O"}, "not a tree of a bundle"),
        ({"ndarray": "t", "dtype": "O", "shape": [1]}, "not a tree of a bundle"),
        ({"ndarray": "t", "dtype": "U1", "shape": [2**40]}, "not a tree of a bundle"),
        ({"dict": [["a"]]}, "not a tree of a bundle"),
        ({"dict": [[{"list": []}, 1]]}, "not a tree of a bundle"),
        ({"dict": 3}, "not a tree of a bundle"),
        ({"list": 3}, "not a tree of a bundle"),
        ({"set": [{"list": []}]}, "not a tree of a bundle"),
        ({"range": [1, 2, 0]}, "not a tree of a bundle"),
        ({"complex": [1, 2, 3]}, "not a tree of a bundle"),
        ({"bytes": "!"}, "not a tree of a bundle"),
        ({"float": "x"}, "not a tree of a bundle"),
        ({"partial": []}, "not a tree of a bundle"),
        ({"partial": [3, {"tuple": []}, {"dict": []}]}, "not a tree of a bundle"),
        ({"object": f"{__name__}:Slotted", "state": [["other", 1]]}, "not a tree of a bundle"),
        ({"object": f"{__name__}:Sample", "pairs": [["a", 1]]}, "not a tree of a bundle"),
        ({"object": f"{__name__}:Sample", "state": 3}, "not a tree of a bundle"),
        ({}, "not a tree of a bundle"),
        ({"unknown": 1}, "not a tree of a bundle"),
        ([1], "not a tree of a bundle"),
    ],
    ids=lambda value: json.dumps(value)[:70] if not isinstance(value, str) else "",
)
def test_trees_that_are_none(tree: Any, message: str) -> None:
    """What a tree says must be what it names; else there is one error, which says so."""
    with pytest.raises(RebuildError) as caught:
        decode(tree, {"t": torch.ones(1, dtype=torch.int64)})
    assert message in str(caught.value)


def test_omegaconf_nodes() -> None:
    """Configurations come back as such, interpolations unresolved."""
    omegaconf = pytest.importorskip("omegaconf", reason="optional: only met where a user passes its nodes")
    value = omegaconf.OmegaConf.create({"lr": 0.1, "sizes": [1, 2], "last": "${sizes.1}", "missing": "???"})
    actual = through({"config": value})["config"]
    assert (type(value), value) == (type(actual), actual)
    assert actual.last == 2
