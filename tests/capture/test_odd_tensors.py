"""Tensors of rare kinds, in buffers and batches: kept where a bundle can hold them, else left alone and named."""

import pytest
import torch
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
