"""Worker processes that replay candidates: asked side by side, killed where they hang, made anew where they died."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LAST_WORDS = 12
"""Lines of a dead worker's stderr that are told."""
_START = 600.0
"""Seconds that a worker may take to import everything and to read the bundle."""
_GLANCE = 0.5
"""Seconds after which a silent worker is looked at: a child of its own may hold the pipe open when it is dead."""

Answer = dict[str, Any]


class Pool:
    """Up to `jobs` workers on one bundle; they start as they are needed, and die with this process."""

    def __init__(self, bundle: Path, device: str, jobs: int = 1) -> None:
        self._command = [
            *(sys.executable, "-m", "pytest_nancapture.shrink.candidate.worker"),
            *(str(bundle), device, str(max((os.cpu_count() or 1) // jobs, 1))),
        ]
        self._workers: list[_Process | None] = [None] * jobs

    def __enter__(self) -> Pool:  # noqa: PYI034, typing has no Self on Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def jobs(self) -> int:
        """How many can be asked at the same time."""
        return len(self._workers)

    def ask(self, requests: Sequence[dict[str, Any]], seconds: float) -> list[Answer]:
        """The answers, in order, of at most `jobs` requests.

        A worker that gives none within `seconds`, or dies, is replaced, and the answer is ``{"error": ...}`` with
        the type ``Hung`` or ``Died``. The time does not count until all workers have read the bundle.
        """
        try:
            workers = self._ready(len(requests))
            for worker, request in zip(workers, requests, strict=True):
                worker.send(request)
            end = time.monotonic() + seconds
            answers = [worker.receive(end) for worker in workers]
        except BaseException:  # Ctrl-C: what they have to say now answers no question any more
            self.close()
            raise
        for place, answer in enumerate(answers):
            if answer.get("error", {}).get("type") in ("Hung", "Died"):
                workers[place].kill()
                self._workers[place] = None
        return answers

    def close(self) -> None:
        """End all workers."""
        for place, worker in enumerate(self._workers):
            if worker is not None:
                worker.kill()
                self._workers[place] = None

    def _ready(self, number: int) -> list[_Process]:
        workers, new = [], []
        for place in range(number):
            worker = self._workers[place]
            if worker is None:
                worker = self._workers[place] = _Process(self._command)
                worker.send({"do": "load"})
                new.append(worker)
            workers.append(worker)
        end = time.monotonic() + _START
        for worker in new:
            worker.receive(end)
        return workers


class _Process:
    def __init__(self, command: list[str]) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed by kill
        self._process = subprocess.Popen(  # noqa: S603, our own
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead one is seen when it is to answer
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, end: float) -> Answer:
        while True:
            left = end - time.monotonic()
            try:
                line = self._lines.get(timeout=min(max(left, 0.0), _GLANCE))
            except queue.Empty:
                if self._process.poll() is not None and self._lines.empty():
                    line = None
                elif left <= 0:
                    return {"error": {"type": "Hung", "message": "it took too long"}}
                else:
                    continue
            if line is None:
                return {"error": {"type": "Died", "message": self._last_words()}}
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-_LAST_WORDS:]
        return "\n".join([f"the process ended with exit code {code}", *lines])

    def kill(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(OSError):
                if stream is not None and stream is not self._process.stdout:
                    stream.close()
        self._process.wait()
