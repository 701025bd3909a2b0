"""The whole story in one command: a run dies of NaN, a test goes red, one line is fixed, the test goes green."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from pathlib import Path

from pytest_nancapture import Bundle, find_bundles

HERE = Path(__file__).resolve().parent
FILES = ("model.py", "data.py", "train.py")
BUNDLES = "nan-bundles"

FAULT = "161 of 161 gradients not finite"
CULPRIT = "mean_loss = loss / count"
BROKEN = "FIXED = False"
FIXED = "FIXED = True"


class NotAsToldError(Exception):
    """An act ended otherwise than the story says."""


def play(folder: Path, *, full: bool) -> None:
    """Play the four acts in `folder`.

    Raises:
        NotAsToldError: at the first thing that is not as told.
    """
    for name in FILES:
        shutil.copy(HERE / name, folder)
    say(
        "A ResNet-50 learns 20 classes. Its loss divides by the number of samples that each class has in the batch. "
        "Sooner or later a batch has no sample of some class."
    )
    print(f"\nThe stage is {folder}, with copies of {', '.join(FILES)}.")

    act("1 of 4: the run dies")
    say(
        "Expected: after 13 steps the run ends with an error, before the bad step reaches the weights. It leaves a "
        "bundle: all it takes to repeat that one step."
    )
    code, _ = run(folder, "python", "train.py", *(["--full"] if full else []))
    expect(code != 0, f"exit code {code}", "exit code 0, as if nothing had happened")
    bundles = find_bundles(folder / BUNDLES) if (folder / BUNDLES).is_dir() else []
    expect(len(bundles) == 1, "one bundle", f"{len(bundles)} bundles in {folder / BUNDLES}")
    print(f"      {bundles[0].relative_to(folder).as_posix()}, {Bundle.open(bundles[0]).size / 1e6:.0f} MB")

    act("2 of 4: the test is red")
    say(
        "Expected: pytest repeats that step in a new process, fails with the fault that the training run saw, and "
        "names the line it comes from."
    )
    code, output = run(folder, "pytest", f"--nan-bundles={BUNDLES}")
    expect(code == 1 and "1 failed" in output, "1 failed", f"exit code {code}, not one failed test")
    for text in (FAULT, CULPRIT):
        expect(text in output, text, f"the failure text does not say: {text}")

    act("3 of 4: the fix")
    say("A class without a sample has no mean: divide by one instead of by zero. In model.py that is one switch.")
    model = folder / "model.py"
    before = model.read_text(encoding="utf-8")
    after = fix(before)
    model.write_text(after, encoding="utf-8")
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), "model.py", "model.py", n=1, lineterm="")
    print("", *diff, sep="\n")

    act("4 of 4: the test is green")
    say("Expected: with the same weights and the same batch, today's code passes.")
    code, output = run(folder, "pytest", f"--nan-bundles={BUNDLES}")
    expect(code == 0 and "1 passed" in output, "1 passed", f"exit code {code}, not one passed test")


def fix(source: str) -> str:
    """The text of model.py with its fault repaired."""
    if source.count(BROKEN) != 1:
        raise NotAsToldError(f"model.py does not have the line to fix exactly once: {BROKEN}")
    return source.replace(BROKEN, FIXED)


def run(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """Run a command in `folder`, showing it and its output as they come.

    Returns:
        Its exit code, and its output without colours.
    """
    print(f"\n$ {shlex.join([program, *arguments])}", flush=True)
    # The programs that belong to this interpreter, also where its environment is not activated.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)])
    if sys.stdout.isatty() and "NO_COLOR" not in environment:
        environment["PY_COLORS"] = "1"
    found = sys.executable if program == "python" else shutil.which(program, path=environment["PATH"])
    if found is None:
        raise NotAsToldError(f"{program} is not installed beside {sys.executable}")
    began = time.monotonic()
    lines = []
    with subprocess.Popen(  # noqa: S603 - the commands are this file's own
        [found, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    print(f"[{time.monotonic() - began:.0f} s]")
    return process.returncode, re.sub(r"\x1b\[[0-9;]*m", "", "".join(lines))


def act(title: str) -> None:
    """Print a heading."""
    print(f"\n\n==== {title} ====\n")


def say(text: str) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, 100), flush=True)


def expect(as_told: bool, fact: str, otherwise: str) -> None:
    """Print `fact` where it is so; end the story with `otherwise` where not."""
    if not as_told:
        raise NotAsToldError(otherwise)
    print(f"  ok  {fact}", flush=True)


def main() -> None:
    """Read the command line, play, and end with exit code 1 if the story did not go as told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="a new or empty folder to play in (default: a temporary one)"
    )
    parser.add_argument(
        "--full", action="store_true", help="the article's size: 224x224 images, on a GPU if there is one"
    )
    options = parser.parse_args()
    folder = (options.out or Path(tempfile.mkdtemp(prefix="nancapture-story-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--out={folder}: expected a new or empty folder")

    began = time.monotonic()
    try:
        play(folder, full=options.full)
    except NotAsToldError as error:
        sys.exit(f"\nNot as told: {error}. What there is lies in {folder}")
    print(f"\n\nAs told, in {time.monotonic() - began:.0f} s: died, red, fixed, green.")
    print(f"{folder} is yours to look into, and to delete.")


if __name__ == "__main__":
    main()
