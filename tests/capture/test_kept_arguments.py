"""Arguments that nobody saved are taken from the module, where its constructor says that it keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_arguments import rebuilt
from torch import nn
from training import Net, batches, capture_one, fit

from pytest_nancapture import NaNCapture, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.capture.kept import kept_under


def arguments_of(bundle: Bundle) -> list[str]:
    assert bundle.fault.reproduced.runs == 1
    return sorted(bundle.manifest.module.arguments)


class Wrapped(Net):
    """Keeps its arguments under names of its own."""

    def __init__(self, encoder: nn.Module, act: Any, width: int) -> None:
        super().__init__()
        self._encoder = encoder
        self.activation = act
        self._size = int(width)
        self.head = nn.Linear(width, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return self.activation(self._encoder(x)).mean() * (good / good)


def test_an_argument_under_another_name(tmp_path: Any, caplog: Any) -> None:
    """The constructor's own lines say which attribute holds it."""
    bundle = capture_one(Wrapped(nn.Linear(3, 4), torch.tanh, 5), batches(), tmp_path)
    assert arguments_of(bundle) == ["act", "encoder", "width"]
    assert "without help" not in caplog.text


class Derived(Net):
    """What it keeps under an argument's name is made of it."""

    def __init__(self, encoder: str, eps: float = 1e-8) -> None:
        super().__init__()
        self.encoder = {"linear": nn.Linear(3, 3)}[encoder]
        self.eps = max(eps, 1e-6)


def test_what_is_made_of_an_argument_is_not_the_argument(tmp_path: Any, caplog: Any) -> None:
    """So it is told when training starts that it is missing, and not after hours."""
    fit(Derived("linear"), batches(bad=[]), NaNCapture(tmp_path))
    assert "argument 'encoder' of Derived is not among its hparams" in caplog.text


class Margined(Net):
    """Has a default that is None, and makes something of that."""

    def __init__(self, criterion: nn.Module | None = None, width: int = 3) -> None:
        super().__init__()
        self.criterion = criterion if criterion is not None else nn.HuberLoss(delta=2.0)
        self.width = width
        self.extra = nn.Linear(width, width)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"criterion": nn.MSELoss()}, ["criterion"]),
        ({"criterion": nn.HuberLoss(delta=3.0)}, ["criterion"]),
        ({"width": 7}, ["width"]),
    ],
)
def test_what_the_code_makes_by_itself_is_no_argument(given: Any, expected: list[str], tmp_path: Any) -> None:
    """A default is code, and stays what a fix makes of it."""
    assert arguments_of(capture_one(Margined(**given), batches(), tmp_path)) == expected


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x))


class Distilled(Net):
    """Is given other modules, one of them for training as well."""

    def __init__(self, student: nn.Module, teacher: Net) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return (self.student(x) - self.teacher.layer(x)).pow(2).mean() * (good / good)


def test_modules_of_the_loop_and_shared_weights(tmp_path: Any) -> None:
    """The Trainer that a module of the loop's holds in training is no part of it, and what is shared stays so."""
    bundle = capture_one(Distilled(Tied(), Net()), batches(), tmp_path)
    assert arguments_of(bundle) == ["student", "teacher"]
    assert (replay(bundle).verdict, bundle.manifest.module.missing) == ("nonfinite", ())
    student = rebuilt(bundle).student
    assert student.one.weight is student.two.weight


class Data(Net):
    """Keeps all of its data."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table


@pytest.mark.parametrize(("numbers", "said"), [(1000, 0), (20_000_000, 1)])
def test_what_is_large_is_not_copied_unasked(numbers: int, said: int, tmp_path: Any, caplog: Any) -> None:
    """It is told as missing when training starts."""
    fit(Data({"all": torch.empty(numbers)}), batches(1, bad=[]), NaNCapture(tmp_path))
    assert caplog.text.count("argument 'table' of Data is not among its hparams") == said


def test_a_constructor_without_source() -> None:
    """Then the attribute of the same name is taken."""
    space: dict[str, Any] = {"Net": Net}
    exec("class Typed(Net):\n    def __init__(self, a, b):\n        super().__init__()\n        self.a = a", space)
    assert kept_under(space["Typed"](1, 2), ["a", "b"]) == {"a": 1}


class Shown(Net):
    """Keeps its argument in a list, and shows it by a property."""

    def __init__(self, encoder: nn.Module, scale: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([encoder])
        self._values = {"scale": (scale,)}
        self.asked = 0

    @property
    def encoder(self) -> nn.Module:
        """The first part."""
        return self.parts[0]

    @property
    def scale(self) -> Any:
        self.asked += 1
        return self._values["scale"][0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, good = batch
        return self.encoder(x).mean() * self._values["scale"][0] * (good / good)


def test_an_argument_that_a_property_shows(tmp_path: Any, caplog: Any) -> None:
    """It is read by a property that only gives a part; one that does more is never called."""
    module = Shown(nn.Linear(3, 4), 2.0)
    assert kept_under(module, ["encoder", "scale"]) == {"encoder": module.parts[0]}
    assert module.asked == 0
    fit(module, batches(bad=[]), NaNCapture(tmp_path))
    assert "argument 'scale' of Shown is not among its hparams" in caplog.text
