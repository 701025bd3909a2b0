"""Pinning: only what was seen red becomes a fixture, and it becomes one whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import write_bundle

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import PinRecord, Reproduced
from pytest_nancapture.errors import BundleDamagedError, DeviceUnavailableError, PinError
from pytest_nancapture.shrink import pin as module
from pytest_nancapture.shrink.pin import pin, replay_afresh

if TYPE_CHECKING:
    from pathlib import Path

NAME = "step-000812-rank-0"
RED = {"verdict": "nonfinite", "reason": "the loss is nan"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "nan-bundles" / NAME)


@pytest.fixture
def fixtures(tmp_path: Path) -> Path:
    return tmp_path / "fixtures"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the replays answer, in order; one that was not expected fails the test."""
    queue: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "replay_afresh", lambda bundle, device: queue.pop(0))
    return queue


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_red_bundle_is_copied(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """The copy is the bundle byte for byte, the source is left as it was, and nothing else appears."""
    before = content(source)
    answers.append(RED)
    pinned = pin(source, fixtures)
    assert (Bundle.open(fixtures / NAME), RED) == (pinned.bundle, pinned.result)
    assert before == content(source) == content(fixtures / NAME)
    assert [fixtures / NAME] == list(fixtures.iterdir())


def test_the_device_is_passed_on(source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay gets the bundle's folder and the device."""
    asked = []

    def answer(*args: Any) -> dict[str, Any]:
        asked.append(args)
        return RED

    monkeypatch.setattr(module, "replay_afresh", answer)
    pin(source / "bundle.json", fixtures, device="cuda:1")
    assert [(source, "cuda:1")] == asked


@pytest.mark.parametrize(
    ("verdict", "advice"),
    [
        ("finite", "If the fault is fixed already, check out the code that still has it and pin it there."),
        ("vacuous", "Bring back the code that it was captured with, or capture it anew."),
        ("mismatch", "Bring back the code that it was captured with, or capture it anew."),
        ("error", "If only your pytest hooks can build the module, see it fail with pytest --nan-bundles=... first."),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_red_is_refused(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], verdict: str, advice: str, known: bool
) -> None:
    """Every other verdict is refused, also for a known fault; the error gives the verdict and the ways out."""
    answers.append({"verdict": verdict, "reason": "as it were"})
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, known=known)
    expected = (
        f"{source}: not pinned, since it is not red: expected a replay that is nonfinite, came {verdict} (as it were)\n"
        f"  A test that was never red proves nothing. {advice}\n"
        "  --force pins it all the same; --known is for a red bundle whose fault stays open for now (a strict xfail)."
    )
    assert expected == str(caught.value)
    assert not fixtures.exists()


def test_force_asks_no_replay(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """A forced pin copies at once and says that nothing was shown."""
    assert not answers
    assert pin(source, fixtures, force=True).result is None
    assert content(source) == content(fixtures / NAME)


def test_a_known_fault_is_marked(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """Only the mark differs, and only in the copy."""
    answers.append(RED)
    before = content(source)
    pin(source, fixtures, known=True)
    copy = content(fixtures / NAME)
    changed = copy.pop("bundle.json").decode()
    assert '"pin": {\n  "known": true\n }' in changed
    assert Bundle.open(fixtures / NAME).known
    assert before == content(source)
    assert copy == {name: text for name, text in before.items() if name != "bundle.json"}


def test_the_mark_goes_when_pinned_plainly(tmp_path: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """A bundle once pinned as known, pinned again without it, is an ordinary fixture."""
    answers.append(RED)
    pin(write_bundle(tmp_path / "old" / NAME, pin=PinRecord(known=True)), fixtures)
    assert Bundle.open(fixtures / NAME).manifest.pin == PinRecord(known=False)


@pytest.mark.parametrize(("of", "after"), [(0, Reproduced(runs=1, of=1)), (2, Reproduced(runs=1, of=3))])
def test_a_red_replay_counts_where_capture_saw_none(
    tmp_path: Path, fixtures: Path, answers: list[dict[str, Any]], of: int, after: Reproduced
) -> None:
    """A bundle that did not come back at capture, but does now, is able to gate."""
    answers.append(RED)
    pin(write_bundle(tmp_path / NAME, fault={"reproduced": Reproduced(runs=0, of=of)}), fixtures)
    assert after == Bundle.open(fixtures / NAME).fault.reproduced


def test_a_forced_pin_counts_nothing(tmp_path: Path, fixtures: Path) -> None:
    """Without a replay there is nothing to count."""
    pin(write_bundle(tmp_path / NAME, fault={"reproduced": Reproduced(runs=0, of=1)}), fixtures, force=True)
    assert Bundle.open(fixtures / NAME).fault.reproduced == Reproduced(runs=0, of=1)


def test_only_the_bundles_own_files_are_copied(source: Path, fixtures: Path) -> None:
    """What else lies in the folder stays there."""
    (source / "evil.pkl").write_bytes(b"cos\nsystem\n.")
    pin(source, fixtures, force=True)
    expected = ["batch.safetensors", "bundle.json", "rng.safetensors", "weights.safetensors"]
    assert expected == sorted(content(fixtures / NAME))


def test_another_name(source: Path, fixtures: Path) -> None:
    """The copy's name may be chosen."""
    assert fixtures / "empty-class" == pin(source, fixtures, name="empty-class", force=True).bundle.path


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "../a"])
def test_a_name_that_leads_elsewhere(source: Path, fixtures: Path, name: str) -> None:
    """A name is one plain folder, and a hidden one would never be found again."""
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, name=name, force=True)
    assert f"expected a plain folder name that does not start with a dot, came {name!r}" == str(caught.value)
    assert not fixtures.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_place_that_is_taken(source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool) -> None:
    """A pinned bundle is never replaced, not even by force, and no replay is made for nothing."""
    pin(source, fixtures, force=True)
    before = content(fixtures / NAME)
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=force)
    expected = (
        f"{fixtures / NAME}: not pinned: something of that name exists already; give another name with --name=NAME, "
        "or remove that folder first"
    )
    assert expected == str(caught.value)
    assert before == content(fixtures / NAME)


def test_a_bundle_that_is_pinned_already(source: Path) -> None:
    """Pinning a bundle where it lies is said to be needless."""
    with pytest.raises(PinError, match="not pinned: it is pinned there already"):
        pin(source, source.parent, force=True)


def test_a_file_in_place_of_the_folder(source: Path, fixtures: Path) -> None:
    """A mistyped folder is named."""
    fixtures.write_text("")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=True)
    assert f"{fixtures}: expected a folder to pin into, came a file" == str(caught.value)


