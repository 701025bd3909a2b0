"""The examples: the network is a ResNet-50, each fault and its fix are real, the CI files gate."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from fake_bundles import write_bundle

from pytest_nancapture import Bundle, find_bundles, replay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"
GALLERY = EXAMPLES / "gallery"
KINDS = sorted(path.stem for path in (GALLERY / "faults").glob("[!_]*.py"))
GATE = "pytest --nan-bundles=fixtures --nan-require-gpu --junitxml="


def load(path: Path) -> ModuleType:
    """A file as a module, kept out of sys.modules: its name is a common one."""
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return load(EXAMPLES / "resnet50" / "model.py")


@pytest.fixture(scope="module")
def story() -> ModuleType:
    return load(EXAMPLES / "resnet50" / "story.py")


@pytest.fixture(scope="module")
def classifier(model: ModuleType) -> Iterator[Any]:
    """With one thread: on a busy machine several wait for each other longer than this little work takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield model.Classifier()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fixed_classifier(story: ModuleType, classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("fixed") / "model.py"
    path.write_text(story.fix((EXAMPLES / "resnet50" / "model.py").read_text(encoding="utf-8")), encoding="utf-8")
    with torch.device("meta"):
        fixed = load(path).Classifier()
    fixed.load_state_dict(classifier.state_dict(), assign=True)
    return fixed


def nonfinite(classifier: Any, *, missing: int | None) -> list[str]:
    """What is not finite after one training step on an image of each class, or of each but `missing`."""
    labels = torch.arange(20)
    if missing is not None:
        labels[missing] = (missing + 1) % 20
    classifier.zero_grad()
    loss = classifier.training_step((torch.randn(20, 3, 32, 32), labels), 0)
    loss.backward()
    found = {"loss": loss, **{name: parameter.grad for name, parameter in classifier.named_parameters()}}
    return [name for name, tensor in found.items() if not tensor.isfinite().all()]


def test_resnet50_parameters(classifier: Any) -> None:
    """The published network has 25,557,032 parameters with 1000 classes; only the head's number depends on them."""
    parameters = list(classifier.parameters())

    assert len(parameters) == 161
    assert sum(p.numel() for p in parameters) == 25_557_032 - (2048 * 1000 + 1000) + (2048 * 20 + 20)


@pytest.mark.parametrize("size", [32, 64])
def test_resnet50_forward(classifier: Any, size: int) -> None:
    """Images of any size give one logit for each class, from a map 32 times smaller."""
    network = classifier.network
    images = torch.randn(2, 3, size, size)

    assert classifier(images).shape == (2, 20)
    assert network.blocks(network.stem(images)).shape == (2, 2048, size // 32, size // 32)


def test_missing_class_is_the_fault(classifier: Any) -> None:
    """With every class in the batch all is finite; without one, loss and all gradients are not."""
    assert nonfinite(classifier, missing=None) == []
    assert len(nonfinite(classifier, missing=3)) == 1 + 161


def test_fix(fixed_classifier: Any) -> None:
    """The story's one edit makes the batch without a class harmless."""
    assert nonfinite(fixed_classifier, missing=3) == []


def test_fix_needs_its_line(story: ModuleType) -> None:
    """A model.py that has lost the faulty line ends the story with a message, not with a false green."""
    with pytest.raises(story.NotAsToldError, match="does not have the line to fix exactly once: FIXED = False"):
        story.fix("mean_loss = 0\n")


RED = "161 of 161 gradients not finite\n> mean_loss = loss / count\n1 failed"


@pytest.mark.parametrize(
    ("bundles", "results", "problem"),
    [
        (1, [(1, ""), (1, RED), (0, "1 passed")], None),
        (1, [(0, "")], "exit code 0, as if nothing had happened"),
        (0, [(1, "Killed")], "0 bundles in "),
        (1, [(1, ""), (0, "1 skipped")], "exit code 0, not one failed test"),
        (1, [(1, ""), (1, "error: no such module\n1 failed")], "the failure text does not say: 161 of 161 gradients"),
        (1, [(1, ""), (1, RED), (1, RED)], "exit code 1, not one passed test"),
        (1, [(1, ""), (1, RED), (0, "1 skipped")], "exit code 0, not one passed test"),
    ],
)
def test_story_checks_each_act(
    story: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bundles: int,
    results: list[tuple[int, str]],
    problem: str | None,
) -> None:
    """Whatever act does not go as told, the story stops there and ends with exit code 1 and the reason."""
    left = iter(results)

    def run(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
        if program == "python":
            for number in range(bundles):
                write_bundle(folder / "nan-bundles" / f"step-{number:06d}-rank-0")
        return next(left)

    monkeypatch.setattr(story, "run", run)
    monkeypatch.setattr("sys.argv", ["story.py", f"--out={tmp_path / 'stage'}"])

    if problem is None:
        story.main()
    else:
        with pytest.raises(SystemExit, match=f"Not as told: {re.escape(problem)}"):
            story.main()
    assert list(left) == []


def test_story_leaves_a_folder_in_use_alone(
    story: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with anything in it is refused: the story would write over files of the same names."""
    (tmp_path / "model.py").write_text("mine\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["story.py", f"--out={tmp_path}"])

    with pytest.raises(SystemExit, match="2"):
        story.main()
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert (tmp_path / "model.py").read_text(encoding="utf-8") == "mine\n"


def test_first_batch_without_a_class() -> None:
    """It is number 13, as README.md and story.py say, however long the run is and however large the images."""
    module: Any = load(EXAMPLES / "resnet50" / "data.py")

    for data in (module.RandomImageData(steps=20), module.RandomImageData(steps=800, image_size=224)):
        batches = data.dataset.labels.split(data.batch_size)
        assert next(i for i, labels in enumerate(batches) if len(labels.unique()) < 20) == 13


def test_images_are_the_same_in_every_run() -> None:
    """An image depends on its index alone, and making it leaves the global random state as it was."""
    dataset = load(EXAMPLES / "resnet50" / "data.py").RandomImageData(steps=1).dataset
    before = torch.get_rng_state()
    first, label = dataset[5]

    torch.testing.assert_close(dataset[5][0], first, rtol=0, atol=0)
    assert first.shape == (3, 32, 32)
    assert label.dtype == torch.int64
    assert not torch.equal(dataset[6][0], first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its train.py, with its faults importable."""
    monkeypatch.syspath_prepend(GALLERY)
    return load(GALLERY / "train.py")


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its pin.py."""
    monkeypatch.syspath_prepend(GALLERY)
    return load(GALLERY / "pin.py")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_gallery(gallery: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Broken, a kind is captured and its statement named; mended, its bundle is green and its training finite."""
    faulty = importlib.import_module(f"faults.{kind}")
    monkeypatch.setattr(faulty, "BROKEN", True)
    _, error = gallery.train(kind, tmp_path / "broken")

    assert error is not None
    [bundle] = map(Bundle.open, find_bundles(tmp_path / "broken"))
    culprit = bundle.manifest.fault.culprit or {}
    assert culprit.get("source", "") == faulty.GUILTY
    assert culprit.get("file", "") == (f"examples/gallery/faults/{kind}.py" if faulty.GUILTY else "")

    monkeypatch.setattr(faulty, "BROKEN", False)
    assert replay(bundle.path).verdict == "finite"
    module, error = gallery.train(kind, tmp_path / "mended")
    assert error is None
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())


@pytest.mark.parametrize("kind", KINDS)
def test_gallery_shows_the_statement_alone(kind: str) -> None:
    """The switch is off, and the statement that a capture names is the only one that it would bring back."""
    source = (GALLERY / "faults" / f"{kind}.py").read_text(encoding="utf-8")
    guilty = re.search(r'^GUILTY = "(.*)"', source, re.MULTILINE)

    assert guilty is not None
    assert source.count("if BROKEN:\n") == 1
    assert re.search(rf"^( *)if BROKEN:\n\1    {re.escape(guilty[1])}.*\n\1(else|return)\b", source, re.MULTILINE)


def test_gallery_is_complete(gallery: ModuleType) -> None:
    """The list of kinds, the README's table and the files are the same."""
    readme = (GALLERY / "README.md").read_text(encoding="utf-8")

    assert sorted(gallery.KINDS) == KINDS
    assert sorted(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)) == KINDS


@pytest.mark.parametrize(
    ("bundles", "codes", "problem"),
    [
        (1, [0, 0, 0], None),
        (1, [3], "exit code 3"),
        (0, [0], "masked_mean: expected one bundle of its training, came 0"),
        (1, [0, 1], "exit code 1"),
        (1, [0, 0, 1], "exit code 1"),
    ],
)
def test_gallery_pins_what_is_red_when_broken_and_green_when_mended(
    pinning: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    bundles: int,
    codes: list[int],
    problem: str | None,
) -> None:
    """Training and pinning run with the fault, the last replay without; what fails ends it with exit code 1."""
    acts: list[str] = []
    switches: list[str] = []
    left = iter(codes)

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        acts.append(next(word for word in command if Path(word).name in ("train.py", "pin", "pytest")))
        switches.append(env["NANCAPTURE_GALLERY"])
        for folder in (word.partition("--bundles=")[2] for word in command if word.startswith("--bundles=")):
            for number in range(bundles):
                write_bundle(Path(folder) / "masked_mean" / f"step-{number:06d}-rank-0")
        return subprocess.CompletedProcess(command, next(left))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("sys.argv", ["pin.py", "masked_mean", f"--into={tmp_path}"])

    if problem is None:
        pinning.main()
        assert acts == ["examples/gallery/train.py", "pin", "pytest"]
        assert switches == ["broken", "broken", ""]
    else:
        with pytest.raises(SystemExit, match=f"Not pinned: {problem}"):
            pinning.main()
    assert list(left) == []


def test_gallery_pins_only_what_it_has_and_where_nothing_is(
    pinning: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong name, or a bundle that is there, is refused before anything is trained."""
    (tmp_path / "masked_mean").mkdir()

    for kind, message in {"mean": "came 'mean'", "masked_mean": "remove it to pin it anew"}.items():
        monkeypatch.setattr("sys.argv", ["pin.py", kind, f"--into={tmp_path}"])
        with pytest.raises(SystemExit, match="2"):
            pinning.main()
        assert message in capsys.readouterr().err


def test_github_actions() -> None:
    """The file parses; the gate needs a GPU runner, runs the documented command, uploads its report, red or green."""
    jobs = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text(encoding="utf-8"))["jobs"]
    gate = jobs["nan-gate"]["steps"]
    [command] = [step["run"] for step in gate if GATE in step.get("run", "")]
    [upload] = [step for step in gate if step.get("uses", "").startswith("actions/upload-artifact@")]

    assert jobs["nan-gate"]["runs-on"] == ["self-hosted", "gpu"]
    assert upload["with"]["path"] == command.partition("--junitxml=")[2].split()[0]
    assert upload["if"] == "${{ !cancelled() }}"
    assert not any("--nan-require-gpu" in step.get("run", "") for step in jobs["cpu"]["steps"])
    for job in jobs.values():
        assert "pip" in [step.get("with", {}).get("cache") for step in job["steps"]]


def test_gitlab_ci() -> None:
    """The file parses; the gate is tagged for a GPU, runs the documented command and keeps its report, red or green."""
    jobs = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text(encoding="utf-8"))
    gate = jobs["nan-gate"]
    [command] = [line for line in gate["script"] if GATE in line]

    assert any("gpu" in tag for tag in gate["tags"])
    assert gate["artifacts"]["when"] == "always"
    assert gate["artifacts"]["reports"]["junit"] == command.partition("--junitxml=")[2].split()[0]
    assert not any("--nan-require-gpu" in line for line in jobs["cpu"]["script"])
    for job in (jobs["cpu"], gate):
        assert job["cache"]["paths"] == [".cache/pip"]


def test_fixtures_are_red_when_the_faults_are_back(tmp_path: Path) -> None:
    """All of the gallery's; the story's fault is known to be open, and stays expected."""
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    done = subprocess.run(
        [*command, "--nan-trace=never", f"--junitxml={report}", "fixtures"],
        cwd=EXAMPLES.parent,
        env={**os.environ, "NANCAPTURE_GALLERY": "broken"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{len(KINDS)} failed, 1 xfailed" in done.stdout
    properties = ElementTree.parse(report).iter("property")
    verdicts = [entry.get("value") for entry in properties if entry.get("name") == "nan_verdict"]
    assert verdicts == ["nonfinite"] * (len(KINDS) + 1)
    assert {path.name for path in find_bundles(EXAMPLES.parent / "fixtures")} == {*KINDS, "resnet50-div-zero-count"}
