"""Random states: taken, written, read and restored, so that the same numbers are drawn again."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from pytest_nancapture.bundle import rng
from pytest_nancapture.bundle.rng import RandomStates, preserved


def draw() -> list[float]:
    """From each of the generators, also one of a pair of normal numbers, whose other half stays in the state."""
    return [
        torch.rand(()).item(),
        torch.randn(17)[-1].item(),
        float(np.random.rand()),
        float(np.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


@pytest.fixture(autouse=True, name="_seeded")
def seeded() -> None:
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def through(states: RandomStates) -> RandomStates:
    record, tensors = states.encode("6")
    return RandomStates.decode(json.loads(json.dumps(record, allow_nan=False)), tensors)


def test_restoring() -> None:
    """All four draw again what they drew."""
    states = RandomStates.take()
    expected = draw()
    draw()
    states.restore()
    assert expected == draw()


def test_taking_and_restoring_draw_nothing() -> None:
    """Training must not notice that it is watched."""
    states = RandomStates.take()
    expected = draw()
    states.restore()
    RandomStates.take().restore()
    assert expected == draw()


def test_states_are_copies() -> None:
    """What is drawn later does not change what was taken."""
    states = RandomStates.take()
    first = draw()
    states.restore()
    assert first == draw()
    states.restore()
    assert first == draw()


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_through_json_and_tensors(before: int) -> None:
    """States survive being written, wherever in their cycle they are, half a pair of normal numbers included."""
    for _ in range(before):
        np.random.rand()
        random.random()
    draw()
    states = RandomStates.take()
    expected = draw()
    through(states).restore()
    assert expected == draw()


def test_names_of_the_tensors() -> None:
    """They begin with the instant's name, so that several fit one file; all are plain integers."""
    record, tensors = RandomStates.take().encode("6")
    assert sorted(tensors) == ["6/numpy", "6/python", "6/torch/cpu"]
    assert record["name"] == "6"
    assert {torch.uint8, torch.int64} == {tensor.dtype for tensor in tensors.values()}


def test_an_accelerator_that_is_not_here() -> None:
    """The states of a GPU are left out where there is none; the others are restored all the same."""
    states = RandomStates.take()
    foreign = RandomStates(
        {**states.generators, "nonsense:0": torch.zeros(16, dtype=torch.uint8)}, states.numpy, states.python
    )
    expected = draw()
    through(foreign).restore()
    assert expected == draw()


class FakeAccelerator:
    """Stands in for ``torch.cuda`` on a machine without."""

    def __init__(self, count: int, *, used: bool = True) -> None:
        self.states = [torch.full((2,), i, dtype=torch.uint8) for i in range(count)]
        self.used = used
        self.set: dict[int, list[int]] = {}

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return self.states

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.set[device.index or 0] = state.tolist()


class OneByOne(FakeAccelerator):
    """Gives states only when asked for a device's."""

    get_rng_state_all = property()  # type: ignore[assignment]

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index]


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeAccelerator) -> FakeAccelerator:
    monkeypatch.setattr(rng, "_accelerator", lambda: rng._Accelerator("privateuseone", fake))
    return fake


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return install(monkeypatch, FakeAccelerator(2))


@pytest.mark.parametrize("kind", [FakeAccelerator, OneByOne])
def test_every_accelerator_has_a_state(monkeypatch: pytest.MonkeyPatch, kind: type[FakeAccelerator]) -> None:
    """One for each device, restored to where it came from."""
    fake = install(monkeypatch, kind(2))
    states = through(RandomStates.take())
    assert list(states.generators) == ["cpu", "privateuseone:0", "privateuseone:1"]
    states.restore()
    assert fake.set == {0: [0, 0], 1: [1, 1]}


def test_an_accelerator_that_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no states, and is not woken to make some."""
    install(monkeypatch, FakeAccelerator(2, used=False))
    assert list(RandomStates.take().generators) == ["cpu"]


def with_states(kind: str, **numbers: int) -> RandomStates:
    """States with a device's for each of `numbers`: ``_5=9`` is 9 on the sixth device."""
    now = RandomStates.take()
    made = {
        f"{kind}:{index.removeprefix('_')}": torch.tensor([n, n], dtype=torch.uint8) for index, n in numbers.items()
    }
    return RandomStates({"cpu": now.generators["cpu"], **made}, now.numpy, now.python)


