"""The package's door: names, laziness, and what they cost."""

import inspect
import json
import subprocess
import sys

import pytest

import pytest_nancapture

LOOK = """
import json, sys
{}
print(json.dumps(sorted({{"torch", "lightning", "numpy", "safetensors"}} & set(sys.modules))))
"""


def heavy_modules_after(statement: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", LOOK.format(statement)], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_importing_the_package_imports_nothing_heavy():
    """Every pytest run of the environment imports the door."""
    assert heavy_modules_after("import pytest_nancapture") == []


def test_the_look_can_fail():
    """Using what needs torch does import it."""
    assert "torch" in heavy_modules_after("from pytest_nancapture import NaNCapture")


@pytest.mark.parametrize("name", pytest_nancapture.__all__)
def test_every_listed_name_resolves(name):
    """What dir() shows is there."""
    assert getattr(pytest_nancapture, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    """As for any module, so that hasattr works."""
    with pytest.raises(AttributeError, match="module 'pytest_nancapture' has no attribute 'nonsense'"):
        pytest_nancapture.nonsense  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import pytest_nancapture.replay.result; from pytest_nancapture import replay",
        "from pytest_nancapture import replay; import pytest_nancapture.replay.result",
        "from pytest_nancapture.replay import replay; import pytest_nancapture.replay.result",
    ],
)
def test_replay_is_the_function_and_the_room(statement):
    """Whatever was imported before: it can be called, and its modules are found in it."""
    look = "; assert callable(replay); assert pytest_nancapture.replay.result.ReplayResult"
    assert heavy_modules_after(statement + look) == []


def test_replay_shows_what_it_takes():
    """As a function would."""
    assert str(inspect.signature(pytest_nancapture.replay)).startswith(
        "(bundle: 'str | PathLike[str] | Bundle', *, module"
    )
