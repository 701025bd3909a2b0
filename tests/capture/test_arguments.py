"""How a module is to be built again is known before training begins, and said there if it is not."""

import argparse
import enum
import functools
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from training import Net, batches, capture_one, fit, replayed

from pytest_nancapture import NaNCapture, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.errors import CaptureError


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = 2


def double(x):
    return x * 2


class Typed(Net):
    """Takes an argument of any type, and is made of it."""

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.value = value


VALUES = [
    None,
    3,
    float("inf"),
    "text",
    [1, (2, {"three": {4, 5}})],
    {"optimizer": {"name": "adam", "betas": (0.9, 0.999)}, 3: "three"},
    Mode.SLOW,
    {Mode.FAST: Path("data") / "train"},
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    nn.Linear,
    nn.functional.relu,
    double,
    Mode,
    argparse.Namespace(lr=0.1, layers=[1, 2], mode=Mode.FAST),
    range(3),
    2 + 1j,
    b"bytes",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: getattr(value, "__name__", repr(value)[:30]))
def test_an_argument_comes_back_as_it_was(value, tmp_path, caplog):
    """With its type, and nothing is said about it."""
    bundle = capture_one(Typed(value), batches(), tmp_path)
    built = rebuilt(bundle)
    assert (built.value, type(built.value)) == (value, type(value))
    assert "without help" not in caplog.text
    assert bundle.manifest.module.unwritten == ()


def rebuilt(bundle: Bundle) -> Any:
    """The module that the replay builds."""
    from pytest_nancapture.bundle.tensors.file import read_tensors
    from pytest_nancapture.bundle.values.decode import Decoder
    from pytest_nancapture.loops.loop import loop_named
    from pytest_nancapture.replay.resolve import resolver_for
    from pytest_nancapture.step.rebuild import build_module

    tensors = read_tensors(bundle.path / "weights.safetensors", bundle.manifest.module.layouts)
    resolver = resolver_for(bundle)
    return build_module(
        bundle.manifest.module, Decoder(tensors, resolver), resolver, loop_named("lightning.pytorch").check_class
    )


def test_tensors_among_the_arguments_come_back(tmp_path):
    """Not mixed up with the weights of the same name, and as they were when training began."""
    value = {"layer.weight": torch.arange(3.0), "scale": torch.tensor(2, dtype=torch.int8)}
    module = Typed(value)
    bundle = capture_one(module, batches(), tmp_path)
    built = rebuilt(bundle)
    assert built.value["layer.weight"].tolist() == [0.0, 1.0, 2.0]
    assert (built.value["scale"].item(), built.value["scale"].dtype) == (2, torch.int8)
    assert replayed(bundle)[0].verdict == "nonfinite"


