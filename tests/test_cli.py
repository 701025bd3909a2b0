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
from fake_shrinker import SMALL, FakeShrinker, install

from pytest_nancapture import __version__
from pytest_nancapture.bundle.manifest import (
    BatchRecord,
    MicroBatch,
    MissingRecord,
    PinRecord,
    Reproduced,
    RngRecord,
    StateRecord,
)
from pytest_nancapture.bundle.text import human_size
from pytest_nancapture.cli import main
from pytest_nancapture.diagnose.culprit import Culprit
from pytest_nancapture.errors import DeviceUnavailableError, ShrinkError
from pytest_nancapture.replay.result import ReplayResult
from pytest_nancapture.shrink.pinning import pin as pinning
from pytest_nancapture.shrink.pinning import promote as promoting

NAME = "step-000812-rank-0"
PINNED = "fixtures/shop-div-zero-count"
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
    expected = [
        ["bundle", "step", "fault", "batch", "reproduced", "size", "device"],
        [
            "nan-bundles/step-000020-rank-1",
            "20",
            "inf in buffers (known)",
            "12",
            "0 of 2",
            size(bundle.with_name("step-000020-rank-1")),
            "cuda:1",
        ],
        [f"nan-bundles/{NAME}", "812", "nan in loss, gradients", "12", "1 of 1", size(bundle), "cpu"],
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
        "reproduced": {"runs": 1, "of": 1, "how": ""},
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
            "state": (
                StateRecord(module="", path=(["attribute", "t"],), value=0.5),
                StateRecord(module="head", path=(["attribute", "scale"], ["key", "x"]), value={"float": "inf"}),
            ),
            "missing": (MissingRecord(where="tokenizer", why="a sentencepiece model cannot be written"),),
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
  reproduced  1 of 1 replays at capture

culprit
  file   train.py
  line   42
  op     aten.div.Tensor
  phase  forward

module
  target                 shop.model:Net   in shop/model.py
  argument lr            0.1
  argument sizes         [1, 2]
  not written            loss_fn: a lambda has no name
  state t                0.5
  state head.scale['x']  inf
  missing                tokenizer: a sentencepiece model cannot be written
  in eval mode           2: the module itself, bn

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
        "  reproduced  0 of 1 replays at capture: not shown to come back, so a test of it proves nothing yet",
        "  pinned      as a known, open fault: pytest expects it to fail",
    ]
    assert expected == lines


@pytest.mark.parametrize(
    ("setting", "row"),
    [
        ([False, False], "no"),
        ([True, False], "yes"),
        ([True, True], "yes, only warning of others"),
        ([False, True], "no"),
        ("odd", "odd"),
    ],
)
def test_show_of_settings_in_words(here: Path, capsys: pytest.CaptureFixture[str], setting: Any, row: str) -> None:
    """What stands for something else is said as that: no pair of flags, and no limit of -1."""
    folder = write_bundle(
        here / "b", numerics={"deterministic_algorithms": setting}, trainer={"max_epochs": -1, "max_steps": -1}
    )
    out = run(capsys, "show", str(folder))[1]
    assert f"\n  deterministic algorithms  {row}\n" in out
    assert re.search(r"\n  max epochs +no limit\n  max steps +no limit\n", out)


def test_show_of_limits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit that was set is shown."""
    folder = write_bundle(here / "b", trainer={"max_epochs": 3, "max_steps": 500})
    assert re.search(r"\n  max epochs +3\n  max steps +500\n", run(capsys, "show", str(folder))[1])


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


# shrink


@pytest.fixture
def shrinker(monkeypatch: pytest.MonkeyPatch) -> FakeShrinker:
    return install(monkeypatch)


def size(path: Path | str) -> str:
    return f"{sum(file.stat().st_size for file in Path(path).iterdir()) / 1000:.1f} kB".replace(".0 ", " ")


def test_shrink(bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the bundle, unless said otherwise: from what to what, what each pass gained, what to do next."""
    shrinker.kept = ("3 of 20 classes: the fault needs them", "all random states")
    code, out, err = run(capsys, "shrink", str(bundle))
    small = f"{bundle}-small"
    before, after = (sum(file.stat().st_size for file in Path(path).iterdir()) for path in (bundle, small))
    gained = f"{human_size(before - after):>6}"
    expected = f"""\
shrunk  {small}   {size(bundle)} -> {size(small)}
red     the loss is nan
        pass      gained     left   tried   kept
        batch     {gained}   {size(small)}      20      3
        weights        -   {size(small)}       4      0
holds   3 of 20 classes: the fault needs them
        all random states
next    nancapture pin {small} fixtures
"""
    assert (0, expected) == (code, out)
    expected = f"""\
shrinking {bundle}, for 300 s at most; Ctrl-C ends that early ...
shrinking  {size(bundle)}      0 s   kept 0 of 1      batch        dropping samples
shrinking  {size(small)}      1 s   kept 1 of 2      batch        dropping samples
"""
    assert expected == err
    options = {"device": "auto", "max_seconds": 300.0, "jobs": 1}
    assert [(bundle.absolute(), Path(small).absolute(), options)] == shrinker.asked


