"""Pinning: only what was seen red becomes a fixture, small and named, and it becomes one whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fake_bundles import write_bundle
from fake_shrinker import SMALL, FakeShrinker, install

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.manifest import PinRecord, Reproduced
from pytest_nancapture.errors import BundleDamagedError, DeviceUnavailableError, PinError, ShrinkError
from pytest_nancapture.shrink.options import ShrinkOptions
from pytest_nancapture.shrink.pinning import pin as module
from pytest_nancapture.shrink.pinning.fresh import replay_afresh
from pytest_nancapture.shrink.pinning.pin import pin

if TYPE_CHECKING:
    from pathlib import Path

NAME = "step-000812-rank-0"
PINNED = "shop-div-zero-count"
CULPRIT = {
    "phase": "forward",
    "op": "aten.div.Tensor",
    "file": "train.py",
    "line": 42,
    "source": "mean_loss = loss / count",
    "columns": [25, 36],
    "library": "",
    "module_path": "",
    "explanation": "division by zero: the divisor is 0 in its only place",
    "chain": [],
}
RED = {"verdict": "nonfinite", "reason": "the loss is nan", "culprit": CULPRIT}
GREEN = {"verdict": "finite", "reason": "loss and gradients are finite", "culprit": None}
ALL = 10**9
"""A size that nothing here has."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "nan-bundles" / NAME, fault={"culprit": CULPRIT})


@pytest.fixture(autouse=True)
def shrinker(monkeypatch: pytest.MonkeyPatch) -> FakeShrinker:
    return install(monkeypatch)


@pytest.fixture
def fixtures(tmp_path: Path) -> Path:
    return tmp_path / "fixtures"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the replays answer, in order; one that was not expected fails the test."""
    queue: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "replay_afresh", lambda bundle, device, trace: queue.pop(0))
    return queue


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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


# what is refused


@pytest.mark.parametrize(
    ("verdict", "advice"),
    [
        ("finite", "If the fault is fixed already, check out the code that still has it and pin it there."),
        ("vacuous", "Bring back the code that it was captured with, or capture it anew."),
        ("mismatch", "Bring back the code that it was captured with, or capture it anew."),
        (
            "error",
            "If only your pytest hooks can build the module, see it fail with pytest --nan-bundles=... first, "
            "then pin it as it is with --force: no hook is asked here, so it can be neither replayed nor shrunk.",
        ),
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
    pin(source, fixtures, force=True, name="mine")
    before = content(fixtures / "mine")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=force, name="mine", again=True)
    expected = (
        f"{fixtures / 'mine'}: not pinned: something of that name exists already; give another name with --name=NAME, "
        "or remove that folder first"
    )
    assert expected == str(caught.value)
    assert before == content(fixtures / "mine")


@pytest.mark.parametrize("force", [False, True])
def test_a_fault_that_is_pinned_already(
    tmp_path: Path, source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool
) -> None:
    """The same operation, line and phase, whatever the pinned one's name: it is named, and nothing is shrunk."""
    first = pin(source, fixtures / "below", name="mine", force=True).bundle.path
    other = write_bundle(tmp_path / "nan-bundles" / "step-000900-rank-0", fault={"culprit": {**CULPRIT, "line": 3}})
    write_bundle(fixtures / "damaged", files={})
    if not force:
        answers.append({**RED, "culprit": {**CULPRIT, "line": 50}})
    with pytest.raises(PinError) as caught:
        pin(other, fixtures, force=force, name="yours")
    line = 3 if force else 50
    expected = (
        f"{other}: not pinned: this fault is pinned already, as {first} "
        f"(mean_loss = loss / count, train.py:{line}, aten.div.Tensor)\n"
        "  --again pins it beside that one all the same."
    )
    assert expected == str(caught.value)
    assert pin(other, fixtures, force=True, again=True).bundle.path == fixtures / PINNED


@pytest.mark.parametrize("changed", [{"op": "aten.div_.Tensor"}, {"file": "b.py"}, {"source": "x = loss / count"}])
def test_another_fault_of_the_same_name(source: Path, fixtures: Path, changed: dict[str, Any]) -> None:
    """It gets a number."""
    pin(source, fixtures, force=True)
    other = write_bundle(source.with_name("step-000900-rank-0"), fault={"culprit": {**CULPRIT, **changed}})
    assert pin(other, fixtures, force=True).bundle.path == fixtures / f"{PINNED}-2"
    assert pin(other, fixtures, force=True, again=True).bundle.path == fixtures / f"{PINNED}-3"


