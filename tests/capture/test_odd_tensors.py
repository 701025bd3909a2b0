"""Tensors of rare kinds, in buffers and batches: kept where a bundle can hold them, else left alone and named."""

import pytest
import torch
from torch import Tensor
from training import Net, batches, capture_one, fit

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles, replay

SPARSE = torch.sparse_coo_tensor([[1, 1, 2], [1, 1, 0]], [1.0, 2.0, 3.0], (3, 3))
WRITABLE = {
    "coo": SPARSE.coalesce(),
    "uncoalesced": SPARSE,
    "csr": SPARSE.to_dense().to_sparse_csr(),
    "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
    "conjugate": torch.complex(torch.ones(3), torch.ones(3)).conj(),
    "expanded": torch.arange(3.0).expand(4, 3),
    "fp8": torch.ones(3).to(torch.float8_e4m3fn),
}
UNWRITABLE = {
    "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensors have no form in a bundle"),
    "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized tensors"),
    "mkldnn": (torch.ones(2, 2).to_mkldnn(), "tensors of layout torch._mkldnn have no form in a bundle"),
    "masked": (
        torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
        "a MaskedTensor keeps its values in other tensors",
    ),
}


class Odd(Net):
    """Has a buffer, and uses a sparse matrix of its own or of the batch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.register_buffer("odd", WRITABLE[kind] if kind in WRITABLE else UNWRITABLE[kind][0])

    def training_step(self, batch, batch_idx):
        x, good, *more = batch
        for matrix in (self.odd, *more):
            if matrix.layout in (torch.sparse_coo, torch.sparse_csr):
                x = (matrix @ x.T).T
        return super().training_step((x, good), batch_idx)


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_buffer(kind, tmp_path):
    """As it was, in the rerun and in the replay."""
    bundle = capture_one(Odd(kind), batches(), tmp_path)
    assert bundle.fault.reproduced.runs == 1
    assert replay(bundle).verdict == "nonfinite"


@pytest.mark.parametrize("kind", WRITABLE)
def test_in_a_batch(kind, tmp_path):
    """The same, several steps in a row, each with a copy of its own."""
    data = [(*batch, WRITABLE[kind]) for batch in batches()]
    bundle = capture_one(Odd("expanded"), data, tmp_path)
    assert bundle.fault.reproduced.runs == 1
    assert replay(bundle).verdict == "nonfinite"


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_buffer_that_no_bundle_can_hold(kind, tmp_path, caplog):
    """Named when training starts; training goes on with it, and a fault still ends the run."""
    module = Odd(kind)
    before = module.odd
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(module, batches(), NaNCapture(tmp_path))
    assert f"this run will write no bundle: odd: {UNWRITABLE[kind][1]}" in caplog.text
    assert f"no bundle: odd: {UNWRITABLE[kind][1]}" in caplog.text
    assert list(find_bundles(tmp_path)) == []
    assert module.odd is before


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_harmless_without_a_fault(kind, tmp_path):
    """To the end of training, and the buffer is still there."""
    module = Odd(kind)
    before, weight = module.odd, module.layer.weight.detach().clone()
    fit(module, batches(bad=()), NaNCapture(tmp_path))
    assert module.odd is before
    assert not torch.equal(module.layer.weight, weight)


class Labelled(Tensor):
    """Has labels, which its own methods need, as a library's: without them it can neither be copied nor looked at."""

    @staticmethod
    def of(values: Tensor, labels: list[str]) -> "Labelled":
        made = values.as_subclass(Labelled)
        made.labels = labels
        return made

    def clone(self, *args, **kwargs):
        return Labelled.of(super().clone(*args, **kwargs), list(self.labels))

    def detach(self):
        raise NotImplementedError("nobody asked for it")


class WithLabels(Net):
    """Keeps one, and is given one."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        self.grid = Labelled.of(torch.linspace(0, 1, 3), ["x"]) if odd else torch.linspace(0, 1, 3)
        self.seen = 0.0

    def training_step(self, batch, batch_idx):
        x, good = batch
        self.seen += float(self.grid.as_subclass(Tensor).sum())
        return (self.layer(x.as_subclass(Tensor)) * self.grid.as_subclass(Tensor)).mean() * (good / good)


def labelled(data):
    return [(Labelled.of(x, ["x"]), good) for x, good in data]


def test_a_subclass_with_methods_of_its_own(tmp_path):
    """None of its methods is called: not to take it, nor to look at it, to write it or to compare it."""
    bundle = capture_one(WithLabels(), labelled(batches()), tmp_path)
    assert bundle.fault.reproduced.runs == 1
    assert bundle.manifest.module.missing == ()
    result = replay(bundle, trace=True)
    assert result.verdict == "nonfinite"
    assert result.culprit is not None
    assert "good / good" in result.culprit.source


def test_a_subclass_changes_no_healthy_run(tmp_path):
    """The same weights as with plain tensors, to the bit."""
    torch.manual_seed(0)
    odd = WithLabels()
    torch.manual_seed(0)
    plain = WithLabels(odd=False)
    fit(odd, labelled(batches(bad=[])), NaNCapture(tmp_path))
    fit(plain, batches(bad=[]), None)
    assert torch.equal(odd.layer.weight, plain.layer.weight)


class Touchy(dict):
    """Raises when it is looked into."""

    def values(self):
        raise RuntimeError("not now")


def test_a_container_that_cannot_be_looked_into(tmp_path):
    """It is let be, training goes on, and a fault is captured."""
    module = Odd("expanded")
    module.touchy = Touchy(a=[1])
    bundle = capture_one(module, batches(), tmp_path)
    assert replay(bundle).verdict in ("nonfinite", "vacuous")


class MakesItsOwn(Net):
    """Makes such a tensor in a way that torch refuses while operations are followed."""

    def training_step(self, batch, batch_idx):
        x, good = batch
        values = torch.ones(3)
        return super().training_step((x * Tensor.__new__(Labelled, values).as_subclass(Tensor), good), batch_idx)


def test_operations_that_cannot_be_followed(tmp_path, caplog):
    """The bundle is proven all the same, and it is said why there is no culprit."""
    bundle = capture_one(MakesItsOwn(), batches(), tmp_path)
    assert bundle.fault.reproduced.runs == 1
    assert "no culprit: its operations could not be followed, since the rerun raised" in caplog.text
    assert replay(bundle).verdict == "nonfinite"
