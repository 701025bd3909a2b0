"""The ``nancapture`` command: list, show, verify, replay, pin.

Exit codes: 0 all is well; 1 a replay that does not pass, or a bundle that must not be pinned; 2 wrong usage, a damaged
bundle or an absent device; 130 interrupted.
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
from pytest_nancapture.bundle.bundle import Bundle, find_bundles
from pytest_nancapture.bundle.describe import page, summary, table
from pytest_nancapture.bundle.manifest import MANIFEST_NAME
from pytest_nancapture.bundle.text import human_size, printable, some
from pytest_nancapture.errors import BundleError, BundleNotFoundError, NancaptureError, PinError
from pytest_nancapture.replay import replay
from pytest_nancapture.replay.describe import result_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OK, NOT_PASSING, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
_MUCH_FOR_GIT = 50_000_000
_EXAMPLE = "nan-bundles/step-000812-rank-0"
_BUNDLE_HELP = "a bundle's folder, or the bundle.json in it"
_DEVICE_HELP = "auto (the default: the kind of device captured on), cpu, cuda, cuda:1, mps ..."
_EPILOG = f"""\
from the captured step to the test that guards its fix:
  nancapture list nan-bundles
  nancapture replay {_EXAMPLE} --trace
  nancapture pin {_EXAMPLE} fixtures
  pytest --nan-bundles=fixtures

exit codes: 0 all is well; 1 the replay does not pass, or the bundle must not be pinned;
2 wrong usage, a damaged bundle, an absent device; nancapture COMMAND --help says more
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, the process's own where None, and return the exit code."""
    args = _parser().parse_args(argv)
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
    return NOT_PASSING if isinstance(error, PinError) else UNUSABLE


def _list(args: argparse.Namespace) -> int:
    folders = args.folders or [Path("nan-bundles") if Path("nan-bundles").is_dir() else Path()]
    found = {path: _try_open(path) for path in _below(folders)}
    sound = {_shown(path): bundle for path, bundle in found.items() if isinstance(bundle, Bundle)}
    damaged = {path: _problem(error) for path, error in found.items() if isinstance(error, BundleError)}
    if args.json:
        rows = [summary(bundle) for bundle in sound.values()]
        rows += [{"path": str(path), "damaged": problem} for path, problem in damaged.items()]
        print(json.dumps(rows, indent=1))
        return UNUSABLE if damaged else OK
    print("\n".join(table(sound)) if found else f"no bundle in {', '.join(map(_shown, folders))}")
    for path, problem in damaged.items():
        print(f"{_shown(path)}   damaged: {printable(problem)}")
    return UNUSABLE if damaged else OK


def _try_open(path: Path) -> Bundle | BundleError:
    try:
        return Bundle.open(path)
    except BundleError as error:
        return error


def _show(args: argparse.Namespace) -> int:
    bundle = _open(args.bundle)
    if args.json:
        manifest = json.loads((bundle.path / MANIFEST_NAME).read_text(encoding="utf-8"))
        print(json.dumps({"path": str(bundle.path), "size": bundle.size, **manifest}, indent=1, sort_keys=True))
        return OK
    print(page(bundle))
    place = shlex.quote(_shown(bundle.path))
    print("\nwhat to do with it")
    print(f"  replay  {_pytest_command(bundle)}")
    print(f"          nancapture replay {place} --trace")
    print(f"  pin     nancapture pin {place} fixtures")
    return OK


def _verify(args: argparse.Namespace) -> int:
    paths = _below(args.bundles)
    if not paths:
        raise BundleNotFoundError(" ".join(map(str, args.bundles)), "expected at least one bundle, found none")
    problems = {path: _verified(path) for path in paths}
    if args.json:
        print(json.dumps([{"path": str(p), "ok": not what, "problem": what or None} for p, what in problems.items()]))
    else:
        width = max(len(_shown(path)) for path in paths)
        for path, what in problems.items():
            print(f"{_shown(path):{width}}  {'damaged: ' + printable(what) if what else 'ok'}")
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
    bundle = _open(args.bundle)
    # Code under test may print: that must not come before the verdict, nor into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        result = replay(bundle, device=args.device, trace=args.trace)
    if args.json:
        print(json.dumps({"path": str(bundle.path), **result.as_dict()}))
    else:
        print(result_page(result, traced=args.trace, repeat=_pytest_command(bundle)))
    return OK if result.finite else NOT_PASSING


def _pin(args: argparse.Namespace) -> int:
    from pytest_nancapture.shrink.pin import pin

    *sources, folder = args.paths
    if not sources or _is_bundle(folder):
        sources, folder = args.paths, Path("fixtures")
    if args.name and len(sources) > 1:
        args.parser.error("--name names one copy: give one BUNDLE")
    code, done = OK, []
    for source in sources:
        try:
            bundle = _open(source)
            if not args.force:
                print(f"replaying {_shown(bundle.path)} in a fresh process ...", file=sys.stderr, flush=True)
            pinned = pin(bundle.path, folder, name=args.name, device=args.device, force=args.force, known=args.known)
        except (NancaptureError, OSError) as error:
            code = max(code, _complain(error))
            continue
        done.append(pinned.bundle)
        why = "forced, not replayed" if pinned.result is None else f"red: {pinned.result['reason']}"
        print(f"pinned  {_shown(pinned.bundle.path)}   {human_size(pinned.bundle.size)}   {printable(why)}")
        for note in (pinned.result or {}).get("notes", ()):
            print(f"note    {printable(note)}")
    if done:
        print(_next_steps(done, _shown(folder), known=args.known))
    return code


