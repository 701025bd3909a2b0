"""Pinning: what was seen red becomes a fixture, small and named."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import write_bundle
from fake_shrinker import SMALL, FakeShrinker
from one_fault import CULPRIT, GREEN, NAME, PINNED, RED, content

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import PinRecord, Reproduced
from pytest_nancapture.errors import ShrinkError
from pytest_nancapture.shrink.options import ShrinkOptions
from pytest_nancapture.shrink.pinning import pin as module
from pytest_nancapture.shrink.pinning.pin import pin

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shrinker")


def test_a_red_bundle_is_shrunk(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker
) -> None:
    """The small one is proven red, named by its fault and put in its place; the source stays, nothing else appears."""
    before, proof = content(source), {**RED, "notes": ["proven"]}
    answers += [RED, proof]
    told: list[str] = []
    pinned = pin(source, fixtures, tell=told.append, shrinking=ShrinkOptions(max_seconds=9, jobs=3))
    assert (Bundle.open(fixtures / PINNED), proof) == (pinned.bundle, pinned.result)
    assert pinned.shrunk is not None
    assert (Bundle.open(source).size, pinned.bundle.size) == (pinned.shrunk.before, pinned.shrunk.after)
    assert {name: text for name, text in content(fixtures / PINNED).items() if name != "bundle.json"} == SMALL
    assert before == content(source)
    assert [fixtures / PINNED] == list(fixtures.iterdir())
    asked, place, options = shrinker.asked[0]
    assert (source, {"device": "auto", "max_seconds": 9, "jobs": 3}) == (asked, options)
    assert (place.name, place.parent.parent, place.parent.name[0]) == (NAME, fixtures, ".")
    expected = [
        f"replaying {source} in a fresh process",
        "shrinking it, for 9 s at most; Ctrl-C ends that early",
        "replaying the shrunk one in a fresh process",
    ]
    assert expected == told


def test_a_copy(source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker) -> None:
    """Without shrinking the copy is the bundle byte for byte, and one replay is enough."""
    before = content(source)
    answers.append(RED)
    pinned = pin(source, fixtures, shrinking=None)
    assert (Bundle.open(fixtures / PINNED), RED, None) == (pinned.bundle, pinned.result, pinned.shrunk)
    assert before == content(source) == content(fixtures / PINNED)
    assert [fixtures / PINNED] == list(fixtures.iterdir())
    assert not shrinker.asked


def test_the_device_is_passed_on(
    source: Path, fixtures: Path, monkeypatch: pytest.MonkeyPatch, shrinker: FakeShrinker
) -> None:
    """The replays and the shrinker get the device; the replays are traced."""
    asked = []

    def answer(*args: Any, trace: bool) -> dict[str, Any]:
        asked.append((*args, trace))
        return RED

    monkeypatch.setattr(module, "replay_afresh", answer)
    pin(source / "bundle.json", fixtures, device="cuda:1")
    assert [(source, "cuda:1", True), (shrinker.asked[0][1], "cuda:1", True)] == asked
    assert shrinker.asked[0][2]["device"] == "cuda:1"


@pytest.mark.parametrize(
    ("raises", "note"),
    [
        (ShrinkError("not red without its hooks"), "not red without its hooks"),
        (RuntimeError("CUDA error: out of memory"), "RuntimeError: CUDA error: out of memory"),
    ],
)
def test_a_shrinker_that_fails(
    source: Path,
    fixtures: Path,
    answers: list[dict[str, Any]],
    shrinker: FakeShrinker,
    raises: Exception,
    note: str,
) -> None:
    """The bundle is red, so it is pinned as it is, and it is said why."""
    shrinker.raises = raises
    answers.append(RED)
    pinned = pin(source, fixtures)
    assert ((f"pinned as it is, since shrinking failed: {note}",), None) == (pinned.notes, pinned.shrunk)
    assert content(source) == content(fixtures / PINNED)


@pytest.mark.parametrize(
    ("proof", "note"),
    [
        (GREEN, "came out finite in a fresh process (loss and gradients are finite)"),
        ({**RED, "culprit": {**CULPRIT, "op": "aten.log.default"}}, "failed in another way in a fresh process"),
        ({**RED, "culprit": {**CULPRIT, "source": "a / b"}}, "failed in another way in a fresh process"),
        ({**RED, "culprit": {"phase": "backward"}}, "failed in another way in a fresh process"),
    ],
)
def test_a_shrunk_bundle_that_is_not_the_same(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], proof: dict[str, Any], note: str
) -> None:
    """What does not fail alike in a fresh process is dropped; the bundle itself is pinned."""
    answers += [RED, proof]
    pinned = pin(source, fixtures)
    assert ((f"pinned as it is, since the shrunk one {note}",), None) == (pinned.notes, pinned.shrunk)
    assert content(source) == content(fixtures / PINNED)
    assert [fixtures / PINNED] == list(fixtures.iterdir())


def test_a_culprit_that_moved_is_the_same(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """Lines above may come and go, values and indentation differ; where no trace could be made, the phase must do."""
    moved = {**CULPRIT, "line": 50, "source": f"    {CULPRIT['source']}", "explanation": "0 / 0"}
    answers += [RED, {**RED, "culprit": moved}]
    assert pin(source, fixtures).shrunk is not None
    answers += [RED, {**RED, "culprit": {"phase": "forward"}}]
    assert pin(source, fixtures, again=True).shrunk is not None


def test_ctrl_c_leaves_nothing_behind(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker
) -> None:
    """Neither a hidden folder nor one that was made for the fixtures."""
    shrinker.raises = KeyboardInterrupt()
    answers.append(RED)
    with pytest.raises(KeyboardInterrupt):
        pin(source, fixtures / "a" / "b")
    assert not fixtures.exists()


def test_force_asks_no_replay(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker
) -> None:
    """A forced pin copies at once, under the name that the capture's own culprit gives, and says nothing was shown."""
    assert not answers
    assert pin(source, fixtures, force=True).result is None
    assert content(source) == content(fixtures / PINNED)
    assert not shrinker.asked


