"""Memory for copies: used again where one copy is as good as another, and nowhere else."""

import pytest
import torch

from pytest_nancapture.step.state.tensors import Pool


class Marked(torch.Tensor):
    """A class of the user's."""


def test_memory_is_used_again():
    """For the same shape and dtype, and filled anew."""
    pool, source = Pool(), torch.arange(6.0)
    (first,) = pool.copies({"x": source}).values()
    pool.give_back([first])
    (second,) = pool.copies({"y": source + 1}).values()
    assert second.data_ptr() == first.data_ptr() != source.data_ptr()
    assert second.tolist() == [1, 2, 3, 4, 5, 6]
    assert pool.copies({"z": source})["z"].data_ptr() != second.data_ptr()


@pytest.mark.parametrize(
    "special",
    [
        torch.arange(6.0).requires_grad_(),
        torch.arange(6.0).as_subclass(Marked),
        torch.arange(6.0).to_sparse(),
        torch.tensor(1.0).expand(6),
    ],
    ids=["requires_grad", "subclass", "sparse", "expanded"],
)
def test_a_special_copy_becomes_no_plain_one(special):
    """Nor the other way round: each is of the same kind as what it was made from."""
    pool, plain = Pool(), torch.ones(6)
    pool.give_back(pool.copies({"special": special, "plain": plain}).values())
    made = pool.copies({"plain": plain, "another": plain, "special": special})
    for name, source in {"plain": plain, "another": plain, "special": special}.items():
        kind = (type(source), source.requires_grad, source.layout)
        assert (type(made[name]), made[name].requires_grad, made[name].layout) == kind
        assert torch.equal(made[name].to_dense(), source.to_dense())
    assert len({id(tensor) for tensor in made.values()}) == len(made)


def test_a_parameter_is_copied_without_its_gradient():
    """Into memory of an earlier copy, which autograd is not to know of."""
    pool, parameter = Pool(), torch.nn.Parameter(torch.ones(3))
    pool.give_back(pool.copies({"p": parameter}).values())
    (made,) = pool.copies({"p": parameter}).values()
    assert (made.requires_grad, made.grad_fn, made.tolist()) == (False, None, [1, 1, 1])
