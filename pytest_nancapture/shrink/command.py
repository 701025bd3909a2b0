"""The commands that make fixtures: ``nancapture shrink``, ``pin`` and ``promote``."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.paths import is_bundle, open_named, shown
from pytest_nancapture.bundle.text import parse_size, printable
from pytest_nancapture.errors import NancaptureError
from pytest_nancapture.shrink.display import ProgressLine, shrinking_line, shrunk_dict, shrunk_page
from pytest_nancapture.shrink.into_place import shrink_into, small_sibling
from pytest_nancapture.shrink.options import ShrinkOptions
from pytest_nancapture.shrink.pinning import pin as pinning
from pytest_nancapture.shrink.pinning import promote as promoting
from pytest_nancapture.shrink.pinning.display import pinned_lines

Command = Callable[[argparse.Namespace], int]
"""Takes what the command line says, returns the exit code."""

EXAMPLE = "nan-bundles/step-000812-rank-0"
BUNDLE_HELP = "a bundle's folder, or the bundle.json in it"
_OK, _INTERRUPTED = 0, 130
_MUCH_FOR_GIT = 50_000_000


def define(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the three commands.

    Args:
        add: called with a command's name, its function, what it does and examples; returns its parser.
    """
    text = "make a smaller bundle with the same fault; the bundle itself stays as it is"
    command = add(
        "shrink", shrink, text, f"nancapture shrink {EXAMPLE}", f"nancapture shrink {EXAMPLE} small --max-seconds=60"
    )
    _add_shrinking(command)
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help=BUNDLE_HELP)
    text = "the smaller one's folder (default: BUNDLE-small); where it is there from an earlier run, this one goes on"
    command.add_argument("out", nargs="?", metavar="OUT", type=Path, help=text)

    text = "shrink bundles into the fixtures, each once a replay in a fresh process has shown that it is red"
    command = add(
        "pin",
        pin,
        text,
        f"nancapture pin {EXAMPLE} fixtures",
        f"nancapture pin {EXAMPLE} --known --name=empty-class",
        f"nancapture pin {EXAMPLE} --no-shrink --max-size=100MB",
    )
    _add_shrinking(command)
    command.usage = "nancapture pin [options] BUNDLE [BUNDLE ...] [DIR]"
    text = "one or more, and last the folder to pin them into (default: fixtures)"
    command.add_argument("paths", nargs="+", metavar="BUNDLE", type=Path, help=text)
    text = "the pinned bundle's name, instead of one made from module, operation and fault"
    command.add_argument("--name", help=text)
    command.add_argument("--no-shrink", dest="shrink", action="store_false", help="copy the bundle as it is")
    text = "refuse what is larger, such as 500kB or 2M (default: 1MB): a fixture stays in git for ever"
    command.add_argument("--max-size", type=_size, default="1MB", metavar="SIZE", help=text)
    text = "pin it although the same fault (operation, source line, phase) is pinned there already"
    command.add_argument("--again", action="store_true", help=text)
    either = command.add_mutually_exclusive_group()
    text = "copy the bundle as it is, without a replay, whatever it would show"
    either.add_argument("--force", action="store_true", help=text)
    text = "the fault stays open for now: pytest expects the bundle to fail (a strict xfail) and so stays green"
    either.add_argument("--known", action="store_true", help=text)

    text = "let bundles that were pinned with --known gate, each once a replay has shown that its fault is gone"
    command = add("promote", promote, text, "nancapture promote fixtures/resnet50-div-zero-count")
    command.add_argument("bundles", nargs="+", metavar="BUNDLE", type=Path, help=BUNDLE_HELP)
    command.add_argument("--force", action="store_true", help="without a replay, whatever it would show")


def _add_shrinking(command: argparse.ArgumentParser) -> None:
    text = "how long shrinking may take; the smallest found by then is kept (default: 300)"
    command.add_argument("--max-seconds", type=_seconds, default=300.0, metavar="S", help=text)
    text = "how many processes shrink at once (default: 1)"
    command.add_argument("--jobs", type=_count, default=1, metavar="N", help=text)


def _options(args: argparse.Namespace, line: ProgressLine) -> ShrinkOptions:
    return ShrinkOptions(max_seconds=args.max_seconds, jobs=args.jobs, progress=line)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, came {text!r}")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, came {text!r}")
    return int(text)