def test_shrink_into_a_place(bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]) -> None:
    """The place and the options are passed on."""
    place = "a/b/small one"
    code, out, _ = run(capsys, "shrink", str(bundle), place, "--device=cpu", "--max-seconds=2.5", "--jobs=4")
    assert (0, f"next    nancapture pin '{place}' fixtures") == (code, out.splitlines()[-1])
    options = {"device": "cpu", "max_seconds": 2.5, "jobs": 4}
    assert [(bundle.absolute(), Path(place).absolute(), options)] == shrinker.asked


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize(
    ("stopped", "code", "note"), [("time", 0, "stopped after 60 s"), ("interrupted", 130, "interrupted")]
)
def test_shrink_that_is_stopped(
    bundle: Path,
    shrinker: FakeShrinker,
    capsys: pytest.CaptureFixture[str],
    stopped: str,
    code: int,
    note: str,
    remembers: bool,
) -> None:
    """The best so far is there; it is said how to go on, and the same command does: from what the shrinker
    remembers or, where it does not, from the smaller bundle."""
    shrinker.stopped, shrinker.remembers = stopped, remembers
    command = ("shrink", str(bundle), "--max-seconds=60")
    first, out, _ = run(capsys, *command)
    assert code == first
    assert f"\nnote    {note}; run the same command again to go on\n" in out
    shrinker.stopped, shrinker.files = "", {**(shrinker.files or {}), "rng.safetensors": tensor_file()}
    small = Path(f"{bundle}-small")
    before = size(small)
    second, out, _ = run(capsys, *command)
    source = bundle if remembers else small
    assert (0, source.absolute(), remembers) == (second, shrinker.asked[1][0], shrinker.remembered)
    assert f" -> {size(small)}\nnote    it went on from the {before} of an earlier run\n" in out
    assert sorted(path.name for path in small.parent.iterdir()) == [NAME, f"{NAME}-small"]


def test_shrink_that_gains_nothing_more(
    bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier one stays, byte for byte."""
    run(capsys, "shrink", str(bundle))
    small = Path(f"{bundle}-small")
    before = {path: path.stat().st_mtime_ns for path in small.iterdir()}
    code, out, _ = run(capsys, "shrink", str(bundle))
    assert (0, f"shrunk  {small}   {size(small)}, as it was") == (code, out.splitlines()[0])
    assert f"\nnote    it came no further than the {size(small)} of an earlier run\n" in out
    assert before == {path: path.stat().st_mtime_ns for path in small.iterdir()}


def test_shrink_that_is_killed_while_it_goes_on(
    bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier one stays where it is, and what the shrinker knows by then is kept for the next time."""
    run(capsys, "shrink", str(bundle))
    small = Path(f"{bundle}-small")
    before = {path: path.stat().st_mtime_ns for path in small.iterdir()}
    shrinker.raises = KeyboardInterrupt()
    assert run(capsys, "shrink", str(bundle))[0] == 130
    assert before == {path: path.stat().st_mtime_ns for path in small.iterdir()}
    memory = f".{NAME}-small.shrink.json"
    assert sorted(path.name for path in small.parent.iterdir()) == [memory, NAME, f"{NAME}-small"]


@pytest.mark.parametrize("there", ["folder", "file", "other", "itself"])
def test_shrink_into_a_place_that_is_taken(
    bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str], there: str
) -> None:
    """Only a smaller one of the same step is gone on with; nothing else is ever replaced."""
    place = bundle if there == "itself" else Path("small")
    if there == "folder":
        place.mkdir()
    elif there == "file":
        place.write_text("")
    elif there == "other":
        write_bundle(place, fault={"global_step": 9})
    problem = "something else of that name exists already; give another OUT, or remove it first"
    expected = f"nancapture: {place.absolute()}: not shrunk: {problem}\n"
    code, out, err = run(capsys, "shrink", str(bundle), str(place))
    assert (1, "", expected) == (code, out, err.partition(" ...\n")[2])
    assert not shrinker.asked


