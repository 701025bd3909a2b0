"""Arguments that nobody saved: handed on to a base, converted by the constructor, or told by the module itself."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from training import Net, batches, capture_one, fault

from pytest_nancapture import replay


class Relative(nn.Module):
    """Divides by what is 0 where a batch is bad."""

    def forward(self, prediction: Any, good: Any) -> Any:
        return prediction.pow(2).mean() * fault(good)


class Forecast(Net):
    """Saves all but its loss, which it keeps under another name."""

    def __init__(self, loss_fn: nn.Module = nn.MSELoss(), scale: float = 1.0) -> None:  # noqa: B008, as people write it
        super().__init__()
        self.save_hyperparameters(ignore=["loss_fn"])
        self.criterion = loss_fn

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self.layer(batch[0]), batch[1])


class HandsOn(Forecast):
    """Knows nothing of the loss."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width


class Decided(Forecast):
    """Takes what its base takes, but decides upon the loss itself."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(loss_fn=Relative(), **kwargs)
        self.width = width


def converted(loss: nn.Module) -> nn.Module:
    """Itself, if it is one of ours."""
    return loss if isinstance(loss, Relative) else Relative()


class Converts(Forecast):
    """Makes its part of the argument, which may be a part that was made so."""

    def __init__(self, criterion: nn.Module = nn.L1Loss(), scale: float = 1.0) -> None:  # noqa: B008
        super().__init__()
        self.save_hyperparameters(ignore=["criterion"])
        if isinstance(criterion, nn.L1Loss):
            self.criterion = criterion
        else:
            self.criterion = converted(criterion)


class Pickled(Net):
    """Does not save its argument, but is pickled by it."""

    def __init__(self, model_kwargs: dict[str, int]) -> None:
        super().__init__()
        self.told = model_kwargs
        self.layer = nn.Linear(**model_kwargs)

    def __getnewargs_ex__(self) -> Any:
        return (), {"model_kwargs": self.told}


class Keywords(Net):
    """Keeps all keyword arguments as they came."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.kwargs = kwargs
        self.layer = nn.Linear(3, kwargs["width"])


class Merged(Net):
    """Saves a configuration that it made of the one that it was given."""

    def __init__(self, config: dict[str, int], **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters({**config, "made": 1})
        self.layer = nn.Linear(3, self.hparams["width"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Forecast(Relative()),
        lambda: HandsOn(4, loss_fn=Relative()),
        lambda: Decided(4),
        lambda: Converts(Relative()),
        lambda: Pickled({"in_features": 3, "out_features": 2}),
        lambda: Keywords(width=5),
        lambda: Merged({"width": 6}),
    ],
    ids=["kept", "handed on", "decided", "converted", "pickled", "keywords", "merged"],
)
def test_they_are_found_unasked(make: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A bundle of such a module needs no help, and lacks nothing."""
    bundle = capture_one(make(), batches(), tmp_path)
    assert not [record.message for record in caplog.records if "without help" in record.message]
    assert bundle.manifest.module.missing == ()
    assert bundle.fault.reproduced.runs == 1
    assert replay(bundle).verdict == "nonfinite"


def test_a_command_lines_callable_is_its_class() -> None:
    """The parser through which it calls the class is none of the value."""
    pytest.importorskip("jsonargparse", reason="pip install -e '.[integration]'")
    from jsonargparse import ArgumentParser

    from pytest_nancapture.bundle.values.decode import Decoder
    from pytest_nancapture.bundle.values.encode import Encoder
    from pytest_nancapture.bundle.values.references import LiveResolver

    parser = ArgumentParser(exit_on_error=False)
    kind = "typing.Callable[[list], torch.optim.Optimizer]"
    parser.add_argument("--optimizer", type=eval(kind, {"typing": __import__("typing"), "torch": torch}))
    config = parser.parse_args(["--optimizer=torch.optim.SGD", "--optimizer.lr=0.25"])
    made = parser.instantiate_classes(config).optimizer
    back = Decoder({}, LiveResolver()).decode(Encoder().encode(made, "optimizer"))
    assert (functools.partial, torch.optim.SGD, 0.25) == (type(back), back.func, back.keywords["lr"])


def test_nodes_of_a_schema_are_compared_by_value() -> None:
    """A configuration with a type for each value is the same as one without, if their values are."""
    import dataclasses

    omegaconf = pytest.importorskip("omegaconf", reason="pip install -e '.[integration]'")
    from pytest_nancapture.step.state.compare import Comparison

    schema = dataclasses.make_dataclass("Schema", [("width", int, 3)])
    live, built = Net(), Net()
    live.config, built.config = omegaconf.OmegaConf.structured(schema), omegaconf.OmegaConf.create({"width": 3})
    assert Comparison(live, built, (), ()).differences() == []
    built.config.width = 4
    (difference,) = Comparison(live, built, (), ()).differences()
    assert (difference.way[0].name, difference.value) == ("config", live.config)
