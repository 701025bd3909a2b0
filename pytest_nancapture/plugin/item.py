"""The test that a bundle is."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_nancapture.bundle.bundle import Bundle
from pytest_nancapture.bundle.describe import reproduced
from pytest_nancapture.bundle.text import printable
from pytest_nancapture.errors import BundleError, NancaptureError
from pytest_nancapture.plugin.options import flags, read_settings
from pytest_nancapture.plugin.replay import replay_for_node
from pytest_nancapture.plugin.report import (
    AS_IT_IS,
    BundleFailure,
    Rows,
    StillFaulty,
    capture_rows,
    confirmation,
    failure_text,
    result_rows,
    short_source,
    terminal_repr,
)
from pytest_nancapture.plugin.selection import relative

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pluggy
    from _pytest._code.code import TerminalRepr

    from pytest_nancapture.replay.result import ReplayResult

SECTION = "nancapture"
"""Of a passed test's report: what to know before trusting it."""


class BundleItem(pytest.Item):
    """Replays one bundle; passes where loss and gradients come out finite."""

    obj = None
    """Other plugins look for the test function here."""

    @property
    def ihook(self) -> pluggy.HookRelay:
        """The same hooks as those of the bundle's node."""
        assert self.parent is not None
        return self.parent.ihook

    def reportinfo(self) -> tuple[Path, int, str]:
        """The bundle's ``bundle.json``, line 0, and the bundle's folder as the headline."""
        folder = self.nodeid.removesuffix("bundle.json::replay").rstrip("/")
        return self.path, 0, folder or self.path.parent.name

    def runtest(self) -> None:
        bundle = None
        try:
            bundle = Bundle.open(self.path)
            self._note(nan_reproduced=reproduced(bundle.fault))
            self._judge(bundle)
        except NancaptureError as error:
            self._note(nan_verdict="error")
            self._fail("error", _message(error), capture_rows(bundle) if bundle else (), cause=error)

    def _judge(self, bundle: Bundle) -> None:
        settings, seen = read_settings(self.config), bundle.fault.reproduced
        if seen.of and not seen.runs and not settings.allow_unreproduced:
            self._fail(
                "cannot gate",
                f"never reproduced: the fault came back in 0 of {seen.of} reruns, so a pass would prove nothing",
                _unreproduced_rows(bundle),
            )
        result = replay_for_node(bundle, self, settings)
        self._note_result(result)
        if result.finite and bundle.known and not self.config.getoption("runxfail", False):
            self._fail(
                "fixed",
                "unpin or promote it: it is pinned as a known fault, and the fault is gone",
                [*self._promotion(), *result_rows(result, bundle)],
            )
        if result.finite:
            caveats = [*result.notes, *([] if seen.runs else [confirmation(bundle.fault)])]
            self.add_report_section("call", SECTION, "\n".join(map(printable, caveats)))
        elif result.verdict == "nonfinite":
            if bundle.known:
                reason = f"known fault: {printable(result.reason)}"
                self.add_marker(pytest.mark.xfail(strict=True, raises=StillFaulty, reason=reason))
            self._fail(
                result.verdict, result.reason, result_rows(result, bundle), detail=result.detail, kind=StillFaulty
            )
        else:
            self._fail(result.verdict, result.reason, result_rows(result, bundle), detail=result.detail)

    def _fail(
        self,
        verdict: str,
        reason: str,
        rows: Rows,
        *,
        detail: str = "",
        kind: type[BundleFailure] = BundleFailure,
        cause: Exception | None = None,
    ) -> NoReturn:
        headline = printable(f"{verdict}: {reason}")
        raise kind(headline, failure_text(headline, rows, detail, repeat_command(self.config, self.path))) from cause

    def repr_failure(  # type: ignore[override]  # pytest calls it without a style, as it does a Collector's
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> str | TerminalRepr:
        """The report of a bundle that failed; whatever else was raised keeps pytest's traceback, from here on."""
        if isinstance(excinfo.value, BundleFailure):
            return terminal_repr(excinfo.value, self.path)
        if not self.config.getoption("fulltrace"):
            excinfo.traceback = excinfo.traceback.cut(path=__file__)
        return super().repr_failure(excinfo)

    def _promotion(self) -> Iterator[tuple[str, str]]:
        place = shlex.quote(relative(self.path.parent, self.config.invocation_params.dir))
        yield "promote", "so that it fails from now on whenever the fault is back:"
        yield AS_IT_IS, f"nancapture promote {place}"
        yield "or unpin", "so that nothing watches over it:"
        yield AS_IT_IS, f"git rm -r {place}"

    def _note_result(self, result: ReplayResult) -> None:
        culprit = result.culprit
        self._note(
            nan_verdict=result.verdict,
            nan_op=culprit.op if culprit else "",
            nan_source=short_source(culprit),
            nan_phase=culprit.phase if culprit else "",
            nan_device=result.device,
        )

    def _note(self, **properties: str) -> None:
        """Set junit properties; what is not known is left out, and a rerun replaces what the run before it said."""
        kept = [(name, value) for name, value in self.user_properties if name not in properties]
        self.user_properties[:] = [*kept, *((name, value) for name, value in properties.items() if value)]


def repeat_command(config: pytest.Config, path: Path) -> str:
    """The command that runs the test of one ``bundle.json`` alone, ready to paste where pytest was started."""
    start = config.invocation_params.dir
    argument = relative(path, start)
    # pytest reads brackets as parameters, and moves rootdir to where an argument outside of it lies.
    if config.rootpath in path.parents and not any(sign in argument for sign in ("[", "::")):
        return shlex.join(["pytest", *flags(config), f"{argument}::replay"])
    return shlex.join(["pytest", *flags(config), f"--nan-bundles={relative(path.parent, start)}", "-m", "nan_bundle"])


def _unreproduced_rows(bundle: Bundle) -> Iterator[tuple[str, str]]:
    yield (
        "remedy",
        "if it fails with the faulty code, pin it: nancapture pin replays it and records that it was red; "
        "to replay it as it is: --nan-allow-unreproduced",
    )
    yield from capture_rows(bundle)


def _message(error: NancaptureError) -> str:
    """Without the bundle's path, which the test's name gives already."""
    if isinstance(error, BundleError):
        return error.problem + (f" ({error.remedy})" if error.remedy else "")
    return str(error)
