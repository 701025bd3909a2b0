"""A replay in a process of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from one_fault import NAME

from pytest_nancapture.errors import DeviceUnavailableError, PinError
from pytest_nancapture.shrink.pinning.fresh import heal_afresh, replay_afresh

if TYPE_CHECKING:
    from pathlib import Path

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


def test_a_step_that_cannot_be_healed(source: Path) -> None:
    """Nothing is claimed of what it would learn, and the pin goes on."""
    assert heal_afresh(source, "cpu") is None
