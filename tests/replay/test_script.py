"""Scripts that were run as ``__main__``: what they define is had without training again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pytest

from pytest_nancapture.errors import RebuildError
from pytest_nancapture.replay.script import load_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NET = """
import lightning.pytorch as pl
class Net(pl.LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.width = width
"""
TRAINER = "pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)"


@pytest.fixture(autouse=True, name="_clean")
def clean() -> Iterator[None]:
    """Loading leaves a module and a folder on the path, which the replay around it cleans up."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "_nancapture_script_" in name or name.startswith(("beside", "shop")):
            del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_a_guarded_script(script: Callable[[str], Path]) -> None:
    """What is behind the guard does not run, since the script has another name now."""
    module = load_script(
        script(NET + "names = [__name__]\nif __name__ == '__main__':\n    raise AssertionError('run')\n")
    )
    assert module.Net(3).width == 3
    assert module.names == [module.__name__] != ["__main__"]
    assert module is sys.modules[module.__name__]


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_a_script_without_a_guard(script: Callable[[str], Path], entry: str) -> None:
    """It stops where it would train, and what is defined by then can be used; the Trainer trains again afterwards."""
    before = getattr(pl.Trainer, entry)
    module = load_script(script(f"{NET}trainer = {TRAINER}\ntrainer.{entry}(Net())\nraise AssertionError('trained')\n"))
    assert module.Net().width == 2
    assert before is getattr(pl.Trainer, entry)


def test_a_script_of_the_other_lightning(script: Callable[[str], Path]) -> None:
    """Its Trainer is another class."""
    pytest.importorskip("pytorch_lightning", reason="the older name of the package is another package")
    text = (NET + f"{TRAINER}.fit(Net())\nraise AssertionError('trained')\n").replace(
        "lightning.pytorch", "pytorch_lightning"
    )
    assert load_script(script(text)).Net().width == 2


def test_a_script_that_saves_itself_from_errors(script: Callable[[str], Path]) -> None:
    """An ``except Exception`` around the training is not taken for its end."""
    text = f"{NET}try:\n    {TRAINER}.fit(Net())\nexcept Exception:\n    raise AssertionError('caught')\n"
    assert load_script(script(text)).Net().width == 2


@pytest.mark.parametrize(
    "ending",
    [
        "import argparse; p = argparse.ArgumentParser(); p.add_argument('--data', required=True); p.parse_args()",
        "import sys; sys.exit()",
        "import sys; sys.exit('no GPU')",
        "raise SystemExit(0)",
    ],
)
def test_a_script_that_exits(script: Callable[[str], Path], ending: str) -> None:
    """Such as one that misses its arguments: the error says what to do, and the test run goes on."""
    path, before = script(f"{NET}{ending}\n"), set(sys.modules)
    with pytest.raises(RebuildError) as caught:
        load_script(path)
    assert f"{path} exits when it is imported; put its work under if __name__ == '__main__':" == str(caught.value)
    assert not [name for name in set(sys.modules) - before if "_nancapture_script_" in name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def", "SyntaxError: invalid syntax"),
        ("open('no_such_file')", "FileNotFoundError: [Errno 2] No such file or directory: 'no_such_file'"),
    ],
)
def test_a_script_that_fails(script: Callable[[str], Path], text: str, problem: str) -> None:
    """The error names the script and what went wrong; the next attempt begins anew."""
    path = script(text)
    for _ in range(2):
        with pytest.raises(RebuildError) as caught:
            load_script(path)
        assert str(caught.value).startswith(f"importing {path} failed with {problem}")
    assert load_script(script(NET)).Net().width == 2


def test_a_script_is_run_once(script: Callable[[str], Path]) -> None:
    """All bundles of one script share its module, so that its classes are the same."""
    path = script(NET)
    assert load_script(path) is load_script(path)


def test_scripts_of_one_name(tmp_path: Path) -> None:
    """Two scripts ``train.py`` in two folders are two modules."""
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(f"folder = '{folder}'")
    assert [load_script(tmp_path / folder / "train.py").folder for folder in "ab"] == ["a", "b"]


def test_what_lies_beside_a_script(script: Callable[[str], Path], tmp_path: Path) -> None:
    """A script imports its neighbours by their bare names."""
    (tmp_path / "beside.py").write_text("value = 5")
    assert load_script(script("import beside")).beside.value == 5


def test_a_script_in_a_package(tmp_path: Path) -> None:
    """One that was run with ``python -m shop.tools.train`` imports its neighbours relatively."""
    folder = tmp_path / "shop" / "tools"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    (folder / "beside.py").write_text("value = 5")
    (folder.parent / "above.py").write_text("value = 6")
    (folder / "train.py").write_text("from . import beside\nfrom ..above import value\nimport beside as bare\n")
    module = load_script(folder / "train.py")
    assert (module.beside.value, module.value, module.bare.value) == (5, 6, 5)


def test_the_scripts_arguments(script: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees none of pytest's, and pytest keeps its own."""
    monkeypatch.setattr(sys, "argv", ["pytest", "--nan-bundles=x"])
    path = script("import sys\narguments = sys.argv")
    assert [str(path)] == load_script(path).arguments
    assert sys.argv == ["pytest", "--nan-bundles=x"]


def test_the_scripts_arguments_after_an_error(script: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    with pytest.raises(RebuildError):
        load_script(script("1 / 0"))
    assert sys.argv == ["pytest"]


def test_dataclasses_and_annotations(script: Callable[[str], Path]) -> None:
    """What looks its module up by name finds it."""
    text = "@dataclasses.dataclass\nclass A:\n    x: B\nclass B: ..."
    module = load_script(script(f"from __future__ import annotations\nimport dataclasses\n{text}"))
    hints: Any = __import__("typing").get_type_hints(module.A)
    assert hints == {"x": module.B}
