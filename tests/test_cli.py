"""The ``nancapture`` command: what each subcommand prints, and its exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_bundles import fake_manifest, tensor_file, write_bundle

from pytest_nancapture import __version__
from pytest_nancapture.bundle.manifest import BatchRecord, MicroBatch, PinRecord, Reproduced, RngRecord
from pytest_nancapture.cli import main
from pytest_nancapture.errors import DeviceUnavailableError
from pytest_nancapture.replay.result import Culprit, ReplayResult
from pytest_nancapture.shrink import pin as pinning

NAME = "step-000812-rank-0"
FINITE = ReplayResult(
    verdict="finite", loss=0.5, nonfinite=(), culprit=None, reason="all is finite", device="cpu", seconds=1.0
)
RED = ReplayResult(
    verdict="nonfinite",
    loss=float("nan"),
    nonfinite=tuple(f"gradient layer{i}.weight" for i in range(9)),
    culprit=Culprit(
        phase="forward",
        op="aten.div.Tensor",
        file="train.py",
        line=42,
        source="    mean_loss = loss / count",
        module_path="head",
        explanation="0 / 0: 3 of 20 classes have no sample",
    ),
    reason="the loss is nan",
    notes=("the device differs",),
    device="cuda:0",
    seconds=2.34,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bundle(here: Path) -> Path:
    return write_bundle(Path("nan-bundles") / NAME)


class StandIn:
    """In place of the real replay: answers or raises what it is told, and keeps what it was asked."""

    def __init__(self, answer: ReplayResult | BaseException) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def run_replay(self, bundle: Any, **options: Any) -> ReplayResult:
        self.asked.append((str(bundle.path), options))
        sys.stdout.write("code under test prints\n")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(FINITE)
    module = ModuleType("pytest_nancapture.replay.run")
    vars(module)["run_replay"] = stand_in.run_replay
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return stand_in


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


# list


def test_list(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each bundle, sorted, below headings; where no folder is given, that of nan-bundles."""
    write_bundle(Path("elsewhere") / NAME)
    write_bundle(
        bundle.with_name("step-000020-rank-1"),
        fault={"global_step": 20, "kind": "inf", "found_in": ("buffers",), "reproduced": Reproduced(runs=0, of=2)},
        environment={"device": "cuda:1"},
        pin=PinRecord(known=True),
    )
    code, out, err = run(capsys, "list")
    size = sum(path.stat().st_size for path in bundle.iterdir()) / 1000
    expected = [
        ["bundle", "step", "fault", "batch", "reproduced", "size", "device"],
        ["nan-bundles/step-000020-rank-1", "20", "inf in buffers (known)", "12", "0 of 2", f"{size:.1f} kB", "cuda:1"],
        [f"nan-bundles/{NAME}", "812", "nan in loss, gradients", "12", "1 of 1", f"{size:.1f} kB", "cpu"],
    ]
    assert expected == [re.split(r"  +", line) for line in out.splitlines()]
    assert (code, err) == (0, "")


def test_list_of_the_current_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no nan-bundles, the current folder is searched."""
    write_bundle(here / "a" / NAME)
    assert f"a/{NAME} " in run(capsys, "list")[1]


def test_list_of_several_folders(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders in the order given, bundles by themselves or by their bundle.json, each once."""
    write_bundle(Path("a") / NAME)
    _, out, _ = run(capsys, "list", f"{bundle}/bundle.json", "a", "nan-bundles", "--json")
    assert [str(bundle.absolute()), str(Path("a", NAME).absolute())] == [row["path"] for row in json.loads(out)]


def test_list_of_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No bundle is no error."""
    (here / "empty").mkdir()
    assert run(capsys, "list", "empty") == (0, "no bundle in empty\n", "")
    assert run(capsys, "list", "empty", "--json") == (0, "[]\n", "")


def test_list_of_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped folder is an error, never an empty list."""
    expected = "nancapture: ghost: expected a bundle or a folder with bundles, found nothing\n"
    assert (2, "", expected) == run(capsys, "list", "ghost")


