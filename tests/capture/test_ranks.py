"""Several ranks: one of them goes bad, all of them act together, and none waits for ever."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from in_time import run_in_time
from torch import nn
from training import Net, batches, bundles_in, capture_one, fit

from pytest_nancapture import NaNCapture, find_bundles, replay
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.capture import export
from pytest_nancapture.errors import CaptureError

SCRIPT = Path(__file__).with_name("ddp_run.py")
SECONDS = 120
BAD, BATCHES = 4, 8
FAULTS = ["loss", "gradient", "loss_only", "buffer", "late_buffer"]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One run: what goes bad where, and what is wanted then."""

    guilty: int = 1
    fault: str = "gradient"
    on_capture: str = "raise"
    accumulate: int = 1
    unused: bool = False
    break_writing: bool = False
    confirm: int = 1
    bad: int = BAD
    manual: str = ""
    static: bool = False
    views: bool = False
    hook: bool = False
    missing: bool = False

    @property
    def step(self) -> int:
        """The optimizer steps before that of the bad batch, as Lightning counts them: none that goes past it."""
        if self.manual == "adversarial":
            return self.bad + self.bad // self.accumulate
        return 0 if self.manual == "raw" else self.bad // self.accumulate


@dataclasses.dataclass(frozen=True)
class Run:
    """How it ended on each rank, and where its bundles are."""

    scenario: Scenario
    folder: Path
    ranks: list[dict[str, Any]]


def told(scenario: Scenario) -> dict[str, Any]:
    """What is not as usual: there is a limit to the length of a command."""
    usual = Scenario()
    return {key: value for key, value in dataclasses.asdict(scenario).items() if value != getattr(usual, key)}


def start(folder: Path, ranks: int, scenarios: list[Scenario], seconds: float) -> tuple[int, str, str]:
    """Run the script to its end, or until its time is over: then all of it is ended, and the test fails."""
    command = [
        sys.executable,
        str(SCRIPT),
        str(folder),
        str(ranks),
        json.dumps([told(scenario) for scenario in scenarios]),
    ]
    return run_in_time(command, seconds)


def runs_of(folder: Path, ranks: int, scenarios: list[Scenario], seconds: float = SECONDS) -> list[Run]:
    """One after the other, in the same processes; and one more at the end, whose error ends them."""
    code, output, errors = start(folder, ranks, [*scenarios, UNCAUGHT], seconds)
    assert code != 0
    assert errors.count("pytest_nancapture.errors.NonFiniteError: step 4: ") >= ranks, errors
    assert bundles_in(folder / str(len(scenarios))) == ["step-000004-rank-1"]
    ends = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    ends.sort(key=lambda end: (end["scenario"], end["rank"]))
    return [
        Run(scenario, folder / str(number), [end for end in ends if end["scenario"] == number])
        for number, scenario in enumerate(scenarios)
    ]