def test_a_known_fault_is_marked(source: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """Only the mark differs, and only in the copy."""
    answers.append(RED)
    before = content(source)
    pin(source, fixtures, known=True, shrinking=None)
    copy = content(fixtures / PINNED)
    changed = copy.pop("bundle.json").decode()
    assert '"pin": {\n  "known": true\n }' in changed
    assert Bundle.open(fixtures / PINNED).known
    assert before == content(source)
    assert copy == {name: text for name, text in before.items() if name != "bundle.json"}


def test_the_mark_goes_when_pinned_plainly(tmp_path: Path, fixtures: Path, answers: list[dict[str, Any]]) -> None:
    """A bundle once pinned as known, pinned again without it, is an ordinary fixture."""
    answers += [RED, RED]
    pinned = pin(write_bundle(tmp_path / "old" / NAME, pin=PinRecord(known=True)), fixtures)
    assert pinned.bundle.manifest.pin == PinRecord(known=False)


@pytest.mark.parametrize("old", [None, {"phase": "forward"}, {**CULPRIT, "source": "as it was then"}])
def test_the_culprit_of_today_is_recorded(
    tmp_path: Path, fixtures: Path, answers: list[dict[str, Any]], old: dict[str, Any] | None
) -> None:
    """A capture without a trace, or code that was changed since: the fixture says what was proven."""
    answers.append(RED)
    pinned = pin(write_bundle(tmp_path / NAME, fault={"culprit": old}), fixtures, shrinking=None)
    assert pinned.bundle.fault.culprit == CULPRIT


@pytest.mark.parametrize(("of", "after"), [(0, Reproduced(runs=1, of=1)), (2, Reproduced(runs=1, of=3))])
def test_a_red_replay_counts_where_capture_saw_none(
    tmp_path: Path, fixtures: Path, answers: list[dict[str, Any]], of: int, after: Reproduced
) -> None:
    """A bundle that did not come back at capture, but does now, is able to gate."""
    answers += [RED, RED]
    pinned = pin(write_bundle(tmp_path / NAME, fault={"reproduced": Reproduced(runs=0, of=of)}), fixtures)
    assert after == pinned.bundle.fault.reproduced


def test_a_forced_pin_counts_nothing(tmp_path: Path, fixtures: Path) -> None:
    """Without a replay there is nothing to count, and without a culprit the step names it."""
    pin(write_bundle(tmp_path / NAME, fault={"reproduced": Reproduced(runs=0, of=1)}), fixtures, force=True)
    assert Bundle.open(fixtures / "shop-step-812").fault.reproduced == Reproduced(runs=0, of=1)


def test_only_the_bundles_own_files_are_copied(source: Path, fixtures: Path) -> None:
    """What else lies in the folder stays there."""
    (source / "evil.pkl").write_bytes(b"cos\nsystem\n.")
    pin(source, fixtures, force=True)
    expected = ["batch.safetensors", "bundle.json", "rng.safetensors", "weights.safetensors"]
    assert expected == sorted(content(fixtures / PINNED))


def test_another_name(source: Path, fixtures: Path) -> None:
    """The copy's name may be chosen."""
    assert fixtures / "empty-class" == pin(source, fixtures, name="empty-class", force=True).bundle.path


@pytest.mark.parametrize("changed", [{"op": "aten.div_.Tensor"}, {"file": "b.py"}, {"source": "x = loss / count"}])
def test_another_fault_of_the_same_name(source: Path, fixtures: Path, changed: dict[str, Any]) -> None:
    """It gets a number."""
    pin(source, fixtures, force=True)
    other = write_bundle(source.with_name("step-000900-rank-0"), fault={"culprit": {**CULPRIT, **changed}})
    assert pin(other, fixtures, force=True).bundle.path == fixtures / f"{PINNED}-2"
    assert pin(other, fixtures, force=True, again=True).bundle.path == fixtures / f"{PINNED}-3"


def test_faults_that_nothing_is_known_of(source: Path, fixtures: Path) -> None:
    """Two bundles without a culprit may hold two faults."""
    for number in range(2):
        pin(write_bundle(source.with_name(f"step-00000{number}-rank-0")), fixtures, force=True)
    assert sorted(path.name for path in fixtures.iterdir()) == ["shop-step-812", "shop-step-812-2"]


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
    pinning = ("-m", "pytest_nancapture.cli", "pin", "nan-bundles/step-000001-rank-0", "--no-shrink")
    done = python(*pinning, "fixtures")
    assert (0, content(tmp_path / "nan-bundles" / "step-000001-rank-0")) == (
        done.returncode,
        content(tmp_path / "fixtures" / "net-div-zero-batch"),
    )
    script.write_text(TRAIN.replace("FAULT", "batch.sum().clamp(min=1)").replace("* batch", "* (batch + 1)"))
    done = python(*pinning, "elsewhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "expected a replay that is nonfinite, came finite (loss and gradients are finite)" in done.stderr
    assert not (tmp_path / "elsewhere").exists()
