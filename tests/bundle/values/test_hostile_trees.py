"""Trees from elsewhere: none runs code or names what it may not, and what is none gets one clear error."""

from __future__ import annotations

import collections
import gc
import json
import shelve
from typing import Any

import pytest
import samples
import torch
from samples import CALLS, Boxes, Closing, decode

from pytest_nancapture.errors import RebuildError

SAMPLES = samples.__name__
FILE = "tests/bundle/values/samples.py"


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


@pytest.mark.parametrize("context", [{"reference": f"{SAMPLES}:spy"}, {"partial": [{"reference": f"{SAMPLES}:spy"}]}])
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
    node = {"pytree": f"{SAMPLES}:Boxes", "children": [1]}
    own = decode({**node, "context": {"dict": [["size", {"reference": f"{SAMPLES}:Boxes"}]]}})
    assert Boxes is own.size
    with pytest.raises(RebuildError, match=r"the context of a .*Boxes.* may not name <function helper"):
        decode({**node, "context": {"dict": [["size", {"reference": f"{SAMPLES}:helper"}]]}})


def test_a_context_may_name_what_all_of_its_class_name() -> None:
    """And no other function."""
    node = {"pytree": f"{SAMPLES}:Table", "children": [1]}
    names = [["kind", {"reference": f"{SAMPLES}:Table"}], ["columns", {"list": ["a"]}]]
    made = decode({**node, "context": {"dict": [*names, ["make", {"reference": f"{SAMPLES}:make_table"}]]}})
    assert made.held == {"a": 1}
    with pytest.raises(RebuildError, match=r"the context of a .*Table.* may not name <function spy"):
        decode({**node, "context": {"dict": [*names, ["make", {"reference": f"{SAMPLES}:spy"}]]}})
    assert CALLS == []


@pytest.mark.parametrize(
    "method", [{"method": "word", "of": 0}, {"method": "shout", "of": 5}, {"method": 3, "of": 0}, {"method": "shout"}]
)
def test_a_method_is_one_of_an_object_above_it(method: Any) -> None:
    """Nothing else is reached by that door."""
    with pytest.raises(RebuildError):
        decode({"object": f"{SAMPLES}:Speaking", "state": [["word", "so"], ["speak", method]]})


def test_nothing_that_acts_when_it_is_dropped() -> None:
    """A class with a ``__del__`` is not filled from a tree: dropping it would act on what the tree says."""
    gc.collect()
    Closing.dropped.clear()
    with pytest.raises(RebuildError, match="is not a kind of object that a bundle may hold"):
        decode(objects([f"{SAMPLES}:Closing", FILE], state=[["name", "/etc/passwd"]]))
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
        ({"enum": f"{SAMPLES}:Sample", "name": "x"}, "expected a subclass of Enum, came <class"),
        ({"enum": f"{SAMPLES}:helper", "name": "x"}, "expected a subclass of Enum, came <function helper"),
        ({"enum": f"{SAMPLES}:Colour", "name": "BLUE"}, "not a tree of a bundle"),
        ({"namedtuple": f"{SAMPLES}:Sample", "fields": []}, "expected a subclass of tuple, came <class"),
        ({"object": f"{SAMPLES}:helper"}, "expected a subclass of object, came <function helper"),
        ({"object": "builtins:type"}, "is not a kind of object that a bundle may hold"),
        ({"object": "threading:Thread"}, "is not a kind of object that a bundle may hold"),
        ({"object": "torch:Generator"}, "is not a kind of object that a bundle may hold"),
        ({"object": "functools:partial"}, "is not a kind of object that a bundle may hold"),
        ({"tensor": "t", "subclass": f"{SAMPLES}:Sample", "state": []}, "expected a subclass of Tensor, came <class"),
        (
            {"pytree": f"{SAMPLES}:Sample", "children": [], "context": None},
            "is not registered with torch.utils._pytree",
        ),
        ({"dtype": "load"}, "torch has no dtype 'load'"),
        ({"dtype": "nn"}, "torch has no dtype 'nn'"),
        ({"dtype": "nothing"}, "not a tree of a bundle"),
        ({"device": "nowhere"}, "not a tree of a bundle"),
        ({"reference": f"{SAMPLES}:gone"}, f"{SAMPLES} has no 'gone'; if it was renamed, say so in bundle.json"),
        ({"reference": f"{SAMPLES}:CALLS"}, "not a tree of a bundle"),
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
        ({"object": f"{SAMPLES}:Slotted", "state": [["other", 1]]}, "not a tree of a bundle"),
        ({"object": f"{SAMPLES}:Sample", "pairs": [["a", 1]]}, "not a tree of a bundle"),
        ({"object": f"{SAMPLES}:Sample", "state": 3}, "not a tree of a bundle"),
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
