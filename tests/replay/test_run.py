"""Replays as a whole: each verdict with its reason, bundles that are damaged, and a process left as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import random
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import models
import numpy as np
import pytest
import torch
from torch import nn

from pytest_nancapture import Bundle, NonFiniteError, replay
from pytest_nancapture.bundle.manifest import BATCH, RNG, WEIGHTS
from pytest_nancapture.bundle.numerics import numeric_settings
from pytest_nancapture.bundle.tensors.file import write_tensors
from pytest_nancapture.errors import (
    BundleDamagedError,
    BundleError,
    BundleNotFoundError,
    DeviceUnavailableError,
)
from pytest_nancapture.replay.hooks import ReplayHooks

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1]


def copied(bundle: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    """A copy whose ``bundle.json`` says something else in one of the sections that people may edit."""
    path = shutil.copytree(bundle, folder / bundle.name)
    manifest = json.loads((path / "bundle.json").read_text())
    for section, changes in sections.items():
        manifest[section].update(changes)
    (path / "bundle.json").write_text(json.dumps(manifest))
    return path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Verdicts.


def test_nonfinite(net: Path) -> None:
    """Today's code still has the fault."""
    result = replay(net)
    assert (
        result.verdict,
        result.finite,
        result.reason,
    ) == ("nonfinite", False, "nan in loss, 2 of 2 gradients not finite")
    assert (result.device, result.notes, result.detail) == ("cpu", (), "")
    assert result.loss != result.loss
    assert 0 < result.seconds < 60
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["loss"] == "nan"


def test_finite(net: Path, mended: None) -> None:
    """Today's code is mended."""
    result = replay(net)
    assert (result.verdict, result.finite, result.reason) == ("finite", True, "loss and gradients are finite")
    assert (result.culprit, result.nonfinite) == (None, ())
    assert result.loss is not None
    assert result.loss > 0


def test_finite_with_a_module_of_ones_own(net: Path) -> None:
    """Given by hand, in place of the one that the bundle names."""

    class Mended(models.Net):
        divisor = staticmethod(models.at_least_one)

    assert (replay(net, module=Mended()).verdict, replay(net, module=models.Net()).verdict) == ("finite", "nonfinite")


def test_a_bundle_that_is_open(net: Path) -> None:
    """Need not be opened again; a path may be text, and name the manifest."""
    for bundle in (Bundle.open(net), str(net), net / "bundle.json"):
        assert replay(bundle).verdict == "nonfinite"


