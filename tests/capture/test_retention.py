"""The folder of bundles: how many, which, and what happens when none can be written."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import Net, batches, bundles_in, fit

from pytest_nancapture import NaNCapture, NonFiniteError, find_bundles
from pytest_nancapture.bundle import paths
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.capture import export


class ManyFaults(Net):
    """Batch i spoils the parameter that its second part names; -1 spoils none."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(1) for _ in range(4))

    def training_step(self, batch, batch_idx):
        x, which = batch
        loss = self.layer(x).pow(2).mean()
        for i, scale in enumerate(self.scales):
            loss = loss + (scale * float(i != which)).abs().sqrt().sum()
        return loss


def faults(*which: int) -> list[Any]:
    return [(x, number) for (x, _), number in zip(batches(len(which)), which, strict=True)]


def lines(caplog: Any) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pytest_nancapture"]


def test_duplicates_of_a_fault_are_counted_and_not_stored_again(tmp_path, caplog, monkeypatch):
    """In the bundle of the first, which stays whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "_STARTED_IN", tmp_path)
    fit(ManyFaults(), faults(0, -1, 0, 1, 0), NaNCapture("b", on_capture="skip"))
    assert bundles_in("b") == ["step-000000-rank-0", "step-000003-rank-0"]
    first, second = (Bundle.open(path) for path in find_bundles("b"))
    assert (first.fault.seen, second.fault.seen) == (3, 1)
    first.verify()
    place = Path("b") / "step-000000-rank-0"
    assert [line for line in lines(caplog) if "same fault" in line] == [
        f"nancapture: the same fault as in {place}, seen 2 times",
        f"nancapture: the same fault as in {place}, seen 3 times",
    ]


def test_the_newest_distinct_faults_are_kept(tmp_path, caplog, monkeypatch):
    """The oldest makes room, and the log says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "_STARTED_IN", tmp_path)
    fit(ManyFaults(), faults(0, 1, 0, 2, 3), NaNCapture("b", on_capture="skip", max_bundles=2))
    assert bundles_in("b") == ["step-000003-rank-0", "step-000004-rank-0"]
    assert [line for line in lines(caplog) if "removed" in line] == [
        f"nancapture: removed {Path('b') / 'step-000000-rank-0'}: max_bundles=2 keeps the newest",
        f"nancapture: removed {Path('b') / 'step-000001-rank-0'}: max_bundles=2 keeps the newest",
    ]


def test_a_fault_that_made_room_is_stored_again_when_it_comes_again(tmp_path):
    """It is one of the newest then."""
    fit(ManyFaults(), faults(0, 1, 0), NaNCapture(tmp_path, on_capture="skip", max_bundles=1))
    assert bundles_in(tmp_path) == ["step-000002-rank-0"]


def test_a_bundle_that_was_taken_away_is_stored_again(tmp_path):
    """Somebody may have moved it while the run went on."""

    class Moves(ManyFaults):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 0:
                (tmp_path / "step-000000-rank-0").rename(tmp_path / "mine")

    fit(Moves(), faults(0, 0), NaNCapture(tmp_path, on_capture="skip"))
    assert bundles_in(tmp_path) == ["mine", "step-000001-rank-0"]


def test_bundles_of_earlier_runs_are_let_be(tmp_path):
    """Neither counted nor removed."""
    for _ in range(3):
        fit(ManyFaults(), faults(0, 1), NaNCapture(tmp_path, on_capture="skip", max_bundles=1))
    assert bundles_in(tmp_path) == ["step-000001-rank-0", "step-000001-rank-0-2", "step-000001-rank-0-3"]


def test_no_bundle_is_written_where_none_is_wanted(tmp_path, caplog):
    """The fault is acted upon all the same."""
    message = (
        "step 4: nan in loss, 2 of 2 gradients not finite; no bundle was written; the weights are as they were before "
        "the step"
    )
    with pytest.raises(NonFiniteError, match=f"^{re.escape(message)}$") as caught:
        fit(Net(), batches(), NaNCapture(tmp_path / "b", max_bundles=0))
    assert caught.value.bundle is None
    assert not (tmp_path / "b").exists()
    assert lines(caplog)[-1] == "nancapture: no bundle: max_bundles=0"


class Locked(Net):
    """Its batches carry what cannot be written."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["good"]), batch_idx)


def locked_batches() -> list[Any]:
    return [{"x": x, "good": good, "meta": [threading.Lock()]} for x, good in batches()]


def test_a_batch_that_cannot_be_written_is_named(tmp_path, caplog):
    """With its path and the remedy; the training error is raised, and nothing lies in the folder."""
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(Locked(), locked_batches(), NaNCapture(tmp_path / "b"))
    assert lines(caplog)[-1] == (
        "nancapture: no bundle: batch['meta'][0]: a _thread.lock cannot be written; turn it into tensors, numbers, "
        "strings or containers of them"
    )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("on_capture", ["stop", "skip"])
def test_a_run_ends_as_it_was_to_end_though_nothing_can_be_written(on_capture, tmp_path, caplog):
    """Stopped or trained on."""
    in_the_way = tmp_path / "b"
    in_the_way.write_text("a file where the folder should be")
    trainer = fit(Net(), batches(), NaNCapture(in_the_way, on_capture=on_capture))
    assert (trainer.state.status, trainer.global_step) == ("finished", 5 if on_capture == "stop" else 6)
    assert f"nancapture: no bundle: [Errno {errno.EEXIST}] File exists: {str(in_the_way)!r}" in lines(caplog)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("file", ["weights.safetensors", "rng.safetensors", "bundle.json"])
def test_an_error_of_the_disk_hides_nothing_and_leaves_nothing(number, file, tmp_path, caplog, monkeypatch):
    """Whichever file it comes at."""
    original = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == file:
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(Net(), batches(), NaNCapture(tmp_path / "b"))
    assert lines(caplog)[-1].startswith(f"nancapture: no bundle: [Errno {number}] {os.strerror(number)}: ")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no file system may be mounted here: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


class Large(Net):
    """Half a megabyte of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2**17))


