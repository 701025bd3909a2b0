"""The step is rerun in place to see whether its fault comes back; the run that goes on does not notice."""

import random
from collections import deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from training import Net, NormNet, batches, bundles_in, capture_one, differing, fault, fit, replayed, state_of

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import Reproduced

FAILURES: list[int] = []


class Transient(Net):
    """Fails in some of its calls only, whatever the batch."""

    calls = 0
    bad_calls: tuple[int, ...] = ()

    def training_step(self, batch, batch_idx):
        call, type(self).calls = self.calls, self.calls + 1
        return super().training_step((batch[0], torch.tensor(float(call not in self.bad_calls))), batch_idx)


@pytest.mark.parametrize(
    ("confirm", "bad_calls", "expected"),
    [
        (0, [4], (0, 0)),
        (1, [4], (0, 1)),
        (1, [4, 5], (0, 1)),
        (1, [4, 5, 6], (1, 1)),
        (3, [4], (0, 3)),
        (3, [4, 9], (1, 3)),
        (3, [4, 5, 6, 7, 8, 9, 10], (3, 3)),
    ],
)
def test_a_bundle_says_how_often_its_fault_came_back(confirm, bad_calls, expected, tmp_path, monkeypatch):
    """Of so many replays of it as were asked for; the reruns of the run's own step, before them, do not count."""
    monkeypatch.setattr(Transient, "calls", 0)
    monkeypatch.setattr(Transient, "bad_calls", tuple(bad_calls))
    bundle = capture_one(Transient(), batches(bad=[]), tmp_path, confirm=confirm, trace=False)
    assert (bundle.fault.reproduced.runs, bundle.fault.reproduced.of) == expected
    assert Transient.calls == 5 + 2 * confirm


def test_a_transient_fault_is_kept_and_labelled(tmp_path, monkeypatch, caplog):
    """The log says what it may mean."""
    monkeypatch.setattr(Transient, "calls", 0)
    monkeypatch.setattr(Transient, "bad_calls", (4,))
    bundle = capture_one(Transient(), batches(bad=[]), tmp_path)
    assert bundle.fault.found_in == ("loss", "gradients")
    lines = [record.message for record in caplog.records if record.name == "pytest_nancapture"]
    assert lines[1].endswith("reproduced 0 of 1 in this process")
    assert lines[2] == (
        "nancapture: transient: the fault did not come back when the step was rerun; it may hang on "
        "non-deterministic kernels, on hardware, or on state that no bundle holds, and cannot gate anything"
    )


class Raises(Net):
    """Its second run of the bad batch raises."""

    runs = 0

    def training_step(self, batch, batch_idx):
        type(self).runs += 1
        if self.runs == 6:
            raise LookupError("no such luck")
        return super().training_step(batch, batch_idx)


def test_a_rerun_that_raises_hides_nothing(tmp_path, monkeypatch, caplog):
    """The fault is captured all the same, the log says why, and the bundle's own replay proves it."""
    monkeypatch.setattr(Raises, "runs", 0)
    bundle = capture_one(Raises(), batches(), tmp_path)
    assert (bundle.fault.batch_idx, bundle.fault.reproduced) == (4, Reproduced(runs=1, of=1, how="here"))
    assert "nancapture: rerunning the step in place raised LookupError: no such luck" in caplog.text


class Interrupts(Raises):
    def training_step(self, batch, batch_idx):
        type(self).runs += 1
        if self.runs == 6:
            raise KeyboardInterrupt
        return Net.training_step(self, batch, batch_idx)