def test_in_a_fresh_process(net: Path) -> None:
    """Where nothing was imported before; a fix that only that process has makes it green."""
    program = """if True:
        import sys
        from pytest_nancapture import replay
        print(replay(sys.argv[1]).verdict)
        import models
        models.Net.divisor = staticmethod(models.at_least_one)
        print(replay(sys.argv[1]).verdict)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", program, str(net)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    # The file in the bundle led to the module, and sys.path was put back, but what is imported stays imported.
    assert (run.stdout, run.returncode) == ("nonfinite\nfinite\n", 0), run.stderr


def returning(value: Any) -> Callable[..., Any]:
    return lambda self, batch, batch_idx: value(self, batch)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda self, batch: None, "the step made no loss for micro-batch 1 of the window, where training had one"),
        (
            lambda self, batch: (self.linear(batch[0]).sum() + torch.nan).nan_to_num(),
            "2 parameters with non-finite gradients at capture now have none, or only zeros: nothing was tested",
        ),
        (
            lambda self, batch: (self.linear(batch[0]) * 0).sum(),
            "2 parameters with non-finite gradients at capture now have none, or only zeros: nothing was tested",
        ),
        (
            lambda self, batch: torch.ones((), requires_grad=True),
            "linear.weight, linear.bias, with non-finite gradients at capture, are cut off from the loss now",
        ),
    ],
    ids=["none", "nan_to_num", "zero", "cut"],
)
def test_vacuous(net: Path, monkeypatch: pytest.MonkeyPatch, step: Any, reason: str) -> None:
    """A fault that was masked is not a fixed one."""
    monkeypatch.setattr(models.Net, "training_step", returning(step))
    result = replay(net)
    assert (result.verdict, result.finite) == ("vacuous", False)
    assert result.reason.partition("; a masked fault is not a fixed one; a fix that ")[0] == reason


def renamed(module: nn.Module) -> None:
    module.head = module.linear
    del module.linear


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (renamed, "linear.bias is gone; linear.weight is gone; head.bias is new; head.weight is new"),
        (lambda module: setattr(module, "linear", nn.Linear(5, 2)), "linear.weight was 2x3, is 2x5"),
        (lambda module: module.register_buffer("scale", torch.ones(1)), "scale is new"),
        (lambda module: setattr(module.linear, "bias", None), "linear.bias is gone"),
    ],
    ids=["renamed", "reshaped", "added", "removed"],
)
def test_mismatch(net: Path, change: Callable[[nn.Module], None], reason: str) -> None:
    """Names of weights and buffers that no longer fit, and how they differ."""

    class Changed(models.Net):
        def __init__(self) -> None:
            super().__init__()
            change(self)

    result = replay(net, module=Changed())
    assert ("mismatch", f"the captured tensors no longer fit the code: {reason}") == (result.verdict, result.reason)


def test_a_step_that_raises(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the reason, and the traceback begins in the user's code."""

    def broken(self: Any, batch: Any, batch_idx: int) -> Any:
        raise KeyError("labels")

    monkeypatch.setattr(models.Net, "training_step", broken)
    result = replay(net)
    assert (result.verdict, result.reason) == ("error", "the step raised KeyError: 'labels'")
    first, *_, last = result.detail.splitlines()
    assert (first.startswith(f'  File "{__file__}"'), last) == (True, "KeyError: 'labels'")


