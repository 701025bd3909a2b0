"""The ``nancapture`` command: list, show, verify, replay, shrink, pin, promote.

Exit codes: 0 all is well; 1 a replay that does not pass, or a bundle that must not be shrunk, pinned or promoted;
2 wrong usage, a damaged bundle or an absent device; 130 interrupted, also where the best so far was kept.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_nancapture import __version__
from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.describe import page, summary, table
from pytest_nancapture.bundle.manifest import MANIFEST_NAME
from pytest_nancapture.bundle.paths import bundles_below, open_named, shown
from pytest_nancapture.bundle.text import printable
from pytest_nancapture.errors import BundleError, BundleNotFoundError, NancaptureError, PinError, ShrinkError
from pytest_nancapture.replay import replay
from pytest_nancapture.replay.describe import result_page
from pytest_nancapture.shrink.command import BUNDLE_HELP, EXAMPLE, Command, define, pin, promote, shrink

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, NOT_PASSING, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
_DEVICE_HELP = "auto (the default: the kind of device captured on), cpu, cuda, cuda:1, mps ..."
_EPILOG = f"""\
from the captured step to the test that guards its fix:
  nancapture list nan-bundles
  nancapture replay {EXAMPLE} --trace
  nancapture pin {EXAMPLE} fixtures     (shrinks it: kilobytes, for git)
  pytest --nan-bundles=fixtures

a fault that stays open for now, and the day it is fixed:
  nancapture pin {EXAMPLE} fixtures --known
  nancapture promote fixtures/resnet50-div-zero-count

exit codes: 0 all is well; 1 the replay does not pass, or the bundle must not be shrunk, pinned or promoted;
2 wrong usage, a damaged bundle, an absent device; 130 interrupted; nancapture COMMAND --help says more
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, the process's own where None, and return the exit code."""
    args = _parsed(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has gone; without this the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_PASSING
    except (NancaptureError, OSError) as error:
        if getattr(args, "json", False):
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}}))
        return _complain(error)
    return code


def _complain(error: Exception) -> int:
    lines = [printable(line) for line in str(error).splitlines()]
    print("nancapture:", "\n".join(lines), file=sys.stderr)
    return NOT_PASSING if isinstance(error, (PinError, ShrinkError)) else UNUSABLE


def _list(args: argparse.Namespace) -> int:
    folders = args.folders or [Path("nan-bundles") if Path("nan-bundles").is_dir() else Path()]
    found = {path: _try_open(path) for path in bundles_below(folders)}
    sound = {shown(path): bundle for path, bundle in found.items() if isinstance(bundle, Bundle)}
    damaged = {path: _problem(error) for path, error in found.items() if isinstance(error, BundleError)}
    if args.json:
        rows = [summary(bundle) for bundle in sound.values()]
        rows += [{"path": str(path), "damaged": problem} for path, problem in damaged.items()]
        print(json.dumps(rows, indent=1))
        return UNUSABLE if damaged else OK
    print("\n".join(table(sound)) if found else f"no bundle in {', '.join(map(shown, folders))}")
    for path, problem in damaged.items():
        print(f"{shown(path)}   damaged: {printable(problem)}")
    return UNUSABLE if damaged else OK


def _try_open(path: Path) -> Bundle | BundleError:
    try:
        return Bundle.open(path)
    except BundleError as error:
        return error


def _show(args: argparse.Namespace) -> int:
    bundle = open_named(args.bundle)
    if args.json:
        manifest = json.loads((bundle.path / MANIFEST_NAME).read_text(encoding="utf-8"))
        print(json.dumps({"path": str(bundle.path), "size": bundle.size, **manifest}, indent=1, sort_keys=True))
        return OK
    print(page(bundle))
    place = shlex.quote(shown(bundle.path))
    print("\nwhat to do with it")
    print(f"  replay  {_pytest_command(bundle)}")
    print(f"          nancapture replay {place} --trace")
    print(f"  promote  nancapture promote {place}" if bundle.known else f"  pin     nancapture pin {place} fixtures")
    return OK


def _verify(args: argparse.Namespace) -> int:
    paths = bundles_below(args.bundles)
    if not paths:
        raise BundleNotFoundError(" ".join(map(str, args.bundles)), "expected at least one bundle, found none")
    problems = {path: _verified(path) for path in paths}
    if args.json:
        print(json.dumps([{"path": str(p), "ok": not what, "problem": what or None} for p, what in problems.items()]))
    else:
        width = max(len(shown(path)) for path in paths)
        for path, what in problems.items():
            print(f"{shown(path):{width}}  {'damaged: ' + printable(what) if what else 'ok'}")
    return UNUSABLE if any(problems.values()) else OK


def _verified(path: Path) -> str:
    try:
        Bundle.open(path).verify()
    except BundleError as error:
        return _problem(error)
    return ""


def _problem(error: BundleError) -> str:
    return error.problem + (f" ({error.remedy})" if error.remedy else "")


def _replay(args: argparse.Namespace) -> int:
    bundle = open_named(args.bundle)
    # Code under test may print: that must not come before the verdict, nor into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        result = replay(bundle, device=args.device, trace=args.trace)
    if args.json:
        print(json.dumps({"path": str(bundle.path), **result.as_dict()}))
    else:
        print(result_page(result, traced=args.trace, repeat=_pytest_command(bundle)))
    return OK if result.finite else NOT_PASSING


def _pytest_command(bundle: Bundle) -> str:
    return f"pytest {shlex.quote(f'--nan-bundles={shown(bundle.path)}')}"


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    args, rest = _parser().parse_known_args(argv)
    if rest and not any(word.startswith("-") for word in rest) and "paths" in args:
        # argparse takes no more of them once an option came between, as in: pin BUNDLE --known fixtures
        args.paths += map(Path, rest)
    elif rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nancapture",
        description="Look at, check, replay, shrink and pin the training steps that NaNCapture caught.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-nancapture {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Command, text: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command, complain=_complain)
        if run in (_list, _show, _verify, _replay, shrink):
            command.add_argument("--json", action="store_true", help="print JSON, for programs")
        if run in (_replay, shrink, pin, promote):
            command.add_argument("--device", default="auto", help=_DEVICE_HELP)
        return command

    command = add("list", _list, "list the bundles in folders, a line each", "nancapture list nan-bundles")
    text = "a folder to search, or a bundle (default: nan-bundles where there is one, else the current folder)"
    command.add_argument("folders", nargs="*", metavar="FOLDER", type=Path, help=text)

    command = add("show", _show, "show all that a bundle says", f"nancapture show {EXAMPLE}")
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help=BUNDLE_HELP)

    text = "compare every file of each bundle with its hash"
    command = add("verify", _verify, text, "nancapture verify nan-bundles fixtures")
    command.add_argument("bundles", nargs="+", metavar="BUNDLE", type=Path, help="a bundle, or a folder to search")

    text = "run the captured step again with today's code and say whether it stays finite"
    command = add("replay", _replay, text, f"nancapture replay {EXAMPLE} --trace --device=cuda:1")
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help=BUNDLE_HELP)
    text = "follow the operations and name the one that gave birth to the first bad value, with its line (slower)"
    command.add_argument("--trace", action="store_true", help=text)

    define(add)
    return parser


if __name__ == "__main__":
    sys.exit(main())
