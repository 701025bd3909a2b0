"""Bring the gallery's faults back, capture each, pin it while it is red, and see it green without the fault."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import KINDS

from pytest_nancapture import find_bundles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
"""Of the repository: a bundle names its source file from here."""


class NotPinnedError(Exception):
    """A fault was not captured, not red or not mended."""


def pin(kinds: list[str], folder: Path) -> None:
    """Pin one bundle of each kind into `folder`, under the kind's name.

    Raises:
        NotPinnedError: at the first thing that goes otherwise; what was pinned before it stays.
    """
    with tempfile.TemporaryDirectory(prefix="nancapture-gallery-") as captured:
        print("The faults are back: train into them.")
        run("examples/gallery/train.py", f"--bundles={captured}", *kinds, broken=True)
        for kind in kinds:
            place = Path(captured, kind)
            found = find_bundles(place) if place.is_dir() else []
            if len(found) != 1:
                raise NotPinnedError(f"{kind}: expected one bundle of its training, came {len(found)}")
            run("-m", "pytest_nancapture.cli", "pin", str(found[0]), str(folder), f"--name={kind}", broken=True)
    print("\nThe faults are mended: replay what was pinned.")
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(folder / kind / "bundle.json") for kind in kinds))


def run(*arguments: str, broken: bool = False) -> None:
    """Run Python in the repository's root, with or without the faults.

    Raises:
        NotPinnedError: the exit code is not 0.
    """
    switch = {"NANCAPTURE_GALLERY": "broken" if broken else ""}
    print(f"\n$ {'NANCAPTURE_GALLERY=broken ' if broken else ''}{shlex.join(['python', *arguments])}", flush=True)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, **switch}, check=False)  # noqa: S603 - the commands are this file's own
    if done.returncode:
        raise NotPinnedError(f"exit code {done.returncode}")


def main() -> None:
    """Read the command line; end with exit code 1 if a kind could not be pinned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=ROOT / "fixtures", help="default: fixtures/ of this repository"
    )
    options = parser.parse_args()
    kinds, folder = options.kinds or list(KINDS), options.into.resolve()
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"expected one of {', '.join(KINDS)}, came {kind!r}")
        if (folder / kind).exists():
            parser.error(f"{folder / kind} is there already; remove it to pin it anew")
    try:
        pin(kinds, folder)
    except NotPinnedError as error:
        sys.exit(f"\nNot pinned: {error}")


if __name__ == "__main__":
    main()