def test_a_full_disk_hides_nothing_and_leaves_nothing(tiny_disk, caplog):
    """A real one, which runs full in the midst of a file."""
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(Large(), batches(), NaNCapture(tiny_disk / "b"))
    assert lines(caplog)[-1].startswith(f"nancapture: no bundle: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}")
    assert list((tiny_disk / "b").iterdir()) == []


def test_a_disk_that_is_full_when_a_fault_is_counted_spoils_no_bundle(tmp_path, caplog, monkeypatch):
    """The count stays as it was, and the bundle whole."""

    def refuse(path, text):
        path.write_text(text[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pytest_nancapture.capture.retention.write_text", refuse)
    fit(ManyFaults(), faults(0, 0), NaNCapture(tmp_path, on_capture="skip"))
    (path,) = find_bundles(tmp_path)
    Bundle.open(path).verify()
    assert Bundle.open(path).fault.seen == 1
    assert sorted(entry.name for entry in path.iterdir()) == [
        "batch.safetensors",
        "bundle.json",
        "rng.safetensors",
        "weights.safetensors",
    ]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, TypeError, AttributeError])
def test_an_error_nobody_thought_of_does_not_replace_the_fault(error, tmp_path, caplog, monkeypatch):
    """Out of memory on the device, say, while the weights are copied."""

    def fail(*args, **kwargs):
        raise error("of some kind")

    monkeypatch.setattr(export, "write_bundle", fail)
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(Net(), batches(), NaNCapture(tmp_path))
    assert lines(caplog)[-1] == f"nancapture: no bundle: {error.__name__}: of some kind"


class Odd:
    """Registered as a tree, and not to be taken apart."""


def refuse_to_flatten(value):
    raise TypeError("no leaves here")


torch.utils._pytree.register_pytree_node(Odd, refuse_to_flatten, lambda leaves, context: Odd())


def test_a_batch_that_cannot_even_be_looked_at_does_no_harm(tmp_path, caplog):
    """Training is as it was, and the log says why there is no bundle."""

    def data(**kwargs):
        return [{"x": x, "good": good, "odd": Odd()} for x, good in batches(**kwargs)]

    fit(Locked(), data(bad=[]), NaNCapture(tmp_path / "b"))
    with pytest.raises(NonFiniteError, match="no bundle was written"):
        fit(Locked(), data(), NaNCapture(tmp_path / "b"))
    assert lines(caplog)[-1] == (
        "nancapture: no bundle: batch: looking at it raised TypeError: no leaves here; turn it into tensors, numbers, "
        "strings or containers of them"
    )


SCRIPT = """\
import sys
sys.path.insert(0, {here!r})
from training import Net, batches, fit
from pytest_nancapture import NaNCapture
import pathlib, time
ready = pathlib.Path({ready!r})
(ready / sys.argv[1]).touch()
while len(list(ready.iterdir())) < 2:
    time.sleep(0.001)
for _ in range(5):
    fit(Net(), batches(), NaNCapture({folder!r}, on_capture="skip"))
"""


def test_two_runs_may_write_into_one_folder(tmp_path):
    """At the same time; each bundle is whole and has a name of its own."""
    ready = tmp_path / "ready"
    ready.mkdir()
    script = SCRIPT.format(here=str(Path(__file__).parents[1]), folder=str(tmp_path / "b"), ready=str(ready))
    commands = [[sys.executable, "-c", script, name] for name in ("first", "second")]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    names = ["step-000004-rank-0", *(f"step-000004-rank-0-{i}" for i in range(2, 11))]
    assert sorted(bundles_in(tmp_path / "b")) == sorted(names)
    for path in find_bundles(tmp_path / "b"):
        Bundle.open(path).verify()
    assert sorted(entry.name for entry in (tmp_path / "b").iterdir()) == sorted(names)


def test_weights_of_two_bundles_are_stored_once(tmp_path, monkeypatch):
    """Where steps are skipped the weights stay as they are; without hard links each bundle has its own."""
    fit(ManyFaults(), faults(0, 1), NaNCapture(tmp_path / "linked", on_capture="skip"))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    fit(ManyFaults(), faults(0, 1), NaNCapture(tmp_path / "copied", on_capture="skip"))
    nodes = {}
    for folder in ("linked", "copied"):
        paths = find_bundles(tmp_path / folder)
        for path in paths:
            Bundle.open(path).verify()
            assert len(list(path.iterdir())) == 4
        nodes[folder] = len({(path / "weights.safetensors").stat().st_ino for path in paths})
    assert nodes == {"linked": 1, "copied": 2}
