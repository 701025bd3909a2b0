"""Buffers as they were: copies where they change, one copy for all steps where they do not."""

import torch
from torch import nn
from training import Net, batches, capture_one

from pytest_nancapture import replay
from pytest_nancapture.bundle.tensors.file import read_tensors
from pytest_nancapture.step.state.inventory import Inventory
from pytest_nancapture.step.state.tensors import Pool, Snapshots

LARGE = 2**16 + 1


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(LARGE, dtype=torch.float32))
        self.register_buffer("small", torch.zeros(3))


def snapshots(module: nn.Module) -> Snapshots:
    return Snapshots(Inventory(module), Pool())


def test_a_large_buffer_that_nothing_writes_to_is_copied_once():
    """A small one each time: that costs less than to find out."""
    taken = snapshots(module := Tables())
    first, second = taken.take({}, by_value=False), taken.take({}, by_value=True)
    assert first["table"] is second["table"]
    assert first["table"].data_ptr() != module.table.data_ptr()
    assert first["small"] is not second["small"]


def test_memory_given_back_is_not_that_of_a_constant():
    """Else the next copies would go over it."""
    taken = snapshots(module := Tables())
    first = taken.take({}, by_value=False)
    taken.give_back(first.values())
    module.other = nn.Parameter(torch.full((LARGE,), 7.0))
    later = taken.take({"other": module.other}, by_value=False)
    assert torch.equal(later["table"], module.table)
    assert bool((later["other"] == 7).all())


def test_a_large_buffer_is_copied_anew_from_its_first_change_on():
    """The copy from before stays what it was."""
    taken = snapshots(module := Tables())
    first = taken.take({}, by_value=False)
    module.table.mul_(2)
    second = taken.take({}, by_value=False)
    module.table.data.mul_(2)
    third = taken.take({}, by_value=False)
    assert [float(copy["table"][1]) for copy in (first, second, third)] == [1, 2, 4]


def test_a_write_past_the_version_counter_is_seen_by_value():
    """As it is looked for in the first steps, and then ever more rarely."""
    taken = snapshots(module := Tables())
    taken.take({}, by_value=True)
    module.table.data.mul_(2)
    assert float(taken.take({}, by_value=True)["table"][1]) == 2


def test_another_tensor_in_its_place_is_a_change():
    """Though it has never been written to."""
    taken = snapshots(module := Tables())
    taken.take({}, by_value=False)
    module.table = torch.zeros(LARGE)
    assert float(taken.take({}, by_value=False)["table"][1]) == 0


class PoisonsLate(Net):
    """Writes into a large table for the first time at the bad step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(LARGE, dtype=torch.float32))

    def training_step(self, batch, batch_idx):
        x, good = batch
        if not good:
            self.table.mul_(good / good)
        return self.layer(x).pow(2).mean() + self.table[1]


def test_the_bundle_holds_a_table_from_before_the_first_step_that_wrote_to_it(tmp_path):
    """And that step can be replayed."""
    bundle = capture_one(PoisonsLate(), batches(), tmp_path)
    stored = read_tensors(bundle.path / "weights.safetensors", bundle.manifest.module.layouts)
    assert torch.equal(stored["table"], torch.arange(LARGE, dtype=torch.float32))
    assert replay(bundle).verdict == "nonfinite"
