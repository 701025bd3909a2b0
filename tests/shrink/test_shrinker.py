"""A shrink from outside: processes that misbehave, interruptions, what is on disk when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import models
import nets
import pytest
from inline import Inline

from pytest_nancapture import Bundle, find_bundles
from pytest_nancapture.errors import ShrinkError
from pytest_nancapture.shrink import search, shrinker
from pytest_nancapture.shrink.shrinker import Progress, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = """
import os, signal, sys
from pathlib import Path
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.shrink.shrinker import shrink

interrupt = sys.argv[3:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored

def tell(progress):
    print(progress.kept, flush=True)
    if progress.kept >= 2 and interrupt:  # on a slow machine the one before may have come further
        interrupt.clear()
        os.kill(os.getpid(), signal.SIGINT)

shrunk = shrink(Bundle.open(sys.argv[1]), Path(sys.argv[2]), progress=tell)
print("stopped", shrunk.stopped, "torch" in sys.modules)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def start(bundle: Bundle, place: Path, *interrupt: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(bundle.path), str(place), *interrupt]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until_kept(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "1":
            return
    raise AssertionError("nothing was kept")


def test_rude_code(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that prints, exits or hangs costs the candidate and no more."""
    monkeypatch.setattr(search, "_SLOWEST", 3.0)
    bundle = capture(nets.Rude())
    before = content(bundle.path)
    seen: list[Progress] = []

    result = shrink(bundle, tmp_path / "small", jobs=2, progress=seen.append)

    assert result.stopped == ""
    assert "5 of 16 samples kept" in result.kept
    assert content(bundle.path) == before
    assert seen[-1].tried >= seen[-1].kept > 0
    assert {progress.pass_name for progress in seen} >= {"samples", "random state"}


def test_number_of_workers(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying several candidates at a time changes nothing about the result."""
    bundle = capture(nets.OneSample())
    results = []
    for jobs in (1, 3):
        monkeypatch.setattr(Inline, "jobs", jobs)
        monkeypatch.setattr(shrinker, "Pool", Inline)
        results.append(shrink(bundle, tmp_path / str(jobs)))

    assert results[0].kept == results[1].kept
    assert content(results[0].bundle.path) == content(results[1].bundle.path)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_killed_and_interrupted(capture: Any, tmp_path: Path) -> None:
    """A kill leaves no bundle and the captured one as it was; the next shrink goes on, and Ctrl-C keeps its best."""
    bundle = capture(nets.Slow())
    before = content(bundle.path)
    place = tmp_path / "small" / "b"
    first = start(bundle, place)
    until_kept(first)
    first.kill()
    first.wait()

    assert find_bundles(tmp_path / "small") == []
    assert [path.name for path in (tmp_path / "small").iterdir()] == [".b.shrink.json"]
    assert content(bundle.path) == before

    second = start(bundle, place, "interrupt")
    assert second.stdout is not None
    assert second.stdout.read().splitlines()[-1] == "stopped interrupted False"
    assert second.wait() == 0
    assert Bundle.open(place).size < bundle.size
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"b", ".b.shrink.json"}  # a third would go on


def test_time_is_up(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found until then is written."""
    monkeypatch.setattr(shrinker, "Pool", Inline)

    result = shrink(capture(nets.OneSample()), tmp_path / "small", max_seconds=0)

    assert result.stopped == "time"
    assert result.gains == ()
    assert result.result["verdict"] == "nonfinite"


def test_goes_on(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best that a stopped shrink had found is where the next one starts."""
    monkeypatch.setattr(shrinker, "Pool", Inline)
    bundle = capture(nets.OneSample())
    full = shrink(bundle, tmp_path / "full")
    told: list[int] = []

    def stop(progress: Progress) -> None:
        told.append(progress.kept)
        if progress.kept == 3:
            raise RuntimeError("the power is gone")

    with pytest.raises(RuntimeError, match="the power is gone"):
        shrink(bundle, tmp_path / "small", progress=stop)
    assert not (tmp_path / "small").exists()
    again = shrink(bundle, tmp_path / "small")

    assert again.after == full.after
    assert sum(gain.tried for gain in again.gains) < sum(gain.tried for gain in full.gains)


def test_not_red(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle whose fault is fixed is not shrunk, nor is anything written."""
    monkeypatch.setattr(shrinker, "Pool", Inline)
    bundle = capture(nets.OneSample())
    monkeypatch.setattr(nets, "FIXED", True)

    with pytest.raises(ShrinkError, match=r"not shrunk, since it is not red: expected .* nonfinite, came finite"):
        shrink(bundle, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_taken(tmp_path: Path) -> None:
    """A place that is taken is refused before anything is done."""
    bundle = Bundle.open(models.capture(models.Net(), tmp_path / "captured"))

    with pytest.raises(ShrinkError, match="something of that name exists already"):
        shrink(bundle, bundle.path)


def test_flaky(capture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fail again once it is written is not passed off as a bundle."""
    answers: list[Callable[..., Any]] = []

    class Flaky(Inline):
        def ask(self, requests: Any, seconds: float) -> Any:
            found = super().ask(requests, seconds)
            if requests[0]["do"] == "look" and answers:
                found[0]["seen"]["result"]["verdict"] = "finite"
            answers.append(self.ask)
            return found

    monkeypatch.setattr(shrinker, "Pool", Flaky)
    with pytest.raises(ShrinkError, match="does not fail in the same way in a fresh process: it is finite"):
        shrink(capture(nets.OneSample()), tmp_path / "small" / "b")
    assert [path.name for path in (tmp_path / "small").iterdir()] == [".b.shrink.json"]