def check(run: Run, ranks: int) -> None:
    """What must hold of every run, whatever its scenario."""
    scenario, ends = run.scenario, run.ranks
    step = scenario.step
    # A buffer that a hook spoils after the update is this rank's secret until the next step.
    acts_at = min(step + (scenario.fault == "late_buffer"), BATCHES)
    assert [end["rank"] for end in ends] == list(range(ranks))
    assert [end["finite"] for end in ends] == [True] * ranks
    assert len({end["weights"] for end in ends}) == 1
    expected = {"skip": BATCHES // scenario.accumulate, "stop": acts_at + 1, "raise": acts_at}[scenario.on_capture]
    if scenario.manual in ("", "single", "switching"):
        assert [end["step"] for end in ends] == [expected] * ranks
    if scenario.break_writing:
        assert bundles_in(run.folder) == []
        assert any("No space left on device" in line for line in ends[scenario.guilty]["log"])
    else:
        assert bundles_in(run.folder) == [f"step-{step:06d}-rank-{scenario.guilty}"]
        bundle = Bundle.open(find_bundles(run.folder)[0])
        bundle.verify()
        trainer = bundle.manifest.trainer
        assert (trainer.rank, trainer.world_size, bundle.fault.batch_idx) == (scenario.guilty, ranks, scenario.bad)
    if scenario.guilty:
        assert f"nancapture: step {step}: not finite on rank {scenario.guilty}" in ends[0]["log"]
    for end in ends:
        if scenario.on_capture != "raise":
            assert end["error"] is None
        elif end["rank"] == scenario.guilty:
            assert end["error"].startswith(f"step {step}: ")
            assert bool(end["bundle"]) == (not scenario.break_writing)
        else:
            assert f"; the fault is that of rank {scenario.guilty}, and so is the bundle; " in end["error"]
            assert end["bundle"] is None


TWO = [
    Scenario(guilty=1, fault="gradient", on_capture="raise"),
    Scenario(guilty=0, fault="gradient", on_capture="stop"),
    Scenario(guilty=1, fault="loss", on_capture="skip"),
    Scenario(guilty=0, fault="loss", on_capture="raise", accumulate=2),
    Scenario(guilty=1, fault="gradient", on_capture="skip", accumulate=2),
    Scenario(guilty=1, fault="loss_only", on_capture="stop"),
    Scenario(guilty=0, fault="loss_only", on_capture="skip", unused=True),
    Scenario(guilty=1, fault="buffer", on_capture="raise"),
    Scenario(guilty=1, fault="late_buffer", on_capture="raise"),
    Scenario(guilty=1, fault="late_buffer", on_capture="skip"),
    Scenario(guilty=1, fault="late_buffer", on_capture="raise", bad=BATCHES - 1),
    Scenario(guilty=1, fault="gradient", on_capture="raise", unused=True),
    Scenario(guilty=1, fault="gradient", on_capture="raise", break_writing=True),
    Scenario(guilty=0, fault="gradient", on_capture="skip", break_writing=True),
    Scenario(guilty=1, fault="gradient", on_capture="stop", confirm=0),
    Scenario(guilty=1, fault="varying", on_capture="skip", unused=True),
    Scenario(guilty=1, fault="shared_forward", on_capture="raise"),
    Scenario(guilty=0, fault="shared_backward", on_capture="skip"),
    Scenario(guilty=1, fault="shared_count", on_capture="stop"),
]
MANUAL = [
    Scenario(guilty=1, fault="loss", on_capture="raise", manual="single"),
    Scenario(guilty=0, fault="gradient", on_capture="stop", manual="single", accumulate=2),
    Scenario(guilty=1, fault="gradient", on_capture="skip", manual="raw"),
    Scenario(guilty=1, fault="loss", on_capture="skip", manual="adversarial"),
    Scenario(guilty=0, fault="gradient", on_capture="raise", manual="adversarial"),
    Scenario(guilty=1, fault="gradient", on_capture="skip", manual="switching"),
    Scenario(guilty=1, fault="loss_only", on_capture="stop", manual="single", unused=True),
    Scenario(guilty=0, fault="buffer", on_capture="skip", manual="single"),
    Scenario(guilty=1, fault="gradient", on_capture="skip", manual="single", static=True),
    Scenario(guilty=1, fault="loss", on_capture="skip", manual="single", views=True),
    Scenario(guilty=1, fault="gradient", on_capture="skip", manual="single", hook=True),
]
THREE = [
    Scenario(guilty=2, fault="gradient", on_capture="raise"),
    Scenario(guilty=1, fault="loss", on_capture="skip", accumulate=2),
    Scenario(guilty=2, fault="buffer", on_capture="stop"),
    Scenario(guilty=1, fault="gradient", on_capture="skip", manual="single"),
    Scenario(guilty=2, fault="loss", on_capture="raise", manual="adversarial"),
]
UNCAUGHT = Scenario(guilty=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return runs_of(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def manual(tmp_path_factory):
    return runs_of(tmp_path_factory.mktemp("manual"), 2, with_twins(MANUAL))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return runs_of(tmp_path_factory.mktemp("three"), 3, THREE)


def name(scenario: Scenario) -> str:
    optional = ("unused", "static", "views", "hook", "break_writing")
    flags = [*filter(None, [scenario.manual]), *(field for field in optional if getattr(scenario, field))]
    parts = [scenario.fault, f"rank{scenario.guilty}", scenario.on_capture, f"x{scenario.accumulate}", *flags]
    parts += ["unconfirmed"] if not scenario.confirm else []
    return "-".join([*parts, *(["last"] if scenario.bad == BATCHES - 1 else [])])


@pytest.mark.parametrize("number", range(len(TWO)), ids=[name(scenario) for scenario in TWO])
def test_two_ranks_act_together(number, two):
    """The guilty one writes its bundle, the others none; all end at the same step with the same good weights."""
    check(two[number], 2)


def with_twins(scenarios: list[Scenario]) -> list[Scenario]:
    """Each with another run after it, to which its bad batch never came."""
    twins = [dataclasses.replace(scenario, missing=True) for scenario in scenarios]
    return [run for pair in zip(scenarios, twins, strict=True) for run in pair]


def check_manual(run: Run, twin: Run, ranks: int) -> None:
    """And the bundle is red on its own; what is skipped leaves nothing behind, to the bit."""
    check(run, ranks)
    (path,) = find_bundles(run.folder)
    reproduced = Bundle.open(path).fault.reproduced
    assert (reproduced.runs, reproduced.of, replay(path).verdict) == (1, 1, "nonfinite")
    # One optimizer's windows are the other's batches there, so that what was dropped is no batch.
    is_alike = not (run.scenario.manual == "adversarial" and run.scenario.accumulate > 1)
    if run.scenario.on_capture == "skip" and is_alike:
        assert [end["digest"] for end in run.ranks] == [end["digest"] for end in twin.ranks]


@pytest.mark.parametrize("number", range(len(MANUAL)), ids=[name(scenario) for scenario in MANUAL])
def test_manual_optimisation(number, manual, monkeypatch):
    """A rerun speaks to no other rank: an innocent one writes no bundle, whatever it does with its gradients."""
    monkeypatch.chdir(Path(__file__).parents[2])
    check_manual(manual[2 * number], manual[2 * number + 1], 2)


@pytest.mark.parametrize("number", range(len(THREE)), ids=[name(scenario) for scenario in THREE])
def test_three_ranks_act_together(number, three):
    """Also where the guilty one is the last, or in the middle."""
    check(three[number], 3)


def test_a_ranks_bundle_is_red_in_one_process(two, monkeypatch):
    """With a note that says where it was captured, and the line that is to blame."""
    monkeypatch.chdir(Path(__file__).parents[2])
    (path,) = find_bundles(two[0].folder)
    result = replay(path, trace=True)
    assert (result.verdict, result.nonfinite) == ("nonfinite", ("gradient out.bias",))
    assert (result.culprit.op, result.culprit.file) == ("aten.sqrt.default", "tests/capture/ddp_run.py")
    assert "captured on rank 1 of 2, replayed on one device" in result.notes
    assert Bundle.open(path).fault.reproduced.runs == 1


class Synchronised(Net):
    """In one process it works on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))


def test_synchronised_statistics_are_said_not_to_have_been_local(tmp_path, monkeypatch):
    """In the bundle, and in the notes of the replay. It needs GPUs to run, so here the ranks are pretended."""
    monkeypatch.setattr(export.Capture, "_is_synchronized", lambda _, module: isinstance(module, nn.SyncBatchNorm))
    bundle = capture_one(Synchronised(), batches(), tmp_path)
    assert bundle.manifest.module.synchronized == ("layer.1",)
    assert replay(bundle).notes == (
        "the statistics of layer.1 were taken over all ranks, here over this rank's batch alone",
    )


def matrix(ranks: int) -> list[Scenario]:
    values = itertools.product(range(ranks), FAULTS, ["raise", "stop", "skip"], [1, 2], [False, True], [False, True])
    scenarios = list(itertools.starmap(Scenario, values))
    # DDP gives all ranks the first one's buffers at each synchronised forward, so a spoilt one has to be in the last.
    late = {s: dataclasses.replace(s, bad=BAD + 1) for s in scenarios if s.accumulate == 2 and "buffer" in s.fault}
    return [late.get(scenario, scenario) for scenario in scenarios]


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_combination_ends_in_time(ranks, tmp_path, request):
    """All ranks, faults and ways to act, with accumulation, unused parameters and a full disk."""
    if "matrix" not in request.config.option.markexpr:
        pytest.skip("slow: asked for with -m matrix")
    scenarios = matrix(ranks)
    failures = []
    for run in runs_of(tmp_path, ranks, scenarios, seconds=2 * len(scenarios) + SECONDS):
        try:
            check(run, ranks)
        except AssertionError as error:
            failures.append(f"{name(run.scenario)}: {error}")
    assert failures == []


def manual_matrix(ranks: int) -> list[Scenario]:
    faults = ["loss", "gradient", "loss_only", "buffer"]
    for guilty, fault, on_capture in itertools.product(range(ranks), faults, ["raise", "stop", "skip"]):
        plain = Scenario(guilty=guilty, fault=fault, on_capture=on_capture)
        for way in ("single", "raw", "adversarial", "switching"):
            yield dataclasses.replace(plain, manual=way)
        yield dataclasses.replace(plain, manual="adversarial", accumulate=2, bad=BAD + 1)
        for options in ({"accumulate": 2, "bad": BAD + 1}, {"unused": True}, {"static": True}, {"views": True}):
            yield dataclasses.replace(plain, manual="single", **options)
        yield dataclasses.replace(plain, manual="single", hook=True)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_combination_of_manual_optimisation(ranks, tmp_path, request, monkeypatch):
    """No bundle from an innocent rank in any of them, and no rank that waits for ever."""
    if "matrix" not in request.config.option.markexpr:
        pytest.skip("slow: asked for with -m matrix")
    monkeypatch.chdir(Path(__file__).parents[2])
    scenarios = list(manual_matrix(ranks))
    runs = runs_of(tmp_path, ranks, with_twins(scenarios), seconds=8 * len(scenarios) + SECONDS)
    failures = []
    for run, twin in zip(runs[::2], runs[1::2], strict=True):
        try:
            check_manual(run, twin, ranks)
        except AssertionError as error:
            failures.append(f"{name(run.scenario)}: {error}")
    assert failures == []


@pytest.mark.parametrize("strategy", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_a_sharding_strategy_is_refused_before_training(strategy, tmp_path):
    """With the reason, and what to use."""
    made = type(strategy, (pl.strategies.SingleDeviceStrategy,), {})
    message = f"NaNCapture cannot capture under {strategy}: no rank holds the whole module; use DDP or one device"
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        fit(Net(), batches(), NaNCapture(tmp_path), strategy=made("cpu"), accelerator="auto")