@pytest.mark.parametrize("hook", ["on_fit_start", "setup", "configure_optimizers", "on_train_batch_start"])
def test_other_code_that_raises(net: Path, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    """Whatever of the user's raises, at whichever moment."""

    def broken(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("data.csv")

    monkeypatch.setattr(models.Net, hook, broken, raising=False)
    result = replay(net)
    assert (result.verdict, result.reason) == ("error", "the step raised FileNotFoundError: data.csv")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            {"target": "os:system"},
            "target os:system: expected a subclass of torch.nn.Module, came <built-in function system>",
        ),
        (
            {"target": "models:batches"},
            "target models:batches: expected a subclass of torch.nn.Module, came <function batches",
        ),
        ({"target": "torch.nn:Linear"}, "target torch.nn:Linear: expected a LightningModule, came Linear"),
        (
            {"factory": "os:getcwd"},
            "factory os:getcwd: expected a function that builds a LightningModule, came <built-in",
        ),
        ({"file": "/etc/x.py"}, "expected a source file relative to the repository, came '/etc/x.py'"),
        ({"file": "../x.py"}, "expected a source file relative to the repository, came '../x.py'"),
        ({"target": "models:Gone"}, "models:Gone: models has no 'Gone'; if it was renamed, say so in bundle.json"),
        ({"target": "gone:Net", "file": None}, "cannot import gone: No module named 'gone'"),
        (
            {"arguments": {"width": {"reference": "os:system"}}},
            "'os:system': a bundle may not name <built-in function system>",
        ),
        ({"arguments": {"width": {"tensor": "gone"}}}, "not a tree of a bundle: {'tensor': 'gone'}"),
        ({"arguments": {"depth": 2}}, "models:Net(depth) failed with TypeError"),
        (
            {"state": [{"module": "", "path": [["attribute", "divisor"]], "value": {"list": []}}]},
            "state at 'divisor': expected a place for values, came one for code",
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_built(net: Path, tmp_path: Path, module: dict[str, Any], reason: str) -> None:
    """These sections are for people to edit, so they may say anything; nothing but a module is called."""
    result = replay(copied(net, tmp_path, module=module))
    assert ("error", reason) == (result.verdict, result.reason[: len(reason)])


def test_renamed_in_the_manifest(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refactoring a person says in bundle.json where the class is now."""
    moved = type("Moved", (models.Net,), {"__module__": "models"})
    monkeypatch.setattr(models, "Moved", moved, raising=False)
    assert replay(copied(net, tmp_path, module={"target": "models:Moved"})).verdict == "nonfinite"


# Building.


def test_a_factory(tmp_path: Path) -> None:
    """A constructor whose arguments are not in hparams."""
    bundle = models.capture(models.Required(4), tmp_path, settings={"factory": "models:make_required"})
    assert replay(bundle).verdict == "nonfinite"


def test_without_the_factory(tmp_path: Path) -> None:
    """What was said when training began is said again."""
    result = replay(models.capture(models.Required(4), tmp_path))
    assert result.verdict == "error"
    assert "argument 'width' of Required is not among its hparams; call self.save_hyperparameters()" in result.detail


def test_arguments_of_many_kinds(tmp_path: Path) -> None:
    """Come back as what they were."""
    module = models.Configured(
        [3, 2], torch.tanh, torch.tensor([1.0, 2.0]), options={"path": Path("a"), "dtype": torch.half}
    )
    bundle = models.capture(module, tmp_path, settings={"confirm": 0})
    expected = models.SEEN[-1]
    models.SEEN.clear()
    assert replay(bundle).verdict == "nonfinite"
    assert [expected] == models.SEEN


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import models
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from pytest_nancapture import NaNCapture

class Sample(tuple):
    pass

class Net(models.Net):
    divisor = staticmethod(lambda count: count)

    def training_step(self, batch, batch_idx):
        assert type(batch).__name__ == "Sample", type(batch)
        return super().training_step(batch, batch_idx)

def main():
    trainer = pl.Trainer(max_epochs=1, callbacks=[NaNCapture("bundles")], **models.QUIET)
    data = DataLoader(models.batches(), batch_size=None, collate_fn=Sample)
    trainer.fit(Net(), data)

{guard}main()
"""


@pytest.mark.parametrize("guard", ["if __name__ == '__main__':\n    ", ""], ids=["guarded", "bare"])
def test_a_script(tmp_path: Path, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of ``__main__``, and a class of it in the batch, are found again by the script's file; it trains no more.

    When the script is edited a fresh process sees the new code.
    """
    script = tmp_path / "train.py"
    text = SCRIPT.format(tests=str(TESTS), guard=guard)
    script.write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NonFiniteError):
        runpy.run_path("train.py", run_name="__main__")
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert (
        Bundle.open(bundle).manifest.module.target,
        Bundle.open(bundle).manifest.module.file,
    ) == ("__main__:Net", "train.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    before = content(tmp_path)
    assert (replay(bundle).verdict, replay(bundle).detail) == ("nonfinite", "")
    assert {name for name in content(tmp_path) if "__pycache__" not in name} == before.keys()
    for name in [name for name in sys.modules if "_nancapture_script_train" in name]:
        del sys.modules[name]
    script.write_text(text.replace("lambda count: count", "models.at_least_one"))
    assert replay(bundle).verdict == "finite"


def test_a_script_that_exits(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose arguments are read as soon as it is imported."""
    (tmp_path / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('x')\np.parse_args()\n"
    )
    monkeypatch.chdir(tmp_path)
    result = replay(copied(net, tmp_path / "bundles", module={"target": "__main__:Net", "file": "train.py"}))
    expected = f"{tmp_path / 'train.py'} exits when it is imported; put its work under if __name__ == '__main__':"
    assert ("error", expected) == (result.verdict, result.reason)


# Hooks.


def test_the_module_hook(net: Path) -> None:
    """It is given the bundle, and its module is run; None leaves it to the bundle."""
    asked: list[Any] = []

    class Mended(models.Net):
        divisor = staticmethod(models.at_least_one)

    def build(bundle: Any) -> Any:
        asked.append(bundle.name)
        return Mended()

    assert replay(net, hooks=ReplayHooks(module=build)).verdict == "finite"
    assert replay(net, hooks=ReplayHooks(module=lambda bundle: None)).verdict == "nonfinite"
    assert replay(net, module=models.Net(), hooks=ReplayHooks(module=build)).verdict == "nonfinite"
    assert asked == ["step-000001-rank-0"]


def test_a_module_hook_that_builds_none(net: Path) -> None:
    """The error says what it built."""
    result = replay(net, hooks=ReplayHooks(module=lambda bundle: nn.Linear(1, 1)))
    assert (result.verdict, result.reason) == ("error", "the module given: expected a LightningModule, came Linear")


def test_the_module_hook_sees_the_captured_dtype(tmp_path: Path) -> None:
    """What it builds is of the default dtype that the training had."""
    torch.set_default_dtype(torch.float64)
    try:
        data = [(x.double(), count.double()) for x, count in models.batches()]
        bundle = models.capture(models.Net(), tmp_path, data)
    finally:
        torch.set_default_dtype(torch.float32)
    assert replay(bundle).verdict == "nonfinite"
    assert replay(bundle, hooks=ReplayHooks(module=lambda _: models.Net())).verdict == "nonfinite"
    assert torch.get_default_dtype() is torch.float32


def test_the_batch_hook(net: Path, accumulated: Path) -> None:
    """It may change each micro-batch, and declines with None."""
    seen: list[Any] = []

    def mend(bundle: Any, batch: Any) -> Any:
        seen.append(batch[1].item())
        return batch[0], batch[1].clamp(min=1)

    assert replay(net, hooks=ReplayHooks(batch=mend)).verdict == "finite"
    assert replay(accumulated, hooks=ReplayHooks(batch=mend)).verdict == "finite"
    assert seen == [0.0, 1.0, 0.0]
    assert replay(net, hooks=ReplayHooks(batch=lambda bundle, batch: None)).verdict == "nonfinite"


def test_the_trainer_hook(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments go over the captured ones; None is no arguments."""
    seen: list[Any] = []

    def noted(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append((self.trainer.precision, self.trainer.gradient_clip_val))
        return self.linear(batch[0]).sum()

    monkeypatch.setattr(models.Net, "training_step", noted)
    kwargs = {"precision": "bf16-mixed", "gradient_clip_val": 0.5}
    assert replay(net, hooks=ReplayHooks(trainer_kwargs=lambda _: kwargs)).verdict == "finite"
    assert replay(net, hooks=ReplayHooks(trainer_kwargs=lambda _: None)).verdict == "finite"
    assert seen == [("bf16-mixed", 0.5), ("32-true", None)]


@pytest.mark.parametrize("hook", ["module", "batch", "trainer_kwargs"])
def test_a_hook_that_raises(net: Path, hook: str) -> None:
    """The verdict is an error, with the hook in its traceback."""

    def broken(*_: Any) -> Any:
        raise LookupError("no config")

    result = replay(net, hooks=ReplayHooks(**{hook: broken}))
    assert (result.verdict, "LookupError: no config" in result.reason) == ("error", True)
    assert "in broken" in result.detail


# Damage.


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of the user's may run."""

    def touched(*_: Any, **__: Any) -> Any:
        pytest.fail("user code was run")

    monkeypatch.setattr(models.Net, "__init__", touched)


def truncate(path: Path, other: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"has_gauss") if path.suffix == ".json" else len(data) // 2] ^= 0x10
    path.write_bytes(data)


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    shutil.copyfile(other / path.name, path)


def link(path: Path, other: Path) -> None:
    path.unlink()
    path.symlink_to(other / path.name)


@pytest.mark.parametrize("damage", [truncate, flip, remove, swap, link])
@pytest.mark.parametrize("name", ["bundle.json", WEIGHTS, BATCH, RNG])
def test_damaged_files(
    net: Path, accumulated: Path, tmp_path: Path, name: str, damage: Callable[..., None], untouched: None
) -> None:
    """Cut, altered, missing or another bundle's: one error, which names the bundle, before any user code runs."""
    path = copied(net, tmp_path)
    damage(path / name, accumulated)
    with pytest.raises(BundleError) as caught:
        replay(path)
    assert str(path) == caught.value.path


def rewritten(bundle: Path, folder: Path, name: str, tensors: dict[str, torch.Tensor] | bytes) -> Path:
    """A bundle one of whose files was replaced by somebody who made the hashes right again."""
    path = shutil.copytree(bundle, folder / bundle.name)
    manifest = Bundle.open(path).manifest
    if isinstance(tensors, bytes):
        (path / name).write_bytes(tensors)
        record = dataclasses.replace(
            manifest.files[name], bytes=len(tensors), sha256=hashlib.sha256(tensors).hexdigest()
        )
    else:
        record, _ = write_tensors(path / name, tensors)
    manifest = dataclasses.replace(manifest, files={**manifest.files, name: record})
    (path / "bundle.json").write_text(manifest.dumps())
    return path


@pytest.mark.parametrize("name", [WEIGHTS, BATCH, RNG])
@pytest.mark.parametrize("junk", [b"", b"x" * 100, b"\x80\x04N.", (2**62).to_bytes(8, "little") + b"{}"])
def test_files_that_are_no_tensors(net: Path, tmp_path: Path, name: str, junk: bytes, untouched: None) -> None:
    """A pickle, or nothing at all: with the right hash it is still not a safetensors file."""
    path = rewritten(net, tmp_path, name, junk)
    with pytest.raises(BundleDamagedError, match="not a safetensors file"):
        replay(path)


def test_random_states_that_are_missing(net: Path, tmp_path: Path, untouched: None) -> None:
    """An error of the bundle's, too."""
    with pytest.raises(BundleDamagedError, match="rng: not a record of random states"):
        replay(rewritten(net, tmp_path, RNG, {}))


def test_a_batch_whose_tensors_are_missing(net: Path, tmp_path: Path) -> None:
    """The tree asks for what is not there."""
    result = replay(rewritten(net, tmp_path, BATCH, {}))
    assert result.verdict == "error"
    assert result.reason.startswith("not a tree of a bundle: {'tensor': '1/batch[0]'}")


def test_a_batch_larger_than_any_memory(net: Path, tmp_path: Path) -> None:
    """A layout may repeat one number as often as it likes; what comes of it is the bundle's error alone."""
    path = copied(net, tmp_path)
    manifest = Bundle.open(path).manifest
    record, _ = write_tensors(path / BATCH, {"base": torch.zeros(8, dtype=torch.uint8), "1/batch[1]": torch.zeros(())})
    layout = {"base": "base", "dtype": "float64", "shape": [2**50, 3], "stride": [0, 0], "offset": 0}
    batch = dataclasses.replace(manifest.batch, layouts={"1/batch[0]": layout})
    manifest = dataclasses.replace(manifest, files={**manifest.files, BATCH: record}, batch=batch)
    (path / "bundle.json").write_text(manifest.dumps())
    assert replay(path).verdict == "error"


def test_no_bundle(tmp_path: Path) -> None:
    """The error says so."""
    with pytest.raises(BundleNotFoundError, match="no bundle here"):
        replay(tmp_path)


def test_no_such_device(net: Path, untouched: None) -> None:
    """Before anything is built."""
    with pytest.raises(DeviceUnavailableError, match="expected a device such as cpu, cuda or cuda:1, came 'gpu'"):
        replay(net, device="gpu")


# What stays as it was.


@pytest.mark.parametrize("code", ["mended", "broken", "failing"])
def test_no_trace(net: Path, tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random states, numeric settings, paths, log levels, filters, gradient mode and files are as before the replay."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        torch.manual_seed(9)
        np.random.seed(9)
        random.seed(9)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
        sys.path.insert(0, "/nowhere")
        os.chdir("/")
        logging.getLogger("lightning.pytorch").setLevel(logging.DEBUG)
        warnings.simplefilter("error")
        if code == "failing":
            raise KeyError
        return self.linear(batch[0]).sum() * (1 if code == "mended" else torch.nan)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models.Net, "training_step", step)
    logger = logging.getLogger("lightning.pytorch")

    def state() -> list[Any]:
        return [
            torch.get_rng_state().tolist(),
            np.random.get_state(legacy=False)["state"]["key"].tolist(),
            random.getstate(),
            numeric_settings(),
            list(sys.path),
            list(sys.argv),
            Path.cwd(),
            logger.level,
            list(warnings.filters),
            torch.is_grad_enabled(),
            content(net),
            list(tmp_path.iterdir()),
        ]

    logger.setLevel(logging.WARNING)
    with torch.no_grad():
        before = state()
        verdict = replay(net).verdict
        after = state()
    assert {"mended": "finite", "broken": "nonfinite", "failing": "error"}[code] == verdict
    assert before == after


def test_no_file_is_left(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What user code writes below the Trainer's folder is thrown away."""
    folders: list[Path] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        folder = Path(self.trainer.default_root_dir)
        (folder / "figures").mkdir()
        (folder / "figures" / "x.txt").write_text("x")
        folders.append(folder)
        return self.linear(batch[0]).sum()

    monkeypatch.setattr(models.Net, "training_step", step)
    monkeypatch.chdir(tmp_path)
    assert replay(net).verdict == "finite"
    assert [folder.exists() for folder in folders] == [False]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_told(net: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither Lightning nor the replay says a word."""
    replay(net)
    assert capfd.readouterr() == ("", "")


def test_an_ended_training(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that ends the training before the step is an error, not a success."""

    def stop(self: Any) -> None:
        self.trainer.should_stop = True

    monkeypatch.setattr(models.Net, "on_train_start", stop)
    monkeypatch.setattr(models.Net, "on_train_batch_start", lambda *_: -1, raising=False)
    result = replay(net)
    assert (result.verdict, result.reason) == ("error", "training ended before the captured step was over")


def test_notes(net: Path, tmp_path: Path) -> None:
    """What a reader should know: another kind of device than at capture."""
    bundle = copied(net, tmp_path, environment={"device": "cuda:0"})
    expected = ("captured on cuda, replayed on cpu: kernels and random numbers differ",)
    assert expected == replay(bundle, device="cpu").notes


def test_random_numbers_of_another_torch(net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that draws some may draw others there, and so be fine by chance; one that draws none is told nothing."""
    drops = models.capture(models.Dropping(), tmp_path / "drops")
    same, torch_now = replay(drops).notes, torch.__version__
    monkeypatch.setattr(torch, "__version__", "1.99.0")
    expected = (
        f"captured with torch {torch_now}, replayed with 1.99.0, and the step draws random numbers: "
        "they may be others, and the fault may be gone for that alone"
    )
    assert [(), (expected,), ()] == [same, replay(drops).notes, replay(net).notes]


def test_the_step_may_use_the_trainer(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, of one device, with the strategy, the optimizers and the schedulers of the module."""
    seen: list[Any] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        trainer: pl.Trainer = self.trainer
        seen.append(
            (
                trainer.world_size,
                trainer.global_rank,
                type(trainer.optimizers[0]),
                self.optimizers().param_groups[0]["lr"],
            )
        )
        self.log("x", batch[0].sum())
        seen.append(sorted(trainer.callback_metrics))
        return self.linear(batch[0]).sum()

    monkeypatch.setattr(models.Net, "training_step", step)
    assert replay(net).verdict == "finite"
    assert seen[0] == (1, 0, torch.optim.SGD, 0.01)
