"""Add the bundles asked for to what pytest collects. Registered only in a run that asks for some."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_nancapture.bundle.text import some
from pytest_nancapture.plugin.github import replayed, table, workflow_commands
from pytest_nancapture.plugin.item import SECTION, BundleItem
from pytest_nancapture.plugin.options import read_settings
from pytest_nancapture.plugin.selection import relative

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    import pluggy

    from pytest_nancapture.plugin.selection import Selection


class BundleFile(pytest.Collector):
    """One bundle; no ``pytest.File``, which ``--lf`` loses outside rootdir, nor ``Directory``, which ``-k`` skips."""

    @property
    def home(self) -> Path:
        """The folder whose ``conftest.py``, with those above, speaks for this bundle: never the bundle's own."""
        root, folder = self.config.rootpath, self.path.parent.parent
        return folder if folder.is_relative_to(root) else root

    @property
    def ihook(self) -> pluggy.HookRelay:
        """The hooks of `home`: pytest knows none of a folder that it has not walked through."""
        return self.session.gethookproxy(self.home)

    def collect(self) -> Iterator[BundleItem]:
        """The one test of this bundle; nothing is read yet."""
        item = BundleItem.from_parent(self, name="replay")
        item.add_marker(pytest.mark.nan_bundle(str(self.path.parent)))
        yield item


class _Folder(pytest.Directory):
    """A folder of bundles whose ``conftest.py`` is to be loaded; it holds no tests."""

    def collect(self) -> list[pytest.Item]:
        return []


class BundleCollection:
    """The hooks of a run that asks for bundles."""

    def __init__(self, config: pytest.Config, selection: Selection) -> None:
        self._config = config
        self._selection = selection
        self._device = read_settings(config).device
        self._files: dict[Path, BundleFile] = {}
        self._folders = frozenset(path.parent for path in selection.found | selection.named)
        self._closed = self._folders - {path.parent for path in selection.named}

    def pytest_report_header(self) -> str | None:
        count = len(self._selection.added) + len(self._selection.named)
        if count:
            return f"nancapture: {count} bundle{'s' if count > 1 else ''}, device {self._device}"
        if self._selection.empty:
            return f"nancapture: no bundle in {', '.join(self._selection.empty)}"
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Append the bundles to the session's own collection; changing ``config.args`` would drop the user's tests."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            self._load_conftests(collector)
            report.result = [*report.result, *(self._file(path, collector) for path in self._selection.added)]
        return report

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> BundleFile | None:
        return self._file(file_path, parent.session) if file_path in self._selection.named else None

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Keep pytest out of the bundles' folders: a test file or ``conftest.py`` in there must not be run."""
        inside = collection_path.parent in self._folders and collection_path not in self._selection.named
        return True if inside or collection_path in self._closed else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Let a skipped bundle's line in the summary name the bundle, not the line of this plugin that skipped it."""
        report = yield
        if isinstance(item, BundleItem) and report.skipped and isinstance(report.longrepr, tuple):
            report.longrepr = (str(item.path), 1, report.longrepr[2])
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what to know before trusting the tests that passed; on GitHub, show it on the job's page."""
        self._tell_github(terminalreporter)
        caveats: dict[str, list[str]] = {}
        for report in terminalreporter.getreports("passed"):
            for title, content in report.sections:
                if title == f"Captured {SECTION} call":
                    for line in content.splitlines():
                        caveats.setdefault(line, []).append(report.nodeid)
        if caveats:
            terminalreporter.write_sep("=", SECTION)
        for line, nodeids in caveats.items():
            terminalreporter.write_line(f"passed, but {line}")
            terminalreporter.write_line(f"  {some(nodeids, 3)}")

    def _tell_github(self, terminalreporter: pytest.TerminalReporter) -> None:
        if hasattr(self._config, "workerinput"):
            return  # of xdist's processes only the one that sees all reports speaks
        reports = [report for kind in ("passed", "failed", "xfailed") for report in terminalreporter.getreports(kind)]
        page = os.environ.get("GITHUB_STEP_SUMMARY")
        rows = replayed(reports) if page or os.environ.get("GITHUB_ACTIONS") == "true" else []
        if rows and os.environ.get("GITHUB_ACTIONS") == "true":
            for line in workflow_commands(rows):
                terminalreporter.write_line(line)
        if rows and page:
            with open(page, "a", encoding="utf-8") as stream:  # noqa: PTH123, a path of GitHub's making
                stream.write(table(rows))

    def _file(self, path: Path, session: pytest.Session) -> BundleFile:
        """The one node of a bundle, however it was asked for."""
        if path not in self._files:
            nodeid = relative(path, self._config.rootpath)
            self._files[path] = BundleFile.from_parent(session, name=nodeid, path=path, nodeid=nodeid)
        return self._files[path]

    def _load_conftests(self, session: pytest.Session) -> None:
        """Those of the bundles' homes, as if pytest had walked there."""
        paths = (*self._selection.added, *self._selection.named)
        for folder in sorted({self._file(path, session).home for path in paths}):
            node = _Folder.from_parent(session, path=folder)
            report = self._config.hook.pytest_make_collect_report(collector=node)
            if report.failed:
                self._config.hook.pytest_collectreport(report=report)