def shrink(args: argparse.Namespace) -> int:
    """Make a smaller bundle, and tell how it went."""
    bundle = open_named(args.bundle)
    out = small_sibling(bundle) if args.out is None else args.out
    print(shrinking_line(shown(bundle.path), args.max_seconds), "...", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr), contextlib.closing(ProgressLine()) as line:
        shrunk, earlier = shrink_into(bundle, out, _options(args, line), device=args.device)
    if args.json:
        print(json.dumps(shrunk_dict(shrunk)))
    else:
        following = f"nancapture pin {shlex.quote(shown(shrunk.bundle.path))} fixtures"
        print(shrunk_page(shrunk, earlier=earlier, seconds=args.max_seconds, following=following))
    return _INTERRUPTED if shrunk.stopped == "interrupted" else _OK


def pin(args: argparse.Namespace) -> int:
    """Pin one bundle after the other; one that is refused doesn't keep the others out."""
    *sources, folder = args.paths
    if not sources or is_bundle(folder):
        sources, folder = args.paths, Path("fixtures")
    if args.name and len(sources) > 1:
        args.parser.error("--name names one copy: give one BUNDLE")
    code, done = _OK, []
    for source in sources:
        try:
            pinned = _pin_one(args, source, folder)
        except (NancaptureError, OSError) as error:
            code = max(code, args.complain(error))
            continue
        done.append(pinned.bundle)
        print("\n".join(pinned_lines(pinned, args.max_seconds)), flush=True)
        if pinned.shrunk is not None and pinned.shrunk.stopped == "interrupted":
            code = _INTERRUPTED
            break
    if done:
        print("\n".join(_next_steps(done, shown(folder), known=args.known)))
    return code


def _pin_one(args: argparse.Namespace, source: Path, folder: Path) -> pinning.Pinned:
    with contextlib.redirect_stdout(sys.stderr), contextlib.closing(ProgressLine()) as line:

        def tell(text: str) -> None:
            line.close()
            print(f"{text} ...", file=sys.stderr, flush=True)

        return pinning.pin(
            open_named(source).path,
            folder,
            name=args.name,
            device=args.device,
            force=args.force,
            known=args.known,
            again=args.again,
            max_size=args.max_size,
            shrinking=_options(args, line) if args.shrink else None,
            tell=tell,
        )


def promote(args: argparse.Namespace) -> int:
    """Promote one bundle after the other; one that is refused doesn't keep the others back."""
    code, done = _OK, []
    for source in args.bundles:
        try:
            bundle = open_named(source)
            if not bundle.known:
                print(f"{shown(bundle.path)}   nothing to do: it is not pinned as a known fault")
                continue
            if not args.force:
                print(f"replaying {shown(bundle.path)} in a fresh process ...", file=sys.stderr, flush=True)
            result = promoting.promote(bundle.path, device=args.device, force=args.force)
        except (NancaptureError, OSError) as error:
            code = max(code, args.complain(error))
            continue
        done.append(bundle)
        why = f"finite: {result['reason']}" if result else "forced, not replayed"
        print(f"promoted  {shown(bundle.path)}   {printable(why)}; from now on it gates")
    if done:
        print(f"next      git add {' '.join(shlex.quote(shown(bundle.path)) for bundle in done)}")
    return code


def _next_steps(done: Sequence[Bundle], folder: str, *, known: bool) -> Iterator[str]:
    yield f"next    git add {' '.join(shlex.quote(shown(bundle.path)) for bundle in done)}"
    yield f"        pytest {shlex.quote(f'--nan-bundles={folder}')}"
    yield "        and for a plain pytest to run it for ever, one line of configuration:"
    yield f"        nan_bundles = {folder}       (pytest.ini, below [pytest])"
    yield f'        nan_bundles = ["{folder}"]   (pyproject.toml, below [tool.pytest.ini_options])'
    if known:
        places = " ".join(shlex.quote(shown(bundle.path)) for bundle in done)
        yield "known   pytest expects it to fail, and says so the day it passes; then it becomes a test that gates:"
        yield f"        nancapture promote {places}"
    if any(bundle.size > _MUCH_FOR_GIT for bundle in done):
        yield "note    this is large for git, and some hosts refuse files over 100 MB: consider Git LFS"