def test_an_interrupt_during_a_rerun_ends_the_run(tmp_path, monkeypatch):
    """With everything put back."""
    monkeypatch.setattr(Interrupts, "runs", 0)
    module, states = Interrupts(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            states.append(state_of(pl_module))

    with pytest.raises(SystemExit):
        fit(module, batches(), NaNCapture(tmp_path), callbacks=[Keep()])
    assert differing(state_of(module), states[4]) == []
    assert [name for name in vars(module) if name in ("log", "on_after_backward", "on_train_batch_start")] == []
    assert module.trainer.callbacks != []


class Metric(nn.Module):
    """Its state in attributes, as torchmetrics has it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())
        self.values: list[torch.Tensor] = []
        self.updates = 0

    def update(self, value):
        self.total += value
        self.values.append(value)
        self.updates += 1


class Notes:
    """A plain object that the module counts with."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[int] = []


class Remembers(NormNet):
    """Keeps state in every kind of place, and is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = Metric()
        self.count = 0
        self.seen: list[Any] = [[0], {"deep": [torch.zeros(2)]}]
        self.by_name: dict[str, Any] = {"a": {"b": 1}}
        self.last = deque([1, 2], maxlen=4)
        self.names = {"x"}
        self.window = torch.zeros(3)
        self.array = np.zeros(3)
        self.bytes = bytearray(b"ab")
        self.generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(1)
        self.own_random = random.Random(1)
        self.notes = Notes()
        self.register_buffer("fresh", None)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = loss.detach().nan_to_num(7.0)
        self.metric.update(value)
        self.count += 1
        self.seen[0][0] += 1
        self.seen[1]["deep"][0] += value
        self.seen.append(value)
        self.by_name["a"]["b"] += 1
        self.by_name[f"batch {len(self.by_name)}"] = value
        self.last.append(self.count)
        self.names.add(f"name {len(self.names)}")
        self.window[batch_idx % 3] += value
        self.array += float(value)
        self.bytes.append(7)
        self.notes.count += 1
        self.notes.seen.append(self.count)
        self.late = getattr(self, "late", 0) + 1
        draws = torch.rand((), generator=self.generator) + self.numpy_generator.random() + self.own_random.random()
        draws = draws + torch.rand(()) + np.random.rand() + random.random()
        self.fresh = draws if self.fresh is None else self.fresh + draws
        self.log("loss", value, on_step=True, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"direct": float(value)})
        return loss + draws * self.layer(batch[0]).mean()

    @property
    def memory(self) -> str:
        """All of it, in words."""
        parts = [self.count, self.seen, self.by_name, list(self.last), sorted(self.names), self.window, self.array]
        parts += [self.bytes, self.notes.count, self.notes.seen, self.late, self.metric.total, self.metric.values]
        return repr([*parts, self.metric.updates])


class Diary(pl.Callback):
    """What other callbacks can see of a run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        draws = torch.get_rng_state().sum(), np.random.get_state()[1].sum(), hash(random.getstate())
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.lines.append(
            f"{batch_idx} {trainer.global_step} {loop.batch_progress} {loop.total_batch_idx} {metrics} {draws}"
            f"{pl_module.memory}"
        )

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.lines.append("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.lines.append("after backward")

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.lines.append("zero grad")


class Logger(DummyLogger):
    """Counts what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.given.append((args, kwargs))


class RemembersManually(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize(("make", "accumulate"), [(Remembers, 1), (Remembers, 2), (RemembersManually, 1)])
def test_nothing_that_a_rerun_does_is_visible(make, accumulate, tmp_path):
    """A run that goes on after ``skip`` is the same with three reruns as with none."""
    runs = []
    for confirm in (0, 3):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        module, diary, logger = make(), Diary(), Logger()
        capture = NaNCapture(tmp_path / str(confirm), on_capture="skip", confirm=confirm)
        kwargs = {} if make is RemembersManually else {"accumulate_grad_batches": accumulate}
        fit(module, batches(8), capture, callbacks=[diary], logger=logger, log_every_n_steps=1, **kwargs)
        runs.append((module, diary, logger))
    (module, diary, logger), (other, others, others_logger) = runs
    assert others.lines == diary.lines
    assert others_logger.given == logger.given
    assert differing(state_of(module), state_of(other)) == []
    assert bundles_in(tmp_path / "0") == bundles_in(tmp_path / "3") == [f"step-{4 // accumulate:06d}-rank-0"]
    (path,) = find_bundles(tmp_path / "3")
    assert Bundle.open(path).fault.reproduced.runs == 3


def test_a_rerun_for_certainty_is_made_though_none_was_asked_for(tmp_path):
    """A loss that is bad beside good gradients may be one that user code dealt with; the bundle counts no reruns."""

    class Adds(Net):
        def training_step(self, batch, batch_idx):
            FAILURES.append(batch_idx)
            return self.layer(batch[0]).mean() + fault(batch[1])

    FAILURES.clear()
    bundle = capture_one(Adds(), batches(), tmp_path, confirm=0)
    assert bundle.fault.reproduced.of == 0
    assert FAILURES == [0, 1, 2, 3, 4, 4]


def test_a_bundle_that_never_reproduced_replays_as_what_it_is(tmp_path, monkeypatch):
    """Green, since the fault is not in it."""
    monkeypatch.setattr(Transient, "calls", 0)
    monkeypatch.setattr(Transient, "bad_calls", (4,))
    bundle = capture_one(Transient(), batches(bad=[]), tmp_path)
    monkeypatch.setattr(Transient, "calls", 100)
    assert replayed(bundle)[0].verdict == "finite"


def test_the_error_is_raised_though_nothing_reproduced(tmp_path, monkeypatch):
    """The fault was real when it was seen."""
    monkeypatch.setattr(Transient, "calls", 0)
    monkeypatch.setattr(Transient, "bad_calls", (4,))
    with pytest.raises(NonFiniteError, match=r"^step 4: nan in loss, 2 of 2 gradients not finite; bundle "):
        fit(Transient(), batches(bad=[]), NaNCapture(tmp_path))