class Whole(Net):
    """One argument that holds them all, saved as the hyperparameters themselves."""

    def __init__(self, hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.given = hparams


@pytest.mark.parametrize("hparams", [{"lr": 0.1, "deep": {"a": [1]}}, argparse.Namespace(lr=0.1, deep=None)])
def test_hyperparameters_saved_as_a_whole_come_back(hparams, tmp_path, caplog):
    """As something from which they can be read in the same way."""
    bundle = capture_one(Whole(hparams), batches(), tmp_path)
    built = rebuilt(bundle)
    assert (dict(built.hparams), "without help" in caplog.text) == (
        dict(vars(hparams) if type(hparams) is not dict else hparams),
        False,
    )
    assert replayed(bundle)[0].verdict == "nonfinite"


class AnyKeywords(Net):
    def __init__(self, width: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kwargs = kwargs


class Derived(Typed):
    """Its own constructor hands the argument on."""

    def __init__(self, other: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()
        self.other = other


def test_keyword_arguments_without_names_come_back(tmp_path):
    """Also through a base class."""
    bundle = capture_one(AnyKeywords(depth=2, names=["a"]), batches(), tmp_path / "any")
    assert rebuilt(bundle).kwargs == {"depth": 2, "names": ["a"]}
    built = rebuilt(capture_one(Derived(5, value=Mode.FAST), batches(), tmp_path / "derived"))
    assert (built.other, built.value) == (5, Mode.FAST)


def warnings_of(module: Any, caplog: Any, tmp_path: Path, **options: Any) -> list[str]:
    """What is said before the first step."""
    fit(module, batches(2, bad=[]), NaNCapture(tmp_path, **options), max_steps=1)
    prefix = "nancapture: bundles of this run cannot be replayed without help: "
    ours = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    assert [line for line in ours if not line.startswith(prefix)] == []
    return [line.removeprefix(prefix) for line in ours]


REMEDY = (
    "give NaNCapture(factory='package.module:function') a function that builds the module, or leave it out with "
    "self.save_hyperparameters(ignore=[...]) if the constructor has a default"
)


@pytest.mark.parametrize(
    ("value", "where", "problem"),
    [
        (lambda x: x, "value", "<lambda> is defined inside of a function, so no import finds it"),
        (iter([1]), "value", "a list_iterator cannot be written"),
        (
            {"act": [1, lambda x: x]},
            "value['act'][1]",
            "<lambda> is defined inside of a function, so no import finds it",
        ),
    ],
)
def test_an_argument_without_a_form_is_named_before_training(value, where, problem, tmp_path, caplog):
    """With its path, and what to do about it."""
    (said,) = warnings_of(Typed(value), caplog, tmp_path)
    assert said == f"argument of Typed: {where}: {problem}; {REMEDY}"


class Forgets(Net):
    """Saves no hyperparameters."""

    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()


def test_forgotten_hyperparameters_are_named_before_training(tmp_path, caplog):
    """Those without a default, without which nothing can be built."""
    assert warnings_of(Forgets(3), caplog, tmp_path) == [
        "argument 'width' of Forgets is not among its hparams; call self.save_hyperparameters() in __init__, or give "
        "NaNCapture(factory='package.module:function') a function that builds the module"
    ]


def test_a_missing_argument_is_named_in_the_replay_too(tmp_path):
    """The bundle remembers what could not be written."""
    bundle = capture_one(Forgets(3), batches(), tmp_path)
    result, _ = replayed(bundle)
    assert result.verdict == "error"
    assert "argument 'width' of Forgets is not among its hparams" in result.detail


def test_a_local_class_is_reported_before_training(tmp_path, caplog):
    """No import finds it."""

    class Local(Net):
        pass

    (said,) = warnings_of(Local(), caplog, tmp_path)
    name = "test_a_local_class_is_reported_before_training.<locals>.Local"
    assert said == (
        f"the module's class cannot be found again: {name} is defined inside of a function, so no import finds it"
    )


def test_a_class_of_a_notebook_is_reported_before_training(tmp_path, caplog, monkeypatch):
    """It was typed in, so no file holds it."""

    notebook = types.ModuleType("__main__")
    vars(notebook)["Net"] = Net
    exec("class Cell(Net):\n    pass", vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    (said,) = warnings_of(notebook.Cell(), caplog, tmp_path)
    assert said == (
        "the module's class cannot be found again: Cell is defined in an interactive session, so no file holds it; "
        "replay(path, module=Cell()) replays one here; for pytest, put the class into a file (begin its cell with "
        "%%writefile cell.py) and write from cell import Cell"
    )


def make_unwritable() -> Any:
    """The factory of the tests."""
    return Typed(functools.partial(max, 1))


not_callable = 3


def test_a_factory_replaces_arguments(tmp_path, caplog):
    """Nothing is said then, and the replay builds the module with it."""
    module = Typed(lambda x: x)
    bundle = capture_one(module, batches(), tmp_path, factory="test_arguments:make_unwritable")
    assert "without help" not in caplog.text
    assert isinstance(rebuilt(bundle).value, functools.partial)
    assert replayed(bundle)[0].verdict == "nonfinite"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_colon", "NaNCapture(factory=...): expected 'package.module:function', came 'no_colon'"),
        ("no_module_of_this:name", "NaNCapture(factory='no_module_of_this:name'): No module named 'no_module_of_this'"),
        (
            "test_arguments:nothing",
            "NaNCapture(factory='test_arguments:nothing'): module 'test_arguments' has no attribute 'nothing'",
        ),
        (
            "test_arguments:not_callable",
            "NaNCapture(factory='test_arguments:not_callable'): expected a function, came 3",
        ),
    ],
)
def test_a_factory_that_is_none_ends_the_run_before_it_begins(factory, message, tmp_path):
    """It names what is wrong."""
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        fit(Net(), batches(), NaNCapture(tmp_path, factory=factory))


class Defaults(Net):
    """Leaves a thing without a form out, and has a default for it."""

    def __init__(self, width: int = 3, hook: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["hook"])


class Two(Net):
    """Saves neither of its arguments."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()


def test_all_of_a_kind_are_told_in_one_line(tmp_path, caplog):
    """Not one warning an argument."""
    fit(Two(3, 2), batches(bad=[]), NaNCapture(tmp_path))
    (said,) = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    assert "arguments 'width', 'depth' of Two are not among its hparams; call self.save_hyperparameters()" in said


class Judged(Net):
    """Its loss is ignored among the hparams, as Lightning advises."""

    def __init__(self, criterion: nn.Module = nn.L1Loss()) -> None:  # noqa: B008, as people write it
        super().__init__()
        self.save_hyperparameters(ignore=["criterion"])
        self.criterion = criterion


class Unwritable(nn.MSELoss):
    """Has no form on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(("criterion", "count"), [(nn.L1Loss(), 0), (nn.MSELoss(), 0), (Unwritable(), 1)])
def test_an_ignored_argument_that_is_not_the_default(criterion, count, tmp_path, caplog):
    """It is written from what the module keeps under its name; where that has no form it is told at the start."""
    fit(Judged(criterion), batches(bad=[]), NaNCapture(tmp_path))
    said = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    assert len(said) == count
    assert all("argument 'criterion' of Judged is not the default, which a replay would take" in line for line in said)


class AutoEncoder(Net):
    """As in Lightning's own first example: nothing is saved."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, scale: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.scale = scale

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return self.decoder(self.encoder(x)).pow(2).mean() * self.scale * (good / good)


def test_arguments_that_the_module_keeps_under_their_names(tmp_path, caplog):
    """They are written unasked, and their weights once."""
    torch.manual_seed(0)
    module = AutoEncoder(nn.Sequential(nn.Linear(3, 200), nn.ReLU()), nn.Linear(200, 3), scale=2.0)
    bundle = capture_one(module, batches(), tmp_path)
    assert not [record.message for record in caplog.records if "without help" in record.message]
    assert sorted(bundle.manifest.module.arguments) == ["decoder", "encoder", "scale"]
    assert bundle.fault.reproduced.runs == 1
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert bundle.manifest.files["weights.safetensors"].bytes < 1.5 * weights
    assert replay(bundle).verdict == "nonfinite"


class Loud(nn.MSELoss):
    """Answers a comparison with more than a flag, as metrics do."""

    def __eq__(self, other: object) -> Any:
        return [other]

    __hash__ = nn.Module.__hash__


class Fooled(Net):
    """Lightning takes its loss for the argument that holds all others."""

    def __init__(self, loss: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters({"loss": loss, "width": width})
        self.loss = loss
        self._hparams_name = "loss"


def test_an_argument_that_equals_everything_does_not_hold_all_others(tmp_path):
    bundle = capture_one(Fooled(Loud(), width=4), batches(), tmp_path)
    assert (sorted(bundle.manifest.module.arguments), bundle.fault.reproduced.runs) == (["loss", "width"], 1)


class FooledAndOpen(Net):
    """The same with its loss ignored, and with keywords that have no name in the constructor."""

    def __init__(self, loss: nn.Module, width: int = 3, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters({"width": width, **more})
        self.loss = loss
        self._hparams_name = "loss"


def test_nor_does_one_that_is_no_container(tmp_path):
    """It is taken from the module, and the others from the hparams."""
    bundle = capture_one(FooledAndOpen(Loud(), width=4, depth=2), batches(), tmp_path)
    arguments = bundle.manifest.module.arguments
    assert (sorted(arguments), arguments["depth"]) == (["depth", "loss", "width"], 2)
    assert bundle.fault.reproduced.runs == 1


def test_callbacks_among_the_arguments_are_left_out(tmp_path):
    """Where a module keeps them among its arguments and in itself."""
    callbacks = [pl.Callback()]
    module = AnyKeywords(4, callbacks=callbacks, limits={"steps": 3})
    bundle = capture_one(module, batches(), tmp_path, callbacks=callbacks)
    record = bundle.manifest.module
    assert (sorted(record.arguments), record.missing) == (["callbacks", "limits", "width"], ())
    assert (record.arguments["callbacks"], bundle.fault.reproduced.runs) == ({"list": []}, 1)


def test_a_factory_takes_no_arguments(tmp_path):
    """So none of them stay in the bundle."""
    bundle = capture_one(AnyKeywords(4), batches(), tmp_path, factory="test_arguments:served")
    assert bundle.manifest.module.arguments == {}


def served() -> Any:
    return AnyKeywords(4)


def test_an_ignored_argument_with_a_default_is_no_problem(tmp_path, caplog):
    """The remedy in the message works."""
    assert warnings_of(Defaults(hook=lambda: None), caplog, tmp_path) == []
    assert rebuilt(capture_one(Defaults(hook=lambda: None), batches(), tmp_path)).hparams == {"width": 3}


class Quantized(Net):
    """Holds a buffer of a kind that no bundle can hold."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8)
        self.register_buffer("table", table, persistent=False)


def test_weights_that_cannot_be_written_are_told_when_training_begins(tmp_path, caplog):
    """And training itself goes on as without the callback."""
    fit(Quantized(), batches(bad=()), NaNCapture(tmp_path))
    assert (
        "this run will write no bundle: table: quantized tensors (torch.quint8) have no form in a bundle" in caplog.text
    )