def test_a_bad_batch_that_is_pinned_already(source: Path, fixtures: Path) -> None:
    """Of values that were bad from the beginning, the tensor tells; what they are is by chance."""

    def bundle(number: int, explanation: str, target: str = "shop.model:Net") -> Path:
        fault = {"culprit": {"phase": "input", "explanation": explanation}}
        return write_bundle(source.with_name(f"step-{number:06d}-rank-0"), fault=fault, module={"target": target})

    pin(bundle(1, "batch['x'] holds 1 NaN among 9 values"), fixtures, force=True)
    with pytest.raises(
        PinError, match=r"this fault is pinned already, as .*shop-input-nan-x \(batch\['x'\] holds 4 NaN"
    ):
        pin(bundle(2, "batch['x'] holds 4 NaN among 9 values, in samples 1, 2 of 3"), fixtures, force=True)
    pin(bundle(3, "batch['y'] holds 1 NaN among 9 values"), fixtures, force=True)
    pin(bundle(4, "batch['x'] holds 1 NaN among 9 values", "shop.model:Other"), fixtures, force=True)
    expected = ["other-input-nan-x", "shop-input-nan-x", "shop-input-nan-y"]
    assert expected == sorted(path.name for path in fixtures.iterdir())


def test_faults_that_nothing_is_known_of(source: Path, fixtures: Path) -> None:
    """Two bundles without a culprit may hold two faults."""
    for number in range(2):
        pin(write_bundle(source.with_name(f"step-00000{number}-rank-0")), fixtures, force=True)
    assert sorted(path.name for path in fixtures.iterdir()) == ["shop-step-812", "shop-step-812-2"]


def test_a_bundle_that_is_pinned_already(source: Path) -> None:
    """Pinning a bundle where it lies is said to be needless."""
    with pytest.raises(PinError, match="not pinned: it is pinned there already"):
        pin(source, source.parent, force=True)


@pytest.mark.parametrize(("force", "option"), [(True, "--force"), (False, "--no-shrink")])
def test_a_bundle_that_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], force: bool, option: str
) -> None:
    """A copy as it is would be larger than what may be: that is known without a replay."""
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, force=force, shrinking=None, max_size=1000)
    size = Bundle.open(source).size / 1000
    expected = (
        f"{source}: not pinned: it is {size:.1f} kB, more than the 1 kB of --max-size\n"
        rf"  Without {option} it is made smaller; --max-size=\d\.\dkB takes it as it is\."
    )
    assert re.fullmatch(re.escape(expected.splitlines()[0]) + "\n" + expected.splitlines()[1], str(caught.value))
    assert not fixtures.exists()


@pytest.mark.parametrize("stopped", ["", "time"])
def test_a_shrunk_bundle_that_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker, stopped: str
) -> None:
    """It is refused, but the work is kept beside the source; it is said what had to stay and how to go on."""
    shrinker.kept, shrinker.stopped = ("20 classes of the head",), stopped
    answers += [RED, RED]
    small = source.with_name(f"{NAME}-small")
    with pytest.raises(PinError) as caught:
        pin(source, fixtures, max_size=1000)
    lines = str(caught.value).removeprefix(f"{source}: ").splitlines()
    assert re.fullmatch(
        r"not pinned: it is \d\.\d kB \(it was \d\.\d kB\), more than the 1 kB of --max-size",
        lines.pop(0),
    )
    assert lines.pop(0) == "  What it holds: 20 classes of the head."
    if stopped:
        assert lines.pop(0) == f"  Shrinking was not finished: nancapture pin {small} goes on from there."
    assert re.fullmatch(
        r"; pin that one with --no-shrink --max-size=\d\.\dkB to take it as it is\.",
        lines.pop(0).removeprefix(f"  It is kept as {small}"),
    )
    assert not lines
    Bundle.open(small).verify()
    assert not fixtures.exists()


def test_a_bundle_that_cannot_be_shrunk_and_is_too_large(
    source: Path, fixtures: Path, answers: list[dict[str, Any]], shrinker: FakeShrinker
) -> None:
    """The limit holds for what is pinned as it is, too."""
    shrinker.raises = ShrinkError("for a reason")
    answers.append(RED)
    with pytest.raises(PinError, match=r"(?s)more than the 1 kB of --max-size\n  shrinking failed: for a reason\.\n"):
        pin(source, fixtures, max_size=1000)
    assert not fixtures.exists()


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


def test_a_fresh_process_whose_trace_fails(source: Path, stand_in: Any) -> None:
    """Where a trace takes the process down, as when memory runs out, a plain replay answers."""
    stand_in(
        "import os; os._exit(9) if trace else None; "
        "return ReplayResult(verdict='finite', loss=None, nonfinite=(), culprit=None, reason='', device='', seconds=0)"
    )
    assert replay_afresh(source, "cpu", trace=True)["verdict"] == "finite"


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