def test_shrink_as_json(bundle: Path, shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for programs, errors too."""
    shrinker.stopped = "time"
    code, out, _ = run(capsys, "shrink", str(bundle), "--json")
    data = json.loads(out)
    assert (0, f"{bundle.absolute()}-small", "time", []) == (code, data["path"], data["stopped"], data["kept"])
    assert data["gains"][0] == {
        "pass_name": "batch",
        "before": data["before"],
        "after": data["after"],
        "tried": 20,
        "kept": 3,
    }
    assert data["result"] == {"verdict": "nonfinite", "reason": "the loss is nan"}
    shrinker.raises = ShrinkError("not red")
    code, out, err = run(capsys, "shrink", str(bundle), "other", "--json")
    assert (code, json.loads(out)) == (1, {"error": {"type": "ShrinkError", "message": "not red"}})
    assert err.endswith("nancapture: not red\n")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--max-seconds=0", "argument --max-seconds: expected a number of seconds above 0, came '0'"),
        ("--max-seconds=long", "argument --max-seconds: expected a number of seconds above 0, came 'long'"),
        ("--jobs=0", "argument --jobs: expected a number from 1 up, came '0'"),
        ("--jobs=two", "argument --jobs: expected a number from 1 up, came 'two'"),
    ],
)
def test_shrink_options_that_are_none(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    """Numbers are checked before anything is done."""
    assert f"nancapture shrink: error: {message}\n" in usage_error(capsys, "shrink", "b", option)


# pin


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch, shrinker: FakeShrinker) -> list[ReplayResult]:
    """What the fresh processes answer, in order."""
    queue: list[ReplayResult] = []
    for module in (pinning, promoting):
        monkeypatch.setattr(module, "replay_afresh", lambda bundle, device, trace=False: queue.pop(0).as_dict())
        monkeypatch.setattr(module, "heal_afresh", lambda bundle, device: None, raising=False)
    return queue


def test_pin(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """What was done, and what to do next."""
    verdicts += [RED, RED]
    code, out, err = run(capsys, "pin", str(bundle), "fixtures")
    expected = f"""\
pinned  {PINNED}   {size(bundle)} -> {size(PINNED)}   red: the loss is nan
note    the device differs
next    git add {PINNED}
        pytest --nan-bundles=fixtures
        and for a plain pytest to run it for ever, one line of configuration:
        nan_bundles = fixtures       (pytest.ini, below [pytest])
        nan_bundles = ["fixtures"]   (pyproject.toml, below [tool.pytest.ini_options])
"""
    assert (0, expected) == (code, out)
    after = size(write_bundle("alike", files=SMALL))
    expected = f"""\
replaying nan-bundles/{NAME} in a fresh process ...
shrinking it, for 300 s at most; Ctrl-C ends that early ...
shrinking  {size(bundle)}      0 s   kept 0 of 1      batch        dropping samples
shrinking  {after}      1 s   kept 1 of 2      batch        dropping samples
replaying the shrunk one in a fresh process ...
"""
    assert expected == err
    assert Path(PINNED, "bundle.json").exists()


def test_pin_tells_what_the_small_bundle_holds(
    bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str], shrinker: FakeShrinker
) -> None:
    """And why it had to stay."""
    verdicts += [RED, RED]
    shrinker.kept = ("1 of 128 samples kept", "weights kept, since the fault depends on them: head.weight")
    _, out, _ = run(capsys, "pin", str(bundle), "fixtures")
    assert out.splitlines()[1:3] == [
        "holds   1 of 128 samples kept",
        "        weights kept, since the fault depends on them: head.weight",
    ]


def test_pin_passes_its_options_on(
    bundle: Path, verdicts: list[ReplayResult], shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options may stand between the bundle and the folder."""
    verdicts += [RED, RED]
    options = ("--max-seconds=9", "--jobs=2", "--device=cpu", "--name=x")
    assert run(capsys, "pin", *options[:2], str(bundle), *options[2:], "elsewhere")[0] == 0
    assert shrinker.asked[0][2] == {"device": "cpu", "max_seconds": 9.0, "jobs": 2}
    assert Path("elsewhere/x/bundle.json").exists()


def test_pin_as_it_is(
    bundle: Path, verdicts: list[ReplayResult], shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without shrinking there is one replay."""
    verdicts.append(RED)
    code, out, err = run(capsys, "pin", str(bundle), "--no-shrink")
    assert (0, f"pinned  {PINNED}   {size(PINNED)}   red: the loss is nan") == (code, out.splitlines()[0])
    assert err == f"replaying nan-bundles/{NAME} in a fresh process ...\n"
    assert not shrinker.asked


def test_pin_that_could_not_shrink(
    bundle: Path, verdicts: list[ReplayResult], shrinker: FakeShrinker, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is pinned all the same, with a note."""
    shrinker.raises = ShrinkError("no pass fits\nat all")
    verdicts.append(RED)
    code, out, _ = run(capsys, "pin", str(bundle))
    lines = out.splitlines()
    assert (0, f"pinned  {PINNED}   {size(PINNED)}   red: the loss is nan") == (code, lines[0])
    assert lines[2:4] == ["note    pinned as it is, since shrinking failed: no pass fits", "note    at all"]


@pytest.mark.parametrize(
    ("stopped", "code", "note"), [("time", 0, "stopped after 300 s"), ("interrupted", 130, "interrupted")]
)
def test_pin_that_is_stopped(
    bundle: Path,
    verdicts: list[ReplayResult],
    shrinker: FakeShrinker,
    capsys: pytest.CaptureFixture[str],
    stopped: str,
    code: int,
    note: str,
) -> None:
    """The best so far is pinned; after Ctrl-C no other bundle is begun."""
    other = write_bundle(bundle.with_name("step-000900-rank-0"), module={"target": "shop.model:Other"})
    shrinker.stopped = stopped
    verdicts += [RED, RED, *([RED] if stopped == "time" else [])]
    found, out, _ = run(capsys, "pin", str(bundle), str(other))
    assert f"note    shrinking was {note}: this is the smallest that was found by then\n" in out
    assert f"next    git add {PINNED}\n" in out
    if stopped == "interrupted":
        assert code == found
    assert not verdicts


def test_pin_several(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Several go into one folder, fixtures where none is given; one that is refused doesn't keep the others out."""
    others = [write_bundle(bundle.with_name(f"step-00090{i}-rank-0")) for i in range(3)]
    assert RED.culprit is not None
    log = dataclasses.replace(RED, culprit=dataclasses.replace(RED.culprit, op="aten.log.default"))
    verdicts += [RED, RED, FINITE, RED, log, log]
    code, out, err = run(capsys, "pin", str(bundle), *map(str, others))
    assert code == 1
    pinned = ["shop-div-zero-count", "shop-log-zero-count"]
    assert pinned == sorted(path.name for path in Path("fixtures").iterdir())
    assert f"next    git add fixtures/{pinned[0]} fixtures/{pinned[1]}\n" in out
    assert f"nancapture: {others[0].absolute()}: not pinned, since it is not red: " in err
    twin = f"this fault is pinned already, as {PINNED} (mean_loss = loss / count, train.py:42, aten.div.Tensor)"
    assert f"nancapture: {others[1].absolute()}: not pinned: {twin}\n  --again pins it" in err


def test_pin_again(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """The same fault a second time, on request."""
    verdicts += [RED, RED, RED, RED]
    run(capsys, "pin", str(bundle))
    code, out, _ = run(capsys, "pin", str(bundle), "--again")
    assert code == 0
    assert out.startswith(f"pinned  {PINNED}-2   ")


def test_pin_of_a_green_bundle(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the verdict and the ways out."""
    verdicts.append(FINITE)
    code, out, err = run(capsys, "pin", str(bundle))
    assert (code, out) == (1, "")
    assert "expected a replay that is nonfinite, came finite (all is finite)\n" in err
    assert "--force pins it all the same" in err
    assert not Path("fixtures").exists()


def test_pin_by_force(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is replayed or shrunk, and it is said."""
    code, out, err = run(capsys, "pin", str(bundle), "--force", "--name=other")
    assert (code, err) == (0, "")
    assert f"pinned  fixtures/other   {size(bundle)}   forced, not replayed" == out.splitlines()[0]


def test_pin_of_a_known_fault(bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """It is said what becomes of it once it is fixed."""
    verdicts += [RED, RED]
    code, out, _ = run(capsys, "pin", str(bundle), "--known")
    last = [
        "known   pytest expects it to fail, and says so the day it passes; then it becomes a test that gates:",
        f"        nancapture promote {PINNED}",
    ]
    assert (0, last) == (code, out.splitlines()[-2:])
    assert json.loads(Path(PINNED, "bundle.json").read_text())["pin"] == {"known": True}


def test_pin_of_what_is_too_large(
    bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is said in the unit that it may be given in."""
    code, out, err = run(capsys, "pin", str(bundle), "--no-shrink", "--max-size=2kB")
    assert (code, out) == (1, "")
    assert f": not pinned: it is {size(bundle)}, more than the 2 kB of --max-size\n" in err


def test_pin_of_a_large_bundle(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large for git is said to be."""
    monkeypatch.setattr("pytest_nancapture.shrink.command._MUCH_FOR_GIT", 1000)
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
        (
            ["--max-size=big"],
            "argument --max-size: expected a size such as 1MB, 500kB, 2M or 2000000 (bytes), came 'big'",
        ),
        (["--jobs=0"], "argument --jobs: expected a number from 1 up, came '0'"),
        (["--shrunk"], "unrecognized arguments: --shrunk"),
    ],
)
def test_pin_options_that_contradict(
    bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """They are refused before anything is done."""
    error = usage_error(capsys, "pin", str(bundle), str(bundle), "fixtures", *arguments)
    assert f"nancapture pin: error: {message}\n" in error
    assert not Path("fixtures").exists()


# promote


@pytest.fixture
def known(here: Path) -> Path:
    return write_bundle(Path(PINNED), pin=PinRecord(known=True))


def test_promote(known: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]) -> None:
    """A fault that is gone gates from now on; but for that word the file stays as it was."""
    before = (known / "bundle.json").read_text()
    verdicts.append(FINITE)
    expected = f"promoted  {PINNED}   finite: all is finite; from now on it gates\nnext      git add {PINNED}\n"
    assert (0, expected, f"replaying {PINNED} in a fresh process ...\n") == run(capsys, "promote", str(known))
    assert before.replace('"known": true', '"known": false') == (known / "bundle.json").read_text()
    assert len(list(known.iterdir())) == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            RED,
            "not promoted: the fault is still there (the loss is nan)\n"
            "  As a known fault it lets the tests pass; --force promotes it all the same, "
            "and they fail until the fix.\n",
        ),
        (
            dataclasses.replace(FINITE, verdict="mismatch", reason="fc is gone"),
            "not promoted: expected a replay that is finite, came mismatch (fc is gone)\n"
            "  --force promotes it all the same.\n",
        ),
    ],
)
def test_promote_of_what_is_not_fixed(
    known: Path,
    verdicts: list[ReplayResult],
    capsys: pytest.CaptureFixture[str],
    answer: ReplayResult,
    message: str,
) -> None:
    """Refused, with the reason, and nothing is changed; unless by force."""
    before = (known / "bundle.json").read_bytes()
    verdicts.append(answer)
    code, out, err = run(capsys, "promote", str(known))
    assert (code, out) == (1, "")
    assert err.endswith(f" ...\nnancapture: {known.absolute()}: {message}")
    assert before == (known / "bundle.json").read_bytes()
    code, out, err = run(capsys, "promote", str(known), "--force")
    assert (code, err) == (0, "")
    assert out.startswith(f"promoted  {PINNED}   forced, not replayed; from now on it gates\n")
    assert b'"known": false' in (known / "bundle.json").read_bytes()


def test_promote_of_what_gates_already(
    bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing to do is said, and is no error."""
    expected = f"nan-bundles/{NAME}   nothing to do: it is not pinned as a known fault\n"
    assert (0, expected, "") == run(capsys, "promote", str(bundle))


def test_promote_several(
    known: Path, bundle: Path, verdicts: list[ReplayResult], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is refused doesn't keep the others back."""
    other = write_bundle("fixtures/other", pin=PinRecord(known=True))
    verdicts += [RED, FINITE]
    code, out, _ = run(capsys, "promote", str(known), "ghost", str(bundle), str(other))
    assert code == 2
    assert out.splitlines()[1:] == [
        "promoted  fixtures/other   finite: all is finite; from now on it gates",
        "next      git add fixtures/other",
    ]


def test_show_of_a_known_fault(known: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What to do with it once it is fixed."""
    assert run(capsys, "show", str(known))[1].endswith(f"\n  promote  nancapture promote {PINNED}\n")


# the command itself


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package and its version."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (0, f"pytest-nancapture {__version__}\n") == (caught.value.code, capsys.readouterr().out)


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage, which is said."""
    assert "nancapture: error: the following arguments are required: COMMAND" in usage_error(capsys)


@pytest.mark.parametrize("command", ["list", "show", "verify", "replay", "shrink", "pin", "promote"])
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

    monkeypatch.setattr("pytest_nancapture.bundle.paths.find_bundles", refuse)
    assert run(capsys, "list") == (2, "", "nancapture: [Errno 13] Permission denied: 'nan-bundles'\n")