@pytest.mark.parametrize(
    ("captured", "index", "expected"),
    [
        ("privateuseone:0", 0, {0: [7, 7], 1: [8, 8]}),
        ("privateuseone:1", 1, {0: [7, 7], 1: [8, 8]}),
        ("privateuseone:1", 0, {0: [8, 8], 1: [8, 8]}),
        ("privateuseone:0", 1, {0: [7, 7], 1: [7, 7]}),
        ("privateuseone:5", 0, {0: [9, 9], 1: [8, 8]}),
        ("privateuseone:5", 1, {0: [7, 7], 1: [9, 9]}),
        ("privateuseone", 1, {0: [7, 7], 1: [7, 7]}),
        ("privateuseone:4", 0, {0: [7, 7], 1: [8, 8]}),
        ("cpu", 0, {0: [7, 7], 1: [8, 8]}),
        ("cuda:1", 0, {0: [7, 7], 1: [8, 8]}),
    ],
)
def test_the_captured_devices_state_goes_to_the_replays(
    accelerator: FakeAccelerator, captured: str, index: int, expected: dict[int, list[int]]
) -> None:
    """All others go to their own device, where it is here; a device that is not named by a number is the first."""
    with_states("privateuseone", _0=7, _1=8, _5=9).moved(captured, torch.device("privateuseone", index)).restore()
    assert accelerator.set == expected


def test_a_replay_on_the_cpu_moves_nothing(accelerator: FakeAccelerator) -> None:
    """The CPU's generator keeps the CPU's state."""
    states = with_states("privateuseone", _0=7, _1=8)
    assert states.moved("privateuseone:1", torch.device("cpu")).generators == states.generators


def test_the_only_state_of_its_kind(accelerator: FakeAccelerator) -> None:
    """Is the captured device's, whatever its number: there were releases that asked for one alone."""
    with_states("privateuseone", _0=7).moved("privateuseone:1", torch.device("privateuseone", 1)).restore()
    assert accelerator.set == {0: [7, 7], 1: [7, 7]}


def test_preserved() -> None:
    """What is drawn inside is not felt outside, also when it ends in an error."""
    states = RandomStates.take()
    expected = draw()
    states.restore()
    with preserved():
        draw()
    with suppress(KeyError), preserved():
        draw()
        raise KeyError
    assert expected == draw()


@pytest.mark.parametrize("missing", ["name", "torch", "numpy", "python"])
def test_a_record_that_lacks_something(missing: str) -> None:
    """The error says what is missing."""
    record, tensors = RandomStates.take().encode("6")
    del record[missing]
    with pytest.raises(ValueError, match=f"rng: not a record of random states: '{missing}'"):
        RandomStates.decode(record, tensors)


@pytest.mark.parametrize("missing", ["6/torch/cpu", "6/numpy", "6/python"])
def test_a_tensor_that_is_missing(missing: str) -> None:
    """The error says which."""
    record, tensors = RandomStates.take().encode("6")
    del tensors[missing]
    with pytest.raises(ValueError, match=f"rng: not a record of random states: '{missing}'"):
        RandomStates.decode(record, tensors)


@pytest.mark.parametrize("record", [{}, {"name": "6", "numpy": 3, "python": 4, "torch": 5}, 3, None])
def test_what_is_no_record(record: Any) -> None:
    """A ValueError, whatever came."""
    _, tensors = RandomStates.take().encode("6")
    with pytest.raises(ValueError, match="rng"):
        RandomStates.decode(record, tensors)


def test_too_short_a_python_state() -> None:
    """Python itself says less about it."""
    record, tensors = RandomStates.take().encode("6")
    tensors["6/python"] = tensors["6/python"][:-1]
    with pytest.raises(ValueError, match=r"rng.safetensors: expected 625 words of python's state, came 624"):
        RandomStates.decode(record, tensors)


def test_a_seed_in_place_of_states() -> None:
    """A record of a seed is what seeding gives."""
    with preserved():
        RandomStates.decode({"seed": 5, "torch": ["cpu"]}, {}).restore()
        drawn = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        assert drawn == (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())


@pytest.mark.parametrize("seed", [-1, "five", 2**70, None])
def test_what_is_no_seed(seed: object) -> None:
    """What is no seed is a clear error."""
    with pytest.raises(ValueError, match=r"rng|Seed|Overflow"):
        RandomStates.decode({"seed": seed, "torch": ["cpu"]}, {})


@pytest.mark.parametrize("devices", [["cuda:0"], ["cpu", "cuda"], ["cpu", "cuda:x"], ["cpu", "cuda:-1"], ["cpu", 3]])
def test_what_are_no_devices(devices: list[Any]) -> None:
    """A record is refused when it is read, not in the middle of a replay."""
    with pytest.raises(ValueError, match="rng: "):
        RandomStates.decode({"seed": 5, "torch": devices}, {})
