"""Modules that are not plain: lazy, built late, tied, compiled, parametrized, sparse, checkpointed."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import capture_one

from pytest_nancapture import replay

BAD = 3


class Base(pl.LightningModule):
    """Its loss is divided by a weight that is 0 in one batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, weight = batch
        return self.net(x).pow(2).mean() * (weight / weight)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Lazy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))


class BuiltLate(Base):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        )


class Sparse(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)

    def net(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x > 0).long().sum(1))


class Complex(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def net(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class Checkpointed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    def net(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Compiled(Base):
    def __init__(self, only_when_compiled: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, weight = batch
        bad = not self.hparams.only_when_compiled or torch.compiler.is_compiling()
        return self.net(x).pow(2).mean() * (weight / weight if bad else 1)


def batches() -> list[Any]:
    return [(torch.randn(5, 4), torch.tensor(float(i != BAD))) for i in range(5)]


@pytest.mark.parametrize("kind", [Lazy, BuiltLate, Tied, Parametrized, Sparse, Complex, Checkpointed])
def test_a_module_that_is_not_plain_is_captured_and_replayed(tmp_path, kind):
    """Rebuilt from its class, red, at the batch where the fault lies."""
    torch.manual_seed(0)
    module = kind()
    if kind is Lazy:
        module.net(torch.randn(2, 4))
    bundle = capture_one(module, batches(), tmp_path)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced.runs) == (BAD, 1)
    assert replay(bundle).verdict == "nonfinite"


def test_tied_weights_are_stored_once(tmp_path):
    """Under one name, the other pointing to it."""
    torch.manual_seed(0)
    bundle = capture_one(Tied(), batches(), tmp_path)
    assert bundle.manifest.module.layouts["net.2.weight"] == {"same_as": "net.0.weight"}


def test_a_compiled_module_is_replayed_without_compiling_first(tmp_path):
    """The bundle's names are those of the plain module."""
    torch.manual_seed(0)
    bundle = capture_one(torch.compile(Compiled(), backend="aot_eager"), batches(), tmp_path)
    result = replay(bundle)
    assert (bundle.manifest.module.compiled, result.verdict, result.notes) == (("",), "nonfinite", ())


def test_a_fault_that_only_compiled_code_has_is_replayed_compiled(tmp_path):
    """And the result says so."""
    torch.manual_seed(0)
    module = torch.compile(Compiled(only_when_compiled=True), backend="aot_eager")
    result = replay(capture_one(module, batches(), tmp_path))
    assert (result.verdict, result.notes) == (
        "nonfinite",
        ("finite without torch.compile; this is the replay with it",),
    )


def test_a_submodule_that_a_script_compiled_is_compiled_again(tmp_path):
    """Its parameters have the names they have without compiling."""
    torch.manual_seed(0)
    module = Compiled()
    module.net = torch.compile(module.net, backend="aot_eager")
    bundle = capture_one(module, batches(), tmp_path)
    assert bundle.manifest.module.compiled == ("net",)
    assert replay(bundle).verdict == "nonfinite"