def test_a_damaged_bundle_is_not_replayed(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """Hashes are checked first: a damaged bundle starts no process and leaves nothing behind."""
    path = source / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BundleDamagedError, match=r"weights\.safetensors was altered"):
        pin(source, fixtures)
    assert not fixtures.exists()


def test_a_full_disk_leaves_nothing_behind(source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be flushed to the device is taken away again, and the system's error is passed on."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        pin(source, fixtures, force=True)
    assert not list(fixtures.iterdir())


def test_a_bundle_that_changes_meanwhile(source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is verified before it takes its place."""
    copyfile = shutil.copyfile

    def alter(file: Path, target: Path) -> None:
        copyfile(file, target)
        if file.name == "batch.safetensors":
            target.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(shutil, "copyfile", alter)
    with pytest.raises(BundleDamagedError) as caught:
        pin(source, fixtures, force=True)
    problem = "batch.safetensors was altered: its hash is not the one in bundle.json"
    assert f"{source}: it changed while it was copied: {problem}" == str(caught.value)
    assert not list(fixtures.iterdir())


STAND_IN = """
import sys, types
from pytest_nancapture.errors import DeviceUnavailableError
from pytest_nancapture.replay.result import ReplayResult

def run_replay(bundle, *, module, device, trace, hooks):
    {body}

stand_in = types.ModuleType("pytest_nancapture.replay.run")
stand_in.run_replay = run_replay
sys.modules[stand_in.__name__] = stand_in
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives fresh processes another replay: its body is run in place of the real one."""

    def write(body: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return write


def test_a_fresh_process_answers(source: Path, stand_in: Any) -> None:
    """The verdict comes back from another process, whatever code under test prints around it."""
    stand_in(
        "import atexit, os; print('by python'); os.write(1, b'{\"verdict\": 1}\\n'); "
        "atexit.register(os.write, 1, b'{from C}\\n{\"epoch\": 1}\\n'); "
        "return ReplayResult(verdict='nonfinite', loss=float('nan'), nonfinite=('loss',), culprit=None, "
        "reason=f'in {bundle.name} on {device}', device='cpu', seconds=0.5, detail=str(os.getpid()))"
    )
    result = replay_afresh(source, "cpu")
    assert str(os.getpid()) != result.pop("detail")
    expected = {
        "path": str(source),
        "verdict": "nonfinite",
        "finite": False,
        "loss": "nan",
        "nonfinite": ["loss"],
        "culprit": None,
        "reason": f"in {NAME} on cpu",
        "notes": [],
        "device": "cpu",
        "seconds": 0.5,
    }
    assert expected == result


def test_a_fresh_process_without_the_device(source: Path, stand_in: Any) -> None:
    """An absent device is the same error as in this process."""
    stand_in("raise DeviceUnavailableError('expected cuda, this machine has none')")
    with pytest.raises(DeviceUnavailableError) as caught:
        replay_afresh(source, "cuda")
    assert str(caught.value) == "expected cuda, this machine has none"


def test_a_fresh_process_that_dies(source: Path, stand_in: Any) -> None:
    """A replay that takes its process down gives no verdict; its last words are shown."""
    stand_in("import os; os.write(2, b'CUDA error: device-side assert triggered\\n'); os._exit(77)")
    with pytest.raises(PinError) as caught:
        replay_afresh(source, "auto")
    expected = (
        f"{source}: not pinned: the replay ended with exit code 77 and no verdict\n"
        "CUDA error: device-side assert triggered"
    )
    assert expected == str(caught.value)


TRAIN = """
import torch
from lightning.pytorch import LightningModule, Trainer
from pytest_nancapture import NaNCapture

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).sum() / FAULT

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(accelerator="cpu", max_steps=3, callbacks=[NaNCapture("nan-bundles")], **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])))
"""


def test_a_captured_step_from_end_to_end(tmp_path: Path) -> None:
    """A step caught by a real training is pinned with the code that has the fault, and refused with the fix."""

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("FAULT", "batch.sum()"))
    assert "NonFiniteError: step 1: " in python("train.py").stderr
    pinning = ("-m", "pytest_nancapture.cli", "pin", "nan-bundles/step-000001-rank-0")
    done = python(*pinning, "fixtures")
    assert (0, content(tmp_path / "nan-bundles" / "step-000001-rank-0")) == (
        done.returncode,
        content(tmp_path / "fixtures" / "step-000001-rank-0"),
    )
    script.write_text(TRAIN.replace("FAULT", "batch.sum().clamp(min=1)").replace("* batch", "* (batch + 1)"))
    done = python(*pinning, "elsewhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected a replay that is nonfinite, came finite (loss and gradients are finite)" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