def test_list_with_damaged_ones(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged bundle is listed with the reason, the others as ever; the exit code tells."""
    damaged = write_bundle(bundle.with_name("step-000001-rank-0"))
    (damaged / "rng.safetensors").unlink()
    code, out, _ = run(capsys, "list")
    assert code == 2
    lines = out.splitlines()
    assert lines[1].startswith(f"{bundle}   812 ")
    assert [f"{damaged}   damaged: rng.safetensors is missing (copy the bundle anew)"] == lines[2:]


def test_list_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for programs."""
    damaged = write_bundle(bundle.with_name("step-000900-rank-0"))
    (damaged / "bundle.json").write_text("[]")
    code, out, _ = run(capsys, "list", "--json")
    sound = {
        "path": str(bundle.absolute()),
        "damaged": None,
        "global_step": 812,
        "epoch": 3,
        "batch_idx": 12,
        "kind": "nan",
        "found_in": ["loss", "gradients"],
        "reproduced": {"runs": 1, "of": 1},
        "size": sum(path.stat().st_size for path in bundle.iterdir()),
        "device": "cpu",
        "known": False,
    }
    assert [sound, {"path": str(damaged.absolute()), "damaged": "bundle.json: expected an object"}] == json.loads(out)
    assert code == 2


def test_list_when_the_reader_has_gone(bundle: Path) -> None:
    """`nancapture list | head -0` ends in silence."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pytest_nancapture.cli", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_list_on_a_terminal_that_lacks_letters(here: Path) -> None:
    """A name that the terminal cannot show is escaped, and the rest is listed."""
    write_bundle(Path("损失") / NAME)
    command = [sys.executable, "-m", "pytest_nancapture.cli", "list"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"\\u635f\\u5931/{NAME} " in done.stdout


@pytest.mark.parametrize(("extra", "expected"), [("", "[]"), ("import numpy; ", "['numpy']")])
def test_list_imports_nothing_heavy(bundle: Path, extra: str, expected: str) -> None:
    """Listing reads JSON only; and the check does see a heavy import where there is one."""
    code = (
        f"import sys; from pytest_nancapture.cli import main; {extra}main(['list']); "
        "print(sorted({'torch', 'lightning', 'numpy', 'safetensors', 'pytest'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert expected == done.stdout.splitlines()[-1]


# show


def test_show(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything a person may want to know, in sections."""
    folder = write_bundle(
        Path("nan-bundles") / NAME,
        fault={
            "losses": ("0.25", "nan"),
            "culprit": {"phase": "forward", "op": "aten.div.Tensor", "file": "train.py", "line": 42},
            "buffers": ("bn.running_mean",),
        },
        module={
            "arguments": {"lr": 0.1, "sizes": {"list": [1, 2]}},
            "eval_mode": ("", "bn"),
            "attributes": {"": {"t": 0.5}, "head": {"scale": {"float": "inf"}}},
            "unwritten": ("loss_fn: a lambda has no name",),
        },
        batch=BatchRecord(
            window=(
                MicroBatch(batch_idx=11, tree={"tensor": "x"}),
                MicroBatch(batch_idx=12, tree={"dict": [["image", {"tensor": "x"}], ["id", "a7"]]}),
            )
        ),
        rng=RngRecord(instants=({}, {})),
        environment={"device": "cuda:0", "versions": {"torch": "2.13.0", "numpy": "2.1"}},
    )
    code, out, err = run(capsys, "show", str(folder))
    assert (code, err) == (0, "")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    trainer = out[out.index("\ntrainer\n") + 9 : out.index("\n\nnumerics\n")]
    expected = f"""\
{NAME}   nan in loss, gradients   {sum(sizes.values()) / 1000:.1f} kB

fault
  what        nan in loss, gradients
  where       step 812, epoch 3, micro-batch 12 of the epoch
  loss        0.25, nan
  gradients   2 of 2 not finite: fc.bias, fc.weight
  buffers     1 not finite: bn.running_mean
  reproduced  1 of 1 reruns at capture

culprit
  file   train.py
  line   42
  op     aten.div.Tensor
  phase  forward

module
  target                shop.model:Net   in shop/model.py
  argument lr           0.1
  argument sizes        [1, 2]
  not written           loss_fn: a lambda has no name
  attribute t           0.5
  attribute head.scale  inf
  in eval mode          2: the module itself, bn

batch
  micro-batch 11  tensor float32 [16, 8]
  micro-batch 12  dict   <- the guilty one
    'image'       tensor float32 [16, 8]
    'id'          'a7'

trainer
{trainer}

numerics
  default dtype  float32

code
  commit  0123456789abcdef0123456789abcdef01234567
  dirty   no

environment
  device    cuda:0
  versions  numpy 2.1, torch 2.13.0

files
  batch.safetensors      {sizes["batch.safetensors"]} B   sha256 df7651656532
  rng.safetensors        {sizes["rng.safetensors"]} B   sha256 0d092aa75f8e
  weights.safetensors    {sizes["weights.safetensors"]} B   sha256 de24e455eba5

what to do with it
  replay  pytest --nan-bundles=nan-bundles/{NAME}
          nancapture replay nan-bundles/{NAME} --trace
  pin     nancapture pin nan-bundles/{NAME} fixtures
"""
    assert expected == out
    assert "  precision                32-true\n" in trainer
    assert "  last batch               no\n" in trainer
    assert "clip" not in trainer


def test_show_says_what_weakens_a_bundle(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that never came back, gradients that are all zero, a fault that is known: all are said."""
    gradients = fake_manifest().fault.gradients
    fault = {
        "reproduced": Reproduced(runs=0, of=1),
        "gradients": type(gradients)(total=3, nonzero=("a",)),
        "losses": (),
    }
    folder = write_bundle(here / "b", fault=fault, pin=PinRecord(known=True))
    lines = run(capsys, "show", str(folder))[1].splitlines()[4:10]
    expected = [
        "  where       step 812, epoch 3, micro-batch 12 of the epoch",
        "  loss        none recorded",
        "  gradients   0 of 3 not finite",
        "              2 of 3 all zero",
        "  reproduced  0 of 1 reruns at capture: not shown to come back, so a test of it proves nothing yet",
        "  pinned      as a known, open fault: pytest expects it to fail",
    ]
    assert expected == lines


def test_show_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest as it stands in bundle.json, with path and size."""
    code, out, _ = run(capsys, "show", str(bundle), "--json")
    data = json.loads(out)
    assert str(bundle.absolute()) == data.pop("path")
    assert sum(path.stat().st_size for path in bundle.iterdir()) == data.pop("size")
    assert (0, json.loads((bundle / "bundle.json").read_text())) == (code, data)


def test_show_cannot_be_made_to_steer_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bundle is data from elsewhere: its escape sequences and line breaks are shown, not obeyed."""
    evil = "\x1b[2J\nall is well"
    folder = write_bundle(
        here / "b",
        fault={"culprit": {"op": evil}, "losses": (evil,), "found_in": (evil,)},
        environment={"device": evil},
        batch=BatchRecord(window=(MicroBatch(batch_idx=0, tree={"dict": [[evil, {"object": evil}]]}),)),
    )
    for command in ("show", "list"):
        _, out, _ = run(capsys, command, str(folder))
        assert "\\x1b[2J\\nall is well" in out
        assert "\x1b" not in out
        assert "\nall is well" not in out


def test_show_of_a_batch_that_is_no_tensor_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with a right hash may still be no tensor file."""
    files = {name: tensor_file() for name in ("weights.safetensors", "rng.safetensors")}
    folder = write_bundle(here / "b", files={**files, "batch.safetensors": b"PK\x03\x04"})
    code, out, err = run(capsys, "show", str(folder))
    assert (code, out) == (2, "")
    assert err.startswith(f"nancapture: {folder}: batch.safetensors is not a safetensors file: ")


def test_a_folder_of_bundles_in_place_of_one(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundles in it are named."""
    expected = (
        f"nancapture: nan-bundles: expected one bundle, found a folder with 1: nan-bundles/{NAME} (name one of them)\n"
    )
    assert (2, "", expected) == run(capsys, "show", "nan-bundles")


@pytest.mark.parametrize(("place", "found"), [("ghost", "nothing"), ("file", "a file")])
def test_no_bundle_there(here: Path, capsys: pytest.CaptureFixture[str], place: str, found: str) -> None:
    """A mistyped bundle is told from a file."""
    (here / "file").write_text("")
    expected = f"nancapture: {place}: expected a bundle's folder, found {found}\n"
    assert (2, "", expected) == run(capsys, "show", place)


# verify


def test_verify(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound bundles are ok, by themselves or by their folder."""
    assert (0, f"nan-bundles/{NAME}  ok\n", "") == run(capsys, "verify", str(bundle))
    assert (0, f"nan-bundles/{NAME}  ok\n", "") == run(capsys, "verify", "nan-bundles")


def test_verify_of_a_damaged_one(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An altered byte is found, and the other bundles are checked all the same."""
    damaged = write_bundle(bundle.with_name("step-000001-rank-0"))
    path = damaged / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    problem = "weights.safetensors was altered: its hash is not the one in bundle.json (copy the bundle anew)"
    expected = f"nan-bundles/step-000001-rank-0  damaged: {problem}\nnan-bundles/{NAME}  ok\n"
    assert (2, expected, "") == run(capsys, "verify", "nan-bundles")
    code, out, _ = run(capsys, "verify", "nan-bundles", "--json")
    rows = [
        {"path": str(damaged.absolute()), "ok": False, "problem": problem},
        {"path": str(bundle.absolute()), "ok": True, "problem": None},
    ]
    assert (2, rows) == (code, json.loads(out))


def test_verify_of_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder is not a verified one."""
    (here / "empty").mkdir()
    expected = "nancapture: empty: expected at least one bundle, found none\n"
    assert (2, "", expected) == run(capsys, "verify", "empty")


# replay


def test_replay_that_is_finite(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict comes first, before anything that code under test prints, and passes."""
    code, out, err = run(capsys, "replay", str(bundle))
    expected = f"""\
finite: all is finite
  loss        0.5
  ran on      cpu, 1.0 s
  repeat      pytest --nan-bundles=nan-bundles/{NAME}
"""
    assert (0, expected, "code under test prints\n") == (code, out, err)
    options = {"module": None, "device": "auto", "trace": False, "hooks": None}
    assert [(str(bundle.absolute()), options)] == replays.asked


def test_replay_that_is_not(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """The culprit, a few names, the notes and the command that repeats it."""
    replays.answer = RED
    code, out, _ = run(capsys, "replay", str(bundle), "--trace", "--device=cuda:0")
    expected = f"""\
nonfinite: the loss is nan
  culprit     mean_loss = loss / count
  born at     train.py:42   aten.div.Tensor   in head
  because     0 / 0: 3 of 20 classes have no sample
  surfaces    forward
  not finite  9: {", ".join(f"gradient layer{i}.weight" for i in range(5))} and 4 more
  loss        nan
  note        the device differs
  ran on      cuda:0, 2.3 s
  repeat      pytest --nan-bundles=nan-bundles/{NAME}
"""
    assert (1, expected) == (code, out)
    options = {"module": None, "device": "cuda:0", "trace": True, "hooks": None}
    assert [(str(bundle.absolute()), options)] == replays.asked


def test_replay_without_a_trace(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """Where only the phase is known, the option that finds the rest is named."""
    replays.answer = ReplayResult(
        verdict="nonfinite",
        loss=1.0,
        nonfinite=("gradient w",),
        culprit=Culprit(phase="backward"),
        reason="a gradient is nan",
        device="cpu",
        seconds=0.0,
    )
    _, out, _ = run(capsys, "replay", str(bundle))
    assert "  surfaces    backward   (add --trace to find the operation and its line)\n" in out


def test_replay_whose_trace_found_nothing(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """The option is not named again."""
    culprit = Culprit(phase="optimizer")
    replays.answer = dataclasses.replace(RED, culprit=culprit)
    assert "  surfaces    optimizer\n" in run(capsys, "replay", str(bundle), "--trace")[1]


@pytest.mark.parametrize("verdict", ["vacuous", "mismatch", "error"])
def test_replay_with_another_verdict(
    bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str], verdict: Any
) -> None:
    """Only finite passes; the detail comes last."""
    replays.answer = ReplayResult(
        verdict=verdict,
        loss=None,
        nonfinite=(),
        culprit=None,
        reason="so it is",
        detail="Traceback:\n\tline \x1b[31m1",
        device="cpu",
        seconds=0.0,
    )
    code, out, _ = run(capsys, "replay", str(bundle))
    expected = f"""\
{verdict}: so it is
  ran on      cpu, 0.0 s
  repeat      pytest --nan-bundles=nan-bundles/{NAME}

Traceback:
        line \\x1b[31m1
"""
    assert (1, expected) == (code, out)


def test_replay_as_json(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object on one line, and nothing else, on stdout."""
    replays.answer = RED
    code, out, _ = run(capsys, "replay", str(bundle), "--json")
    expected = json.loads(json.dumps({"path": str(bundle.absolute()), **RED.as_dict()}))
    assert (1, expected) == (code, json.loads(out))
    assert out.count("\n") == 1


def test_replay_quotes_the_command(here: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """A path with a space can be pasted."""
    folder = write_bundle(Path("my runs") / NAME)
    assert f"pytest '--nan-bundles=my runs/{NAME}'" in run(capsys, "replay", str(folder))[1]


def test_replay_without_the_device(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """An absent device is no verdict."""
    replays.answer = DeviceUnavailableError("cuda was asked for, and this machine has no accelerator")
    expected = f"code under test prints\nnancapture: {replays.answer}\n"
    assert (2, "", expected) == run(capsys, "replay", str(bundle), "--device=cuda")
    code, out, _ = run(capsys, "replay", str(bundle), "--device=cuda", "--json")
    error = {"error": {"type": "DeviceUnavailableError", "message": str(replays.answer)}}
    assert (2, error) == (code, json.loads(out))


def test_a_damaged_bundle_is_not_replayed(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """One clear error that names bundle and problem, and no replay begins."""
    (bundle / "weights.safetensors").unlink()
    expected = f"nancapture: {bundle.absolute()}: weights.safetensors is missing (copy the bundle anew)\n"
    assert (2, "", expected) == run(capsys, "replay", str(bundle))
    assert not replays.asked


def test_ctrl_c(bundle: Path, replays: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted replay ends without a traceback."""
    replays.answer = KeyboardInterrupt()
    assert run(capsys, "replay", str(bundle)) == (130, "", "code under test prints\n")


# pin


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[ReplayResult]:
    """What the fresh processes answer, in order."""
    queue: list[ReplayResult] = []
    monkeypatch.setattr(pinning, "replay_afresh", lambda bundle, device: queue.pop(0).as_dict())
    return queue


def test_pin(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """What was done, and what to do next."""
    verdicts.append(RED)
    code, out, err = run(capsys, "pin", str(bundle), "fixtures")
    size = sum(path.stat().st_size for path in bundle.iterdir()) / 1000
    expected = f"""\
pinned  fixtures/{NAME}   {size:.1f} kB   red: the loss is nan
note    the device differs
next    git add fixtures/{NAME}
        pytest --nan-bundles=fixtures
        and for a plain pytest to run it for ever, one line of configuration:
        nan_bundles = fixtures       (pytest.ini, below [pytest])
        nan_bundles = ["fixtures"]   (pyproject.toml, below [tool.pytest.ini_options])
"""
    assert (0, expected, f"replaying nan-bundles/{NAME} in a fresh process ...\n") == (code, out, err)
    assert Path("fixtures", NAME, "bundle.json").exists()


def test_pin_several(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Several go into one folder, fixtures where none is given; one that is refused doesn't keep the others out."""
    others = [write_bundle(bundle.with_name(f"step-00090{i}-rank-0")) for i in range(2)]
    verdicts += [RED, FINITE, RED]
    code, out, err = run(capsys, "pin", str(bundle), *map(str, others))
    assert code == 1
    assert sorted(path.name for path in Path("fixtures").iterdir()) == [NAME, "step-000901-rank-0"]
    assert f"next    git add fixtures/{NAME} fixtures/step-000901-rank-0\n" in out
    assert f"nancapture: {others[0].absolute()}: not pinned, since it is not red: " in err


def test_pin_of_a_green_bundle(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the verdict and the ways out."""
    verdicts.append(FINITE)
    code, out, err = run(capsys, "pin", str(bundle))
    assert (code, out) == (1, "")
    assert "expected a replay that is nonfinite, came finite (all is finite)\n" in err
    assert "--force pins it all the same" in err
    assert not Path("fixtures").exists()


def test_pin_by_force(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is replayed, and it is said."""
    code, out, err = run(capsys, "pin", str(bundle), "--force", "--name=other")
    assert (code, err) == (0, "")
    assert out.startswith("pinned  fixtures/other   ")
    assert out.splitlines()[0].endswith("forced, not replayed")


def test_pin_of_a_known_fault(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """It is said what becomes of it once it is fixed."""
    verdicts.append(RED)
    code, out, _ = run(capsys, "pin", str(bundle), "--known")
    last = "known   pytest expects it to fail. Once the fault is fixed, set pin.known to false in its bundle.json"
    assert (0, last) == (code, out.splitlines()[-1])
    assert json.loads(Path("fixtures", NAME, "bundle.json").read_text())["pin"] == {"known": True}


def test_pin_of_a_large_bundle(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large for git is said to be."""
    monkeypatch.setattr("pytest_nancapture.cli._MUCH_FOR_GIT", 1000)
    _, out, _ = run(capsys, "pin", str(write_bundle(here / NAME)), "--force")
    last = "note    this is large for git, and some hosts refuse files over 100 MB: consider Git LFS"
    assert last == out.splitlines()[-1]


def test_pin_of_a_damaged_bundle(
    bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not replayed, and worse than one that was refused."""
    other = write_bundle(bundle.with_name("step-000900-rank-0"))
    (bundle / "rng.safetensors").write_bytes(bytes((bundle / "rng.safetensors").stat().st_size))
    verdicts.append(FINITE)
    code, _, err = run(capsys, "pin", str(bundle), str(other))
    assert code == 2
    assert f"nancapture: {bundle.absolute()}: rng.safetensors was altered" in err
    assert not verdicts


def test_pin_of_a_missing_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped bundle is wrong usage."""
    expected = "nancapture: ghost: expected a bundle's folder, found nothing\n"
    assert (2, "", expected) == run(capsys, "pin", "ghost", "fixtures")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name=x"], "--name names one copy: give one BUNDLE"),
        (["--force", "--known"], "argument --known: not allowed with argument --force"),
    ],
)
def test_pin_options_that_contradict(
    bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """They are refused before anything is done."""
    error = usage_error(capsys, "pin", str(bundle), str(bundle), "fixtures", *arguments)
    assert f"nancapture pin: error: {message}\n" in error
    assert not Path("fixtures").exists()


# the command itself


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package and its version."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (0, f"pytest-nancapture {__version__}\n") == (caught.value.code, capsys.readouterr().out)


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage, which is said."""
    assert "nancapture: error: the following arguments are required: COMMAND" in usage_error(capsys)


@pytest.mark.parametrize("command", ["list", "show", "verify", "replay", "pin"])
def test_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Each command explains itself with an example."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  nancapture {command} " in capsys.readouterr().out


def test_help_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    """The first page tells the story and the exit codes."""
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "  pytest --nan-bundles=fixtures\n" in out
    assert "exit codes: 0 all is well; 1 " in out


def test_what_the_system_refuses(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the system is a message, not a traceback."""

    def refuse(folder: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("pytest_nancapture.cli.find_bundles", refuse)
    assert run(capsys, "list") == (2, "", "nancapture: [Errno 13] Permission denied: 'nan-bundles'\n")