def _next_steps(done: Sequence[Bundle], folder: str, *, known: bool) -> str:
    lines = [
        f"next    git add {' '.join(shlex.quote(_shown(bundle.path)) for bundle in done)}",
        f"        pytest {shlex.quote(f'--nan-bundles={folder}')}",
        "        and for a plain pytest to run it for ever, one line of configuration:",
        f"        nan_bundles = {folder}       (pytest.ini, below [pytest])",
        f'        nan_bundles = ["{folder}"]   (pyproject.toml, below [tool.pytest.ini_options])',
    ]
    if known:
        lines.append(
            "known   pytest expects it to fail. Once the fault is fixed, set pin.known to false in its bundle.json"
        )
    if any(bundle.size > _MUCH_FOR_GIT for bundle in done):
        lines.append("note    this is large for git, and some hosts refuse files over 100 MB: consider Git LFS")
    return "\n".join(lines)


def _below(paths: Sequence[Path]) -> list[Path]:
    """The bundles at or below each path, each once, in the order given."""
    found: dict[Path, None] = {}
    for path in paths:
        folder = path.parent if path.name == MANIFEST_NAME else path
        if not folder.is_dir():
            raise BundleNotFoundError(path, "expected a bundle or a folder with bundles, found " + _what(folder))
        found |= dict.fromkeys(find_bundles(folder))
    return list(found)


def _open(path: Path) -> Bundle:
    try:
        return Bundle.open(path)
    except BundleNotFoundError:
        if not path.is_dir():
            raise BundleNotFoundError(path, "expected a bundle's folder, found " + _what(path)) from None
        inside = [_shown(found) for found in find_bundles(path)]
        if not inside:
            raise
        problem = f"expected one bundle, found a folder with {len(inside)}: {some(inside, 3)}"
        raise BundleNotFoundError(path, problem, "name one of them") from None


def _what(path: Path) -> str:
    return "a file" if path.exists() else "nothing"


def _is_bundle(path: Path) -> bool:
    return path.name == MANIFEST_NAME or (path / MANIFEST_NAME).exists()


def _shown(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the current folder."""
    whole, here = path.absolute(), Path.cwd()
    return printable(str(whole.relative_to(here) if whole.is_relative_to(here) else whole))


def _pytest_command(bundle: Bundle) -> str:
    return f"pytest {shlex.quote(f'--nan-bundles={_shown(bundle.path)}')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nancapture",
        description="Look at, check, replay and pin the training steps that NaNCapture caught.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-nancapture {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, *examples: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog="\n  ".join(["examples:", *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, parser=command)
        if run is not _pin:
            command.add_argument("--json", action="store_true", help="print JSON, for programs")
        if run in (_replay, _pin):
            command.add_argument("--device", default="auto", help=_DEVICE_HELP)
        return command

    command = add("list", _list, "list the bundles in folders, a line each", "nancapture list nan-bundles")
    text = "a folder to search, or a bundle (default: nan-bundles where there is one, else the current folder)"
    command.add_argument("folders", nargs="*", metavar="FOLDER", type=Path, help=text)

    command = add("show", _show, "show all that a bundle says", f"nancapture show {_EXAMPLE}")
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help=_BUNDLE_HELP)

    text = "compare every file of each bundle with its hash"
    command = add("verify", _verify, text, "nancapture verify nan-bundles fixtures")
    command.add_argument("bundles", nargs="+", metavar="BUNDLE", type=Path, help="a bundle, or a folder to search")

    text = "run the captured step again with today's code and say whether it stays finite"
    command = add("replay", _replay, text, f"nancapture replay {_EXAMPLE} --trace --device=cuda:1")
    command.add_argument("bundle", metavar="BUNDLE", type=Path, help=_BUNDLE_HELP)
    text = "follow the operations and name the one that gave birth to the first bad value, with its line (slower)"
    command.add_argument("--trace", action="store_true", help=text)

    text = "copy bundles among the fixtures, each once a replay in a fresh process has shown that it is red"
    command = add(
        "pin", _pin, text, f"nancapture pin {_EXAMPLE} fixtures", f"nancapture pin {_EXAMPLE} --name=empty-class"
    )
    command.usage = "nancapture pin [-h] [--device DEVICE] [--name NAME] [--force | --known] BUNDLE [BUNDLE ...] [DIR]"
    text = "one or more, and last the folder to pin them into (default: fixtures)"
    command.add_argument("paths", nargs="+", metavar="BUNDLE", type=Path, help=text)
    command.add_argument("--name", help="the copy's name, where the bundle's own is taken or says too little")
    either = command.add_mutually_exclusive_group()
    either.add_argument("--force", action="store_true", help="pin without a replay, whatever the bundle would show")
    text = "the fault stays open for now: pytest expects the bundle to fail (a strict xfail) and so stays green"
    either.add_argument("--known", action="store_true", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
